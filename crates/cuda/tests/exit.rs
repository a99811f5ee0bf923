//! The end of a process waits for work in the driver. Needs no GPU.

use std::process::Command;
use std::time::Duration;

use flashcore_cuda::Unfinished;

/// Set in the process whose end is watched.
const CHILD: &str = "FLASHCORE_TEST_EXIT";

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
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_ends_after_its_unfinished_work", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("the work is done"), "{child:?}");
}
