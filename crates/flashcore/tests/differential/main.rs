//! The same scenes through a GPU and through the simulator. Each test passes over itself where
//! there is no GPU that can run it.

mod banks;
#[path = "../device/mod.rs"]
mod device;
mod rungs;
mod words;

use cuda::{Arguments, Buffer, DeviceAddress, TensorMap};
use flashcore::gpu::Gpu;
use ptx::ParameterKind;
use sim::scene::Scene;
use sim::{Argument, Options, Policy};

use device::{gpu, hopper};

/// Every buffer of a scene after the kernel ran on the GPU.
fn on_gpu(gpu: &Gpu, scene: &Scene) -> Vec<Vec<u8>> {
    let memory = &scene.memory;
    let ids: Vec<_> = memory.ids().collect();
    let upload = |bytes: &[u8]| Buffer::from_slice(gpu.stream(), bytes).unwrap();
    let buffers: Vec<Buffer> = ids.iter().map(|id| upload(memory.bytes(*id))).collect();
    let buffer = |id| &buffers[ids.iter().position(|it| *it == id).unwrap()];
    let mut arguments = Arguments::new();
    for (argument, parameter) in scene.arguments.iter().zip(&scene.program.parameters) {
        match argument {
            // Nowhere: what the kernel has no use for.
            Argument::U64(address) if parameter.kind == ParameterKind::Address => {
                arguments.push(DeviceAddress(*address))
            }
            Argument::U32(value) => arguments.push(*value),
            Argument::S32(value) => arguments.push(*value),
            Argument::U64(value) => arguments.push(*value),
            Argument::S64(value) => arguments.push(*value as u64),
            Argument::F32(value) => arguments.push(*value),
            Argument::Address(id, offset) => arguments.push(buffer(*id).address().offset(*offset)),
            Argument::TensorMap(map) => {
                let address = buffer(map.buffer).address().offset(map.offset);
                let (dimensions, strides) = (&map.dimensions, &map.strides);
                arguments.push(
                    TensorMap::encode(gpu.device(), &map.tensor_box, address, dimensions, strides)
                        .unwrap(),
                )
            }
        };
    }
    let kernel = gpu.kernel(&scene.program.name, || Ok(scene.program.clone())).unwrap();
    kernel.launch(gpu.stream(), scene.grid, &arguments).unwrap();
    buffers.iter().map(|buffer| gpu.stream().download_vec(buffer.all()).unwrap()).collect()
}

/// The same after a run of the simulator.
fn simulated(scene: &Scene) -> Vec<Vec<u8>> {
    let (memory, _) = scene
        .run(&Options::values(Policy::Random, 1))
        .unwrap_or_else(|failure| panic!("{}: {failure}", scene.program.name));
    memory.ids().map(|id| memory.bytes(id).to_vec()).collect()
}
