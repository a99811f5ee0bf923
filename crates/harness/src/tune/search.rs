//! The tuner's search: an evolving population of configurations, measured by successive halving.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use kernels::{Configuration, Forward};
use rayon::prelude::*;
use serde::{Serialize, Serializer};

use super::log::{Log, Record, TrialOutcome};
use super::space::{Genome, neighbours, possible};
use crate::Error;
use crate::statistics::{Difference, Random, median};

/// Compiles, predicts and measures configurations. A GPU implements it; tests have another
/// implementation.
pub trait Meter: Sync {
    /// The GPU and its driver, for the log.
    fn machine(&self) -> String;
    /// Predicts milliseconds by the cost model, which covers the forward kernel only.
    fn predict(&self, forward: &Forward) -> Result<f64, String>;
    /// Compiles configurations on all cores; returns the fingerprint of each, or why it is useless.
    fn compile(&self, kernels: &[Configuration]) -> Vec<Result<String, String>>;
    /// Measures milliseconds of each, round by round, in alternation.
    fn measure(&mut self, kernels: &[Configuration], rounds: usize)
    -> Result<Vec<Vec<f64>>, Error>;
    /// Checks the output of a configuration.
    fn check(&mut self, kernel: &Configuration) -> Result<(), Error>;
}

/// How a search begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// From what the rules choose, and a few at random.
    Rules,
    /// From the poorest configuration alone.
    Poor,
}

/// How to search.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchOptions {
    /// How it begins.
    pub start: Start,
    /// When it must end.
    pub budget: Duration,
    /// Seed of the search, which repeats it but for the measured times.
    pub seed: u64,
    /// How many configurations of a generation reach the compiler.
    pub batch: usize,
    /// Generations without anything better, after which it ends.
    pub patience: usize,
}

impl Default for SearchOptions {
    fn default() -> Self {
        SearchOptions {
            start: Start::Rules,
            budget: Duration::from_secs(60),
            seed: 0,
            batch: 16,
            patience: 6,
        }
    }
}

/// Configurations that survive a generation.
const POPULATION: usize = 12;
/// A configuration is hopeless if the model predicts this many times the prediction for the best
/// measured one.
const HOPELESS: f64 = 1.5;
/// Rounds of successive halving; those that are left after the last make the population.
const HALVINGS: [usize; 3] = [3, 5, 9];
/// Rounds of the last duel.
const DUEL: usize = 21;

/// What a search found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SearchResult {
    /// The best.
    #[serde(serialize_with = "name")]
    pub best: Configuration,
    /// The fingerprint of its PTX.
    #[serde(skip)]
    pub kernel: String,
    /// What the rules choose.
    #[serde(serialize_with = "name")]
    pub rules: Configuration,
    /// Milliseconds of both in the last duel.
    pub milliseconds: [f64; 2],
    /// The speed of the best over that of the rules' choice.
    pub speedup: f64,
    /// The noise of the speedup.
    pub noise: f64,
    /// Whether the best is better than the rules by more than noise.
    pub better: bool,
    /// Generations of the search.
    pub generations: usize,
    /// Configurations tried, with those that were not compiled.
    pub seen: usize,
    /// Configurations measured.
    pub measured: usize,
    /// Seconds it took.
    pub seconds: f64,
}

fn name<S: Serializer>(kernel: &Configuration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&kernel.name())
}

/// A member of the population: milliseconds relative to all others, whenever they were measured.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Member {
    genome: Genome,
    milliseconds: f64,
}

struct Search<'a> {
    problem: &'a str,
    base: Forward,
    options: &'a SearchOptions,
    meter: &'a mut dyn Meter,
    log: &'a mut Log,
    random: Random,
    seen: HashSet<Genome>,
    kernels: HashMap<Genome, String>,
    predictions: HashMap<Genome, f64>,
    population: Vec<Member>,
    measured: usize,
}

