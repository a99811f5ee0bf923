//! Work inside the driver for which the exit of the process must wait.
//!
//! When a process exits, its libraries are torn down while its threads still run. A thread that is
//! compiling then uses memory that is gone, and the process crashes after all its work is done.
//!
//! A process that was forked has none of these threads, and does not wait for them.

use std::ffi::c_int;
use std::process;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

/// Number of threads with such work.
static WORKING: Mutex<usize> = Mutex::new(0);
static FINISHED: Condvar = Condvar::new();
/// The process whose exit waits.
static WAITING: OnceLock<u32> = OnceLock::new();

/// Work on a background thread, from the creation of this guard until it is dropped.
#[derive(Debug)]
pub struct Unfinished(());

impl Unfinished {
    /// Starts such work.
    pub fn begin() -> Self {
        *WORKING.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Unfinished(())
    }

    /// Makes the exit of the process wait for all such work. Must be called after the libraries
    /// that the work needs are loaded and have been used: exit handlers run in reverse order of
    /// registration.
    pub fn finish_before_exit() {
        WAITING.get_or_init(|| {
            // SAFETY: the function is alive as long as the process. If there is no room for it, the
            // process ends as it would have ended without.
            unsafe { atexit(finish) };
            process::id()
        });
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        *WORKING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        FINISHED.notify_all();
    }
}

unsafe extern "C" {
    /// From the C library, which every process has.
    fn atexit(function: extern "C" fn()) -> c_int;
}

extern "C" fn finish() {
    if WAITING.get() != Some(&process::id()) {
        return;
    }
    let mut working = WORKING.lock().unwrap_or_else(PoisonError::into_inner);
    while *working > 0 {
        working = FINISHED.wait(working).unwrap_or_else(PoisonError::into_inner);
    }
}
