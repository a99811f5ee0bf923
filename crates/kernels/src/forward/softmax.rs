//! The softmax of a warpgroup's rows: the guarded softmax, with its slow path in the block's own
//! registers and the output rescaled when the products in flight have landed.
//!
//! Where the tensor cores add weights up ([`Sums::TensorCores`]), there is no sum of a block to be
//! its guard: the bits of its rounded weights are. The topmost bit of an exponent is set from two
//! on, so all weights are lowered by a power of two, and one that reaches two trips the guard. It
//! takes one instruction to put the bits of four weights together, and four to add them.

use ptx::{Accumulator, Builder, Element, Expression, F32, Fragment, Pred, Reg, U32, Value};

use super::{Forward, Sums};
use crate::attention::rows::Finished;
use crate::attention::{ACCUMULATOR_ROWS, Score, softmax};

/// The state of a thread's two rows.
pub(super) struct Softmax {
    guard: Guard,
    slow_path_apart: bool,
    rows: softmax::Softmax,
}

/// What shows that a row's reference is too low.
enum Guard {
    /// A block's sum: beyond this it is too large for the element.
    Sum(f32),
    /// The bits of its weights.
    Bits,
}

/// The topmost bits of the exponents of a pair of f16 or of bf16.
const LARGE: u32 = 0x4000_4000;

/// The binary logarithm of the weight of a row's reference, where two trips the guard. bf16 has room
/// for far more on either side. An f16 below 2^-14 loses a bit with each power of two: weights are
/// whole down to 2^-8 of the reference's, and lose 2^-19 of it below; one of 2^7 trips the guard.
fn lift(element: Element) -> f32 {
    match element {
        Element::F16 => -6.0,
        _ => -30.0,
    }
}

/// How the output must be rescaled, where the guard tripped.
pub(super) struct Rescale {
    needed: Reg<Pred>,
    factors: [Reg<F32>; 2],
}

impl Softmax {
    pub(super) fn new(k: &mut Builder, forward: &Forward, scale_log2: Reg<F32>) -> Self {
        let rows = softmax::Softmax::new(k, ACCUMULATOR_ROWS.len(), scale_log2);
        let (guard, rows) = match forward.sums {
            Sums::Additions => (Guard::Sum(softmax::bound(forward.element)), rows),
            Sums::TensorCores => (Guard::Bits, rows.lifted(lift(forward.element)).without_sums()),
        };
        Softmax { guard, slow_path_apart: forward.form.slow_path_apart, rows }
    }

    /// Starts the rows: their exact maximum becomes their reference.
    pub(super) fn first_block(&self, k: &mut Builder, scores: &[Score], p: &Fragment) {
        self.rows.begin(k, scores);
        match self.guard {
            Guard::Sum(_) => {
                let sums = self.exponentials(k, scores, p);
                self.rows.start(k, &sums);
            }
            Guard::Bits => self.weights(k, scores, p, |_, _| {}),
        }
    }