/// Searches for the best configuration for a problem. `base` is what the rules choose for it.
pub fn search(
    problem: &str,
    base: Forward,
    options: &SearchOptions,
    meter: &mut dyn Meter,
    log: &mut Log,
    told: &mut dyn FnMut(&str),
) -> Result<SearchResult, Error> {
    let begun = Instant::now();
    let mut search = Search {
        problem,
        base,
        options,
        meter,
        log,
        random: Random::new(options.seed),
        seen: HashSet::new(),
        kernels: HashMap::new(),
        predictions: HashMap::new(),
        population: Vec::new(),
        measured: 0,
    };
    search.resume();
    let mut quiet = 0;
    let mut generation = 0;
    while quiet < options.patience && begun.elapsed() < options.budget {
        let before = search.best().map(|it| it.milliseconds);
        let candidates = search.candidates(generation);
        if candidates.is_empty() {
            break;
        }
        search.generation(generation, candidates)?;
        generation += 1;
        quiet += 1;
        let Some(best) = search.best() else { continue };
        if before.is_none_or(|before| best.milliseconds < 0.998 * before) {
            quiet = 0;
        }
        told(&format!(
            "{problem}: generation {generation}, {} measured, best {:.4} ms ({})",
            search.measured,
            best.milliseconds,
            best.genome.configuration(&search.base).name()
        ));
    }
    let rules = Configuration::Forward(base);
    let best = search.population.iter().map(|it| search.kernel(&it.genome));
    let best = best.filter(|it| *it != rules).take(3).collect();
    let found = duel(search.meter, rules, best)?;
    Ok(SearchResult {
        generations: generation,
        seen: search.seen.len(),
        measured: search.measured,
        seconds: begun.elapsed().as_secs_f64(),
        ..found
    })
}

/// Searches among everything near what the rules choose: each is measured a little, and the best few
/// at length.
pub fn sweep(
    problem: &str,
    base: Configuration,
    meter: &mut dyn Meter,
    told: &mut dyn FnMut(&str),
) -> Result<SearchResult, Error> {
    let begun = Instant::now();
    let all = neighbours(&base);
    let compiled = meter.compile(&all);
    let kernels: Vec<Configuration> =
        all.iter().zip(compiled).filter(|(_, it)| it.is_ok()).map(|(kernel, _)| *kernel).collect();
    told(&format!("{problem}: {} of {} compile without a spill", kernels.len(), all.len()));
    let samples = meter.measure(&kernels, HALVINGS[0])?;
    let mut order: Vec<usize> = (0..kernels.len()).collect();
    order.sort_by(|a, b| median(&samples[*a]).total_cmp(&median(&samples[*b])));
    let best = order.iter().take(3).map(|index| kernels[*index]).collect();
    let found = duel(meter, base, best)?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok(SearchResult { generations: 1, seen: all.len(), measured: kernels.len(), seconds, ..found })
}

/// Measures the best few against the rules' choice at length: only a significant difference
/// replaces the rules.
fn duel(
    meter: &mut dyn Meter,
    rules: Configuration,
    best: Vec<Configuration>,
) -> Result<SearchResult, Error> {
    let kernels = [&[rules][..], &best].concat();
    let compiled: Vec<String> = (meter.compile(&kernels).into_iter())
        .collect::<Result<_, _>>()
        .map_err(Error::Impossible)?;
    let samples = meter.measure(&kernels, DUEL)?;
    let mut order: Vec<usize> = (0..kernels.len()).collect();
    order.sort_by(|a, b| median(&samples[*a]).total_cmp(&median(&samples[*b])));
    let difference = |index: usize| Difference::between(&samples[index], &samples[0]);
    let mut winner = 0;
    for &index in &order {
        let difference = difference(index);
        if index == 0 || !difference.is_significant() || difference.ratio < 1.0 {
            break;
        }
        // Configurations with wrong results are out.
        if meter.check(&kernels[index]).is_ok() {
            winner = index;
            break;
        }
    }
    let other = order.into_iter().find(|index| *index != 0).unwrap_or(0);
    let contender = if winner == 0 { other } else { winner };
    let Difference { ratio, noise } = difference(contender);
    Ok(SearchResult {
        best: kernels[contender],
        kernel: compiled[contender].clone(),
        rules,
        milliseconds: [median(&samples[contender]), median(&samples[0])],
        speedup: ratio,
        noise,
        better: winner != 0,
        generations: 0,
        seen: 0,
        measured: 0,
        seconds: 0.0,
    })
}

