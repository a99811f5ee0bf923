//! Block masks found on the device: the kernels that find, list and distribute blocks, against a
//! host computation that evaluates every pair of query and key.

use flashcore_testing::composition;
use flashcore_testing::mutant::{Kind, every};
use kernels::attention::function::{BlockMask, Function, Here, HostTensor, ListsOf, Row, rules};
use kernels::finder::SharerProblem;
use kernels::forward::TileLists;
use kernels::parameter::{Number, Parameter, Reach, Workspace};
use kernels::{BlockFinder, BlockLister, Divisor, MaskKind, TileSharer, Window};
use ptx::{Program, Target};
use sim::{Argument, BufferId, Failure, Launch, Memory, Mode, Options, Policy};

use crate::function::passed;

/// The numbers of sequences, heads, queries and keys.
const SIZES: [usize; 4] = [2, 2, 37, 45];

/// A mask whose blocks are found in the simulator.
struct Finding<'a> {
    mask: BlockMask,
    tensors: &'a [HostTensor],
    memory: Memory,
    captured: Vec<BufferId>,
    /// The found blocks, the lists of blocks and the lists of tiles.
    buffers: [BufferId; 3],
    shared: SharerProblem,
}

impl<'a> Finding<'a> {
    fn new(mask: BlockMask, tensors: &'a [HostTensor], blocks: u32) -> Self {
        let heads = mask.heads * mask.batch;
        let tiles = heads * mask.lengths[0].div_ceil(mask.query_rows);
        let shared =
            SharerProblem { tiles, heads, blocks: blocks.min(tiles), groups: [3, heads / 2] };
        let mut memory = Memory::new();
        let captured = tensors.iter().map(|it| memory.input(&it.name, it.bytes.clone())).collect();
        let sizes = [mask.found_words(), mask.size(), shared.words()];
        let names = ["found", "lists", "tiles"];
        // Words that no kernel writes are recognisable.
        let mut place =
            |index: usize| memory.result(names[index], vec![0xEE; 4 * sizes[index] as usize]);
        let buffers = [place(0), place(1), place(2)];
        Finding { mask, tensors, memory, captured, buffers, shared }
    }

    fn launch(&mut self, program: Program, grid: u32, policy: Policy) {
        let launched = self.try_launch(&program, grid, (policy, 0));
        launched.unwrap_or_else(|failure| panic!("{}: {failure}", program.name));
    }

    fn try_launch(
        &mut self,
        program: &Program,
        grid: u32,
        (policy, seed): (Policy, u64),
    ) -> Result<(), Failure> {
        let mask = self.mask;
        let numbers = || {
            let of_mask = mask.numbers().into_iter().chain(mask.finder_numbers());
            let tiles = self.shared.tiles / self.shared.heads;
            let own = [
                (Number::QueryLength, mask.lengths[0]),
                (Number::KeyLength, mask.lengths[1]),
                (Number::QueryHeads, mask.heads),
                (Number::TilesPerHead, tiles),
                (Number::Chunk, mask.window.chunk.unwrap_or(0)),
            ];
            of_mask.chain(self.shared.numbers()).chain(own)
        };
        let number = |number| numbers().find(|(it, _)| *it == number).unwrap().1;
        let argument = |parameter: &Parameter| match *parameter {
            Parameter::Workspace(Workspace::FoundBlocks) => Argument::Address(self.buffers[0], 0),
            Parameter::Workspace(Workspace::BlockLists) => Argument::Address(self.buffers[1], 0),
            Parameter::Workspace(Workspace::TileLists) => Argument::Address(self.buffers[2], 0),
            Parameter::Number(it) => Argument::U32(number(it)),
            Parameter::Multiplier(it) => Argument::U32(Divisor::new(number(it)).multiplier),
            Parameter::Shift(it) => Argument::U32(Divisor::new(number(it)).shift),
            Parameter::Reach(Reach::Left) => Argument::S32(mask.window.left),
            Parameter::Reach(Reach::Right) => Argument::S32(mask.window.right),
            Parameter::Captured(it) => passed(it, mask.function, self.tensors, &self.captured),
            other => panic!("{other}"),
        };
        let parameters = Parameter::of(&program.parameters).unwrap();
        let arguments = parameters.iter().map(argument).collect();
        let launch = Launch { program, grid, arguments };
        let options = Options { mode: Mode::Checked, policy, seed, ..Options::default() };
        sim::run(&launch, &mut self.memory, &options).map(|_| ())
    }

