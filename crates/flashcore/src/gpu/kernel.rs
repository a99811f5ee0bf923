//! A program compiled for a device, ready to launch.

use std::sync::{Arc, OnceLock};

use cuda::{
    Arguments, Cache, Device, Function, FunctionAttributes, Launch, Module, OptimizationLevel,
    Parameter, Stream,
};
use ptx::{ParameterKind, Program, Type};

/// How kernels that the cache does not have are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// At one level, before the first use.
    Once(OptimizationLevel),
    /// At a quick level before the first use, and at the full one by a thread behind it: launches
    /// take the better binary as soon as it is there, and only that one is cached.
    QuickThenFull {
        /// The level of the first use.
        quick: OptimizationLevel,
        /// The level of the rest.
        full: OptimizationLevel,
    },
}

impl Policy {
    /// The level at which kernels are kept.
    pub const fn full(self) -> OptimizationLevel {
        match self {
            Policy::Once(level) => level,
            Policy::QuickThenFull { full, .. } => full,
        }
    }
}

impl Default for Policy {
    /// The one that is right for the kernels as they are.
    fn default() -> Self {
        Policy::Once(OptimizationLevel::O3)
    }
}

/// A compiled kernel.
#[derive(Debug)]
pub struct Kernel {
    /// What runs until `full` is there.
    quick: Option<Binary>,
    full: OnceLock<Binary>,
    /// The names of its parameters.
    parameters: Vec<String>,
}

/// One compilation of a kernel, on the device.
#[derive(Debug)]
struct Binary {
    function: Function,
    launch: Launch,
    compilation: Compilation,
}

/// How a kernel's binary was come by.
#[derive(Debug, Clone)]
pub struct Compilation {
    /// How hard the compiler tried.
    pub level: OptimizationLevel,
    /// Milliseconds, from the cache or from the compiler.
    pub milliseconds: f64,
    /// Whether the cache had it.
    pub cached: bool,
    /// What the cache has to complain about.
    pub warnings: Vec<String>,
}

/// A second compilation that is still to be done.
pub(super) type Remainder = Box<dyn FnOnce() + Send>;

impl Kernel {
    /// Compiles a program, or takes it from the cache. What the policy leaves for later is handed
    /// back: run it on a thread of its own.
    pub(super) fn compile(
        device: &Device,
        cache: &Cache,
        program: Program,
        policy: Policy,
    ) -> cuda::Result<(Arc<Self>, Option<Remainder>)> {
        let text = ptx::print(&program);
        let parameters = program.parameters.iter().map(|it| it.name.clone()).collect();
        let new = |quick, full: Option<Binary>| {
            let full = full.map_or_else(OnceLock::new, OnceLock::from);
            Arc::new(Kernel { quick, full, parameters })
        };
        let (quick, full) = match policy {
            Policy::QuickThenFull { quick, full } if !has(device, cache, &text, full) => {
                (quick, full)
            }
            _ => {
                let binary = Binary::compile(device, cache, &program, &text, policy.full())?;
                return Ok((new(None, Some(binary)), None));
            }
        };
        let binary = Binary::compile(device, &Cache::disabled(), &program, &text, quick)?;
        let kernel = new(Some(binary), None);
        let (device, cache, shared) = (device.clone(), cache.clone(), kernel.clone());
        let remainder: Remainder = Box::new(move || {
            // What was compiled once compiles again; if not, the quick binary stays.
            if let Ok(binary) = Binary::compile(&device, &cache, &program, &text, full) {
                let _ = shared.full.set(binary);
            }
        });
        Ok((kernel, Some(remainder)))
    }

    /// The best binary so far.
    fn best(&self) -> &Binary {
        let best = self.full.get().or(self.quick.as_ref());
        best.expect("a kernel is made with one of its binaries")
    }

    /// Puts a launch of `blocks` blocks on a stream.
    pub fn launch(&self, stream: &Stream, blocks: u32, arguments: &Arguments) -> cuda::Result<()> {
        let Binary { function, launch, .. } = self.best();
        let launch = Launch { grid: [blocks, 1, 1], ..*launch };
        function.launch(stream, &launch, arguments)
    }

    /// Registers, local memory and so on, as the driver reports them.
    pub fn attributes(&self) -> FunctionAttributes {
        self.best().function.attributes()
    }

    /// How the binary that a launch takes now was come by.
    pub fn compilation(&self) -> &Compilation {
        &self.best().compilation
    }

    /// The names of its parameters, in order.
    pub fn parameters(&self) -> &[String] {
        &self.parameters
    }
}

/// Whether the cache has a text compiled at a level.
fn has(device: &Device, cache: &Cache, text: &str, level: OptimizationLevel) -> bool {
    // The only error of this call is the one made here: nothing to compile with.
    cache.get_or_compile(&device.cache_key(text, level), || Err(())).is_ok()
}

impl Binary {
    fn compile(
        device: &Device,
        cache: &Cache,
        program: &Program,
        text: &str,
        level: OptimizationLevel,
    ) -> cuda::Result<Self> {
        let cubin = device.compile_cached(text, level, cache)?;
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
        let compilation = Compilation {
            level,
            milliseconds: cubin.milliseconds,
            cached: cubin.cached,
            warnings: cubin.warnings.iter().map(ToString::to_string).collect(),
        };
        Ok(Binary { function, launch, compilation })
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
