//! From a configuration to a kernel on the device, ready to launch: built, compiled and kept.

use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use cuda::{
    Arguments, Cache, Cubin, Device, Function, FunctionAttributes, Launch, Module,
    OptimizationLevel, Parameter, RelaxedCapture, Stream, Unfinished,
};
use kernels::Configuration;
use ptx::{Compiler, ParameterKind, Program, Type};

use super::{Gpu, GpuError, lock};

/// How hard the compiler tries: as the assembler does in the tests of registers and spills.
pub(super) const LEVEL: OptimizationLevel = OptimizationLevel::O3;

/// How kernels that the cache does not have are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Before the first use. For measuring, where every launch must be of the same machine code.
    AtOnce,
    /// Where a kernel has a compact form, that one before the first use, and the full one by a
    /// thread beside it: launches take it as soon as it is there. Both give the same results.
    /// Where the driver's compiler cannot be called beside the driver, at once.
    #[default]
    CompactFirst,
}

/// Where a kernel will be once it is compiled.
pub(super) type Slot = Arc<Mutex<Option<Arc<Kernel>>>>;

/// A compiled kernel.
#[derive(Debug)]
pub struct Kernel {
    /// What runs until `full` is there.
    compact: OnceLock<Binary>,
    full: OnceLock<Binary>,
    parameters: Vec<ptx::Parameter>,
}

/// One form of a kernel as the compiler takes it.
struct Source {
    program: Program,
    ptx: String,
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

impl Gpu {
    /// A kernel, built and compiled the first time; one that has a compact form by the GPU's
    /// [`Policy`].
    pub fn compiled(&self, configuration: &Configuration) -> Result<Arc<Kernel>, GpuError> {
        let slot = lock(&self.kernels).entry(*configuration).or_default().clone();
        let mut kernel = lock(&slot);
        match &*kernel {
            Some(kernel) => Ok(kernel.clone()),
            None => Ok(kernel.insert(self.compile(configuration)?).clone()),
        }
    }

    fn compile(&self, configuration: &Configuration) -> Result<Arc<Kernel>, GpuError> {
        let (device, cache) = (&self.device, &self.cache);
        let full = Source::new(configuration.program()?, self.compiler());
        let compact = match configuration.compact() {
            Some(compact) if self.policy != Policy::AtOnce && device.compiles_ahead() => compact,
            _ => return Ok(Kernel::at_once(device, cache, &full)?),
        };
        if let Some(kernel) = Kernel::cached(device, cache, &full)? {
            return Ok(kernel);
        }
        let compact = Source::new(compact.program()?, self.compiler());
        let (kernel, beside) = Kernel::compact_first(device, cache, full, &compact);
        lock(&self.compilers).push(beside);
        Ok(kernel?)
    }

    /// A program of anybody's, compiled.
    pub fn compiled_program(&self, program: Program) -> Result<Arc<Kernel>, GpuError> {
        let source = Source::new(program, self.compiler());
        Ok(Kernel::at_once(&self.device, &self.cache, &source)?)
    }

    /// Waits until every kernel that was asked for is compiled in its full form.
    pub fn finish_compiling(&self) {
        let compilers = std::mem::take(&mut *lock(&self.compilers));
        for compiler in compilers {
            // A compiler that panicked leaves the compact form in place.
            let _ = compiler.join();
        }
    }
}

impl Kernel {
    fn new(source: &Source) -> Self {
        let parameters = source.program.parameters.clone();
        Kernel { compact: OnceLock::new(), full: OnceLock::new(), parameters }
    }

    /// Of a cubin of its full form.
    fn loaded(device: &Device, source: &Source, cubin: &Cubin) -> cuda::Result<Arc<Self>> {
        let kernel = Kernel::new(source);
        let binary = Binary::load(device, source, cubin, false)?;
        kernel.full.get_or_init(|| binary);
        Ok(Arc::new(kernel))
    }

    /// Compiles it, or takes it from the cache.
    fn at_once(device: &Device, cache: &Cache, source: &Source) -> cuda::Result<Arc<Self>> {
        Kernel::loaded(device, source, &source.compile(device, cache)?)
    }

    /// Takes it from the cache, if it is there.
    fn cached(device: &Device, cache: &Cache, source: &Source) -> cuda::Result<Option<Arc<Self>>> {
        let cubin = device.cached(&source.ptx, LEVEL, cache);
        cubin.map(|cubin| Kernel::loaded(device, source, &cubin)).transpose()
    }

    /// Compiles the compact form, or takes it from the cache, and the full form on a thread beside
    /// it, which is handed back.
    fn compact_first(
        device: &Device,
        cache: &Cache,
        full: Source,
        compact: &Source,
    ) -> (cuda::Result<Arc<Self>>, JoinHandle<()>) {
        let kernel = Arc::new(Kernel::new(&full));
        let beside = {
            let (device, cache, kernel) = (device.clone(), cache.clone(), kernel.clone());
            let unfinished = Unfinished::begin();
            std::thread::spawn(move || {
                kernel.complete(device, cache, full);
                drop(unfinished);
            })
        };
        let compiled = compact.compile(device, cache);
        let loaded = compiled.and_then(|cubin| Binary::load(device, compact, &cubin, true));
        let kernel = loaded.map(|binary| {
            kernel.compact.get_or_init(|| binary);
            kernel
        });
        // Whoever keeps the GPU in a static never drops it, and does not wait by that.
        Unfinished::finish_before_exit();
        (kernel, beside)
    }

    /// Compiles the full form.
    fn complete(self: Arc<Self>, device: Device, cache: Cache, full: Source) {
        // Loading the module must not break a capture that is under way elsewhere.
        let _relaxed = RelaxedCapture::begin();
        // If it does not compile, the compact form stays, and the next process tries again.
        let compiled = full.compile(&device, &cache);
        let loaded = compiled.and_then(|cubin| Binary::load(&device, &full, &cubin, false));
        if let Ok(binary) = loaded {
            self.full.get_or_init(|| binary);
        }
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

    /// Its parameters, in order.
    pub fn parameters(&self) -> &[ptx::Parameter] {
        &self.parameters
    }
}

impl Source {
    /// Prints a program, once for all that is asked about it.
    fn new(program: Program, compiler: Compiler) -> Self {
        let ptx = ptx::print_for(&program, compiler);
        Source { program, ptx }
    }

    fn compile(&self, device: &Device, cache: &Cache) -> cuda::Result<Cubin> {
        device.compile_cached(&self.ptx, LEVEL, cache)
    }
}

impl Binary {
    fn load(device: &Device, source: &Source, cubin: &Cubin, compact: bool) -> cuda::Result<Self> {
        let program = &source.program;
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
