//! Attention on Hopper (wgmma and TMA) over sequences of equal lengths: the host side of the
//! persistent `forward` kernel.

use kernels::attention::Window;
use kernels::attention::function::{BlockMask, ListsOf};
use kernels::finder::SharerProblem;
use kernels::forward::{TileLists, Workload, tuned};
use kernels::parameter::{Number, Workspace};
use kernels::{Configuration, Rules, TileSharer};
use ptx::{Capability, Element};

use super::tuning::Tunings;
use super::{
    Asked, Choice, Contents, Counts, Family, Finding, Tiling, UNTUNED, block_mask,
    check_equal_lengths, check_head_dims, check_scale, effective_window, mask_kind,
    tensor_core_element,
};
use crate::chip::Chip;
use crate::dtype::DType;
use crate::plan::arrangement::TENSORS;
use crate::plan::{Launch, map_strides};
use crate::problem::{DTypes, Descale, Problem};

/// The `forward` family.
pub(super) struct Forward;

impl Family for Forward {
    fn name(&self) -> &'static str {
        "forward"
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, arrangement } = *asked;
        let workload = workload(chip, problem)?;
        let rules = tuned(&workload).ok_or(UNTUNED)?;
        let chosen = Tunings::of_this_process().choose(chip, &workload, rules);
        arrangement.check_copies(problem)?;
        for tensor in TENSORS {
            map_strides(problem, arrangement, tensor)?;
        }
        let configuration = with_output(chosen.configuration, problem);
        let configuration = with_stream_k(chip, problem, configuration)?;
        launch(chip, problem, configuration, chosen.reason.into_owned())
    }
}

/// Returns the launches of a configuration, tuned or not.
pub(crate) fn launch(
    chip: &Chip,
    problem: &Problem,
    forward: kernels::Forward,
    reason: String,
) -> Result<Choice, String> {
    let counts = Counts::new(forward.query_rows(), problem)?;
    let mut blocks = chip.multiprocessors.min(counts.tiles).max(1);
    let mut choice = Choice::of(Configuration::Forward(forward), blocks, reason);
    choice.launches[0].numbers =
        vec![(Number::Tiles, counts.tiles), (Number::TilesPerHead, counts.tiles_per_head)];
    let tile = [forward.query_rows(), forward.key_block];
    let mask = block_mask(problem, tile, &counts, ListsOf::Queries);
    let found = match mask {
        Some(mask) => choice.with_blocks(chip.target, forward.rules.mask, mask)?,
        None => false,
    };
    if forward.takes_tile_lists() {
        let order = TileOrder {
            forward,
            lengths: [counts.query_length, counts.key_length],
            heads: [counts.heads, counts.key_heads, counts.batch],
            window: effective_window(problem),
            mask,
            processors: chip.multiprocessors,
            // The rest of L2 is left to queries, outputs and the other heads.
            cache_bytes: chip.l2_bytes / 5 * 3,
        };
        if let Some(mask) = mask.filter(|_| found) {
            blocks = blocks.min(TileSharer::MOST_BLOCKS);
            let shared = order.shared(counts.tiles, blocks);
            let contents = Contents::FoundTiles(order, Finding::of(&mask));
            choice.add_memory(Workspace::TileLists, 4 * shared.words(), contents);
            let kernel = Configuration::TileSharer(TileSharer { target: chip.target });
            let numbers = shared.numbers().into_iter().chain(mask.numbers());
            let numbers = numbers.chain(mask.finder_numbers());
            let of_head = [(Number::TilesPerHead, counts.tiles_per_head)];
            choice.prepare(Launch::new(kernel, 1, numbers.chain(of_head)));
        } else {
            // Per block the start and the end marker of its list, and one word per tile.
            let mut words = 2 * u64::from(blocks) + u64::from(counts.tiles);
            if forward.stream_k {
                let lists = order.lists_over(&[]);
                (blocks, words) = (lists.blocks, lists.words.len() as u64);
                let (places, bytes) = (u64::from(lists.places), u64::from(forward.partial_bytes()));
                let counters = 4 * places * u64::from(forward.warpgroups);
                choice.add_memory(Workspace::Partials, places * bytes, Contents::Anything);
                choice.add_memory(Workspace::Counters, counters, Contents::Zeros);
            }
            choice.add_memory(Workspace::TileLists, 4 * words, Contents::Tiles(order));
        }
    }
    let main = choice.main;
    choice.launches[main].blocks = blocks;
    let tiles = [counts.tiles_per_head, counts.tiles];
    choice.tiling = Some(Tiling::new(chip, tile, tiles, 1));
    Ok(choice)
}