    /// The lists of blocks.
    fn lists(&mut self, kind: MaskKind, policy: Policy) -> Vec<u32> {
        let BlockMask { function, query_rows, key_block, lists, .. } = self.mask;
        let target = Target::SM_80;
        let finder = BlockFinder { target, function, mask: kind, query_rows, key_block };
        let blocks = BlockFinder::blocks(self.mask.pairs());
        self.launch(finder.program().unwrap(), blocks, policy);
        let lister = BlockLister { target, lists };
        let blocks = BlockLister::blocks(self.mask.lists());
        self.launch(lister.program().unwrap(), blocks, policy);
        self.memory.u32(self.buffers[1])
    }

    /// The lists of tiles, after those of blocks.
    fn tiles(&mut self, policy: Policy) -> Vec<u32> {
        let sharer = TileSharer { target: Target::SM_80 };
        self.launch(sharer.program().unwrap(), 1, policy);
        self.memory.u32(self.buffers[2])
    }
}

/// Evaluates every pair of a query tile and a key block: `None` if no pair is visible, else whether
/// some pair is hidden.
fn looked(mask: &BlockMask, tensors: &[HostTensor], own: [u32; 2], at: [u32; 2]) -> Option<bool> {
    let [queries, keys] = mask.lengths;
    let rows = at[0] * mask.query_rows..((at[0] + 1) * mask.query_rows).min(queries);
    let columns = at[1] * mask.key_block..((at[1] + 1) * mask.key_block).min(keys);
    let offset = i64::from(keys) - i64::from(queries);
    let [first, last] = [rows.start, rows.end - 1].map(|row| i64::from(row) + offset);
    let by_name = mask.window.tile_keys(first, last, keys);
    if by_name.start.max(columns.start) >= by_name.end.min(columns.end) {
        // Kernels walk whole blocks.
        let blocks = by_name.start / mask.key_block..by_name.end.div_ceil(mask.key_block);
        if by_name.is_empty() || !blocks.contains(&at[1]) {
            return None;
        }
    }
    let [batches, heads] =
        mask.finder_numbers().iter().fold([1, 1], |[batch, head], it| match it {
            (Number::SequencesPerList, count) => [*count, head],
            (Number::HeadsPerList, count) => [batch, *count],
            _ => [batch, head],
        });
    let (mut seen, mut hidden) = (false, false);
    for batch in own[0] * batches..(own[0] + 1) * batches {
        for head in own[1] * heads..(own[1] + 1) * heads {
            for query in rows.clone() {
                let here = Here {
                    batch: batch as i32,
                    head: head as i32,
                    query: query as i32,
                    query_length: queries as i32,
                    key_length: keys as i32,
                };
                let mut row = Row::new(mask.function, tensors, here);
                for key in columns.clone() {
                    let is_seen = row.sees(key as usize);
                    (seen, hidden) = (seen | is_seen, hidden | !is_seen);
                }
            }
        }
    }
    seen.then_some(hidden)
}

