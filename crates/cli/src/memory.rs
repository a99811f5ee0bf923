//! Checks whether a problem's tensors fit in memory before they are allocated: a system that
//! overcommits memory kills the process later, without a message.

use std::error::Error;
use std::fs;

use flashcore::{Alibi, DTypes, Problem, Storage};

use crate::terminal;

/// Refuse a problem whose tensors are larger than the memory that is free.
pub(crate) fn admit(problem: &Problem) -> Result<(), Box<dyn Error>> {
    let DTypes { query, key, value, output } = problem.dtypes;
    let bytes: u128 = [
        (problem.query_shape(), query),
        (problem.key_shape(), key),
        (problem.value_shape(), value),
        (problem.output_shape(), output),
    ]
    .into_iter()
    .map(|(shape, dtype)| {
        let elements = shape.elements().map_or(u128::MAX / 64, |count| count as u128);
        elements * dtype.bytes() as u128
    })
    .sum();
    // The output's rows are listed once while they are shared out among threads.
    let rows = problem.rows() as u128 * (4 + 16);
    let needed = (bytes + rows).saturating_add(lists(problem));
    match available() {
        Some(available) if needed > available => Err(format!(
            "this problem needs {} of memory, {} are free",
            terminal::bytes(needed),
            terminal::bytes(available)
        )
        .into()),
        _ => Ok(()),
    }
}

/// Bytes of the lists that say where sequences are, and of what each head has.
fn lists(problem: &Problem) -> u128 {
    let batch = problem.batch as u128;
    // Starts or lengths of queries and of keys, each beside those that it is made from; the reference
    // lists sequences of equal lengths too.
    let sequences = batch * 4 * size_of::<usize>() as u128;
    let places = match problem.keys {
        Storage::Paged { columns, pages, .. } => batch * columns as u128 + pages as u128,
        Storage::Entries(entries) => entries as u128,
        Storage::Padded | Storage::Packed(_) => 0,
    };
    let slopes = match problem.scores.alibi {
        Alibi::None => 0,
        Alibi::PerHead => 1,
        Alibi::PerSequence => batch,
    };
    let heads = problem.query_heads as u128 * (slopes + u128::from(problem.scores.sinks));
    places.saturating_add(heads).saturating_mul(4).saturating_add(sequences)
}

/// Bytes that can be allocated, where the system says so.
pub(crate) fn available() -> Option<u128> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        let kilobytes: u128 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kilobytes * 1024)
    });
    [machine, container()].into_iter().flatten().min()
}

/// Returns the memory that a container's limit leaves (cgroup version 2).
fn container() -> Option<u128> {
    let read = |name: &str| -> Option<u128> {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse().ok()
    };
    Some(read("memory.max")?.saturating_sub(read("memory.current")?))
}