/// The least saving for which the keys of the last wave are shared out (stream-K), as a fraction of
/// the predicted time. On an H200, predictions of 1.4 % and more gave 0.6 to 2.9 %, a prediction of
/// 0.7 % gave -0.5 %.
const WORTH_SHARING: f64 = 0.01;

/// Turns stream-K on where the prediction says that it saves enough.
fn with_stream_k(
    chip: &Chip,
    problem: &Problem,
    forward: kernels::Forward,
) -> Result<kernels::Forward, String> {
    // Other head dims have not been measured with stream-K.
    let dims = (forward.head_dim, forward.value_head_dim);
    let measured = matches!(dims, (64, 64) | (128, 128) | (256, 256));
    let possible = measured && forward.rules == Rules::DENSE && !forward.is_fp8();
    let counts = Counts::new(forward.query_rows(), problem)?;
    let saves = || forward.stream_k_saves(counts.tiles, counts.key_length, chip.multiprocessors);
    Ok(kernels::Forward { stream_k: possible && saves() >= WORTH_SHARING, ..forward })
}

/// Returns what the choice among configurations depends on, or why the kernel does not serve a
/// problem.
pub fn workload(chip: &Chip, problem: &Problem) -> Result<Workload, String> {
    if !chip.target.has(Capability::Wgmma) {
        return Err(format!("{} has no wgmma", chip.target));
    }
    check_equal_lengths(problem)?;
    check_scale(problem)?;
    let workload = equal_lengths_workload_of(hopper_element(problem)?, chip, problem);
    match problem.key_length {
        0 => Err("there are no keys".to_owned()),
        _ => Ok(workload),
    }
}

/// Like [`workload`], for every tensor-core kernel over sequences of equal lengths.
pub(super) fn equal_lengths_workload(chip: &Chip, problem: &Problem) -> Result<Workload, String> {
    let element = tensor_core_element(problem)?;
    check_equal_lengths(problem)?;
    check_scale(problem)?;
    Ok(equal_lengths_workload_of(element, chip, problem))
}

fn equal_lengths_workload_of(element: Element, chip: &Chip, problem: &Problem) -> Workload {
    Workload {
        element,
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        rules: problem.rules(mask_kind(problem)),
        query_length: problem.query_length as u64,
        key_length: problem.key_length as u64,
        heads: problem.batch as u64 * problem.query_heads as u64,
        multiprocessors: chip.multiprocessors,
    }
}

/// Returns the element type of the inputs if the Hopper kernels support it: f16 and bf16, or e4m3
/// with a wider output.
pub(super) fn hopper_element(problem: &Problem) -> Result<Element, String> {
    let DTypes { query, key, value, output } = problem.dtypes;
    if [query, key, value] != [DType::E4M3; 3] {
        return tensor_core_element(problem);
    }
    if !matches!(output, DType::F16 | DType::BF16) {
        return Err(format!("the output of e4m3 is f16 or bf16, not {output}"));
    }
    if problem.descales.into_array().contains(&Descale::PerToken) {
        return Err("queries of 8 bits take descale factors of heads, not of tokens".to_owned());
    }
    check_head_dims(problem, 16)?;
    Ok(Element::E4M3)
}

/// Sets the output type that a problem asks for.
pub(super) fn with_output(configuration: kernels::Forward, problem: &Problem) -> kernels::Forward {
    kernels::Forward { output: problem.dtypes.output.element(), ..configuration }
}

/// The inputs from which tiles of unequal cost are distributed over thread blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TileOrder {
    forward: kernels::Forward,
    lengths: [u32; 2],
    heads: [u32; 3],
    window: Window,
    /// Description of the lists of key blocks, where the mask has a function.
    mask: Option<BlockMask>,
    processors: u32,
    cache_bytes: u64,
}

