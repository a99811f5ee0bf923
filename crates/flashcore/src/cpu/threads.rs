//! The threads on which a process computes.
//!
//! They are those of rayon's global pool, or of the pool from which the call is made. A fork copies
//! a process without its threads: in the child, the global pool of the parent would never answer,
//! so a forked process gets a pool of its own. No thread is started before there is work.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use rayon::{Scope, ThreadPool, ThreadPoolBuilder};

use crate::backend::BackendError;

/// The process that owns the threads of the global pool; 0 as long as none does.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The pool of a forked process, and the id of that process.
static FORKED: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// Runs work where parallel iterators use the threads of this process.
pub(super) fn install<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, BackendError> {
    Ok(match own_pool()? {
        None => work(),
        Some(pool) => pool.install(work),
    })
}

/// Runs work on a thread of this process's pool, while the calling thread calls `watch` once per
/// `period`. On a thread of a pool, which must not block, the work runs directly and `watch` is not
/// called.
pub(super) fn watched<'work, T: Send + 'work>(
    work: impl FnOnce() -> T + Send + 'work,
    period: Duration,
    mut watch: impl FnMut(),
) -> Result<T, BackendError> {
    if rayon::current_thread_index().is_some() {
        return Ok(work());
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let wait = |scope: &Scope<'work>| {
        scope.spawn(move |_| {
            let _ = sender.send(work());
        });
        loop {
            match receiver.recv_timeout(period) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Timeout) => watch(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    };
    let result = match own_pool()? {
        None => rayon::in_place_scope(wait),
        Some(pool) => pool.in_place_scope(wait),
    };
    Ok(result.expect("the scope passes on the panic of work that sent nothing"))
}

/// Returns the pool of a forked process; `None` where the global pool can be used.
fn own_pool() -> Result<Option<Arc<ThreadPool>>, BackendError> {
    let process = std::process::id();
    let owner = OWNER.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed);
    if owner.is_ok() || owner == Err(process) || rayon::current_thread_index().is_some() {
        return Ok(None);
    }
    // Never blocks: a lock that another thread held during the fork is never released in the child.
    let look = || match FORKED.try_lock() {
        Ok(pool) => Some(pool),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    let found = look().and_then(|pool| pool.clone()).filter(|(of, _)| *of == process);
    if let Some((_, pool)) = found {
        return Ok(Some(pool));
    }
    let pool = ThreadPoolBuilder::new().build();
    let pool = Arc::new(pool.map_err(|error| BackendError::Threads(error.to_string()))?);
    if let Some(mut kept) = look() {
        // The parent's pool is leaked: dropping it would wait for threads that do not exist here.
        std::mem::forget(kept.replace((process, pool.clone())));
    }
    Ok(Some(pool))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_may_watch() {
        let (begun, watched_once) = mpsc::sync_channel(0);
        let mut times = 0;
        let work = move || watched_once.recv().map(|()| rayon::current_thread_index().is_some());
        let watch = || {
            times += 1;
            if times == 3 {
                begun.send(()).unwrap();
            }
        };
        assert_eq!(watched(work, Duration::from_millis(1), watch).unwrap(), Ok(true));
        assert!(times >= 3);
    }

    #[test]
    fn a_panic_of_the_work_reaches_whoever_waits() {
        let wait = || watched(|| panic!("of the work"), Duration::from_secs(1), || ());
        let panic = std::panic::catch_unwind(wait).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"of the work"));
    }
}
