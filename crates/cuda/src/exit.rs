//! Work in the driver that the end of the process must wait for.
//!
//! When a process ends, its libraries are torn down while its threads still run. One that compiles
//! then works in memory that is gone, and the process crashes after all its work was done.

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, Once, PoisonError};

/// How many threads do such work.
static WORKING: Mutex<usize> = Mutex::new(0);
static FINISHED: Condvar = Condvar::new();

/// Work of a thread of its own, from when this is made until it is dropped.
#[derive(Debug)]
pub struct Unfinished(());

impl Unfinished {
    /// Work that begins.
    pub fn begin() -> Self {
        *WORKING.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Unfinished(())
    }

    /// Makes the end of the process wait for all such work. To be called once the libraries that it
    /// needs are loaded and were used: what was registered last is called first.
    pub fn finish_before_exit() {
        static REGISTER: Once = Once::new();
        REGISTER.call_once(|| {
            // SAFETY: the function is alive as long as the process. If there is no room for it, the
            // process ends as it would have ended without.
            unsafe { atexit(finish) };
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
    /// Of the C library, which every process has.
    fn atexit(function: extern "C" fn()) -> c_int;
}

extern "C" fn finish() {
    let mut working = WORKING.lock().unwrap_or_else(PoisonError::into_inner);
    while *working > 0 {
        working = FINISHED.wait(working).unwrap_or_else(PoisonError::into_inner);
    }
}
