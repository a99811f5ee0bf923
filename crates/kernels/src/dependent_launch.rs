//! Programmatic dependent launch: a kernel begins while the last blocks of the one before it still
//! run.
//!
//! A launch takes an H200 about half a microsecond from the end of one kernel to the first
//! instruction of the next, a tenth of a short decode. Kernels of the forward pass spend it before the
//! end of the previous kernel: they are launched early, and wait before they access global memory.
//! The gradients' kernels do not: they gained nothing, and some have no register left.

use ptx::{Builder, Capability};

/// Waits for the earlier grids on the stream, and lets the next one be launched, where the target has
/// programmatic dependent launch. Every block comes here before it accesses global memory: a block that
/// ends without waiting would let a later grid begin before an earlier one has ended.
pub(crate) fn wait_for_earlier_grids(k: &mut Builder) {
    if k.target().has(Capability::GridDependency) {
        k.wait_for_grids();
        k.launch_dependents();
    }
}
