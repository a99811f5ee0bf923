//! The candidates of a benchmark: kernels of ours by name, and peers.

use flashcore::family::Choice;
use flashcore::family::tuning::Variant;
use flashcore::gpu::{Chip, Gpu};
use flashcore::plan::{Arrangement, candidates};
use flashcore::serving::{Pages, Placement};
use flashcore::{Pass, Plan, Preference, Problem, Storage, random_descales};
use kernels::attention::Batch;
use kernels::decode::Splits;
use kernels::mma::BackwardMma;
use kernels::{Backward, Configuration, Decode, Forward, MaskKind, Mma, Rules, Scalar, shipped};
use ptx::Target;

use crate::Error;
use crate::auxiliary_inputs::AuxiliaryInputs;
use crate::statistics::Random;
use crate::subject::{Call, Planned, Source};

/// A candidate, under a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The name in tables.
    pub name: String,
    /// What is measured under the name.
    pub kind: CandidateKind,
}

/// What is measured.
#[derive(Debug, Clone, PartialEq)]
pub enum CandidateKind {
    /// Whatever our planner chooses for a problem.
    Planned,
    /// A kernel family of ours, in its best configuration for a problem.
    Family(&'static str),
    /// One configuration of ours; problems that it does not serve are skipped.
    Kernel(Configuration),
    /// What our planner chooses for the same keys in shuffled pages of so many positions.
    Pages(usize),
    /// What our planner chooses for a batch-invariant call.
    Invariant,
    /// A peer's implementation.
    Peer(&'static Peer),
}

/// An attention implementation of others.
#[derive(Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name in commands and tables.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
}

/// Every peer; `driver.py` knows how each is called.
pub static PEERS: [Peer; 7] = [
    Peer { name: "cudnn", about: "cuDNN through PyTorch's scaled_dot_product_attention" },
    Peer { name: "fa2", about: "FlashAttention-2 through PyTorch's scaled_dot_product_attention" },
    Peer { name: "fa3", about: "FlashAttention-3, the wheel fa3-fwd" },
    Peer { name: "fa4", about: "FlashAttention-4, the wheel flash-attn-4" },
    Peer { name: "efficient", about: "memory-efficient attention through PyTorch" },
    Peer { name: "flex", about: "PyTorch's FlexAttention, compiled" },
    Peer { name: "jax", about: "JAX's attention in Mosaic GPU, host clock" },
];

/// The families that can be asked for by name.
pub fn families() -> Vec<&'static str> {
    [Pass::Forward, Pass::Backward].into_iter().flat_map(families_of).collect()
}

/// Returns the families of a pass.
fn families_of(pass: Pass) -> Vec<&'static str> {
    let mut problem = Problem::new(1, 1, 1, 64);
    problem.pass = pass;
    let arrangement = Arrangement::contiguous(&problem).expect("a small problem");
    candidates(&Chip::H200, &problem, &arrangement).into_iter().map(|it| it.kernel).collect()
}

