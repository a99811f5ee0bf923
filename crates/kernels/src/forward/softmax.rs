//! The guarded softmax ([`softmax`]) of a consumer warpgroup: turns the scores of a key block into
//! P in the operand's element.
//!
//! The slow path, which takes a new reference where a block's sum exceeds the bound, recomputes P
//! from the scores, which are still in registers. The output is rescaled later, when the `P V` in
//! flight has landed ([`Rescale`]).

use ptx::{Accumulator, Builder, Expression, F32, Fragment, Pred, Reg, Value};

use super::Forward;
use crate::attention::rows::Finished;
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
    pub(super) fn new(k: &mut Builder, forward: &Forward, scale_log2: Reg<F32>) -> Self {
        Softmax {
            bound: softmax::bound(forward.element),
            slow_path_apart: forward.form.slow_path_apart,
            rows: softmax::Softmax::new(k, ACCUMULATOR_ROWS.len(), scale_log2),
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
        let (sums, needed) = if self.slow_path_apart {
            let sums = self.exponentials(k, scores, p);
            let sums: Vec<Reg<F32>> = sums.into_iter().map(|sum| k.variable(sum)).collect();
            let needed = self.rows.exceeds(k, &sums, self.bound);
            k.if_(needed, |k| {
                self.rows.raise(k, scores, &factors);
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
                    self.rows.raise(k, scores, &factors);
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
        };
        self.rows.add(k, &sums);
        Rescale { needed, factors }
    }

    /// Writes the exponentials of a block to `p`, rounded, and returns the thread's sums of them.
    fn exponentials(&self, k: &mut Builder, scores: &[Score], p: &Fragment) -> Vec<Reg<F32>> {
        self.rows.exponentials(k, scores, |k, pair, [low, high]| p.set_pair(k, pair, low, high))
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

fn set(k: &mut Builder, registers: &[Reg<F32>], values: &[Reg<F32>]) {
    for (register, value) in registers.iter().zip(values) {
        k.set(*register, *value);
    }
}
