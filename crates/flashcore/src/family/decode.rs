//! Attention of few queries per sequence over caches of any storage, on Ampere and later: the host
//! side of the `decode` kernel.

use kernels::decode::{DecodeWorkload, Splits, rows_in_one_page, tuned};
use kernels::parameter::{Number, Workspace};
use kernels::{Cache, Configuration, Scales};
use ptx::Capability;

use super::schedule::key_rows;
use super::{
    Asked, Choice, Contents, Family, MOST_POSITIONS, UNTUNED, check_head_dims, check_positions,
    narrow_cache, tensor_core_element, window_kind,
};
use crate::chip::Chip;
use crate::problem::{Problem, Storage};

/// The `decode` family.
pub(super) struct Decode;

/// Name of the family.
pub(super) const NAME: &str = "decode";

impl Family for Decode {
    fn name(&self) -> &'static str {
        NAME
    }

    /// With splits of fixed size, which [`choose`](Family::choose) uses where batch invariance is
    /// asked for.
    fn is_batch_invariant(&self) -> bool {
        true
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, arrangement } = *asked;
        if !chip.target.has(Capability::AsyncCopies) || !chip.target.has(Capability::Mma) {
            return Err(format!("{} has no cp.async or no mma.sync", chip.target));
        }
        let (element, cache) = match problem.dtypes.key.is_8_bit() {
            true => {
                check_head_dims(problem, 16)?;
                narrow_cache(problem)?
            }
            false => {
                let element = tensor_core_element(problem)?;
                (element, Cache::plain(element))
            }
        };
        if !cache.is_converted_by(chip.target) {
            return Err(format!("{} does not convert {}", chip.target, cache.element));
        }
        let query_rows = query_rows(problem).ok_or("there are too many queries")?;
        check_positions(problem)?;
        let rows = problem.query_shape().length.max(problem.key_shape().length);
        if rows > MOST_POSITIONS {
            return Err(format!("{rows} rows of a tensor are more than {MOST_POSITIONS}"));
        }
        let workload = DecodeWorkload {
            element,
            cache,
            head_dim: problem.head_dim as u32,
            value_head_dim: problem.value_head_dim as u32,
            query_rows,
            page_rows: match problem.keys {
                Storage::Paged { size, .. } => {
                    Some(rows_in_one_page(size, problem.lists.left_padding))
                }
                _ => None,
            },
            rules: problem.rules(window_kind(problem)),
            batch_invariant: problem.batch_invariant,
        };
        if problem.batch_invariant && cache.value_scales == Scales::PerToken {
            return Err("scales of tokens are rounded with those that only later queries see, so \
                        bits depend on the queries of a call"
                .to_owned());
        }
        let tuned = tuned(chip.target, &workload).ok_or(UNTUNED)?;
        arrangement.check_copies(problem)?;
        launch(chip, problem, tuned.configuration, None, tuned.reason.to_owned())
    }
}