/// Returns the expected lists: their entries, and their turns where these are counted.
fn expected(mask: &BlockMask, tensors: &[HostTensor]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let tiles = mask.lengths[0].div_ceil(mask.query_rows);
    let blocks = mask.lengths[1].div_ceil(mask.key_block);
    let own_heads = mask.finder_numbers().iter().find(|it| it.0 == Number::ListHeads).unwrap().1;
    let heads = mask.pairs() / tiles / blocks;
    let mut lists = Vec::new();
    for own in 0..heads {
        let own = [own / own_heads, own % own_heads];
        let of_row = |tile: u32| {
            (0..blocks).map(|block| looked(mask, tensors, own, [tile, block])).collect::<Vec<_>>()
        };
        let table: Vec<_> = (0..tiles).map(of_row).collect();
        let entry = |other: u32, hidden: bool| 2 * other + u32::from(hidden);
        match mask.lists {
            ListsOf::Queries => lists.extend(table.iter().map(|row| {
                let seen = |(block, it): (u32, &Option<bool>)| it.map(|it| entry(block, it));
                ((0..).zip(row).filter_map(seen).collect(), vec![])
            })),
            ListsOf::Keys { turns } => lists.extend((0..blocks as usize).map(|block| {
                let seen = (0..).zip(&table).filter(|(_, row)| row[block].is_some());
                let entries = seen.clone().map(|(tile, row)| entry(tile, row[block] == Some(true)));
                let turn = |row: &Vec<Option<bool>>| row[..block].iter().flatten().count() as u32;
                let turns = seen.map(|(_, row)| turn(row)).take(if turns { usize::MAX } else { 0 });
                (entries.collect(), turns.collect())
            })),
        }
    }
    lists
}

fn windows() -> [(MaskKind, Window); 4] {
    [
        (MaskKind::Dense, Window::DENSE),
        (MaskKind::Causal, Window::CAUSAL),
        (MaskKind::Local, Window { left: 12, right: 3, ..Window::DENSE }),
        (MaskKind::Chunked, Window { left: 40, chunk: Some(17), ..Window::CAUSAL }),
    ]
}

/// Every ready-made rule that loads from tensors, under every kind of mask by name, for lists of
/// query tiles and of key blocks: the blocks found are exactly those that have a visible pair, and
/// never more than an analysis by intervals over the same contents leaves.
#[test]
fn what_is_found_is_what_functions_leave() {
    let masks = composition::masks().into_iter().filter(|mask| !mask.tensors().is_empty());
    let of_heads = Function::mask("heads", |at| {
        let ids = at.integers("ids");
        ids.load([at.batch(), at.query()]).eq(ids.load([at.batch(), at.key()])) | at.head().eq(1)
    });
    let all_lists = [
        (ListsOf::Queries, 1),
        (ListsOf::Keys { turns: false }, 2),
        (ListsOf::Keys { turns: true }, 1),
    ];
    for (index, function) in masks.chain([of_heads]).enumerate() {
        let tensors = composition::tensors_of(std::iter::once(function), SIZES);
        for (which, (lists, group)) in all_lists.into_iter().enumerate() {
            let (kind, window) = windows()[(index + which) % 4];
            let [batch, heads, queries, keys] = SIZES.map(|it| it as u32);
            let mask = BlockMask {
                function,
                window,
                lengths: [queries, keys],
                heads,
                group,
                batch,
                query_rows: [8, 12][index % 2],
                key_block: [5, 40][(index + which) % 2],
                lists,
            };
            let mut finding = Finding::new(mask, &tensors, 4);
            let policy = Policy::HOSTILE[index % Policy::HOSTILE.len()];
            let found = finding.lists(kind, policy);
            let bounds = mask.words_over(&tensors);
            let words = mask.list_words() as usize;
            let lists = found.chunks(words).zip(bounds.chunks(words));
            let expected = expected(&mask, &tensors);
            assert_eq!(lists.len(), expected.len());
            for ((list, bound), (entries, turns)) in lists.zip(expected) {
                let count = list[0] as usize;
                assert_eq!(list[1..][..count], entries, "{function}, {kind:?}, {mask:?}");
                let turns_at = 1 + (words - 1) / 2;
                assert!(turns.is_empty() || list[turns_at..][..count] == turns, "{function}");
                assert!(count > 0 || list[1] == 1, "{function}: nothing for an empty list");
                let bound = &bound[1..][..bound[0] as usize];
                assert!(entries.iter().all(|it| bound.iter().any(|of| of >> 1 == it >> 1)));
            }
        }
    }
}

