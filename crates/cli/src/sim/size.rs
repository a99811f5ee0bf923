//! The size of the simulated problem.

use std::error::Error;

use clap::Args;
use flashcore::gpu::Chip;
use flashcore::{Pass, Plan, Preference, Problem};
use harness::auxiliary_inputs::AuxiliaryInputs;
use harness::bench::families;
use kernels::Configuration;
use testing::scene::{Call, Ragged, Scene};

/// What is not given is small. An option that the kernel has no use for is refused.
#[derive(Args)]
#[command(next_help_heading = "Size")]
pub(super) struct SizeArguments {
    /// Rows of a product
    #[arg(long, value_name = "COUNT")]
    rows: Option<u32>,
    /// Inner extent of a product
    #[arg(long, value_name = "COUNT")]
    inner: Option<u32>,
    /// Sequences of attention
    #[arg(long, value_name = "COUNT")]
    batch: Option<u32>,
    /// Queries of a sequence
    #[arg(long, value_name = "COUNT")]
    seq: Option<u32>,
    /// Keys of a sequence
    #[arg(long, value_name = "COUNT")]
    kv_seq: Option<u32>,
    /// Query heads
    #[arg(long, value_name = "COUNT")]
    heads: Option<u32>,
    /// Key and value heads
    #[arg(long, value_name = "COUNT")]
    kv_heads: Option<u32>,
    /// Partial results that are put together
    #[arg(long, value_name = "COUNT")]
    parts: Option<u32>,
}

impl SizeArguments {
    /// The kernel on a problem of this size.
    pub(super) fn scene(&self, kernel: &Configuration) -> Result<Scene, String> {
        let attention = families().contains(&kernel.family());
        let taken: &[&str] = match kernel {
            Configuration::Product(_) => &["rows", "inner"],
            Configuration::Combine(_) => &["batch", "seq", "heads", "parts"],
            _ if attention => &["batch", "seq", "kv-seq", "heads", "kv-heads"],
            _ => &[],
        };
        if let Some((name, _)) = self.given().find(|(name, _)| !taken.contains(name)) {
            let family = kernel.family();
            return Err(format!("--{name} means nothing to the {family} kernel"));
        }
        let or = |given: Option<u32>, small: usize| given.map_or(small, |given| given as usize);
        let scene = match kernel {
            Configuration::Product(product) => {
                let (rows, inner) = Scene::PRODUCT;
                Scene::product(*product, self.rows.unwrap_or(rows), self.inner.unwrap_or(inner))
            }
            Configuration::Combine(combine) => {
                let sizes = [or(self.batch, 1), or(self.seq, 11), or(self.heads, 2)];
                Scene::combine(*combine, sizes, or(self.parts, Scene::COMBINE_PARTS))
            }
            kernel if attention && self.given().next().is_some() => self.call(*kernel)?.scene(),
            other => Scene::small(other),
        };
        scene.map_err(|error| error.to_string())
    }

    /// A problem as a family of kernels would serve it on an H200, or the best one.
    pub(super) fn of_problem(
        &self,
        problem: &Problem,
        family: Option<&str>,
    ) -> Result<(Configuration, Scene), Box<dyn Error>> {
        if let Some((name, _)) = self.given().next() {
            return Err(format!("--{name} is said by --problem already").into());
        }
        let known = families();
        if let Some(name) = family.filter(|name| !known.contains(name)) {
            return Err(format!(
                "`{name}` is no family of attention, and a problem has its own configuration: name \
                 one of {}, or none for what the planner chooses",
                known.join(", ")
            )
            .into());
        }
        let preference =
            Preference { backend: Some("gpu".to_owned()), kernel: family.map(str::to_owned) };
        let plan = Plan::on_chip(&Chip::H200, problem, &preference)?;
        let choice = plan.chosen.choice.ok_or("it is no kernel of a GPU")?;
        // As it runs: a window or a cap that was a function is one by name there.
        let problem = &plan.problem;
        Scene::admit(problem)?;
        let mut call = Call::chosen(&Chip::H200, problem, &choice);
        call.ragged = AuxiliaryInputs::of(problem)?.ragged(problem);
        Ok((call.kernel, call.scene()?))
    }

    /// A call of this size. Sequences of unequal lengths become as many of equal ones.
    fn call(&self, kernel: Configuration) -> Result<Call, String> {
        let small = Call::small(kernel);
        let or = |given: Option<u32>, small| given.map_or(small, |given| given as usize);
        let problem = &small.problem;
        let heads = or(self.heads, problem.query_heads);
        // Some heads and no word on key heads: as many.
        let key_heads = if self.heads.is_some() { heads } else { problem.kv_heads };
        let (batch, queries) = (or(self.batch, problem.batch), or(self.seq, problem.query_length));
        let keys = or(self.kv_seq, self.seq.map_or(problem.key_length, |seq| seq as usize));
        let heads = [heads, or(self.kv_heads, key_heads)];
        let plain = Call::new(kernel, batch, [queries, keys], heads);
        plain.problem.validate().map_err(|error| error.to_string())?;
        Scene::admit(&plain.problem).map_err(|error| error.to_string())?;
        // The planner leaves such problems to the CPU.
        if plain.problem.rows() == 0 {
            return Err("there are no queries".to_owned());
        }
        let dense = matches!(kernel, Configuration::Forward(_));
        if keys == 0 && (dense || plain.problem.pass == Pass::Backward) {
            return Err(format!("the {} kernel takes at least one key", kernel.family()));
        }
        Ok(match small.ragged {
            None => plain,
            Some(ragged) => {
                let equal = Ragged::new(vec![queries; batch], vec![keys; batch]);
                Call::ragged(kernel, equal.over(ragged.key_place), heads)
                    .with_multiprocessors(small.multiprocessors)
            }
        })
    }

    /// The options that were given, as one would type them again.
    pub(super) fn describe(&self) -> String {
        self.given().map(|(name, value)| format!(" --{name} {value}")).collect()
    }

    fn given(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let all = [
            ("rows", self.rows),
            ("inner", self.inner),
            ("batch", self.batch),
            ("seq", self.seq),
            ("kv-seq", self.kv_seq),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("parts", self.parts),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }
}
