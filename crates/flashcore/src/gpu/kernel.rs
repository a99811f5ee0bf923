//! A program compiled for a device, ready to launch.

use cuda::{
    Arguments, Cache, Device, Function, FunctionAttributes, Launch, Module, OptimizationLevel,
    Parameter, Stream,
};
use ptx::{ParameterKind, Program, Type};

/// A compiled kernel.
#[derive(Debug)]
pub struct Kernel {
    function: Function,
    launch: Launch,
    /// How the binary was come by.
    compilation: Compilation,
}

/// How a kernel's binary was come by.
#[derive(Debug, Clone)]
pub struct Compilation {
    /// Milliseconds, from the cache or from the compiler.
    pub milliseconds: f64,
    /// Whether the cache had it.
    pub cached: bool,
    /// What the cache has to complain about.
    pub warnings: Vec<String>,
}

impl Kernel {
    /// Compiles a program, or takes it from the cache.
    pub fn compile(
        device: &Device,
        cache: &Cache,
        program: &Program,
        level: OptimizationLevel,
    ) -> cuda::Result<Self> {
        let cubin = device.compile_cached(&ptx::print(program), level, cache)?;
        let module = Module::load(device, &cubin.bytes)?;
        let function = module.function(&program.name, &signature(program))?;
        let shared_bytes = program.shared_bytes();
        function.set_dynamic_shared(shared_bytes)?;
        let launch = Launch {
            block: [program.threads, 1, 1],
            cluster: [program.cluster, 1, 1],
            shared_bytes,
            ..Launch::default()
        };
        let warnings = cubin.warnings.iter().map(ToString::to_string).collect();
        let compilation =
            Compilation { milliseconds: cubin.milliseconds, cached: cubin.cached, warnings };
        Ok(Kernel { function, launch, compilation })
    }

    /// Puts a launch of `blocks` blocks on a stream.
    pub fn launch(&self, stream: &Stream, blocks: u32, arguments: &Arguments) -> cuda::Result<()> {
        let launch = Launch { grid: [blocks, 1, 1], ..self.launch };
        self.function.launch(stream, &launch, arguments)
    }

    /// Registers, local memory and so on, as the driver reports them.
    pub fn attributes(&self) -> FunctionAttributes {
        self.function.attributes()
    }

    /// How the binary was come by.
    pub fn compilation(&self) -> &Compilation {
        &self.compilation
    }
}

/// The parameters of a program as the driver layer names them.
fn signature(program: &Program) -> Vec<Parameter> {
    let of = |parameter: &ptx::Parameter| match &parameter.kind {
        ParameterKind::Scalar(Type::F32) => Parameter::F32,
        ParameterKind::Scalar(Type::S32) => Parameter::I32,
        ParameterKind::Scalar(Type::U64 | Type::S64) => Parameter::U64,
        ParameterKind::Scalar(_) => Parameter::U32,
        ParameterKind::Address => Parameter::Address,
        ParameterKind::TensorMap(_) => Parameter::TensorMap,
    };
    program.parameters.iter().map(of).collect()
}