impl Candidate {
    /// Parses a candidate: `flashcore`, a family such as `mma`, a configuration, or a peer;
    /// `label=` in front sets the name in tables.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (label, name) = match text.split_once('=') {
            Some((label, name)) => (label.trim(), name.trim()),
            None => (text.trim(), text.trim()),
        };
        let peer = PEERS.iter().find(|peer| peer.name == name).map(CandidateKind::Peer);
        let family = families().into_iter().find(|it| *it == name).map(CandidateKind::Family);
        let size = name.strip_prefix("page").and_then(|size| size.parse().ok());
        let kind = match peer.or(family).or(size.map(CandidateKind::Pages)) {
            Some(kind) => kind,
            None if name == "flashcore" => CandidateKind::Planned,
            None if name == "invariant" => CandidateKind::Invariant,
            None => CandidateKind::Kernel(configuration(name)?),
        };
        Ok(Candidate { name: label.to_owned(), kind })
    }

    /// Returns the candidate that the environment asks for, as [`Preference::from_environment`]
    /// reads it; otherwise the planner's choice.
    pub fn from_environment(pass: Pass) -> Result<Self, String> {
        match Preference::from_environment(pass).kernel {
            Some(name) => Candidate::parse(&name),
            None => Candidate::parse("flashcore"),
        }
    }

    /// Returns the candidate for one pass of a training step: the planner's choice if the candidate
    /// belongs to the other pass.
    pub fn of_pass(&self, pass: Pass) -> Self {
        let family = match &self.kind {
            CandidateKind::Family(family) => family,
            CandidateKind::Kernel(kernel) => kernel.family(),
            _ => return self.clone(),
        };
        match families_of(pass).contains(&family) {
            true => self.clone(),
            false => Candidate { kind: CandidateKind::Planned, ..self.clone() },
        }
    }

    /// One configuration.
    pub fn of(kernel: Configuration) -> Self {
        Candidate { name: kernel.name(), kind: CandidateKind::Kernel(kernel) }
    }

    /// The peer, if it is one.
    pub fn peer(&self) -> Option<&'static Peer> {
        match self.kind {
            CandidateKind::Peer(peer) => Some(peer),
            _ => None,
        }
    }

    /// What it is, in a few words.
    pub fn about(&self) -> String {
        match &self.kind {
            CandidateKind::Planned => "what FlashCore's planner chooses".to_owned(),
            CandidateKind::Family(family) => format!("FlashCore's `{family}`"),
            CandidateKind::Kernel(kernel) => kernel.name(),
            CandidateKind::Pages(size) => format!("FlashCore over pages of {size}, shuffled"),
            CandidateKind::Invariant => {
                "FlashCore with bits that do not depend on the batch".to_owned()
            }
            CandidateKind::Peer(peer) => peer.about.to_owned(),
        }
    }

    /// Returns our plan for a problem over contiguous tensors, with the lists of its calls; or why
    /// the candidate does not serve the problem.
    pub fn plan(&self, chip: &Chip, problem: &Problem) -> Result<(Plan, AuxiliaryInputs), String> {
        let planned = |problem: &Problem, family: Option<&str>| {
            let preference = Preference { backend: None, kernel: family.map(str::to_owned) };
            let arrangement = Arrangement::contiguous(problem).map_err(|it| it.to_string())?;
            let plan = Plan::on_gpu(chip, problem, &arrangement, &preference);
            plan.map_err(|error| error.to_string())
        };
        let mut auxiliary = AuxiliaryInputs::of(problem).map_err(|error| error.to_string())?;
        let plan = match &self.kind {
            CandidateKind::Planned => planned(problem, None)?,
            CandidateKind::Family(family) => planned(problem, Some(family))?,
            CandidateKind::Invariant => planned(&problem.clone().batch_invariant(), None)?,
            CandidateKind::Kernel(kernel) => {
                let mut plan = planned(problem, Some(kernel.family()))?;
                let best = plan.chosen.choice.as_ref().map(|choice| *choice.kernel());
                if !best.is_some_and(|best| is_variant(kernel, &best, problem)) {
                    return Err("it is for another element, head dim, mask or storage".to_owned());
                }
                let splits = splits(chip, problem, kernel)?;
                let choice = Choice::for_kernel(chip, problem, *kernel, splits)?;
                plan.chosen.configuration = Some(kernel.name());
                plan.chosen.reason = choice.reason.clone();
                plan.chosen.choice = Some(choice);
                plan
            }
            CandidateKind::Pages(size) => {
                let paged = in_pages(problem, *size)?;
                auxiliary = shuffled(&paged, auxiliary)?;
                planned(&paged, None)?
            }
            CandidateKind::Peer(peer) => return Err(format!("{} is not ours", peer.name)),
        };
        Ok((plan, auxiliary))
    }

    /// Plans and compiles the candidate for a problem on a GPU.
    pub fn ready(&self, gpu: &Gpu, problem: &Problem) -> Result<Planned, Error> {
        let (plan, auxiliary) = self.plan(&gpu.chip(), problem).map_err(Error::Impossible)?;
        Planned::new(gpu, plan, &auxiliary)
    }
}

