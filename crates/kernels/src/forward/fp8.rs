//! The consumers' loop with inputs of 8 bits (`e4m3`).
//!
//! ```text
//! for j = n-1 down to 0:
//!     S = Q K(j)^T
//!     m' = max(m, S);  P = 2^(S - m' + 8) in e4m3;  l = l 2^(m - m') + sums
//!     T = P V(j)                      a fresh accumulator
//!     O = O 2^(m - m') + T            in f32
//! ```
//!
//! docs/fp8-forward.md counts what the lines cost. Two things make it unlike the loop of 16 bits:
//!
//! - Hopper's tensor cores add 8-bit products to about 14 bits, so no more than one block of keys
//!   goes into one accumulator. The second one costs nothing: its addition is the rescaling.
//! - Weights of `e4m3` reach 448 and have four bits down to 2^-6. They are lifted by 2^8 over an
//!   exact running maximum, so that none saturates and the tail stays normal for 14 octaves.
//!
//! `T` lives where `S` lived (the assembler finds that by itself; told so, it serialises
//! products), so that a warpgroup waits for its own products; others multiply in the meantime.

use std::cell::Cell;

use ptx::{
    Accumulate, Accumulator, Builder, E4M3x2, Expression, F32, Fragment, GlobalAddress, Reg, U32,
};

use super::epilogue::{Epilogue, Output};
use super::probe::{Phase, Probe};
use super::rule::Rule;
use super::scheduler::ConsumerScheduler;
use super::warpgroup::Warpgroup;
use super::{Form, Forward, Shared};
use crate::attention::descale::Product;
use crate::attention::function::lower::Functions;
use crate::attention::scores::ScoreRule;
use crate::attention::softmax::Softmax;
use crate::attention::{ACCUMULATOR_ROWS, Score};

/// The most columns of the output that are multiplied at once: no more registers than the scores
/// have left.
fn slots(forward: &Forward) -> &'static [u32] {
    match (forward.form.slow_path_apart, forward.value_head_dim > 128) {
        (true, true) if forward.form == Form::FULL => &[32, 64],
        (true, true) => &[64, 32],
        (true, false) => &[64, 64],
        (false, _) if forward.key_block < 128 => &[64],
        (false, _) => &[128],
    }
}

/// The binary logarithm of the largest weight.
const LIFT: f32 = 8.0;

/// Masked scores times a scale of zero would not be numbers; with this one they are weighed alike.
const LEAST_SCALE: f32 = 1e-20;

/// When a warpgroup passes its turn at the tensor cores on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Started,
    NearlyLanded,
    Landed,
}

/// What the loop carries from step to step.
struct State<'a, T: ConsumerScheduler> {
    tiles: &'a T,
    group: Warpgroup<'a>,
    probe: Probe,
    rule: Rule,
    softmax: Softmax,
    /// What makes scores of products: the launch's, and the tile's.
    scale_log2: Reg<F32>,
    tile_scale: Reg<F32>,
    /// The tile's factor of products, where scores are changed before they are scaled.
    descale: Option<Reg<F32>>,
    /// The weights of a block.
    weights: Fragment,
    output: Accumulator,
    /// Columns of it that are multiplied at once, of each product that is under way.
    slots: &'static [u32],
    /// When the turn is passed on.
    pass: Pass,
    /// Whether the next scores are begun before the last piece is added.
    late: bool,
    current: T::Current,
    block: Reg<U32>,
}

