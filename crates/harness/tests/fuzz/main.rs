//! Everything that is read from outside, with bytes that nobody means well: texts of problems,
//! safetensors, descriptions of kernels, tunings, results, times, logs and cubins in the cache. See
//! `engine.rs` for how, and `corpus/` for where they come from.

mod engine;

use std::convert::Infallible;
use std::path::Path;

use cuda::{Cache, CacheKey, ComputeCapability, Driver, DriverVersion};
use engine::fuzz;
use flashcore::family::tuning::TuningFile;
use flashcore::file::{Names, read_inputs};
use flashcore::gpu::Chip;
use flashcore::{Backend, CpuBackend, Plan, Preference, Problem, RunOptions};
use flashcore_harness::gate::foreign::{Description, evaluate};
use flashcore_harness::gate::{ForeignKernel, Thresholds};
use flashcore_harness::report::compare::compare;
use flashcore_harness::report::{Results, chart, html};
use flashcore_harness::scale::times::Times;
use flashcore_harness::tune::log::Log;
use kernels::forward::{Workload, tuned};
use kernels::{Configuration, Rules};

/// A target that reads a file, which holds the bytes.
fn fuzz_file(name: &str, target: impl Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fuzz(name, |bytes| {
        std::fs::write(&path, bytes).unwrap();
        target(&path);
    });
}

/// What parses is valid, says itself in words and as a text that parses to the same, and can be
/// planned for a GPU or is refused.
#[test]
fn problem() {
    fuzz("problem", |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let Ok(problem) = text.parse::<Problem>() else { return };
        problem.validate().unwrap();
        let again = problem.text();
        assert_eq!(again.parse::<Problem>().unwrap().text(), again, "{text:?}");
        let _ = (problem.to_string(), problem.flops(), problem.visible_pairs(), problem.rows());
        for chip in [Chip::H200, Chip::typical(ptx::Target::SM_80)] {
            let plan = Plan::on_chip(&chip, &problem, &Preference::default());
            let _ = plan.map(|plan| plan.to_string());
        }
    });
}

/// Tensors that are read make a problem or are refused, and a small one can be computed.
#[test]
fn safetensors() {
    fuzz_file("safetensors", |path| {
        let Ok(tensors) = read_inputs(path, &Names::default()) else { return };
        let Ok(problem) = tensors.inputs().problem() else { return };
        if problem.validate().is_ok() && problem.rows() < 1000 && problem.key_length < 1000 {
            let cpu = CpuBackend::new();
            let _ = cpu.run(&problem, tensors.inputs(), &RunOptions::default());
        }
    });
}

/// A description means a launch for every problem of its contract, or nothing.
#[test]
fn description() {
    let ptx = ".visible .entry mine(.param .u64 q, .param .u32 n)\n{ }".to_owned();
    fuzz("description", |bytes| {
        let Ok(description) = serde_json::from_slice::<Description>(bytes) else { return };
        if let Ok(foreign) = ForeignKernel::new(ptx.clone(), description) {
            let _ = foreign.validate();
            let _ = foreign.describe(&foreign.contract.timed());
        }
    });
}

/// Any PTX beside a good description.
#[test]
fn ptx_text() {
    let description = r#"{ "entry": "mine", "problem": "d=64,f16", "grid": ["heads"],
        "threads": 256, "arguments": [{ "tensor": "query" }, { "u32": "query_length" }] }"#;
    fuzz("ptx", |bytes| {
        let ptx = String::from_utf8_lossy(bytes).into_owned();
        let description = serde_json::from_str(description).unwrap();
        let _ = ForeignKernel::new(ptx, description).unwrap().validate();
    });
}

#[test]
fn expression() {
    fuzz("expression", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let _ = evaluate(&text, &[("heads", 6.0), ("query_length", 100.0)]);
    });
}

/// Whatever a tuning asks for is built or refused: sizes beyond any hardware, too.
#[test]
fn tuning() {
    let workload = |head_dim| Workload {
        element: ptx::Element::BF16,
        head_dim,
        value_head_dim: head_dim,
        rules: Rules::CAUSAL,
        query_length: 8000,
        key_length: 8000,
        heads: 32,
        multiprocessors: 132,
    };
    let bases = [64, 128, 256].map(|dim| tuned(&workload(dim)).unwrap().configuration);
    fuzz("tuning", |bytes| {
        let Ok(file) = TuningFile::parse(&String::from_utf8_lossy(bytes)) else { return };
        let entries = file.tunings.iter().flat_map(|tuning| &tuning.entries);
        for entry in entries.take(2) {
            for base in &bases {
                let configuration = entry.variant.configuration(base);
                let _ = configuration.program();
                let _ = Configuration::Forward(configuration).name();
            }
        }
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(TuningFile::parse(&text).unwrap().tunings.len(), file.tunings.len());
    });
}

/// Results can be shown and compared, whatever is in them.
#[test]
fn results() {
    fuzz_file("results", |path| {
        let Ok(results) = Results::read(path) else { return };
        let _ = (html::page(&results), chart::ratios(&results), results.above_roofline());
        let _ = (results.wrong_outputs(), compare(&results, &results));
    });
}

/// Times that are read can be written and predicted from, or something is said to be missing.
#[test]
fn times() {
    fuzz_file("times", |path| {
        let Ok(times) = Times::read(path) else { return };
        let problem: Problem = "b=1,h=8,s=100000,d=128,bf16,causal".parse().unwrap();
        if let Ok(milliseconds) = times.milliseconds(&problem) {
            assert!(milliseconds >= 0.0, "{milliseconds}");
        }
        std::fs::write(path, times.text()).unwrap();
        assert_eq!(Times::read(path).unwrap().measured.len(), times.measured.len());
    });
}

#[test]
fn log() {
    fuzz_file("log", |path| {
        if let Ok(log) = Log::open(path) {
            // Opening again finds the same: the cut line at the end was ended.
            let again = Log::open(path).unwrap();
            assert_eq!(again.records().len(), log.records().len());
        }
    });
}

#[test]
fn thresholds() {
    fuzz_file("thresholds", |path| {
        if let Ok(thresholds) = Thresholds::read(path) {
            let _ = thresholds.judge("forward_bf16", &[("sm__warps_active".to_owned(), 1.0)]);
        }
    });
}

/// A file in the cache is the cubin that was put there, or it is compiled anew: no other bytes ever
/// come out.
#[test]
fn cubin() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let driver = Driver { version: DriverVersion { major: 13, minor: 0 }, release: None };
    let capability = ComputeCapability { major: 9, minor: 0 };
    let key = CacheKey::new("a kernel", &driver, capability);
    let cubin: Vec<u8> = (0..64).collect();
    let get = || {
        let Ok(entry) = cache.get_or_compile(&key, || Ok::<_, Infallible>(cubin.clone()));
        entry
    };
    assert!(!get().cached && get().cached);
    let path = cache.path(&key).unwrap();
    fuzz("cubin", |bytes| {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(get().bytes, cubin);
        // It was mended, where it had to be.
        assert!(get().cached);
    });
}