impl TileOrder {
    /// Returns the tile lists that the kernel reads. Where the mask has a function, `block_lists`
    /// are the key blocks of each tile, whose number is the tile's cost.
    pub fn words_over(&self, block_lists: &[u32]) -> Vec<u32> {
        self.lists_over(block_lists).words
    }

    /// Describes how a launch on the device distributes the tiles over thread blocks.
    fn shared(&self, tiles: u32, blocks: u32) -> SharerProblem {
        let TileOrder { forward, lengths, heads, window, processors, cache_bytes, .. } = self;
        let groups =
            TileLists::groups(forward, window, *lengths, *heads, *processors, *cache_bytes);
        SharerProblem { tiles, heads: heads[0] * heads[2], blocks, groups }
    }

    fn lists_over(&self, block_lists: &[u32]) -> TileLists {
        let TileOrder { forward, lengths, heads, window, mask, processors, cache_bytes } = self;
        let seen = mask.map(|mask| mask.counts(block_lists));
        let seen = seen.as_ref();
        TileLists::new(forward, window, seen, *lengths, *heads, *processors, *cache_bytes)
    }
}

#[cfg(test)]
mod tests {
    use kernels::attention::MaskKind;
    use kernels::attention::function::HostTensor;
    use ptx::Target;

    use super::super::{Lists, Memory};
    use super::*;
    use crate::plan::Arrangement;
    use crate::problem::Mask;
    use crate::tensor::Strides;

    fn choose(chip: &Chip, problem: &Problem) -> Result<Choice, String> {
        let arrangement = Arrangement::contiguous(problem).unwrap();
        Forward.choose(&Asked { chip, problem, arrangement: &arrangement })
    }

