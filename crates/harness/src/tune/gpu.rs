//! Compiling and measuring configurations on a GPU.

use std::collections::HashMap;

use cuda::toolkit::Assembled;
use flashcore::Problem;
use flashcore::family::tuning::fingerprint;
use flashcore::gpu::Gpu;
use kernels::{Configuration, Forward};
use rayon::prelude::*;

use super::cost::{BlockCost, predict};
use super::search::Meter;
use crate::Error;
use crate::bench::{Candidate, CandidateTimer, Pool};
use crate::provenance::GpuFound;
use crate::statistics::Random;

/// Measures configurations for one problem on a GPU.
pub struct GpuMeter<'a> {
    gpu: &'a Gpu,
    problem: Problem,
    timer: CandidateTimer,
    random: Random,
    /// What the compiler said of each, by fingerprint: the cache of cubins has no log.
    known: std::sync::Mutex<HashMap<String, Result<(), String>>>,
}

impl<'a> GpuMeter<'a> {
    /// Makes a meter for a problem.
    pub fn new(gpu: &'a Gpu, problem: &Problem, seed: u64) -> Result<Self, Error> {
        Ok(GpuMeter {
            gpu,
            problem: problem.clone(),
            timer: CandidateTimer::new(gpu, problem, Pool::new(seed))?,
            random: Random::new(seed),
            known: Default::default(),
        })
    }

    /// Compiles a configuration; returns its fingerprint, or why it cannot be used.
    fn compile_one(&self, kernel: &Configuration) -> Result<String, String> {
        let program = kernel.program().map_err(|error| error.to_string())?;
        let kernel = fingerprint(&ptx::print(&program));
        let lock = || self.known.lock().unwrap_or_else(|poison| poison.into_inner());
        if let Some(known) = lock().get(&kernel) {
            return known.clone().map(|()| kernel);
        }
        let text = ptx::print_for(&program, self.gpu.compiler());
        let compiled = self.gpu.device().compile_cached(&text, self.gpu.cache());
        let verdict = compiled.map_err(|error| error.to_string()).and_then(|cubin| {
            let faults = Assembled::from_log(cubin.log).faults();
            if faults.is_empty() { Ok(()) } else { Err(faults.join("; ")) }
        });
        lock().insert(kernel.clone(), verdict.clone());
        verdict.map(|()| kernel)
    }
}

impl Meter for GpuMeter<'_> {
    fn machine(&self) -> String {
        let found = GpuFound::of(self.gpu.info());
        format!("{}, {}", found.name, found.driver)
    }

    fn predict(&self, forward: &Forward) -> Result<f64, String> {
        let cost = BlockCost::count(forward)?;
        let clock = f64::from(self.gpu.info().clock_kilohertz) / 1e3;
        predict(forward, &cost, &self.problem, &self.gpu.chip(), clock)
    }

    fn compile(&self, kernels: &[Configuration]) -> Vec<Result<String, String>> {
        kernels.par_iter().map(|kernel| self.compile_one(kernel)).collect()
    }

    fn measure(
        &mut self,
        kernels: &[Configuration],
        rounds: usize,
    ) -> Result<Vec<Vec<f64>>, Error> {
        let candidates: Vec<Candidate> = kernels.iter().map(|it| Candidate::of(*it)).collect();
        self.timer.time(self.gpu, &self.problem, &candidates, rounds)
    }

    fn check(&mut self, kernel: &Configuration) -> Result<(), Error> {
        let candidate = Candidate::of(*kernel);
        self.timer.validate(self.gpu, &self.problem, &candidate, self.random.bits())
    }
}
