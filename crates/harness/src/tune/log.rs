//! The log of a search: one line of JSON for each configuration that was tried. A search that is
//! started with an existing log resumes from it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::space::Genome;
use crate::Error;

/// A configuration that was tried, and the outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The problem, as its text.
    pub problem: String,
    /// The GPU and its driver.
    pub machine: String,
    /// The configuration.
    pub genome: Genome,
    /// The fingerprint of its PTX, where it was built.
    pub kernel: Option<String>,
    /// The generation that tried it.
    pub generation: usize,
    /// Milliseconds by the cost model.
    pub predicted: Option<f64>,
    /// The outcome.
    pub fate: TrialOutcome,
}

/// The outcome of trying a configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "fate", rename_all = "snake_case")]
pub enum TrialOutcome {
    /// It cannot be built.
    Impossible {
        /// Why.
        reason: String,
    },
    /// The cost model rejected it.
    Hopeless,
    /// The compiler refused it, or it spills.
    Discarded {
        /// Why.
        reason: String,
    },
    /// It was measured.
    Measured {
        /// Milliseconds.
        milliseconds: f64,
        /// The number of samples, of which this is the median.
        rounds: usize,
    },
}

impl Record {
    /// Milliseconds, if it was measured.
    pub fn milliseconds(&self) -> Option<f64> {
        match self.fate {
            TrialOutcome::Measured { milliseconds, .. } => Some(milliseconds),
            _ => None,
        }
    }
}

/// A log, in memory and perhaps in a file.
#[derive(Debug, Default)]
pub struct Log {
    records: Vec<Record>,
    file: Option<File>,
}

impl Log {
    /// A log in memory alone.
    pub fn new() -> Self {
        Log::default()
    }

    /// A log in a file; what is there already is read. A last line that was cut off in the middle
    /// is removed.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let what = path.display().to_string();
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Error::io(format!("cannot read {what}"))(error)),
        };
        let mut records = Vec::new();
        // Bytes of the lines read so far.
        let mut end = 0;
        for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
            match serde_json::from_slice(line) {
                Ok(record) => records.push(record),
                Err(error) if error.is_eof() && end + line.len() == bytes.len() => break,
                Err(error) => {
                    let what = format!("{what}, line {}", index + 1);
                    return Err(Error::Malformed { what, reason: error.to_string() });
                }
            }
            end += line.len();
        }
        let open = OpenOptions::new().create(true).append(true).open(path);
        let mut file = open.map_err(Error::io(format!("cannot write {what}")))?;
        if end < bytes.len() {
            let writable = OpenOptions::new().write(true).open(path);
            let cut = writable.and_then(|file| file.set_len(end as u64));
            cut.map_err(Error::io(format!("cannot write {what}")))?;
        } else if !bytes.is_empty() && !bytes.ends_with(b"\n") {
            file.write_all(b"\n").map_err(Error::io(format!("cannot write {what}")))?;
        }
        Ok(Log { records, file: Some(file) })
    }

    /// Adds a record.
    pub fn push(&mut self, record: Record) -> Result<(), Error> {
        if let Some(file) = &mut self.file {
            let mut line = serde_json::to_string(&record).map_err(|error| Error::Malformed {
                what: "a record".to_owned(),
                reason: error.to_string(),
            })?;
            line.push('\n');
            file.write_all(line.as_bytes()).map_err(Error::io("cannot write the log"))?;
        }
        self.records.push(record);
        Ok(())
    }

    /// Everything, oldest first.
    pub fn records(&self) -> &[Record] {
        &self.records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read_again_even_if_it_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let record = |generation| Record {
            problem: "b=1".to_owned(),
            machine: "a GPU".to_owned(),
            genome: Genome::POOR,
            kernel: None,
            generation,
            predicted: Some(1.5),
            fate: TrialOutcome::Measured { milliseconds: 1.25, rounds: 3 },
        };
        let mut log = Log::open(&path).unwrap();
        log.push(record(0)).unwrap();
        log.push(record(1)).unwrap();
        drop(log);
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.push_str("{\"problem\": \"b=");
        std::fs::write(&path, text).unwrap();
        let mut log = Log::open(&path).unwrap();
        assert_eq!(log.records(), [record(0), record(1)]);
        log.push(record(2)).unwrap();
        drop(log);
        let log = Log::open(&path).unwrap();
        assert_eq!(log.records(), [record(0), record(1), record(2)]);
        // Only the end of the line was not written.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.trim_end()).unwrap();
        let mut log = Log::open(&path).unwrap();
        log.push(record(3)).unwrap();
        assert_eq!(Log::open(&path).unwrap().records().len(), 4);
    }

    /// What is no log stays as it is.
    #[test]
    fn another_file_is_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.json");
        for (text, line) in
            [("{}", "line 1"), ("{\"problem\"\n{}\n", "line 1"), ("words", "line 1")]
        {
            std::fs::write(&path, text).unwrap();
            let message = Log::open(&path).unwrap_err().to_string();
            assert!(message.contains(line), "{message}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