    fn configuration(problem: &Problem) -> kernels::Forward {
        match *choose(&Chip::H200, problem).unwrap().kernel() {
            Configuration::Forward(forward) => forward,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_served_has_a_configuration_of_its_own_dimensions() {
        for dim in (8..=256).step_by(8) {
            let problem = Problem::new(1, 2, 100, dim).with_dtype(DType::BF16);
            let forward = configuration(&problem);
            assert_eq!((forward.head_dim as usize, forward.rules.mask), (dim, MaskKind::Dense));
        }
        let problem = Problem::new(1, 2, 100, 192).with_value_head_dim(128);
        let forward = configuration(&problem.with_mask(Mask::CAUSAL));
        assert_eq!((forward.head_dim, forward.value_head_dim), (192, 128));
        assert_eq!(forward.rules.mask, MaskKind::Causal);
    }

    /// Stream-K is used where the last wave would leave much of the GPU idle and has enough keys to
    /// share.
    #[test]
    fn the_last_round_is_shared_out_where_that_saves_enough() {
        let shares = |text: &str| configuration(&text.parse().unwrap()).stream_k;
        assert!(shares("b=4,h=16,s=4096,d=128,bf16"));
        assert!(shares("b=4,h=32,s=4096,d=64,bf16"));
        assert!(shares("b=2,h=8,s=8192,d=256,bf16"));
        assert!(shares("b=1,h=16,s=128,sk=65536,d=128,bf16"));
        // Too few keys; whole waves; tiles of unequal cost; a score rule; an unmeasured head dim.
        assert!(!shares("b=32,h=16,s=512,d=128,bf16"));
        assert!(!shares("b=1,h=33,s=4096,d=128,bf16"));
        assert!(!shares("b=4,h=16,s=4096,d=128,bf16,causal"));
        assert!(!shares("b=4,h=16,s=4096,d=128,bf16,alibi"));
        assert!(!shares("b=4,h=16,s=4096,d=192,bf16"));
        let problem = "b=4,h=16,s=4096,d=128,bf16".parse().unwrap();
        let choice = choose(&Chip::H200, &problem).unwrap();
        // 17 times 2 KB for each of the two warpgroups, and a counter for each.
        let bytes: Vec<u64> = choice.memory.iter().map(|it| it.bytes).collect();
        assert_eq!(bytes[0] / 69_632, bytes[1] / 8);
        assert!((64..=132).contains(&(bytes[1] / 8)));
        assert_eq!(choice.launches[0].blocks, 132);
        let tiles = choice.lists_over(&[]).tiles.unwrap();
        assert_eq!(tiles.len() as u64 * 4, bytes[2]);
    }

    /// A window that hides nothing counts as no window.
    #[test]
    fn masks_have_the_cheapest_kind_that_is_right() {
        let kind = |mask: Mask| {
            let problem = Problem::new(1, 2, 100, 64).with_key_length(200).with_mask(mask);
            configuration(&problem).rules.mask
        };
        assert_eq!(kind(Mask::window(Some(199), Some(99))), MaskKind::Dense);
        assert_eq!(kind(Mask::window(Some(199), Some(0))), MaskKind::Causal);
        assert_eq!(kind(Mask::window(Some(198), Some(0))), MaskKind::Local);
        assert_eq!(kind(Mask::window(None, Some(98))), MaskKind::Local);
        assert_eq!(kind(Mask::NONE.with_chunk(200)), MaskKind::Dense);
        assert_eq!(kind(Mask::CAUSAL.with_chunk(199)), MaskKind::Chunked);
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let good = Problem::new(1, 2, 100, 64);
        let refusal = |problem: &Problem| choose(&Chip::H200, problem).unwrap_err();
        let older = Chip::typical(Target::SM_80);
        assert_eq!(choose(&older, &good).unwrap_err(), "sm_80 has no wgmma");
        assert_eq!(
            refusal(&good.clone().with_dtype(DType::F32)),
            "the tensor cores take f16 and bf16, not f32"
        );
        assert_eq!(
            refusal(&Problem::new(1, 2, 100, 100)),
            "head dim 100 is not a multiple of 8 up to 256"
        );
        for scale in [0.0, -1.0, 1e7] {
            let reason = refusal(&good.clone().with_scale(scale));
            assert!(reason.ends_with("is not between 1e-20 and 1e6"), "{reason}");
        }
        assert_eq!(refusal(&good.clone().with_key_length(0)), "there are no keys");
        assert_eq!(refusal(&Problem::new(0, 2, 100, 64)), "there are no queries");
        assert_eq!(refusal(&Problem::new(1, 2, 0, 64)), "there are no queries");
        let many = refusal(&Problem::new(1 << 20, 1 << 12, 1, 8));
        assert!(many.starts_with("the number of tiles"), "{many}");
        assert!(
            refusal(&Problem::new(1, 1, 1 << 31, 8)).starts_with("a length of 2147483648 is more")
        );
        // A batch of more than 65 thousand and more than 2^31 elements are supported.
        assert!(choose(&Chip::H200, &Problem::new(65_536, 32, 128, 128)).is_ok());
    }

    #[test]
    fn strides_are_those_of_the_copy_engine() {
        let problem = Problem::new(2, 4, 100, 64);
        let good = Arrangement::contiguous(&problem).unwrap();
        let refusal = |arrangement: Arrangement| {
            let asked = Asked { chip: &Chip::H200, problem: &problem, arrangement: &arrangement };
            Forward.choose(&asked).unwrap_err()
        };
        let with = |key: Strides| Arrangement { key, ..good };
        assert_eq!(
            refusal(with(Strides { heads: 68, ..good.key })),
            "the key tensor: its heads stride of 136 bytes is not a multiple of 16"
        );
        assert_eq!(
            refusal(with(Strides { batch: 0, ..good.key })),
            "the key tensor: its batch stride of 0 bytes cannot be walked"
        );
        let apart = refusal(Arrangement { aligned: false, ..good });
        assert_eq!(apart, "a tensor's address is not a multiple of 16");
    }

    #[test]
    fn every_row_is_in_a_tile() {
        let problem = Problem::new(4, 6, 300, 128).with_kv_heads(3);
        let choice = choose(&Chip::H200, &problem).unwrap();
        let tiling = choice.tiling.unwrap();
        assert_eq!((tiling.query_rows, tiling.key_block), (128, 128));
        assert_eq!((tiling.tiles_per_head, tiling.tiles), (3, 72));
        assert_eq!((choice.launches[0].blocks, choice.memory.len()), (72, 0));
        let causal = Problem::new(2, 4, 1000, 128).with_mask(Mask::CAUSAL);
        let choice = choose(&Chip::H200, &causal).unwrap();
        let [Memory { bytes, contents: Contents::Tiles(_), .. }] = &choice.memory[..] else {
            panic!("{:?}", choice.memory);
        };
        assert_eq!(*bytes, 4 * choice.lists_over(&[]).tiles.unwrap().len() as u64);
    }

    /// A mask function brings the lists of key blocks of its tiles; tiles are distributed as for
    /// the same mask without a function.
    #[test]
    fn functions_bring_lists_of_key_blocks() {
        let causal = Mask::from_fn("causal", |at| at.query().ge(at.key()));
        let problem = Problem::new(2, 4, 1000, 128).with_mask(causal);
        let choice = choose(&Chip::H200, &problem).unwrap();
        let [blocks, tiles] = &choice.memory[..] else { panic!("{:?}", choice.memory) };
        let lists = choice.lists_over(&[]);
        for memory in [blocks, tiles] {
            let words = lists.of(memory.source).unwrap();
            assert_eq!(memory.bytes, 4 * words.len() as u64);
            assert!(memory.contents.is_constant());
        }
        // Eight blocks of 128 keys: the first tile sees part of one, the last all of seven and part
        // of one.
        let words = lists.blocks.unwrap();
        assert_eq!(choice.tiling.unwrap().key_block, 128);
        assert_eq!(words[..9], [1, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(words[words.len() - 9..], [8, 0, 2, 4, 6, 8, 10, 12, 15]);
    }

    /// With known document boundaries, no thread block has much more to do than the mean, counted
    /// in key blocks. Distributed as for a plain causal mask, some would.
    #[test]
    fn tiles_are_shared_out_by_what_documents_leave() {
        let mask = Mask::CAUSAL.with_function(kernels::attention::function::rules::documents());
        for (batch, heads, length, dim) in
            [(4, 16, 4096, 128), (1, 16, 16384, 128), (4, 32, 4096, 64), (1, 32, 16384, 64)]
        {
            let problem = Problem::new(batch, heads, length, dim).with_mask(mask);
            let choice = choose(&Chip::H200, &problem).unwrap();
            for cuts in documents(length) {
                let id = |at: usize| cuts.iter().filter(|cut| **cut <= at as i32).count() as i32;
                let ids: Vec<i32> = (0..length).map(id).collect();
                let ids = HostTensor::integers("ids", &ids, &[batch, length]).with_strides(&[0, 1]);
                let known = choice.lists_over(&[ids]);
                let blind = Lists { blocks: known.blocks.clone(), ..choice.lists_over(&[]) };
                let [found, blind] = [known, blind].map(|lists| excess(&choice, &lists));
                assert!(found < 1.03 && found < blind, "{problem}: {found} instead of {blind}");
            }
        }
    }

    /// Document boundaries: those of `bench/flex.py`, and others.
    fn documents(length: usize) -> [Vec<i32>; 3] {
        let long = vec![1230, 3391, 7069, 7796, 13930, 16084];
        let short = vec![991, 2245, 2334, 2386, 3082, 3303];
        let sevenths = (1..7).map(|it| it * length as i32 / 7).collect();
        let half = vec![length as i32 / 4, length as i32 / 4 * 3];
        [if length > 4096 { long } else { short }, sevenths, half]
    }

    /// Returns the load of the busiest thread block relative to the mean.
    fn excess(choice: &Choice, lists: &Lists) -> f64 {
        let Contents::FoundBlocks(mask, _) = &choice.memory[0].contents else {
            panic!("{choice:?}")
        };
        let counts = mask.counts(lists.blocks.as_ref().unwrap());
        let of_head = choice.tiling.unwrap().tiles_per_head;
        let cost = |tile: &u32| {
            let walked = counts.of_head((tile / of_head).into())[(tile % of_head) as usize];
            // Additional cost of a block in which the mask is evaluated, inferred from times on an
            // H200.
            f64::from(walked.blocks) + 1.3 * f64::from(walked.evaluated) + 2.0
        };
        let tiles = lists.tiles.as_ref().unwrap();
        let load = |block: usize| {
            let list = tiles[tiles[block] as usize..].iter();
            list.take_while(|it| **it != TileLists::END).map(cost).sum::<f64>()
        };
        let blocks = choice.launches[choice.main].blocks as usize;
        let loads: Vec<f64> = (0..blocks).map(load).collect();
        let mean = loads.iter().sum::<f64>() / loads.len() as f64;
        loads.into_iter().fold(0.0, f64::max) / mean
    }
}