/// Returns a mask of documents of very unequal lengths.
fn documents() -> (BlockMask, [HostTensor; 1]) {
    let ids: Vec<i32> =
        (0..2 * 192).map(|at| [(at % 192) / 8, at / 300][at / 192] as i32).collect();
    let mask = BlockMask {
        function: rules::documents(),
        window: Window::CAUSAL,
        lengths: [192, 192],
        heads: 3,
        group: 1,
        batch: 2,
        query_rows: 16,
        key_block: 16,
        lists: ListsOf::Queries,
    };
    (mask, [HostTensor::integers("ids", &ids, &[2, 192])])
}

/// Returns the tiles in the list of each thread block.
fn tiles_of(words: &[u32], blocks: usize) -> Vec<Vec<u32>> {
    let list = |block: usize| {
        let list = words[words[block] as usize..].iter();
        list.take_while(|it| **it != TileLists::END).copied().collect::<Vec<u32>>()
    };
    (0..blocks).map(list).collect()
}

/// Each tile is in exactly one list, and no thread block has more work than the mean plus the
/// shortest tile.
#[test]
fn tiles_are_shared_out_by_what_was_found() {
    let (mask, tensors) = documents();
    for blocks in [1, 9] {
        let mut finding = Finding::new(mask, &tensors, blocks);
        let lists = finding.lists(MaskKind::Causal, Policy::HOSTILE[0]);
        let words = finding.tiles(Policy::HOSTILE[1]);
        let counts = mask.counts(&lists);
        let cost = |tile: &u32| {
            let walked = counts.of_head((tile / 12).into())[(tile % 12) as usize];
            4 * walked.blocks.max(1) + 5 * walked.evaluated + 8
        };
        let lists = tiles_of(&words, blocks as usize);
        let mut all = lists.concat();
        all.sort();
        assert_eq!(all, (0..6 * 12).collect::<Vec<u32>>());
        let loads: Vec<u32> = lists.iter().map(|list| list.iter().map(cost).sum()).collect();
        let mean = f64::from(loads.iter().sum::<u32>()) / f64::from(blocks);
        let most = f64::from(*loads.iter().max().unwrap());
        let shortest = f64::from(all.iter().map(cost).min().unwrap());
        assert!(most < mean + shortest, "{blocks}: {loads:?}");
    }
}

/// With any synchronisation of the sharer deleted or weakened, the simulator reports a hazard or a
/// tile is lost.
#[test]
fn whatever_orders_the_sharer_is_missed() {
    let (mask, tensors) = documents();
    let program = TileSharer { target: Target::SM_80 }.program().unwrap();
    let blocks = 9;
    let mut finding = Finding::new(mask, &tensors, blocks);
    finding.lists(MaskKind::Causal, Policy::HOSTILE[0]);
    let prepared = finding.memory.clone();
    let all: Vec<u32> = (0..6 * 12).collect();
    let (mut tried, mut survivors) = (0, Vec::new());
    for mutant in every(&program).iter().filter(|it| it.kind != Kind::Value) {
        let changed = mutant.apply(&program);
        tried += 1;
        if ptx::validate(&changed).is_err() {
            continue;
        }
        let mut noticed = |schedule| {
            finding.memory = prepared.clone();
            finding.try_launch(&changed, 1, schedule).is_err() || {
                let words = finding.memory.u32(finding.buffers[2]);
                let mut tiles = tiles_of(&words, blocks as usize).concat();
                tiles.sort();
                tiles != all
            }
        };
        let mut schedules = Policy::HOSTILE.into_iter().flat_map(|it| [(it, 0), (it, 1), (it, 3)]);
        if !schedules.any(&mut noticed) {
            survivors.push(mutant.to_string());
        }
    }
    assert!(tried >= 8 && survivors.is_empty(), "of {tried} not noticed: {survivors:#?}");
}
