//! State of this process, which forked children do not inherit.
//!
//! A fork copies memory only: threads and the driver's state are gone in the child, and a lock that
//! another thread held is never released. A child therefore starts with fresh state, and leaks its
//! parent's.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flashcore::gpu::{AttentionPlan, Gpu};
use pyo3::PyResult;

use crate::error;
use crate::info::Last;
use crate::rules::Spare;

/// Everything that is kept between calls.
#[derive(Default)]
pub(crate) struct Process {
    /// The devices that were opened, by their ordinals. They stay open to the end of the process:
    /// kernels may run on them until then.
    pub(crate) devices: Mutex<Vec<(u32, &'static Gpu)>>,
    /// The last call, for `info()`.
    pub(crate) last: Mutex<Option<Last>>,
    /// Plans of the slow kernel about which the user was warned.
    pub(crate) told: Mutex<Vec<Weak<AttentionPlan>>>,
    /// Memory of block lists that no mask has any more, the oldest first.
    pub(crate) spare: Mutex<Vec<Spare>>,
    /// Whether this process has called the driver.
    called: AtomicBool,
    /// Whether a process that this one was forked from has.
    called_before: bool,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the state of this process.
pub(crate) fn process() -> &'static Process {
    let found = PROCESS.load(Ordering::Acquire);
    let found = if found.is_null() { begin() } else { found };
    // SAFETY: the pointer was leaked by `begin` or `forked`.
    unsafe { &*found }
}

#[cold]
fn begin() -> *mut Process {
    let fresh = Box::into_raw(Box::default());
    let null = std::ptr::null_mut();
    match PROCESS.compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => fresh,
        // Another thread was faster; ours leaks a few bytes.
        Err(first) => first,
    }
}

/// Replaces the state in a process that was just forked, on its only thread.
pub(crate) fn forked() {
    let parent = process();
    let called_before = parent.called_before || parent.called.load(Ordering::Relaxed);
    let child = Process { called_before, ..Process::default() };
    PROCESS.store(Box::into_raw(Box::new(child)), Ordering::Release);
}

impl Process {
    /// Must be called before the driver is; fails if a fork has made the driver unusable.
    pub(crate) fn call_driver(&self) -> PyResult<()> {
        if self.called_before {
            return Err(error::runtime(
                "the GPU cannot be used here: CUDA was used before this process was forked, and does \
                 not survive a fork; start processes with multiprocessing's \"spawn\" or \
                 \"forkserver\", or use the GPU in the forked processes only",
            ));
        }
        self.called.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns whether this is the first warning about a plan, and remembers it.
    pub(crate) fn tell(&self, plan: &Arc<AttentionPlan>) -> bool {
        let mut told = lock(&self.told);
        told.retain(|it| it.strong_count() > 0);
        let fresh = !told.iter().any(|it| std::ptr::eq(it.as_ptr(), Arc::as_ptr(plan)));
        if fresh {
            told.push(Arc::downgrade(plan));
        }
        fresh
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