/// Returns the launch of a configuration with a given number of teams of thread blocks, or with as
/// many as fill the GPU. A team takes one share of the key tiles of the whole batch.
pub(crate) fn launch(
    chip: &Chip,
    problem: &Problem,
    decode: kernels::Decode,
    teams: Option<u32>,
    reason: String,
) -> Result<Choice, String> {
    // A count that does not fit is refused below, with the number of blocks.
    let key_heads = u32::try_from(problem.kv_heads).unwrap_or(u32::MAX);
    let members = decode.team(key_heads, query_rows(problem).unwrap_or(0));
    let teams = teams.unwrap_or_else(|| fill(chip, &decode, problem, members));
    let teams = teams.clamp(1, decode.most_teams());
    let blocks = teams.checked_mul(members).filter(|blocks| *blocks <= i32::MAX as u32);
    let blocks = blocks.ok_or("the number of query rows is too large for the GPU kernel")?;
    // Tile numbers have 31 bits; every sequence has at least one tile.
    let tiles = key_rows(problem) / u64::from(decode.tile_keys);
    let tiles = tiles.saturating_add((problem.batch as u64).saturating_mul(2));
    if tiles > i32::MAX as u64 {
        return Err("the number of keys of all sequences is too large".to_owned());
    }
    // A single team has every sequence as a whole: only its running parts need room.
    let parts = match teams {
        1 => u64::from(decode.running_parts()),
        _ => decode.parts_of_block(problem.key_length as u64),
    };
    // Offsets of partial results have 32 bits.
    let all_parts = parts.checked_mul(blocks.into()).filter(|all| *all <= u32::MAX.into());
    let all_parts = all_parts.ok_or("the number of parts of sequences is too large")?;
    let mut choice = Choice::of(Configuration::Decode(decode), blocks, reason);
    let of_splits = match decode.splits {
        Splits::Balanced => (Number::LeastTiles, decode.warps),
        Splits::Fixed { .. } => (Number::PartsPerBlock, parts as u32),
    };
    choice.launches[0].numbers =
        vec![(Number::Teams, teams), (Number::BlocksPerTeam, members), of_splits];
    if teams > 1 || decode.running_parts() > 0 {
        let counters = match decode.splits {
            Splits::Balanced => problem.batch as u64 * u64::from(members),
            Splits::Fixed { .. } => 2 * u64::from(blocks),
        };
        let bytes = all_parts * decode.part_bytes();
        choice.add_memory(Workspace::Partials, bytes, Contents::Anything);
        choice.add_memory(Workspace::Counters, 4 * counters, Contents::Zeros);
    }
    Ok(choice)
}

/// Returns the number of query rows per sequence and key head: queries times the heads of a group.
fn query_rows(problem: &Problem) -> Option<u32> {
    let rows = problem.query_length.checked_mul(problem.group_size())?;
    u32::try_from(rows).ok().filter(|rows| *rows <= MOST_POSITIONS as u32)
}

