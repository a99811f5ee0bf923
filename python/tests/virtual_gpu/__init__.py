"""A virtual GPU for PyTorch: FlashCore's kernels run in the simulator, PyTorch's own on the host.

    cargo build --release -p flashcore-virtual-gpu
    python python/tests/virtual_gpu target/release/libflashcore_virtual_gpu.so python/tests/test_torch.py

runs the tests marked `gpu`, without a GPU. All of FlashCore is what a GPU would get: the extension module, its
reading of tensors, plans, arguments, launches, and the PTX text of kernels.
"""
