//! The guarded softmax ([`softmax`]) of a consumer warpgroup: turns the scores of a key block into
//! P in the operand's element.
//!
//! The slow path, which takes a new reference where a block's sum exceeds the bound, recomputes P
//! from the scores, which are still in registers. The output is rescaled later, when the `P V` in
//! flight has landed ([`Rescale`]).

use ptx::{Accumulator, Builder, Expression, F32, Fragment, Pred, Reg, Value};

use super::Forward;
use crate::attention::rows::Finished;
use crate::attention::scores::{CappedExponents, ScoreRule};
use crate::attention::{ACCUMULATOR_ROWS, Score, softmax};

/// The softmax state of a thread's two rows.
pub(super) struct Softmax {
    /// The guard's bound: a block whose sum of exponentials exceeds it takes the slow path.
    bound: f32,
    slow_path_apart: bool,
    rows: softmax::Softmax,
}

/// The factors by which the output must be rescaled where the guard tripped.
pub(super) struct Rescale {
    needed: Reg<Pred>,
    factors: [Reg<F32>; 2],
}

impl Softmax {
    pub(super) fn new(k: &mut Builder, forward: &Forward, scores: &ScoreRule) -> Self {
        let rows = ACCUMULATOR_ROWS.len();
        Softmax {
            bound: softmax::bound(forward.element),
            slow_path_apart: forward.form.slow_path_apart,
            rows: softmax::Softmax::new(k, rows, scores.scale_log2, scores.least_reference()),
        }
    }

    /// Processes the key block that a tile walks first: its exact row maximum becomes the rows'
    /// reference.
    pub(super) fn first_block(&self, k: &mut Builder, scores: &[Score], p: &Fragment) {
        self.rows.begin(k, scores);
        let sums = self.exponentials(k, scores, p);
        self.rows.start(k, &sums);
    }

    /// Processes a later key block: writes its probabilities to `p`, adds their sums, and returns
    /// how the output must be rescaled.
    pub(super) fn block(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Rescale {
        let factors = [k.variable(1.0), k.variable(1.0)];
        let (sums, needed) = self.guarded(k, scores, p, &factors);
        self.rows.add(k, &sums);
        Rescale { needed, factors }
    }

    /// Processes a later key block like [`block`](Softmax::block), from products `Q K^T`. Where
    /// exponents cannot be taken from the products, `rule` turns them into scores.
    pub(super) fn capped_block(
        &self,
        k: &mut Builder,
        products: &[Score],
        p: &Fragment,
        exponents: &CappedExponents,
        rule: impl FnOnce(&mut Builder),
    ) -> Rescale {
        let factors = [k.variable(1.0), k.variable(1.0)];
        let sums = [k.register::<F32>(), k.register()];
        let needed = k.register::<Pred>();
        k.if_else(
            exponents.served,
            |k| {
                let found = self.rows.capped_exponentials(k, products, exponents, store_in(p));
                set(k, &sums, &found);
                let exceeds = self.rows.exceeds(k, &sums, self.bound);
                k.set(needed, exceeds);
                k.if_(needed, |k| {
                    exponents.cap(k, products);
                    self.rows.raise(k, products, &factors);
                    let again = self.exponentials(k, products, p);
                    set(k, &sums, &again);
                });
            },
            |k| {
                rule(k);
                let (found, raised) = self.guarded(k, products, p, &factors);
                set(k, &sums, &found);
                k.set(needed, raised);
            },
        );
        self.rows.add(k, &sums);
        Rescale { needed, factors }
    }

    /// Writes the probabilities of a later key block to `p`. Returns their sums, and whether a row's
    /// reference had to be raised; `factors` are then those by which the output must be rescaled.
    fn guarded(
        &self,
        k: &mut Builder,
        scores: &[Score],
        p: &Fragment,
        factors: &[Reg<F32>; 2],
    ) -> (Vec<Reg<F32>>, Reg<Pred>) {
        if self.slow_path_apart {
            let sums = self.exponentials(k, scores, p);
            let sums: Vec<Reg<F32>> = sums.into_iter().map(|sum| k.variable(sum)).collect();
            let needed = self.rows.exceeds(k, &sums, self.bound);
            k.if_(needed, |k| {
                self.rows.raise(k, scores, factors);
                let again = self.exponentials(k, scores, p);
                set(k, &sums, &again);
            });
            (sums, needed)
        } else {
            let sums = vec![k.register::<F32>(), k.register()];
            let raised = k.variable(Value::<Pred>::from(false));
            let bound = k.variable(self.bound);
            // With the exit in the middle, the assembler would duplicate the code before it.
            k.loop_(|k| {
                k.if_(raised, |k| {
                    self.rows.raise(k, scores, factors);
                    // No second retry: no sum exceeds infinity.
                    k.set(bound, f32::INFINITY);
                });
                let found = self.exponentials(k, scores, p);
                set(k, &sums, &found);
                let beyond = self.rows.exceeds(k, &sums, bound);
                k.break_if(!beyond);
                k.set(raised, true);
            });
            (sums, raised)
        }
    }

    /// Writes the exponentials of a block to `p`, rounded, and returns the thread's sums of them.
    fn exponentials(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Vec<Reg<F32>> {
        self.rows.exponentials(k, scores, store_in(p))
    }

    /// Returns the references of the thread's rows, then its partial sums of these rows.
    pub(super) fn state(&self) -> Vec<Reg<F32>> {
        self.rows.state()
    }

    /// Merges the state of the same rows over other keys. Returns how this output must be rescaled,
    /// and the factors of the other output before it is added.
    pub(super) fn merge_partial(
        &self,
        k: &mut Builder,
        others: [Reg<F32>; 4],
    ) -> (Rescale, [Reg<F32>; 2]) {
        let [first, second] =
            [0, 1].map(|row| self.rows.merge_partial(k, row, [others[row], others[row + 2]]));
        let needed = k.any(first[0].differs(1.0) | second[0].differs(1.0));
        (Rescale { needed, factors: [first[0], second[0]] }, [first[1], second[1]])
    }

    /// Finishes the rows: returns the factor of each row's output and its log-sum-exp.
    pub(super) fn finish(&self, k: &mut Builder, sink: Option<Reg<F32>>) -> Vec<Finished> {
        self.rows.finish(k, sink)
    }
}

impl Rescale {
    /// Rescales the output. To be called once the products in flight have landed.
    pub(super) fn apply(&self, k: &mut Builder, output: &Accumulator) {
        k.if_(self.needed, |k| {
            for (index, element) in output.registers().iter().enumerate() {
                k.set(*element, *element * self.factors[Accumulator::row_of(index)]);
            }
        });
    }
}

/// Returns how a pair of probabilities is stored in `p`.
fn store_in(p: &Fragment) -> impl Fn(&mut Builder, usize, [Reg<F32>; 2]) {
    |k, pair, [low, high]| p.set_pair(k, pair, low, high)
}

fn set(k: &mut Builder, registers: &[Reg<F32>], values: &[Reg<F32>]) {
    for (register, value) in registers.iter().zip(values) {
        k.set(*register, *value);
    }
}