/// Returns how many teams fill the GPU, but no more than give each warp a tile (with splits of
/// fixed size, each team a split), and at least one team per sequence where there is room.
fn fill(chip: &Chip, decode: &kernels::Decode, problem: &Problem, members: u32) -> u32 {
    let places = chip.multiprocessors * decode.blocks;
    let tiles = problem.key_length.div_ceil(decode.tile_keys as usize).max(1);
    let useful = match decode.splits {
        Splits::Balanced => problem.batch.saturating_mul(tiles).div_ceil(decode.warps as usize),
        Splits::Fixed { .. } => {
            problem.batch.saturating_mul(tiles.div_ceil(decode.unit_tiles() as usize))
        }
    };
    let useful = useful.max(problem.batch);
    let useful = u32::try_from(useful).unwrap_or(u32::MAX);
    (places / members.max(1)).clamp(1, decode.most_teams()).min(useful)
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::plan::Arrangement;

    fn choose(chip: &Chip, problem: &Problem) -> Result<Choice, String> {
        let arrangement = Arrangement::contiguous(problem).unwrap();
        Decode.choose(&Asked { chip, problem, arrangement: &arrangement })
    }

    #[test]
    fn every_width_is_served_from_ampere_on() {
        for target in [Target::SM_80, Target::SM_89, Target::SM_90A, Target::SM_120] {
            for dim in (8..=256).step_by(8) {
                for (heads, kv_heads) in [(1, 1), (16, 1)] {
                    let keys = Storage::Paged { size: 16, columns: 4, pages: 9 };
                    let problem = Problem::new(3, heads, 1, dim)
                        .with_kv_heads(kv_heads)
                        .with_storage(Storage::Padded, keys);
                    let choice = choose(&Chip::typical(target), &problem).unwrap();
                    let Configuration::Decode(decode) = choice.kernel() else { panic!() };
                    assert_eq!((decode.head_dim as usize, decode.page_rows), (dim, Some(16)));
                }
            }
        }
    }

    /// The longest of many packed sequences says little about all of them.
    #[test]
    fn keys_are_counted_where_their_number_is_known() {
        let problem = Problem::new(100_000, 8, 1, 64).with_key_length(1 << 20);
        let packed = problem.clone().with_storage(Storage::Padded, Storage::Packed(4_000_000));
        assert!(choose(&Chip::H200, &packed).is_ok());
        let refused = choose(&Chip::H200, &problem).unwrap_err();
        assert_eq!(refused, "the number of keys of all sequences is too large");
    }

    #[test]
    fn sixteen_rows_share_a_look_up_where_they_lie_in_one_page() {
        let page_rows = |text: &str| {
            let problem =
                format!("b=2,h=4,s=1,sk=96,d=64,bf16,key_lengths,{text}").parse().unwrap();
            let choice = choose(&Chip::H200, &problem).unwrap();
            let Configuration::Decode(decode) = choice.kernel() else { panic!() };
            decode.page_rows
        };
        assert_eq!(page_rows("keys=entries:3"), None);
        assert_eq!(page_rows("keys=pages:48:2:9"), Some(16));
        assert_eq!(page_rows("keys=pages:48:2:9,left_padding"), Some(1));
        assert_eq!(page_rows("keys=pages:24:4:9"), Some(1));
        assert_eq!(page_rows("keys=pages:1:96:200"), Some(1));
    }

    #[test]
    fn caches_of_8_bits_are_served_to_the_edges() {
        let cache = |dim: usize, size| {
            let keys = Storage::Paged { size, columns: 4, pages: 9 };
            let problem = Problem::new(3, 8, 1, dim).with_kv_heads(2);
            problem
                .with_dtype(DType::BF16)
                .with_kv_dtype(DType::E4M3)
                .with_storage(Storage::Padded, keys)
        };
        for target in [Target::SM_89, Target::SM_90A, Target::SM_120] {
            for dim in (16..=256).step_by(16) {
                for size in [1, 3, 16, 1 << 20] {
                    let choice = choose(&Chip::typical(target), &cache(dim, size));
                    assert!(choice.is_ok(), "{target} {dim} {size}: {choice:?}");
                }
            }
        }
        for dim in [8, 24, 72, 264, 272] {
            let expected = format!("head dim {dim} is not a multiple of 16 up to 256");
            assert_eq!(choose(&Chip::H200, &cache(dim, 16)).unwrap_err(), expected);
        }
        let ampere = choose(&Chip::typical(Target::SM_80), &cache(64, 16)).unwrap_err();
        assert_eq!(ampere, "sm_80 does not convert e4m3");
        // Widening int8 needs no instruction that sm_80 lacks.
        let integers = cache(64, 16).with_kv_dtype(DType::Int8);
        assert!(choose(&Chip::typical(Target::SM_80), &integers).is_ok());

        // Strides and addresses that are not multiples of 16 bytes.
        let problem = cache(64, 16);
        let mut arrangement = Arrangement::contiguous(&problem).unwrap();
        arrangement.value.length += 8;
        let asked = Asked { chip: &Chip::H200, problem: &problem, arrangement: &arrangement };
        assert_eq!(
            Decode.choose(&asked).unwrap_err(),
            "the value tensor: its length stride of 136 bytes is not a multiple of 16"
        );
        let aligned = Arrangement::contiguous(&problem).unwrap();
        let arrangement = Arrangement { aligned: false, ..aligned };
        let asked = Asked { chip: &Chip::H200, problem: &problem, arrangement: &arrangement };
        assert_eq!(
            Decode.choose(&asked).unwrap_err(),
            "a tensor's address is not a multiple of 16"
        );
    }

    /// The splits of a sequence, on which its bits depend, are the same whatever else is in the
    /// call.
    #[test]
    fn splits_of_a_fixed_size_do_not_depend_on_the_call() {
        for target in [Target::SM_80, Target::SM_89, Target::SM_90A, Target::SM_120] {
            let chip = Chip::typical(target);
            for dim in (8..=256).step_by(8) {
                let mut seen = Vec::new();
                for (batch, queries, keys) in
                    [(1, 1, 8192), (128, 1, 77), (3, 2, 1 << 17), (2, 40, 40), (1, 3000, 5000)]
                {
                    let pages = Storage::Paged { size: 16, columns: keys / 16 + 1, pages: 9 };
                    for storage in [Storage::Padded, pages] {
                        let problem = Problem::new(batch, 32, queries, dim)
                            .with_kv_heads(8)
                            .with_key_length(keys)
                            .with_storage(Storage::Padded, storage)
                            .batch_invariant();
                        let choice = choose(&chip, &problem).unwrap();
                        let Configuration::Decode(decode) = choice.kernel() else { panic!() };
                        seen.push((decode.warps, decode.tile_keys, decode.splits));
                        let keys = decode.unit_tiles() * decode.tile_keys;
                        assert!((448..=576).contains(&keys), "{keys}");
                    }
                }
                seen.dedup();
                assert_eq!(seen.len(), 1, "{target} {dim}: {seen:?}");
            }
        }
        let tokens = Problem::new(1, 8, 1, 128)
            .with_dtype(DType::BF16)
            .with_kv_dtype(DType::E4M3)
            .with_descales(crate::problem::Descales::of_cache(crate::problem::Descale::PerToken));
        let refusal = choose(&Chip::H200, &tokens.batch_invariant()).unwrap_err();
        assert!(refusal.starts_with("scales of tokens are rounded"), "{refusal}");
    }

    /// Partial results take 4 KB each, and their number does not grow with the batch.
    #[test]
    fn fixed_splits_take_little_memory() {
        let bytes = |batch: usize, queries: usize, keys: usize| {
            let problem = Problem::new(batch, 32, queries, 128).with_kv_heads(8);
            let problem = problem.with_key_length(keys).batch_invariant();
            let choice = choose(&Chip::H200, &problem).unwrap();
            choice.memory.iter().map(|it| it.bytes).sum::<u64>()
        };
        let (block, part) = (128, 8 * 130 * 4);
        assert_eq!(bytes(1, 1, 8192), block * (17 * part + 8));
        assert_eq!(bytes(128, 1, 1 << 17), block * (32 * part + 8));
        // With many queries a block has few of them and all the keys that they see: no partial
        // results.
        assert_eq!(bytes(1, 4096, 4096), 0);
    }

    /// Sequences of a single tile get one team each where there is room.
    #[test]
    fn short_sequences_do_not_stand_in_line() {
        let problem = Problem::new(16, 32, 1, 128).with_kv_heads(8).with_key_length(32);
        let choice = choose(&Chip::H200, &problem).unwrap();
        assert_eq!(choice.launches[0].blocks, 128);
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let refusal = |chip: Chip, problem: Problem| choose(&chip, &problem).unwrap_err();
        let good = Problem::new(1, 2, 1, 64);
        assert_eq!(
            refusal(Chip::typical(Target::SM_75), good.clone()),
            "sm_75 has no cp.async or no mma.sync"
        );
        assert_eq!(
            refusal(Chip::H200, good.clone().with_dtype(DType::F32)),
            "the tensor cores take f16 and bf16, not f32"
        );
        assert_eq!(refusal(Chip::H200, Problem::new(0, 2, 1, 64)), "there are no queries");
        assert_eq!(
            refusal(Chip::H200, good.clone().with_key_length(1 << 30)),
            "a length of 1073741824 is more than 536870912"
        );
        let pages = Storage::Paged { size: 1, columns: 100, pages: 1 << 31 };
        assert_eq!(
            refusal(Chip::H200, good.with_storage(Storage::Padded, pages)),
            "2147483648 batch entries or pages are more than 2147483647"
        );
    }
}