impl Source for Candidate {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn prepare(&self, gpu: &Gpu, problem: &Problem) -> Result<Box<dyn Call>, Error> {
        Ok(Box::new(self.ready(gpu, problem)?))
    }
}

/// Returns whether a configuration differs from the best one for a problem in its shape only. One
/// built for windows also serves simpler masks.
fn is_variant(kernel: &Configuration, best: &Configuration, problem: &Problem) -> bool {
    let chunked = problem.mask.chunk.is_some();
    let rules = |own: Rules, best: Rules| match own.mask {
        MaskKind::Local if !chunked => Rules { mask: own.mask, ..best },
        MaskKind::Chunked if chunked => Rules { mask: own.mask, ..best },
        _ => best,
    };
    let is_tile = |it: &Forward, best: &Forward| {
        let rules = rules(it.rules, best.rules);
        let best = Forward { rules, stream_k: it.stream_k, ..*best };
        Variant::of(it).configuration(&best) == *it
    };
    match (*kernel, *best) {
        (Configuration::Forward(it), Configuration::Forward(best)) => is_tile(&it, &best),
        (Configuration::Prefill(it), Configuration::Prefill(best)) => {
            is_tile(&it.tile, &best.tile)
                && it.page_rows.is_some() == best.page_rows.is_some()
                && (!it.single_tile || best.single_tile)
        }
        (Configuration::Mma(it), Configuration::Mma(best)) => {
            let Mma { warps, row_tiles, key_block, query_source, residents, .. } = it;
            let (accumulate, split, rules) = (it.accumulate, it.split, rules(it.rules, best.rules));
            let tile = Mma { warps, row_tiles, key_block, query_source, residents, ..best };
            // A kernel for ragged batches also serves equal lengths.
            let batch = if best.batch == Batch::Equal { it.batch } else { best.batch };
            let batch_fits = it.batch == best.batch || it.batch == Batch::Ragged;
            batch_fits && Mma { accumulate, split, rules, batch, ..tile } == it
        }
        (Configuration::Decode(it), Configuration::Decode(best)) => {
            let Decode { rows, warps, tile_keys, stages, blocks, splits, .. } = it;
            // A kernel for pages of any size also serves those of multiples of 16 rows.
            let any_pages = it.page_rows == Some(1) && best.page_rows.is_some();
            let page_rows = if any_pages { it.page_rows } else { best.page_rows };
            Decode { rows, page_rows, warps, tile_keys, stages, blocks, splits, ..best } == it
        }
        (Configuration::Scalar(it), Configuration::Scalar(best)) => {
            Scalar { rules: rules(it.rules, best.rules), ..best } == it
        }
        (Configuration::Backward(it), Configuration::Backward(best)) => {
            let Backward { query_block, deterministic, persistent, split, shares, .. } = it;
            let rules = rules(it.rules, best.rules);
            let best = Backward { query_block, deterministic, persistent, split, ..best };
            Backward { shares, rules, ..best } == it
        }
        (Configuration::BackwardMma(it), Configuration::BackwardMma(best)) => {
            let BackwardMma { key_tiles, key_warps, column_warps, query_block, .. } = it;
            let BackwardMma { part, ahead, residents, deterministic, .. } = it;
            let rules = rules(it.rules, best.rules);
            let tile = BackwardMma { key_tiles, key_warps, column_warps, query_block, ..best };
            BackwardMma { part, ahead, residents, deterministic, rules, ..tile } == it
        }
        _ => false,
    }
}