/// One warpgroup's work: 64 query rows of each of the block's tiles.
pub(super) fn consume<T: ConsumerScheduler>(
    k: &mut Builder,
    forward: &Forward,
    shared: &Shared,
    tiles: &T,
    (scores, functions): (ScoreRule, Functions),
    epilogue: &Epilogue,
    probe: Option<Reg<GlobalAddress>>,
) {
    let group = Warpgroup::new(k, forward, shared);
    let staging = Output::new(k, shared, &group);
    let tile = tiles.first_tile(k);
    let tile_scale = k.register();
    let state = State {
        tiles,
        probe: Probe::new(k, probe, forward.warpgroups, group.index, group.thread),
        rule: Rule::new(k, forward, &group, scores, functions),
        group,
        softmax: Softmax::new(k, ACCUMULATOR_ROWS.len(), tile_scale).lifted(LIFT),
        scale_log2: scores.scale_log2,
        tile_scale,
        descale: forward.rules.changes_scores().then(|| k.register()),
        weights: Fragment::new(k, forward.element, forward.key_block),
        output: Accumulator::new(k, forward.value_head_dim),
        slots: slots(forward),
        late: forward.form.overlap_tiles && forward.form.two_steps,
        pass: match forward.form {
            Form { overlap_tiles: true, .. } => Pass::NearlyLanded,
            Form { two_steps: true, .. } => Pass::Landed,
            _ => Pass::Started,
        },
        current: tiles.current(k, &tile),
        block: k.variable(tiles.last_block(&tile)),
    };
    state.probe.stamp(k, Phase::Begin);
    k.loop_(|k| {
        k.break_if(!tiles.has_tile(&tile));
        state.tile(k);
        let sink = tiles.sink(k, &state.current);
        let mut rows = state.softmax.finish(k, sink);
        let descale = tiles.descale(k, &state.current, Product::Output);
        for row in &mut rows {
            row.factor = k.eval(row.factor * descale);
        }
        epilogue.store(k, tiles, &staging, &rows, &state.output, &state.current);
        state.probe.stamp(k, Phase::Epilogue);
        tiles.next_tile(k, &tile);
        tiles.take(k, &state.current, &tile);
        k.set(state.block, tiles.last_block(&tile));
    });
    staging.drain(k);
}

