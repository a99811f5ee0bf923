//! The end of a process waits for work in the driver. Needs no GPU.
#![allow(unsafe_code)] // `fork`

use std::ffi::{c_int, c_uint};
use std::process::{Command, Output};
use std::time::Duration;

use flashcore_cuda::Unfinished;

/// Set in the process whose end is watched.
const CHILD: &str = "FLASHCORE_TEST_EXIT";

/// Runs one of these tests in a process of its own.
fn run(test: &str) -> Output {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap()
}

#[test]
fn a_process_ends_after_its_unfinished_work() {
    if std::env::var_os(CHILD).is_some() {
        let unfinished = Unfinished::begin();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            println!("the work is done");
            drop(unfinished);
        });
        Unfinished::finish_before_exit();
        return;
    }
    let child = run("a_process_ends_after_its_unfinished_work");
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("the work is done"), "{child:?}");
}

/// A fork copies no threads, and so there is nobody who would finish the work of the parent.
#[test]
#[cfg(unix)]
fn a_forked_process_does_not_wait() {
    unsafe extern "C" {
        fn fork() -> c_int;
        fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
        fn alarm(seconds: c_uint) -> c_uint;
        fn exit(status: c_int) -> !;
    }
    if std::env::var_os(CHILD).is_some() {
        let _unfinished = Unfinished::begin();
        Unfinished::finish_before_exit();
        let mut status = -1;
        // SAFETY: the copy calls nothing but the handlers of its exit, or is ended by the alarm.
        unsafe {
            match fork() {
                0 => {
                    alarm(10);
                    exit(0)
                }
                copy => waitpid(copy, &mut status, 0),
            }
        };
        return println!("the copy ended with {status}");
    }
    let output = run("a_forked_process_does_not_wait");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("the copy ended with 0"), "{output:?}");
}
