//! The consumers' main loop with 8-bit inputs (`e4m3`).
//!
//! ```text
//! for j = n-1 down to 0:
//!     S = Q K(j)^T
//!     m' = max(m, S);  P = 2^(S - m' + 8) in e4m3;  l = l 2^(m - m') + sums
//!     T = P V(j)                      a fresh accumulator
//!     O = O 2^(m - m') + T            in f32
//! ```
//!
//! docs/fp8-forward.md counts what each line costs. Two things set it apart from the 16-bit loop:
//!
//! - Hopper's tensor cores sum 8-bit products to about 14 bits only, so no more than one key block
//!   goes into an accumulator, and blocks are added in `f32`. The second accumulator costs no
//!   instruction: adding it and rescaling the output is one FMA.
//! - Numbers of `e4m3` reach 448 and have four significant bits down to 2^-6. P is scaled by 2^8
//!   relative to an exact running maximum, so that nothing saturates and the tail stays normal for
//!   14 octaves.
//!
//! `T` takes the registers of `S`. The assembler finds that by itself; when the program says so
//! explicitly, it serialises the products. A warpgroup therefore waits for its own products, while
//! other warpgroups multiply.

use ptx::{Accumulate, Accumulator, Builder, E4M3x2, Expression, F32, Fragment, Reg, Select, U32};

use super::Forward;
use super::consumer::Consumers;
use super::epilogue::Epilogue;
use super::probe::Phase;
use super::rule::{Rule, Step};
use super::scheduler::ConsumerScheduler;
use super::warpgroup::Warpgroup;
use crate::attention::descale::Product;
use crate::attention::softmax::Softmax;
use crate::attention::{ACCUMULATOR_ROWS, Score};

/// Returns the output columns of each `P V` product that may be in flight at the same time: no more
/// registers than the scores leave free. With several products, one is added to the output while
/// the next runs (a gain of 3 % at head dim 256; at 128, two halves are 2 % slower than one whole).
fn slots(forward: &Forward) -> &'static [u32] {
    match forward.value_head_dim {
        129.. => &[64, 32],
        _ if forward.key_block < 128 => &[64],
        _ => &[128],
    }
}

/// The binary logarithm of the largest P: P is scaled by `2^MAX_OFFSET`.
const MAX_OFFSET: f32 = 8.0;

/// The least scale of scores. Masked scores, minus infinity, times a scale of zero would be NaN;
/// with this scale instead of zero all visible keys get the same weight. A negative scale, which
/// descale factors on the device may lead to, makes the tile NaN: the row maximum would not be the
/// largest scaled score.
const LEAST_SCALE: f32 = 1e-20;

/// When a warpgroup passes its turn at the tensor cores on: when its scores have been started, or
/// when they have landed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Started,
    Landed,
}

/// The state that one consumer warpgroup carries through the main loop.
struct State<'a, T: ConsumerScheduler> {
    tiles: &'a T,
    group: Warpgroup<'a>,
    rule: Rule,
    softmax: Softmax,
    /// The scale of the launch, in units of log2.
    scale_log2: Reg<F32>,
    /// The scale that the softmax applies in this tile: with the descale factor of `Q K^T`, unless
    /// `descale` applies that.
    tile_scale: Reg<F32>,
    /// The tile's descale factor of `Q K^T`, where score rules need scores in their own units
    /// before the scale.
    descale: Option<Reg<F32>>,
    /// P of a key block.
    weights: Fragment,
    output: Accumulator,
    /// The output columns of each `P V` product in flight ([`slots`]).
    slots: &'static [u32],
    /// When the turn at the tensor cores is passed on.
    pass: Pass,
    current: T::Current,
    block: Reg<U32>,
}

/// Emits the code of a consumer warpgroup: 64 query rows of each of the thread block's tiles.
pub(super) fn consume<T: ConsumerScheduler>(k: &mut Builder, given: Consumers<'_, T>) {
    let group = Warpgroup::new(k, &given);
    let Consumers { forward, shared, tiles, scores, functions, results, .. } = given;
    let epilogue = Epilogue::new(k, results, shared, &group);
    let tile = tiles.first_tile(k);
    let tile_scale = k.register();
    let state = State {
        tiles,
        rule: Rule::new(k, forward, &group, scores, functions),
        group,
        softmax: Softmax::new(k, ACCUMULATOR_ROWS.len(), tile_scale, scores.least_reference())
            .with_max_offset(MAX_OFFSET),
        scale_log2: scores.scale_log2,
        tile_scale,
        descale: forward.rules.changes_scores().then(|| k.register()),
        weights: Fragment::new(k, forward.element, forward.key_block),
        output: Accumulator::new(k, forward.value_head_dim),
        slots: slots(forward),
        // Measured: `Landed` gains 1 % at head dims 64 and 128, where exponentials take longer than
        // products, and loses 1 % at 256.
        pass: if forward.value_head_dim > 128 { Pass::Started } else { Pass::Landed },
        current: tiles.hold(k, &tile),
        block: k.variable(tiles.last_block(&tile)),
    };
    state.group.probe.stamp(k, Phase::Begin);
    k.loop_(|k| {
        k.break_if(!tiles.has_tile(&tile));
        state.tile(k);
        let sink = tiles.sink(k, &state.current);
        let mut rows = state.softmax.finish(k, sink);
        let descale = tiles.descale(k, &state.current, Product::Output);
        for row in &mut rows {
            row.factor = k.eval(row.factor * descale);
        }
        epilogue.store(k, (tiles, &state.current), &rows, &state.output);
        state.group.probe.stamp(k, Phase::Epilogue);
        tiles.next_tile(k, &tile);
        tiles.take(k, &state.current, &tile);
        k.set(state.block, tiles.last_block(&tile));
    });
    epilogue.staging.drain(k);
}

