//! Passages: pieces of program that are written apart and placed among each other.
//!
//! The assembler hides latencies inside straight-line code, and mostly keeps
//! the order it is given. Where two independent computations use different
//! units (products on the tensor cores, exponentials on the special-function
//! units), a kernel writes each as its algorithm has it and weaves the two.

use super::Builder;
use crate::Block;

/// Statements that have been written and not yet been placed.
#[must_use = "a passage is not part of the program until it is placed"]
#[derive(Debug)]
pub struct Passage {
    statements: Block,
}

impl Passage {
    /// How many statements it has.
    pub fn len(&self) -> usize {
        self.statements.len()
    }

    /// This passage and then another.
    pub fn then(mut self, other: Passage) -> Passage {
        self.statements.extend(other.statements);
        self
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.statements.is_empty()
    }
}

impl Builder {
    /// Writes a piece of program without placing it.
    pub fn passage(&mut self, body: impl FnOnce(&mut Self)) -> Passage {
        Passage { statements: self.block(body) }
    }

    /// Places a passage here.
    pub fn place(&mut self, passage: Passage) {
        self.open.last_mut().expect("the body is always open").extend(passage.statements);
    }

    /// Places two passages that do not depend on each other: each in its own
    /// order, the statements of the shorter one spread evenly among those of
    /// the longer.
    ///
    /// ```
    /// use flashcore_ptx::{Builder, F32, Target};
    ///
    /// let mut k = Builder::new("woven", Target::SM_75, 32);
    /// let (a, b) = (k.variable::<F32>(1.0), k.variable::<F32>(2.0));
    /// let sums = k.passage(|k| (0..4).for_each(|_| k.set(a, a + 1.0)));
    /// let products = k.passage(|k| (0..2).for_each(|_| k.set(b, b * 2.0)));
    /// k.weave(sums, products);
    /// let text = flashcore_ptx::print(&k.finish().unwrap());
    /// let order: String = text.lines().filter_map(|line| {
    ///     let line = line.trim();
    ///     line.starts_with("add").then_some('+').or(line.starts_with("mul").then_some('*'))
    /// }).collect();
    /// assert_eq!(order, "++*++*");
    /// ```
    pub fn weave(&mut self, first: Passage, second: Passage) {
        let (long, short) =
            if first.len() < second.len() { (second, first) } else { (first, second) };
        let (many, few) = (long.len(), short.len());
        let block = self.open.last_mut().expect("the body is always open");
        let mut short = short.statements.into_iter();
        for (index, statement) in long.statements.into_iter().enumerate() {
            block.push(statement);
            // After `index + 1` of `many`, as many of `few` in proportion.
            let due = (index + 1) * few / many - index * few / many;
            block.extend(short.by_ref().take(due));
        }
    }
}
