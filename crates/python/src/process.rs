//! What belongs to this process and not to those that are forked from it.
//!
//! A fork copies memory and nothing else: threads and the driver's state stay behind, and a lock that
//! another thread had is never released. So a child begins with nothing of its parent's, and what the
//! parent had is left where it is.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use flashcore::gpu::{AttentionPlan, Gpu};
use pyo3::PyResult;

use crate::error;
use crate::info::Last;

/// All that is kept between calls.
#[derive(Default)]
pub(crate) struct Process {
    /// The devices that were opened, by their ordinals. They stay open to the end of the process:
    /// kernels may run on them until then.
    pub(crate) devices: Mutex<Vec<(u32, &'static Gpu)>>,
    /// The last call.
    pub(crate) last: Mutex<Option<Last>>,
    /// Plans of the slow kernel that their user was told about.
    pub(crate) told: Mutex<Vec<Weak<AttentionPlan>>>,
    /// Whether this process has called the driver.
    called: AtomicBool,
    /// Whether one that it was forked from has.
    called_before: bool,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

/// This process.
pub(crate) fn process() -> &'static Process {
    let found = PROCESS.load(Ordering::Acquire);
    let found = if found.is_null() { begin() } else { found };
    // SAFETY: one that `begin` or `forked` leaked.
    unsafe { &*found }
}

#[cold]
fn begin() -> *mut Process {
    let fresh = Box::into_raw(Box::default());
    let null = std::ptr::null_mut();
    match PROCESS.compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => fresh,
        // Another thread was faster: a few bytes are lost.
        Err(first) => first,
    }
}

/// Begins anew in a process that was just forked, on its only thread.
pub(crate) fn forked() {
    let parent = process();
    let called_before = parent.called_before || parent.called.load(Ordering::Relaxed);
    let child = Process { called_before, ..Process::default() };
    PROCESS.store(Box::into_raw(Box::new(child)), Ordering::Release);
}

impl Process {
    /// To be called before the driver is; an error where a fork has made it useless.
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

    /// Whether a plan is told of for the first time.
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