impl<T: ConsumerScheduler> State<'_, T> {
    /// All key blocks of a tile.
    fn tile(&self, k: &mut Builder) {
        let State { tiles, group, probe, softmax, output, current, .. } = self;
        let descale = tiles.descale(k, current, Product::Scores);
        match self.descale {
            // What changes scores is given them in their own units.
            Some(register) => {
                k.set(register, descale);
                k.set(self.tile_scale, self.scale_log2);
            }
            None => k.set(self.tile_scale, (self.scale_log2 * descale).maximum(LEAST_SCALE)),
        }
        softmax.clear(k);
        for element in output.registers() {
            k.set(*element, 0.0);
        }
        group.take_queries(k);
        probe.stamp(k, Phase::Queries);
        if self.late {
            self.blocks_late(k);
        } else {
            self.blocks(k);
        }
        group.release_queries(k);
    }

    /// Scores, weights, output: one after the other.
    fn blocks(&self, k: &mut Builder) {
        let State { tiles, group, probe, current, block, .. } = self;
        group.ping_pong.take(k);
        k.loop_(|k| {
            group.wait_for_keys(k);
            probe.stamp(k, Phase::WaitForKeys);
            let scores = match self.pass {
                Pass::NearlyLanded => {
                    let (begun, rest) = group.start_scores_in_two(k);
                    begun.wait(k);
                    group.ping_pong.pass(k);
                    rest
                }
                Pass::Landed => group.start_scores(k),
                Pass::Started => {
                    let scores = group.start_scores(k);
                    group.ping_pong.pass(k);
                    scores
                }
            };
            let scores = Score::of(&scores.wait(k));
            if self.pass == Pass::Landed {
                group.ping_pong.pass(k);
            }
            group.release_keys(k);
            probe.stamp(k, Phase::Scores);
            let factors = self.raise(k, &scores);
            self.weigh(k, &scores);
            self.update(k, &factors);
            // The exit stands last, so that there is one copy of everything.
            k.break_if(tiles.is_first_block(current, *block));
            k.set(*block, *block - 1);
        });
        group.ping_pong.pass(k);
    }

    /// Products become scores, and the rows' references their exact maximum; the result is what the
    /// output so far is multiplied with.
    fn raise(&self, k: &mut Builder, scores: &[Score]) -> [Reg<F32>; 2] {
        let State { tiles, softmax, current, block, .. } = self;
        let entry = tiles.entry(k, current, || (*block).into());
        if let Some(descale) = self.descale {
            for Score { register, .. } in scores {
                k.set(*register, *register * descale);
            }
        }
        self.rule.apply(k, *tiles, current, (*block, entry), scores);
        let factors = [k.register(), k.register()];
        softmax.raise(k, scores, &factors);
        factors
    }

    /// Scores become weights.
    fn weigh(&self, k: &mut Builder, scores: &[Score]) {
        let mut pairs: Vec<Reg<E4M3x2>> = Vec::new();
        let sums = self.softmax.exponentials(k, scores, |k, _, [low, high]| {
            pairs.push(k.pack::<E4M3x2>(low, high));
            // Pairs of two groups of eight columns, of two rows each: four of each row.
            if let [.., first, first_below, second, second_below] = pairs[..]
                && pairs.len().is_multiple_of(4)
            {
                let index = pairs.len() / 2 - 2;
                self.weights.set_four(k, index, [first, second]);
                self.weights.set_four(k, index + 1, [first_below, second_below]);
            }
        });
        self.softmax.add(k, &sums);
        self.probe.stamp(k, Phase::Softmax);
    }

    /// `O = O f + P V`, in pieces of the output's columns.
    fn update(&self, k: &mut Builder, factors: &[Reg<F32>; 2]) {
        let last = self.update_but_last(k, factors);
        self.add(k, factors, &last);
    }

    /// The same but for the last piece, which has landed.
    fn update_but_last(&self, k: &mut Builder, factors: &[Reg<F32>; 2]) -> Piece {
        let State { group, probe, output, .. } = self;
        group.wait_for_values(k);
        group.ping_pong.take(k);
        probe.stamp(k, Phase::Turn);
        // While a piece is added to the output, the next one is multiplied.
        let slots: Vec<Accumulator> =
            self.slots.iter().map(|columns| Accumulator::new(k, *columns)).collect();
        let mut pieces: Vec<Piece> = Vec::new();
        let mut first = 0;
        for slot in slots.iter().cycle() {
            if first >= output.columns() {
                break;
            }
            let count = slot.columns().min(output.columns() - first);
            pieces.push(Piece { first, product: slot.narrowed(count) });
            first += count;
        }
        let start = |k: &mut Builder, Piece { first, product }: &Piece| {
            let values = group.transposed_operand(k, *first, product.columns());
            let values = values.expect("values have 8 bits");
            k.start_product(product, Accumulate::No, &self.weights, values);
        };
        let ahead = slots.len();
        for piece in pieces.iter().take(ahead) {
            start(k, piece);
        }
        let last = pieces.len() - 1;
        for (index, piece) in pieces.iter().enumerate() {
            k.wait_products((last - index).min(ahead - 1) as u32);
            if index < last {
                self.add(k, factors, piece);
            }
            if let Some(next) = pieces.get(index + ahead) {
                start(k, next);
            }
        }
        group.release_values(k);
        probe.stamp(k, Phase::Update);
        pieces.remove(last)
    }

    /// Multiplies columns of the output with their rows' factors and adds a product.
    fn add(&self, k: &mut Builder, factors: &[Reg<F32>; 2], Piece { first, product }: &Piece) {
        let sums = &self.output.registers()[*first as usize / 2..];
        for (index, (sum, part)) in sums.iter().zip(product.registers()).enumerate() {
            let together = k.fma(*sum, factors[Accumulator::row_of(index)], *part);
            k.set(*sum, together);
        }
    }

    /// As `blocks`, with the next scores begun before the last piece is added.
    fn blocks_late(&self, k: &mut Builder) {
        let State { tiles, group, probe, current, block, .. } = self;
        group.ping_pong.take(k);
        let product = Accumulator::new(k, self.weights.columns());
        let start = |k: &mut Builder| {
            group.wait_for_keys(k);
            probe.stamp(k, Phase::WaitForKeys);
            let (queries, keys) = group.score_operands(k);
            k.start_product_in_two(&product, queries, keys);
        };
        start(k);
        let last = Cell::new(None);
        let factors = [k.register(), k.register()];
        k.loop_(|k| {
            k.wait_products(1);
            group.ping_pong.pass(k);
            k.wait_products(0);
            let scores = Score::of(&product);
            group.release_keys(k);
            probe.stamp(k, Phase::Scores);
            let found = self.raise(k, &scores);
            for (factor, found) in factors.iter().zip(&found) {
                k.set(*factor, *found);
            }
            self.weigh(k, &scores);
            let piece = self.update_but_last(k, &factors);
            k.break_if(tiles.is_first_block(current, *block));
            k.set(*block, *block - 1);
            start(k);
            self.add(k, &factors, &piece);
            last.set(Some(piece));
        });
        let last = last.into_inner().expect("the loop was written");
        self.add(k, &factors, &last);
        group.ping_pong.pass(k);
    }
}

/// Some columns of a block's part of the output.
struct Piece {
    first: u32,
    product: Accumulator,
}