    /// Adds a block.
    pub(super) fn block(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Rescale {
        let factors = [k.variable(1.0), k.variable(1.0)];
        let needed = match self.guard {
            Guard::Sum(bound) => self.add(k, scores, p, bound, &factors),
            Guard::Bits => self.weigh(k, scores, p, &factors),
        };
        Rescale { needed, factors }
    }

    /// The weights of a block and their sums; the result is whether references were raised.
    fn add(
        &self,
        k: &mut Builder,
        scores: &[Score],
        p: &Fragment,
        bound: f32,
        factors: &[Reg<F32>; 2],
    ) -> Reg<Pred> {
        let (sums, needed) = if self.slow_path_apart {
            let sums = self.exponentials(k, scores, p);
            let sums: Vec<Reg<F32>> = sums.into_iter().map(|sum| k.variable(sum)).collect();
            let needed = self.rows.exceeds(k, &sums, bound);
            k.if_(needed, |k| {
                self.rows.raise(k, scores, factors);
                let again = self.exponentials(k, scores, p);
                set(k, &sums, &again);
            });
            (sums, needed)
        } else {
            let sums = vec![k.register::<F32>(), k.register()];
            let raised = k.variable(Value::<Pred>::from(false));
            let bound = k.variable(bound);
            // The exit stands last, or the assembler would copy what is before it.
            k.loop_(|k| {
                k.if_(raised, |k| {
                    self.rows.raise(k, scores, factors);
                    // Once is enough: nothing is beyond infinity.
                    k.set(bound, f32::INFINITY);
                });
                let found = self.exponentials(k, scores, p);
                set(k, &sums, &found);
                let beyond = self.rows.exceeds(k, &sums, bound);
                k.break_if(!beyond);
                k.set(raised, true);
            });
            (sums, raised)
        };
        self.rows.add(k, &sums);
        needed
    }

    /// The same without sums.
    fn weigh(
        &self,
        k: &mut Builder,
        scores: &[Score],
        p: &Fragment,
        factors: &[Reg<F32>; 2],
    ) -> Reg<Pred> {
        if self.slow_path_apart {
            let bits = self.weight_bits(k, scores, p);
            let needed = k.any((bits & LARGE).differs(0));
            k.if_(needed, |k| {
                self.rows.raise(k, scores, factors);
                self.weights(k, scores, p, |_, _| {});
            });
            return needed;
        }
        let raised = k.variable(Value::<Pred>::from(false));
        let large = k.variable(LARGE);
        k.loop_(|k| {
            k.if_(raised, |k| {
                self.rows.raise(k, scores, factors);
                // Once is enough: what is still large is infinite or not a number.
                k.set(large, 0);
            });
            let bits = self.weight_bits(k, scores, p);
            let beyond = k.any((bits & large).differs(0));
            k.break_if(!beyond);
            k.set(raised, true);
        });
        raised
    }

    /// The weights of a block, rounded into `p`, and every bit that is set in one.
    fn weight_bits(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Reg<U32> {
        let mut all: Option<Reg<U32>> = None;
        self.weights(k, scores, p, |k, pair| {
            let bits = p.bits(k, pair);
            all = Some(match all {
                Some(all) => k.eval(all | bits),
                None => bits,
            });
        });
        all.expect("a block has keys")
    }

    /// The weights of a block, rounded into `p` pair by pair.
    fn weights(
        &self,
        k: &mut Builder,
        scores: &[Score],
        p: &Fragment,
        mut look: impl FnMut(&mut Builder, usize),
    ) {
        let ignore = |_: &mut Builder, _, _, _| {};
        self.rows.weights(k, scores, ignore, |k, pair, [low, high]| {
            p.set_pair(k, pair, low, high);
            look(k, pair);
        });
    }

    /// The exponentials of a block, rounded into `p`, and the thread's sums of them.
    fn exponentials(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Vec<Reg<F32>> {
        self.rows.exponentials(k, scores, |k, pair, [low, high]| p.set_pair(k, pair, low, high))
    }

    /// Ends the rows; where the tensor cores added weights up, sums are the output's last columns,
    /// in every lane.
    pub(super) fn finish(
        &self,
        k: &mut Builder,
        output: &Accumulator,
        sink: Option<Reg<F32>>,
    ) -> Vec<Finished> {
        match (&self.guard, output.registers()) {
            (Guard::Bits, [.., upper, _, lower, _]) => {
                self.rows.finish_with(k, &[*upper, *lower], sink)
            }
            _ => self.rows.finish(k, sink),
        }
    }
}

impl Rescale {
    /// Rescales the output, once the products that were in flight have landed.
    pub(super) fn apply(&self, k: &mut Builder, output: &Accumulator) {
        k.if_(self.needed, |k| {
            for (index, element) in output.registers().iter().enumerate() {
                k.set(*element, *element * self.factors[Accumulator::row_of(index)]);
            }
        });
    }
}

fn set(k: &mut Builder, registers: &[Reg<F32>], values: &[Reg<F32>]) {
    for (register, value) in registers.iter().zip(values) {
        k.set(*register, *value);
    }
}