/// Returns the number of splits of a split-KV configuration: as many as fill the chip.
fn splits(chip: &Chip, problem: &Problem, kernel: &Configuration) -> Result<Option<u32>, String> {
    if !matches!(kernel, Configuration::Mma(mma) if mma.split) {
        return Ok(None);
    }
    let whole = Choice::for_kernel(chip, problem, *kernel, None)?;
    let tiling = whole.tiling.ok_or("it has no tiles")?;
    let blocks = (problem.key_length as u32).div_ceil(tiling.key_block).max(1);
    let wanted = (chip.multiprocessors / tiling.tiles.max(1)).max(2).min(blocks);
    // Splits have equal lengths in blocks: recount how many of that length there are.
    Ok(Some(blocks.div_ceil(blocks.div_ceil(wanted))))
}

/// Returns the problem with the same keys stored in pages.
fn in_pages(problem: &Problem, size: usize) -> Result<Problem, String> {
    let keys = problem.key_length;
    if !problem.has_equal_lengths() || problem.query_length > 1 || problem.scores.has_alibi() {
        return Err("keys in another order are the same to one query alone".to_owned());
    }
    if size == 0 || !keys.is_multiple_of(size) {
        return Err(format!("{keys} keys are no whole number of pages of {size}"));
    }
    let columns = keys / size;
    let pages = Storage::Paged { size, columns, pages: problem.batch * columns };
    Ok(problem.clone().with_storage(Storage::Padded, pages))
}

/// Shuffles the pages of each sequence, with contents such that the result is that of the plain
/// problem.
fn shuffled(paged: &Problem, auxiliary: AuxiliaryInputs) -> Result<AuxiliaryInputs, String> {
    let Storage::Paged { size, columns, .. } = paged.keys else { return Ok(auxiliary) };
    let mut random = Random::new(size as u64);
    let mut table: Vec<u32> = (0..(paged.batch * columns) as u32).collect();
    for row in table.chunks_exact_mut(columns.max(1)) {
        random.shuffle(row);
    }
    let pages = Pages::new(size, columns, table).map_err(|error| error.to_string())?;
    // The same factors in the same memory, in the shape of pages.
    let descales = random_descales(paged.descale_shapes(), 0).map_err(|error| error.to_string())?;
    Ok(AuxiliaryInputs {
        descales,
        queries: Some(Placement::padded(vec![paged.query_length; paged.batch])),
        keys: Some(Placement::paged(vec![paged.key_length; paged.batch], pages)),
        ..auxiliary
    })
}

/// Finds a configuration by name: a shipped one, or any that the tuner could try.
pub fn configuration(name: &str) -> Result<Configuration, String> {
    let shipped = shipped(Target::SM_90A).into_iter().find(|it| it.name() == name);
    let found = shipped
        .or_else(|| crate::tune::space::find(name).map(Configuration::Forward))
        .or_else(|| decode_shape(name).map(Configuration::Decode));
    found.ok_or_else(|| {
        let peers = PEERS.each_ref().map(|peer| peer.name).join(", ");
        let families = families().join(", ");
        format!(
            "there is no candidate `{name}`; there are flashcore, the kernels {families}, \
             configurations as `flashcore inspect --all` lists them, and the peers {peers}"
        )
    })
}

