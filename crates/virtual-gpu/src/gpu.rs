//! The state of the device: its memory, its context, and what the driver's handles stand for.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use ptx::Target;
use sim::Memory;

use crate::error::{Error, Result, explain};
use crate::graph::{Graph, UserObject};
use crate::module::{Kernel, Programs};
use crate::options::Options;
use crate::stream::{Capture, Event, Stream};

/// A handle of the driver: a pointer to its callers, a number here.
pub(crate) type Handle = u64;

/// The handle of the device's primary context.
pub(crate) const CONTEXT: Handle = 0x100;

/// The device; `None` before `cuInit`.
static GPU: Mutex<Option<Gpu>> = Mutex::new(None);

thread_local! {
    /// The contexts of this thread, the current one last.
    static CONTEXTS: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

pub(crate) struct Gpu {
    pub(crate) options: Options,
    pub(crate) memory: Memory,
    /// The size of each allocation, by its address.
    pub(crate) allocations: BTreeMap<u64, u64>,
    /// The number of references to the primary context.
    pub(crate) retained: u32,
    pub(crate) programs: Programs,
    pub(crate) kernels: HashMap<Handle, Kernel>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    /// The captures under way, by id.
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: HashMap<Handle, Graph>,
    pub(crate) executables: HashMap<Handle, Graph>,
    /// User objects, and how many references their creators have.
    pub(crate) objects: HashMap<Handle, (Arc<UserObject>, u32)>,
    /// The number of launches so far.
    pub(crate) launches: u64,
    /// Whether a launch has failed.
    pub(crate) failed: bool,
    last_handle: Handle,
}

impl Gpu {
    pub(crate) fn new(options: Options) -> Gpu {
        Gpu {
            options,
            memory: Memory::new(),
            allocations: BTreeMap::new(),
            retained: 0,
            programs: Programs::default(),
            kernels: HashMap::new(),
            streams: HashMap::from([(0, Stream::default())]),
            events: HashMap::new(),
            captures: BTreeMap::new(),
            graphs: HashMap::new(),
            executables: HashMap::new(),
            objects: HashMap::new(),
            launches: 0,
            failed: false,
            last_handle: 0x1000,
        }
    }

    /// Returns a handle that nothing else has had.
    pub(crate) fn handle(&mut self) -> Handle {
        self.last_handle += 16;
        self.last_handle
    }

    /// Gives back a reference to the primary context. With the last one the context ends: memory is
    /// freed, and a failure is forgotten.
    pub(crate) fn release(&mut self) -> Result {
        self.retained = self.retained.checked_sub(1).ok_or(Error::InvalidContext)?;
        if self.retained == 0 {
            for (address, _) in std::mem::take(&mut self.allocations) {
                self.memory.free(Memory::place(address).0);
            }
            self.failed = false;
        }
        Ok(())
    }

    // ---- memory ---------------------------------------------------------------

    /// Returns how many bytes can still be allocated.
    pub(crate) fn free_bytes(&self) -> u64 {
        (self.options.memory << 30).saturating_sub(self.allocations.values().sum())
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64> {
        self.unsafe_call()?;
        if bytes == 0 {
            return Err(Error::InvalidValue);
        }
        if bytes > self.free_bytes() {
            return Err(Error::OutOfMemory);
        }
        let name = format!("allocation {}", self.memory.ids().count());
        let address = Memory::address(self.memory.output(&name, bytes as usize), 0);
        self.allocations.insert(address, bytes);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result {
        if address == 0 {
            return Ok(());
        }
        self.unsafe_call()?;
        let unknown = || explain(Error::InvalidValue, format!("{address:#x} is no allocation"));
        self.allocations.remove(&address).ok_or_else(unknown)?;
        self.memory.free(Memory::place(address).0);
        Ok(())
    }

    // ---- properties -----------------------------------------------------------

    /// Returns an attribute of the device by its number; those of an H200, but for what the
    /// architecture decides. Attributes that nobody has asked for yet are 0.
    pub(crate) fn attribute(&self, attribute: u32) -> i32 {
        let Target { architecture, .. } = self.options.target;
        let shared = self.options.target.shared_memory_limit();
        let value = match attribute {
            // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X, _Y and _Z
            1..=3 => 1024,
            4 => 64,
            // MAX_GRID_DIM_X, _Y and _Z
            5 => i32::MAX as u32,
            6 | 7 => 65535,
            // MAX_SHARED_MEMORY_PER_BLOCK
            8 => 48 << 10,
            // TOTAL_CONSTANT_MEMORY, WARP_SIZE
            9 => 64 << 10,
            10 => 32,
            // MAX_REGISTERS_PER_BLOCK, and below MAX_REGISTERS_PER_MULTIPROCESSOR
            12 | 82 => ptx::MULTIPROCESSOR_REGISTERS,
            // CLOCK_RATE, MULTIPROCESSOR_COUNT
            13 => 1_980_000,
            16 => self.options.multiprocessors,
            // MEMORY_CLOCK_RATE, GLOBAL_MEMORY_BUS_WIDTH, L2_CACHE_SIZE
            36 => 3_201_000,
            37 => 6144,
            38 => 50 << 20,
            // MAX_THREADS_PER_MULTIPROCESSOR
            39 => self.threads_per_multiprocessor(),
            // CONCURRENT_KERNELS, UNIFIED_ADDRESSING
            31 | 41 => 1,
            // COMPUTE_CAPABILITY_MAJOR and _MINOR
            75 => architecture / 10,
            76 => architecture % 10,
            // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR and _PER_BLOCK_OPTIN
            81 => self.shared_bytes_per_multiprocessor(),
            97 => shared,
            // RESERVED_SHARED_MEMORY_PER_BLOCK
            111 => 1024,
            // CLUSTER_LAUNCH
            120 => (architecture >= 90).into(),
            _ => 0,
        };
        value as i32
    }

    /// A block's largest shared memory and the KiB that is reserved for each block; on Turing
    /// nothing is.
    pub(crate) fn shared_bytes_per_multiprocessor(&self) -> u32 {
        let target = self.options.target;
        target.shared_memory_limit() + if target.architecture == 75 { 0 } else { 1024 }
    }

    pub(crate) fn threads_per_multiprocessor(&self) -> u32 {
        match self.options.target.architecture {
            75 => 1024,
            80 | 90 => 2048,
            _ => 1536,
        }
    }
}

// ---- access to the state ------------------------------------------------------

/// Initialises the device, once.
pub(crate) fn initialize() -> Result {
    let mut gpu = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    if gpu.is_none() {
        let options = Options::from_environment();
        let options = options.map_err(|reason| explain(Error::InvalidValue, reason))?;
        *gpu = Some(Gpu::new(options));
    }
    Ok(())
}

/// Calls a function with the device.
pub(crate) fn with<T>(call: impl FnOnce(&mut Gpu) -> Result<T>) -> Result<T> {
    let mut gpu = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    call(gpu.as_mut().ok_or(Error::NotInitialized)?)
}

/// Calls a function with the device, for which this thread needs a context that has not failed.
pub(crate) fn in_context<T>(call: impl FnOnce(&mut Gpu) -> Result<T>) -> Result<T> {
    let current = current();
    with(|gpu| match current {
        0 => Err(Error::InvalidContext),
        _ if gpu.retained == 0 => Err(Error::ContextIsDestroyed),
        _ if gpu.failed => Err(Error::LaunchFailed),
        _ => call(gpu),
    })
}

// ---- the contexts of a thread -------------------------------------------------

/// Returns the current context, or 0.
pub(crate) fn current() -> Handle {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0))
}

/// Replaces the current context; 0 takes it off.
pub(crate) fn set_current(context: Handle) -> Result {
    CONTEXTS.with_borrow_mut(|contexts| contexts.pop());
    if context == 0 { Ok(()) } else { push(context) }
}

pub(crate) fn push(context: Handle) -> Result {
    if context != CONTEXT {
        return Err(Error::InvalidContext);
    }
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
    Ok(())
}

pub(crate) fn pop() -> Result<Handle> {
    CONTEXTS.with_borrow_mut(Vec::pop).ok_or(Error::InvalidContext)
}