impl Search<'_> {
    fn kernel(&self, genome: &Genome) -> Configuration {
        Configuration::Forward(genome.configuration(&self.base))
    }

    fn best(&self) -> Option<Member> {
        self.population.first().copied()
    }

    /// Resumes from the log: takes the records of this problem and machine whose kernels have not
    /// changed.
    fn resume(&mut self) {
        let machine = self.meter.machine();
        let records: Vec<Record> = (self.log.records().iter())
            .filter(|it| it.problem == self.problem && it.machine == machine)
            .cloned()
            .collect();
        for record in records {
            if let Some(kernel) = &record.kernel {
                let program = record.genome.configuration(&self.base).program();
                let text = program.map(|program| ptx::print(&program)).unwrap_or_default();
                if flashcore::family::tuning::fingerprint(&text) != *kernel {
                    continue;
                }
                self.kernels.insert(record.genome, kernel.clone());
            }
            self.seen.insert(record.genome);
            if let Some(predicted) = record.predicted {
                self.predictions.insert(record.genome, predicted);
            }
            if let Some(milliseconds) = record.milliseconds() {
                self.admit(Member { genome: record.genome, milliseconds });
            }
        }
    }

    fn admit(&mut self, member: Member) {
        self.population.retain(|it| it.genome != member.genome);
        self.population.push(member);
        self.population.sort_by(|a, b| a.milliseconds.total_cmp(&b.milliseconds));
        self.population.truncate(POPULATION);
    }

    /// The configurations of a generation, none of which was tried before.
    fn candidates(&mut self, generation: usize) -> Vec<Genome> {
        if generation == 0 && self.population.is_empty() {
            let mut genomes = self.beginning();
            genomes.retain(|it| !self.seen.contains(it));
            if !genomes.is_empty() {
                return genomes;
            }
        }
        self.children()
    }

    fn beginning(&mut self) -> Vec<Genome> {
        match self.options.start {
            Start::Poor => vec![Genome::POOR],
            Start::Rules => {
                let mut genomes = vec![Genome::of(&self.base)];
                let all = Genome::all();
                while genomes.len() < self.options.batch {
                    let genome = match self.random.below(2) {
                        0 => genomes[0].mutate(&mut self.random),
                        _ => self.random.choose(&all),
                    };
                    if !genomes.contains(&genome) {
                        genomes.push(genome);
                    }
                }
                genomes
            }
        }
    }

    /// Makes new configurations: children and neighbours of the population, and random ones; only
    /// random ones while no configuration could be measured.
    fn children(&mut self) -> Vec<Genome> {
        let all = Genome::all();
        let mut genomes: Vec<Genome> = Vec::new();
        // More than are compiled: the model rejects many of them.
        let wanted = 4 * self.options.batch;
        for _ in 0..50 * wanted {
            if genomes.len() == wanted {
                break;
            }
            let parents = self.parent().zip(self.parent());
            let child = match (self.random.below(4), parents) {
                (0, _) | (_, None) => self.random.choose(&all),
                (1, Some((one, two))) => one.cross(two, &mut self.random).mutate(&mut self.random),
                (2, Some((one, two))) => one.cross(two, &mut self.random),
                (_, Some((one, _))) => one.mutate(&mut self.random),
            };
            if !self.seen.contains(&child) && !genomes.contains(&child) {
                genomes.push(child);
            }
        }
        genomes
    }

    /// The better of two members, drawn at random; None if there is no member.
    fn parent(&mut self) -> Option<Genome> {
        let count = self.population.len();
        let [one, two] = [self.random.below(count), self.random.below(count)];
        self.population.get(one.min(two)).map(|it| it.genome)
    }

    fn record(
        &mut self,
        genome: Genome,
        generation: usize,
        fate: TrialOutcome,
    ) -> Result<(), Error> {
        self.seen.insert(genome);
        self.log.push(Record {
            problem: self.problem.to_owned(),
            machine: self.meter.machine(),
            genome,
            kernel: self.kernels.get(&genome).cloned(),
            generation,
            predicted: self.predictions.get(&genome).copied(),
            fate,
        })
    }

    /// Discards the hopeless, compiles the rest and measures what is left of them.
    fn generation(&mut self, generation: usize, candidates: Vec<Genome>) -> Result<(), Error> {
        let base = self.base;
        let (meter, first) = (&*self.meter, self.population.is_empty());
        let judged: Vec<(Genome, Result<f64, String>)> = candidates
            .into_par_iter()
            .map(|genome| {
                let forward = genome.configuration(&base);
                (genome, possible(&forward).and_then(|()| meter.predict(&forward)))
            })
            .collect();
        let mut hopeful = Vec::new();
        for (genome, predicted) in judged {
            match predicted {
                Err(reason) => {
                    self.record(genome, generation, TrialOutcome::Impossible { reason })?
                }
                Ok(predicted) => {
                    self.predictions.insert(genome, predicted);
                    hopeful.push((genome, predicted));
                }
            }
        }
        hopeful.sort_by(|a, b| a.1.total_cmp(&b.1));
        let known = self.population.iter().filter_map(|it| self.predictions.get(&it.genome));
        let best =
            known.copied().chain(hopeful.first().map(|it| it.1)).fold(f64::INFINITY, f64::min);
        let mut chosen = Vec::new();
        for (index, (genome, predicted)) in hopeful.into_iter().enumerate() {
            if !first && predicted > HOPELESS * best {
                self.record(genome, generation, TrialOutcome::Hopeless)?;
            } else if index < self.options.batch || first {
                chosen.push(genome);
            }
        }
        let kernels: Vec<Configuration> = chosen.iter().map(|it| self.kernel(it)).collect();
        let compiled = self.meter.compile(&kernels);
        let mut alive = Vec::new();
        for (genome, compiled) in chosen.into_iter().zip(compiled) {
            match compiled {
                Ok(kernel) => {
                    self.kernels.insert(genome, kernel);
                    alive.push(genome);
                }
                Err(reason) => {
                    self.record(genome, generation, TrialOutcome::Discarded { reason })?
                }
            }
        }
        self.halve(generation, alive)
    }

    /// Measures by successive halving: all configurations briefly, the better half longer, and so
    /// on. The best so far is measured along, so that times of different generations can be
    /// compared.
    fn halve(&mut self, generation: usize, mut alive: Vec<Genome>) -> Result<(), Error> {
        let champion = self.best();
        for (step, rounds) in HALVINGS.into_iter().enumerate() {
            if alive.is_empty() {
                return Ok(());
            }
            let mut genomes = alive.clone();
            genomes.extend(champion.map(|it| it.genome));
            let kernels: Vec<Configuration> = genomes.iter().map(|it| self.kernel(it)).collect();
            let samples = self.meter.measure(&kernels, rounds)?;
            if step == 0 {
                self.measured += alive.len();
            }
            let time = |index: usize| match champion {
                Some(champion) => {
                    let reference = &samples[genomes.len() - 1];
                    champion.milliseconds * Difference::between(reference, &samples[index]).ratio
                }
                None => median(&samples[index]),
            };
            let mut ranked: Vec<Member> = (0..alive.len())
                .map(|index| Member { genome: alive[index], milliseconds: time(index) })
                .collect();
            ranked.sort_by(|a, b| a.milliseconds.total_cmp(&b.milliseconds));
            let last = step + 1 == HALVINGS.len() || ranked.len() <= 2;
            let keep = if last { 0 } else { ranked.len().div_ceil(2) };
            for member in &ranked[keep..] {
                let Member { genome, milliseconds } = *member;
                self.record(genome, generation, TrialOutcome::Measured { milliseconds, rounds })?;
                self.admit(*member);
            }
            alive = ranked[..keep].iter().map(|it| it.genome).collect();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::space::Gene;
    use super::*;

    /// A GPU whose times are known: each thing costs something, and blocks of 112 are best.
    struct Known {
        random: Random,
        measured: usize,
        /// Registers spill with larger key blocks.
        largest_block: u32,
    }

    fn forward(kernel: &Configuration) -> Forward {
        match kernel {
            Configuration::Forward(forward) => *forward,
            other => panic!("{other:?}"),
        }
    }

    fn true_time(forward: &Forward) -> f64 {
        let Genome(genome) = Genome::of(forward);
        let block = 1.0 + 0.02 * (genome.key_block as f64 / 16.0 - 7.0).abs();
        let groups = [1.6, 1.0, 1.1][genome.warpgroups as usize - 1];
        let stages = [1.5, 1.0, 1.01, 1.02][genome.stages as usize - 1];
        let turns = if genome.turns { 1.0 } else { 1.08 };
        block * groups * stages * turns * if genome.query_buffers == 2 { 1.0 } else { 1.01 }
    }

    impl Meter for Known {
        fn machine(&self) -> String {
            "known".to_owned()
        }

        fn predict(&self, forward: &Forward) -> Result<f64, String> {
            Ok(true_time(forward) * (0.9 + 0.02 * f64::from(forward.key_block % 5)))
        }

        fn compile(&self, kernels: &[Configuration]) -> Vec<Result<String, String>> {
            let of = |kernel: &Configuration| match forward(kernel).key_block > self.largest_block {
                true => Err("registers spill".to_owned()),
                false => {
                    let program = kernel.program().map_err(|error| error.to_string())?;
                    Ok(flashcore::family::tuning::fingerprint(&ptx::print(&program)))
                }
            };
            kernels.iter().map(of).collect()
        }

        fn measure(
            &mut self,
            kernels: &[Configuration],
            rounds: usize,
        ) -> Result<Vec<Vec<f64>>, Error> {
            self.measured += kernels.len();
            let mut samples = vec![Vec::new(); kernels.len()];
            for _ in 0..rounds {
                let drift = 1.0 + 0.02 * self.random.normal();
                for (kernel, samples) in kernels.iter().zip(&mut samples) {
                    let noise = 1.0 + 0.003 * self.random.normal();
                    samples.push(true_time(&forward(kernel)) * drift * noise);
                }
            }
            Ok(samples)
        }

        fn check(&mut self, _: &Configuration) -> Result<(), Error> {
            Ok(())
        }
    }

    fn base() -> Forward {
        super::super::space::chosen("b=2,h=32,s=8192,d=64,bf16")
    }

    fn run(start: Start, log: &mut Log) -> (SearchResult, usize) {
        let mut meter = Known { random: Random::new(3), measured: 0, largest_block: 160 };
        let options =
            SearchOptions { start, budget: Duration::from_secs(60), ..SearchOptions::default() };
        let found = search("p", base(), &options, &mut meter, log, &mut |_| {}).unwrap();
        (found, meter.measured)
    }

    #[test]
    fn from_a_poor_start_it_comes_within_two_percent_of_the_best() {
        let rules = Genome::of(&base());
        let all = Genome::all().into_iter().filter(|it| it.same_form(&rules));
        let possible = all.map(|it| it.configuration(&base()));
        let possible = possible.filter(|it| super::possible(it).is_ok() && it.key_block <= 160);
        let best = possible.map(|it| true_time(&it)).fold(f64::INFINITY, f64::min);
        for start in [Start::Poor, Start::Rules] {
            let (found, measured) = run(start, &mut Log::new());
            let time = true_time(&forward(&found.best));
            assert!(time <= 1.02 * best, "{start:?}: {time} against {best} with {:?}", found.best);
            assert!(found.better && measured < 700, "{found:?} after {measured}");
        }
    }

    /// Blocks of 16 keys are too small for 8-bit elements, so the poor start itself cannot be built.
    #[test]
    fn a_start_that_cannot_be_built_is_no_end() {
        let base = super::super::space::chosen("b=2,h=16,s=8192,d=128,e4m3");
        assert!(super::possible(&Genome::POOR.configuration(&base)).is_err());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let options = SearchOptions { start: Start::Poor, patience: 2, ..SearchOptions::default() };
        for _ in 0..2 {
            let mut meter = Known { random: Random::new(3), measured: 0, largest_block: 256 };
            let mut log = Log::open(&path).unwrap();
            let found = search("p", base, &options, &mut meter, &mut log, &mut |_| {}).unwrap();
            assert!(found.measured > 0, "{found:?}");
            let poor = log.records().iter().filter(|it| it.genome == Genome::POOR);
            assert_eq!(poor.count(), 1);
        }
    }

    #[test]
    fn a_compiler_that_discards_everything_ends_the_search_with_its_reason() {
        for start in [Start::Poor, Start::Rules] {
            let mut meter = Known { random: Random::new(3), measured: 0, largest_block: 0 };
            let (options, mut log) =
                (SearchOptions { start, ..SearchOptions::default() }, Log::new());
            let found = search("p", base(), &options, &mut meter, &mut log, &mut |_| {});
            let message = found.unwrap_err().to_string();
            assert!(message.contains("registers spill"), "{message}");
            assert_eq!(meter.measured, 0);
        }
    }

    #[test]
    fn a_log_is_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let (_, first) = run(Start::Poor, &mut Log::open(&path).unwrap());
        let mut log = Log::open(&path).unwrap();
        let before = log.records().len();
        let (found, second) = run(Start::Poor, &mut log);
        assert!(second < first, "{second} after {first}");
        assert!(found.better);
        // No configuration is tried twice.
        let genomes: Vec<Genome> = log.records().iter().map(|it| it.genome).collect();
        let mut once = genomes.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), genomes.len());
        assert!(log.records().len() >= before);
    }

    #[test]
    fn the_hopeless_are_not_measured() {
        let mut log = Log::new();
        run(Start::Rules, &mut log);
        let outcomes =
            |is: fn(&TrialOutcome) -> bool| log.records().iter().filter(|it| is(&it.fate)).count();
        assert!(outcomes(|it| matches!(it, TrialOutcome::Hopeless)) > 0);
        assert!(outcomes(|it| matches!(it, TrialOutcome::Impossible { .. })) > 0);
        let single_stage = log.records().iter().filter(|it| {
            it.genome.get(Gene::Stages) == 1 && it.milliseconds().is_some() && it.generation > 0
        });
        assert_eq!(single_stage.count(), 0);
    }
}
