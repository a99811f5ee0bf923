//! Differential tests: the same scenes on a GPU and in the simulator. Each test skips itself where
//! there is no GPU that can run it.

mod banks;
#[path = "../device/mod.rs"]
mod device;
mod kernels;
mod words;

use std::sync::Arc;

use cuda::{Arguments, Buffer, DeviceAddress, TensorMap};
use flashcore::gpu::{Gpu, Kernel};
use flashcore_testing::scene::{KernelLaunch, Scene};
use ptx::ParameterKind;
use sim::{Argument, Launch, Options, Policy};

use device::{gpu, hopper};

/// Returns the launches of a scene in their order.
fn launches(scene: &Scene) -> Vec<Launch<'_>> {
    let before = scene.before.iter().map(KernelLaunch::launch);
    before.chain([scene.launch()]).chain(scene.after.iter().map(KernelLaunch::launch)).collect()
}

/// Compiles the kernels of a scene's launches.
fn compiled(gpu: &Gpu, scene: &Scene) -> Vec<Arc<Kernel>> {
    let compile = |it: Launch<'_>| gpu.compiled_program(it.program.clone()).unwrap();
    launches(scene).into_iter().map(compile).collect()
}

/// Runs a scene on the GPU, and returns the contents of all buffers afterwards.
fn on_gpu(gpu: &Gpu, scene: &Scene, kernels: &[Arc<Kernel>]) -> Vec<Vec<u8>> {
    let memory = &scene.memory;
    let ids: Vec<_> = memory.ids().collect();
    let upload = |bytes: &[u8]| Buffer::from_slice(gpu.stream(), bytes).unwrap();
    let buffers: Vec<Buffer> = ids.iter().map(|id| upload(memory.bytes(*id))).collect();
    let buffer = |id| &buffers[ids.iter().position(|it| *it == id).unwrap()];
    for (launch, kernel) in launches(scene).into_iter().zip(kernels) {
        let mut arguments = Arguments::new();
        for (argument, parameter) in launch.arguments.iter().zip(&launch.program.parameters) {
            match argument {
                // The null address of a tensor or list that the kernel does not use.
                Argument::U64(address) if parameter.kind == ParameterKind::Address => {
                    arguments.push(DeviceAddress(*address))
                }
                Argument::U32(value) => arguments.push(*value),
                Argument::S32(value) => arguments.push(*value),
                Argument::U64(value) => arguments.push(*value),
                Argument::S64(value) => arguments.push(*value as u64),
                Argument::F32(value) => arguments.push(*value),
                Argument::Address(id, offset) => {
                    arguments.push(buffer(*id).address().offset(*offset))
                }
                Argument::TensorMap(map) => {
                    let address = buffer(map.buffer).address().offset(map.offset);
                    let (shape, strides) = (&map.dimensions, &map.strides);
                    let map =
                        TensorMap::encode(gpu.device(), &map.tensor_box, address, shape, strides);
                    arguments.push(map.unwrap())
                }
            };
        }
        kernel.launch(gpu.stream(), launch.grid, &arguments).unwrap();
    }
    buffers.iter().map(|buffer| gpu.stream().download_vec(buffer.all()).unwrap()).collect()
}

/// Runs a scene in the simulator, and returns the contents of all buffers afterwards.
fn simulated(scene: &Scene) -> Vec<Vec<u8>> {
    let (memory, _) = scene
        .run(&Options::values(Policy::Random, 1))
        .unwrap_or_else(|failure| panic!("{}: {failure}", scene.program.name));
    memory.ids().map(|id| memory.bytes(id).to_vec()).collect()
}
