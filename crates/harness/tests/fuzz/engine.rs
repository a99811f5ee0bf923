//! Inputs that nobody means well: files of a corpus, changed at random.
//!
//! A target takes bytes and must neither panic nor take long, whatever they are. Changes are drawn
//! by proptest, so that what fails comes out small. Every target runs for a share of
//! `FLASHCORE_FUZZ_SECONDS` (a few, by default) with the same draws each time; a longer time tries
//! further ones. Whatever once failed belongs into the corpus, which is tried first and unchanged.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};

/// Seconds of a target where the environment does not say.
const SECONDS: u64 = 2;

/// The longest that one input may take.
const SLOW: Duration = Duration::from_secs(5);

/// One change of some bytes. Places are shares of the length, so that they mean something in what
/// other changes have left.
#[derive(Debug, Clone)]
enum Change {
    Flip {
        at: u16,
        bit: u8,
    },
    Put {
        at: u16,
        byte: u8,
    },
    Word {
        at: u16,
        word: &'static str,
    },
    /// A number in the text becomes another one.
    Number {
        which: u16,
        number: &'static str,
    },
    Remove {
        at: u16,
        length: u16,
    },
    Repeat {
        at: u16,
        length: u16,
        times: u16,
    },
    Cut {
        at: u16,
    },
    /// What another file of the corpus has from there on.
    Splice {
        at: u16,
        other: u16,
    },
}

/// Numbers at which things go wrong.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "-1",
    "2",
    "7",
    "255",
    "256",
    "65535",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e309",
    "-0.0",
    "nan",
];

/// Words that mean something to one target or another.
const WORDS: [&str; 24] = [
    "\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "(",
    ")",
    "-",
    "ceil(",
    "min(",
    "null",
    "true",
    "\n",
    "\0",
    "\u{e9}",
    "causal",
    "window=",
    "queries=packed:",
    "keys=paged:",
    ".entry",
    ".param .b8 x[",
    "[[[[[[[[",
];

fn change() -> impl Strategy<Value = Change> {
    let at = any::<u16>;
    let few = || prop_oneof![1u16..8, 1u16..200];
    prop_oneof![
        (at(), 0u8..8).prop_map(|(at, bit)| Change::Flip { at, bit }),
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Put { at, byte }),
        (at(), prop::sample::select(&WORDS[..])).prop_map(|(at, word)| Change::Word { at, word }),
        (at(), prop::sample::select(&NUMBERS[..]))
            .prop_map(|(which, number)| Change::Number { which, number }),
        (at(), few()).prop_map(|(at, length)| Change::Remove { at, length }),
        (at(), few(), few()).prop_map(|(at, length, times)| Change::Repeat { at, length, times }),
        at().prop_map(|at| Change::Cut { at }),
        (at(), at()).prop_map(|(at, other)| Change::Splice { at, other }),
    ]
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>, corpus: &[Vec<u8>]) {
        let place = |at: u16, length: usize| at as usize * length / (u16::MAX as usize + 1);
        let length = bytes.len();
        let range = |at: u16, count: u16| {
            let first = place(at, length);
            first..(first + count as usize).min(length)
        };
        match self {
            Change::Flip { at, bit } if length > 0 => bytes[place(*at, length)] ^= 1 << bit,
            Change::Put { at, byte } => bytes.insert(place(*at, length + 1), *byte),
            Change::Word { at, word } => {
                let at = place(*at, length + 1);
                bytes.splice(at..at, word.bytes());
            }
            Change::Number { which, number } => {
                let numbers = numbers(bytes);
                if let Some(range) = numbers.get(place(*which, numbers.len())) {
                    bytes.splice(range.clone(), number.bytes());
                }
            }
            Change::Remove { at, length } => drop(bytes.drain(range(*at, *length))),
            Change::Repeat { at, length, times } => {
                let range = range(*at, *length);
                let part = bytes[range.clone()].repeat(*times as usize);
                bytes.splice(range.end..range.end, part);
            }
            Change::Cut { at } => bytes.truncate(place(*at, length + 1)),
            Change::Splice { at, other } => {
                let other = &corpus[place(*other, corpus.len())];
                bytes.truncate(place(*at, length + 1));
                bytes.extend(&other[place(*at, other.len())..]);
            }
            Change::Flip { .. } => {}
        }
        bytes.truncate(1 << 16);
    }
}

/// Where the bytes have digits.
fn numbers(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut found: Vec<std::ops::Range<usize>> = Vec::new();
    for (index, _) in bytes.iter().enumerate().filter(|(_, byte)| byte.is_ascii_digit()) {
        match found.last_mut() {
            Some(range) if range.end == index => range.end += 1,
            _ => found.push(index..index + 1),
        }
    }
    found
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{folder:?} has no files");
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Runs a target over its corpus, and over changes of it until the time is over.
pub(crate) fn fuzz(name: &str, target: impl Fn(&[u8])) {
    let variable = std::env::var("FLASHCORE_FUZZ_SECONDS").ok();
    let seconds = variable.map_or(SECONDS, |it| it.parse().expect("FLASHCORE_FUZZ_SECONDS"));
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let timed = |bytes: &[u8]| {
        let begun = Instant::now();
        target(bytes);
        assert!(begun.elapsed() < SLOW, "{:?} for one input", begun.elapsed());
    };
    let corpus = corpus(name);
    corpus.iter().for_each(|bytes| timed(bytes));
    let changed = (any::<u16>(), prop::collection::vec(change(), 1..8));
    let (mut round, mut inputs) = (0, 0);
    while Instant::now() < deadline {
        let config = Config {
            cases: 64,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(round),
            max_shrink_time: 20_000,
            ..Config::default()
        };
        let result = TestRunner::new(config).run(&changed, |(first, changes)| {
            let mut bytes = corpus[first as usize % corpus.len()].clone();
            changes.iter().for_each(|change| change.apply(&mut bytes, &corpus));
            // proptest shrinks panics too; the bytes belong into the message.
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| timed(&bytes)));
            caught
                .map_err(|_| TestCaseError::fail(format!("{:?}", String::from_utf8_lossy(&bytes))))
        });
        if let Err(error) = result {
            panic!("{name}, round {round}: {error}");
        }
        (round, inputs) = (round + 1, inputs + 64);
    }
    println!("{name}: {inputs} inputs in {seconds} s");
}
