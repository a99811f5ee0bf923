//! A program compiled for a device, ready to launch.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use cuda::{
    Arguments, Cache, Device, Function, FunctionAttributes, Launch, Module, OptimizationLevel,
    Parameter, RelaxedCapture, Stream,
};
use ptx::{ParameterKind, Program, Type};

/// How hard the compiler tries: as the assembler does in the tests of registers and spills.
pub(super) const LEVEL: OptimizationLevel = OptimizationLevel::O3;

/// How kernels that the cache does not have are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Before the first use. For measuring, where every launch must be of the same machine code.
    AtOnce,
    /// Where a kernel has a compact form, that one before the first use, and the full one by a
    /// thread beside it: launches take it as soon as it is there. Both give the same results.
    #[default]
    CompactFirst,
}

/// A compiled kernel.
#[derive(Debug)]
pub struct Kernel {
    /// What runs until `full` is there.
    compact: OnceLock<Binary>,
    full: OnceLock<Binary>,
    /// The names of its parameters.
    parameters: Vec<String>,
}

/// One form of a kernel, on the device.
#[derive(Debug)]
struct Binary {
    function: Function,
    launch: Launch,
    compilation: Compilation,
}

/// How a kernel's binary was come by.
#[derive(Debug, Clone)]
pub struct Compilation {
    /// Whether it is the compact form, and the full one is still being compiled.
    pub compact: bool,
    /// Milliseconds, from the cache or from the compiler.
    pub milliseconds: f64,
    /// Whether the cache had it.
    pub cached: bool,
    /// What the cache has to complain about, and what the compiler says costs speed.
    pub warnings: Vec<String>,
}

impl Kernel {
    fn new(program: &Program) -> Self {
        let parameters = program.parameters.iter().map(|it| it.name.clone()).collect();
        Kernel { compact: OnceLock::new(), full: OnceLock::new(), parameters }
    }

    /// Compiles a program, or takes it from the cache.
    pub(super) fn at_once(
        device: &Device,
        cache: &Cache,
        program: &Program,
    ) -> cuda::Result<Arc<Self>> {
        let kernel = Kernel::new(program);
        let binary = Binary::compile(device, cache, program, false)?;
        kernel.full.get_or_init(|| binary);
        Ok(Arc::new(kernel))
    }

    /// Compiles the compact form, or takes it from the cache, and the full form on a thread beside
    /// it, which is handed back.
    pub(super) fn compact_first(
        device: &Device,
        cache: &Cache,
        full: Program,
        compact: &Program,
    ) -> (cuda::Result<Arc<Self>>, JoinHandle<()>) {
        let kernel = Arc::new(Kernel::new(&full));
        let beside = {
            let (device, cache, kernel) = (device.clone(), cache.clone(), kernel.clone());
            std::thread::spawn(move || {
                // Loading the module must not break a capture that is under way elsewhere.
                let _relaxed = RelaxedCapture::begin();
                // If it does not compile, the compact form stays, and the next process tries again.
                if let Ok(binary) = Binary::compile(&device, &cache, &full, false) {
                    kernel.full.get_or_init(|| binary);
                }
            })
        };
        let compiled = Binary::compile(device, cache, compact, true).map(|binary| {
            kernel.compact.get_or_init(|| binary);
            kernel
        });
        (compiled, beside)
    }

    /// The best binary so far.
    fn best(&self) -> &Binary {
        let best = self.full.get().or(self.compact.get());
        best.expect("a kernel is handed out with one of its binaries")
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

/// Whether the cache has a program compiled.
pub(super) fn is_cached(device: &Device, cache: &Cache, program: &Program) -> bool {
    // The only error of this call is the one made here: nothing to compile with.
    let key = device.cache_key(&ptx::print(program), LEVEL);
    cache.get_or_compile(&key, || Err(())).is_ok()
}

impl Binary {
    fn compile(
        device: &Device,
        cache: &Cache,
        program: &Program,
        compact: bool,
    ) -> cuda::Result<Self> {
        let cubin = device.compile_cached(&ptx::print(program), LEVEL, cache)?;
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
            compact,
            milliseconds: cubin.milliseconds,
            cached: cubin.cached,
            warnings: (cubin.warnings.iter().map(ToString::to_string))
                .chain(losses(&cubin.log).map(str::to_owned))
                .collect(),
        };
        Ok(Binary { function, launch, compilation })
    }
}

/// The compiler's notes on what will be slow: a spill is not among them, see
/// [`Kernel::attributes`].
fn losses(log: &str) -> impl Iterator<Item = &str> {
    log.lines().filter(|line| line.contains("Potential Performance Loss"))
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
