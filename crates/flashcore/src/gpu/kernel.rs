//! Compilation: from a configuration to a kernel on the device, built, compiled and kept.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};

use cuda::{
    Arguments, Cache, Cubin, Device, Function, FunctionAttributes, Launch, Module, Parameter,
    RelaxedCapture, Stream, Unfinished,
};
use kernels::Configuration;
use ptx::{Compiler, ParameterKind, Program, Type};

use super::{Gpu, GpuError, lock};

/// How kernels that are not in the cache are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// The full form before the first use. For measurements, where every launch must run the same
    /// machine code.
    AtOnce,
    /// Where a kernel has a compact form, that form before the first use, and the full form on a
    /// background thread; launches use it as soon as it is ready. Both forms give the same results.
    /// Where the driver's compiler cannot be called on its own, the full form before the first use.
    #[default]
    CompactFirst,
}

/// Holds a kernel once it is compiled.
pub(super) type Slot = Arc<Mutex<Option<Arc<Kernel>>>>;

/// A compiled kernel, in one or two forms.
#[derive(Debug)]
pub struct Kernel {
    /// The form that runs until `full` is ready.
    compact: OnceLock<Binary>,
    full: OnceLock<Binary>,
    parameters: Vec<ptx::Parameter>,
}

/// One form of a kernel as a program and its PTX text.
struct Source {
    program: Program,
    ptx: String,
}

/// One form of a kernel, loaded on the device.
#[derive(Debug)]
struct Binary {
    function: Function,
    launch: Launch,
    compilation: Compilation,
}

/// How the binary of a kernel was obtained.
#[derive(Debug, Clone)]
pub struct Compilation {
    /// Whether it is the compact form, while the full form is still being compiled.
    pub compact: bool,
    /// Time in milliseconds to compile it, or to read it from the cache.
    pub milliseconds: f64,
    /// Whether it came from the cache.
    pub cached: bool,
    /// Failures of the cache, and performance warnings of the compiler.
    pub warnings: Vec<String>,
}

impl Gpu {
    /// Returns a kernel, which is built and compiled at the first request; one with a compact form
    /// according to the GPU's [`Policy`].
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
        lock(&self.compilers).extend(beside);
        Ok(kernel?)
    }

    /// Compiles a program that the caller built.
    pub fn compiled_program(&self, program: Program) -> Result<Arc<Kernel>, GpuError> {
        let source = Source::new(program, self.compiler());
        Ok(Kernel::at_once(&self.device, &self.cache, &source)?)
    }

    /// Waits until every requested kernel is compiled in its full form.
    pub fn finish_compiling(&self) {
        let compilers = std::mem::take(&mut *lock(&self.compilers));
        for compiler in compilers {
            // A thread that panicked leaves the compact form in place.
            let _ = compiler.join();
        }
    }
}

impl Kernel {
    fn new(source: &Source) -> Self {
        let parameters = source.program.parameters.clone();
        Kernel { compact: OnceLock::new(), full: OnceLock::new(), parameters }
    }

    /// Loads a cubin of the full form.
    fn loaded(device: &Device, source: &Source, cubin: &Cubin) -> cuda::Result<Arc<Self>> {
        let kernel = Kernel::new(source);
        let binary = Binary::load(device, source, cubin, false)?;
        kernel.full.get_or_init(|| binary);
        Ok(Arc::new(kernel))
    }

    /// Compiles the full form, or takes it from the cache.
    fn at_once(device: &Device, cache: &Cache, source: &Source) -> cuda::Result<Arc<Self>> {
        Kernel::loaded(device, source, &source.compile(device, cache)?)
    }

    /// Takes the full form from the cache, if it is there.
    fn cached(device: &Device, cache: &Cache, source: &Source) -> cuda::Result<Option<Arc<Self>>> {
        let cubin = device.cached(&source.ptx, cache);
        cubin.map(|cubin| Kernel::loaded(device, source, &cubin)).transpose()
    }

    /// Compiles the compact form, or takes it from the cache, while a new thread compiles the full
    /// form. Returns the kernel and that thread; where the system has no room for a thread, the
    /// compact form stays.
    fn compact_first(
        device: &Device,
        cache: &Cache,
        full: Source,
        compact: &Source,
    ) -> (cuda::Result<Arc<Self>>, io::Result<JoinHandle<()>>) {
        let kernel = Arc::new(Kernel::new(&full));
        let beside = {
            let (device, cache, kernel) = (device.clone(), cache.clone(), kernel.clone());
            let unfinished = Unfinished::begin();
            thread::Builder::new().spawn(move || {
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
        // A GPU in a static is never dropped, so its drop does not wait for the thread: exit does.
        Unfinished::finish_before_exit();
        (kernel, beside)
    }

    /// Compiles and loads the full form.
    fn complete(self: Arc<Self>, device: Device, cache: Cache, full: Source) {
        // Loading a module must not invalidate a stream capture on another thread.
        let _relaxed = RelaxedCapture::begin();
        // If compilation fails, the compact form stays, and the next process tries again.
        let compiled = full.compile(&device, &cache);
        let loaded = compiled.and_then(|cubin| Binary::load(&device, &full, &cubin, false));
        if let Ok(binary) = loaded {
            self.full.get_or_init(|| binary);
        }
    }

    /// Returns the full form if it is ready, otherwise the compact one.
    fn best(&self) -> &Binary {
        let best = self.full.get().or(self.compact.get());
        best.expect("a kernel is handed out with one of its binaries")
    }

    /// Enqueues a launch of `blocks` thread blocks on a stream.
    pub fn launch(&self, stream: &Stream, blocks: u32, arguments: &Arguments) -> cuda::Result<()> {
        let Binary { function, launch, .. } = self.best();
        let launch = Launch { grid: [blocks, 1, 1], ..*launch };
        function.launch(stream, &launch, arguments)
    }

    /// Returns the registers, local memory and other attributes that the driver reports.
    pub fn attributes(&self) -> FunctionAttributes {
        self.best().function.attributes()
    }

    /// Returns how the binary that a launch would use now was obtained.
    pub fn compilation(&self) -> &Compilation {
        &self.best().compilation
    }

    /// Returns the parameters, in order.
    pub fn parameters(&self) -> &[ptx::Parameter] {
        &self.parameters
    }
}

impl Source {
    /// Prints a program to PTX.
    fn new(program: Program, compiler: Compiler) -> Self {
        let ptx = ptx::print_for(&program, compiler);
        Source { program, ptx }
    }

    fn compile(&self, device: &Device, cache: &Cache) -> cuda::Result<Cubin> {
        device.compile_cached(&self.ptx, cache)
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
            programmatic: program.waits_for_grids() && device.takes_programmatic_launches(),
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

/// Returns the compiler's performance warnings. Spills are not among them: see
/// [`Kernel::attributes`].
fn losses(log: &str) -> impl Iterator<Item = &str> {
    log.lines().filter(|line| line.contains("Potential Performance Loss"))
}

/// Returns the parameter types of a program in the terms of the driver layer.
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