/// The decode configuration of a name: a shipped one's element, dims and scores in any shape that
/// can be built, with splits of any fixed size or none.
fn decode_shape(name: &str) -> Option<Decode> {
    if let Some((shape, tiles_per_warp)) = name.rsplit_once("_fixed") {
        let splits = Splits::Fixed { tiles_per_warp: tiles_per_warp.parse().ok()? };
        let found = Decode { splits, ..decode_shape(shape)? };
        return Some(found).filter(|it| it.program().is_ok());
    }
    let bases = kernels::decode::every_tuned(Target::SM_90A).into_iter();
    let bases = bases.filter(|base| base.splits == Splits::Balanced);
    let bases = bases
        .flat_map(|base| [None, Some(1), Some(16)].map(|page_rows| Decode { page_rows, ..base }));
    for base in bases.flat_map(|base| [8, 16].map(|rows| Decode { rows, ..base })) {
        // All but the shape, which is what names end with.
        let own = base.name();
        let shape = own.rfind("_w").unwrap_or(own.len());
        if !name.starts_with(&own[..shape + 2]) {
            continue;
        }
        let all = crate::tune::space::decodes(&base);
        let named = all.into_iter().find(|it| it.name() == name);
        if let Some(found) = named.filter(|it| it.program().is_ok()) {
            return Some(found);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernels(name: &str, problem: &str) -> Result<Vec<String>, String> {
        let problem = problem.parse().unwrap();
        let (plan, _) = Candidate::parse(name)?.plan(&Chip::H200, &problem)?;
        Ok(plan.chosen.choice.unwrap().launches.iter().map(|it| it.kernel.name()).collect())
    }

    #[test]
    fn decode_has_shapes_beside_the_shipped_and_pages() {
        let problem = "b=1,h=32,hk=8,s=1,sk=8192,d=128,bf16";
        let shipped = kernels("flashcore", problem).unwrap();
        assert!(shipped[0].starts_with("decode_bf16_d128x128_") && shipped.len() == 1);
        let shape = &shipped[0][..shipped[0].rfind("_w").unwrap()];
        for shape in ["w4x32_s3b1", "w4x16_s3b2", "w8x16_s3b1"].map(|it| format!("{shape}_{it}")) {
            assert_eq!(kernels(&shape, problem).unwrap(), [shape]);
        }
        let fixed = kernels("invariant", problem).unwrap();
        assert_eq!(fixed, [format!("{}_fixed4", shipped[0])]);
        for tiles_per_warp in [2, 8] {
            let fixed = format!("{}_fixed{tiles_per_warp}", shipped[0]);
            assert_eq!(kernels(&fixed, problem).unwrap(), [fixed]);
        }
        let impossible = kernels(&format!("{shape}_w16x32_s8b4"), problem).unwrap_err();
        assert!(impossible.contains("no candidate"), "{impossible}");
        let paged = kernels("page16", problem).unwrap();
        assert!(paged[0].contains("_pages16_"), "{paged:?}");
        let refusal = kernels("page24", problem).unwrap_err();
        assert!(refusal.contains("whole number of pages"), "{refusal}");

        let packed = "b=9,h=8,s=200,d=128,bf16,causal,queries=packed:900,keys=packed:900";
        let both = kernels("flashcore", packed).unwrap();
        assert!(both.len() == 2 && both[1].starts_with("prefill"), "{both:?}");
        assert_eq!(kernels(&shipped[0], packed).unwrap(), shipped);
        assert!(kernels("page16", packed).is_err());
    }

    #[test]
    fn names_mean_what_they_say() {
        assert_eq!(Candidate::parse("flashcore").unwrap().kind, CandidateKind::Planned);
        assert_eq!(Candidate::parse("fa4").unwrap().peer().unwrap().name, "fa4");
        let labelled = Candidate::parse("again=flashcore").unwrap();
        assert_eq!((labelled.name.as_str(), labelled.kind), ("again", CandidateKind::Planned));
        let message = Candidate::parse("fa5").unwrap_err();
        assert!(message.contains("no candidate `fa5`") && message.contains("cudnn"), "{message}");
    }

    #[test]
    fn a_configuration_serves_its_own_problems() {
        let dense = "b=1,h=16,s=4096,d=128,bf16";
        let kernel = kernels("flashcore", dense).unwrap();
        assert_eq!(kernels(&kernel[0], dense).unwrap(), kernel);
        let causal = kernels(&kernel[0], "b=1,h=16,s=4096,d=128,bf16,causal").unwrap_err();
        assert!(causal.contains("another element"), "{causal}");
    }
}