impl<T: ConsumerScheduler> State<'_, T> {
    /// Computes all key blocks of a tile.
    fn tile(&self, k: &mut Builder) {
        let State { tiles, group, softmax, output, current, .. } = self;
        let descale = tiles.descale(k, current, Product::Scores);
        match self.descale {
            // Score rules take scores in their own units, so the descale factor comes first.
            Some(register) => {
                k.set(register, descale);
                k.set(self.tile_scale, self.scale_log2);
            }
            None => {
                let scale = k.eval(self.scale_log2 * descale);
                let positive = scale.at_least(0.0);
                let lifted = scale.maximum(LEAST_SCALE);
                k.set(self.tile_scale, positive.select::<F32>(lifted, f32::NAN));
            }
        }
        softmax.clear(k);
        for element in output.registers() {
            k.set(*element, 0.0);
        }
        group.take_queries(k);
        self.blocks(k);
    }

    /// Loops over the key blocks of a tile: scores, softmax and output, one after the other.
    fn blocks(&self, k: &mut Builder) {
        let State { tiles, group, current, block, .. } = self;
        group.take_turn(k);
        k.loop_(|k| {
            group.wait_for_keys(k);
            let scores = group.start_scores(k);
            if self.pass == Pass::Started {
                group.pass_turn(k);
            }
            let scores = Score::of(&scores.wait(k));
            if self.pass == Pass::Landed {
                group.pass_turn(k);
            }
            group.release_keys(k);
            let last = k.eval(tiles.is_first_block(current, *block));
            // The next tile's queries are loaded during the softmax of this tile's last key block.
            k.if_(last, |k| group.release_queries(k));
            let factors = self.raise(k, &scores);
            self.probabilities(k, &scores);
            self.update(k, &factors);
            // The exit is at the end, so that there is one copy of the loop's body.
            k.break_if(last);
            k.set(*block, *block - 1);
        });
        group.pass_turn(k);
    }

    /// Turns products into scores and raises the rows' references to the exact running maximum.
    /// Returns the factors by which the output so far must be rescaled.
    fn raise(&self, k: &mut Builder, scores: &[Score]) -> [Reg<F32>; 2] {
        let State { tiles, softmax, current, block, .. } = self;
        let entry = tiles.entry(k, current, || (*block).into());
        if let Some(descale) = self.descale {
            for Score { register, .. } in scores {
                k.set(*register, *register * descale);
            }
        }
        self.rule.apply(k, *tiles, current, (*block, entry), Step::Any, scores);
        let factors = [k.register(), k.register()];
        softmax.raise(k, scores, &factors);
        factors
    }

    /// Turns scores into P, rounded to `e4m3`, and adds the row sums.
    fn probabilities(&self, k: &mut Builder, scores: &[Score]) {
        let mut pairs: Vec<Reg<E4M3x2>> = Vec::new();
        let sums = self.softmax.exponentials(k, scores, |k, _, [low, high]| {
            pairs.push(k.pack::<E4M3x2>(low, high));
            // Pairs of two groups of eight columns, of two rows each: four elements of each row.
            if let [.., first, first_below, second, second_below] = pairs[..]
                && pairs.len().is_multiple_of(4)
            {
                let index = pairs.len() / 2 - 2;
                self.weights.set_four(k, index, [first, second]);
                self.weights.set_four(k, index + 1, [first_below, second_below]);
            }
        });
        self.softmax.add(k, &sums);
        self.group.probe.stamp(k, Phase::Softmax);
    }

    /// Computes `O = O f + P V`, piece by piece of the output's columns.
    fn update(&self, k: &mut Builder, factors: &[Reg<F32>; 2]) {
        let group = &self.group;
        group.wait_for_values(k);
        group.take_turn(k);
        let pieces = self.pieces(k);
        let start = |k: &mut Builder, Piece { first, product }: &Piece| {
            let values = group.transposed_operand(k, *first, product.columns());
            let values = values.expect("values have 8 bits");
            k.start_product(product, Accumulate::No, &self.weights, values);
        };
        // While a piece is added to the output, the next one is multiplied.
        let at_once = self.slots.len();
        for piece in pieces.iter().take(at_once) {
            start(k, piece);
        }
        for (index, piece) in pieces.iter().enumerate() {
            let later = (pieces.len() - 1 - index).min(at_once - 1);
            k.wait_products(later as u32);
            self.add(k, factors, piece);
            if let Some(next) = pieces.get(index + at_once) {
                start(k, next);
            }
        }
        group.release_values(k);
    }

    /// Splits the output's columns into pieces, which use the slots in turn.
    fn pieces(&self, k: &mut Builder) -> Vec<Piece> {
        let slots: Vec<Accumulator> =
            self.slots.iter().map(|columns| Accumulator::new(k, *columns)).collect();
        let mut pieces = Vec::new();
        let mut first = 0;
        for slot in slots.iter().cycle() {
            let count = slot.columns().min(self.output.columns() - first);
            if count == 0 {
                break;
            }
            pieces.push(Piece { first, product: slot.narrowed(count) });
            first += count;
        }
        pieces
    }

    /// Multiplies columns of the output by their rows' factors and adds a product.
    fn add(&self, k: &mut Builder, factors: &[Reg<F32>; 2], Piece { first, product }: &Piece) {
        let sums = &self.output.registers()[*first as usize / 2..];
        for (index, (sum, part)) in sums.iter().zip(product.registers()).enumerate() {
            let together = k.fma(*sum, factors[Accumulator::row_of(index)], *part);
            k.set(*sum, together);
        }
    }
}

/// `P V` of a key block for some columns of the output; `first` is the first of them.
struct Piece {
    first: u32,
    product: Accumulator,
}
