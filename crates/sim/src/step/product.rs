//! Tensor-core products: `mma.sync`, and `wgmma` from its issue to its completion.

use ptx::{Accumulate, Element, Instruction, MmaShape, Register, WgmmaA};

use super::Flow;
use super::access::Target;
use crate::float;
use crate::hazard::HazardKind;
use crate::lower;
use crate::machine::{Executed, Executor, Product, SHARED_BASE};
use crate::shadow::{Event, NO_LANE, Observer, Proxy, Source};
use crate::tensor::{Descriptor, decode_chunk, decode_word, multiply, multiply_fp8};
use crate::trace::{Span, Track};
use crate::warp::{Wait, Warp};
use crate::{Fp8Accumulation, Measure};

/// An operand of a `wgmma` in shared memory.
struct SharedOperand {
    name: &'static str,
    bits: u64,
    rows: u32,
    outer_contiguous: bool,
}

/// Returns the shared-memory operands of a product.
fn shared_operands(instruction: &Instruction, product: &Product) -> Vec<SharedOperand> {
    let Instruction::Wgmma { n, a, b_transpose, .. } = instruction else {
        unreachable!("products are made of wgmma");
    };
    let mut operands = vec![SharedOperand {
        name: "b",
        bits: product.b,
        rows: *n,
        outer_contiguous: *b_transpose,
    }];
    if let WgmmaA::Shared { transpose, .. } = a {
        operands.push(SharedOperand {
            name: "a",
            bits: product.a,
            rows: 64,
            outer_contiguous: *transpose,
        });
    }
    operands
}

impl<'a> Executor<'_, 'a> {
    // ---- wgmma --------------------------------------------------------------------

    pub(super) fn issue_product(
        &mut self,
        warp: &mut Warp<'a>,
        instruction: &Instruction,
    ) -> Executed<()> {
        let Instruction::Wgmma { d, accumulate, a, b, .. } = instruction else {
            unreachable!("dispatched on wgmma");
        };
        let number = warp.products + 1;
        let a_bits = match a {
            WgmmaA::Shared { descriptor, .. } => self.uniform(warp, *descriptor, "a")?,
            WgmmaA::Registers(_) => 0,
        };
        let b_bits = self.uniform(warp, *b, "b")?;
        let accumulate = match accumulate {
            Accumulate::No => false,
            Accumulate::Yes => true,
            Accumulate::If(predicate) => match warp.predicate(*predicate) {
                0 => false,
                u32::MAX => true,
                lanes => {
                    let text = format!("the accumulate predicate is true in lanes {lanes:#010x}");
                    return Err(self.hazard(warp, None, HazardKind::Divergent, text));
                }
            },
        };
        if self.grid_state.checked {
            self.check_product_registers(warp, d, accumulate, a, number)?;
        }
        warp.products = number;
        let released = self.grid_state.checked.then(|| warp.clock.release(u32::MAX));
        let (after, since) = (self.cluster.next_operation, self.grid_state.shadow.count());
        let group = &mut self.cluster.groups[warp.group];
        let index = (number - group.done - 1) as usize;
        let member = 1u8 << (warp.in_block % 4);
        if let Some(product) = group.queue.get_mut(index) {
            let same = (product.step, product.a, product.b, product.accumulate)
                == (warp.pc, a_bits, b_bits, accumulate);
            if !same {
                let other = self.grid_state.code.places[product.step];
                let text = format!(
                    "product {number} of this warp is not product {number} of the others in its \
                     warpgroup"
                );
                let hazard = self.hazard(warp, None, HazardKind::WarpgroupMismatch, text);
                return Err(hazard.with_other(other));
            }
            product.issued |= member;
            product.issued_at = product.issued_at.max(warp.time);
            (product.after, product.since) = (after, since);
            if let Some(released) = released {
                // Each warp reads the operands by itself, so the product may rely only on what all
                // four warps know.
                product.start.meet(&released);
            }
            return Ok(());
        }
        let product = Product {
            number,
            step: warp.pc,
            issued: member,
            a: a_bits,
            b: b_bits,
            accumulate,
            after,
            since,
            start: released.unwrap_or_default(),
            issued_at: warp.time,
        };
        for operand in shared_operands(instruction, &product) {
            self.check_descriptor(warp, &operand)?;
        }
        if self.grid_state.checked {
            self.mark_product(warp.block, instruction, &product, 1);
        }
        self.cluster.groups[warp.group].queue.push_back(product);
        Ok(())
    }

    fn uniform(&self, warp: &Warp<'a>, register: Register, name: &str) -> Executed<u64> {
        let values = warp.wide_of(register);
        if values.iter().all(|v| *v == values[0]) {
            return Ok(values[0]);
        }
        let text = format!("the descriptor of {name} differs between the lanes of the warp");
        Err(self.hazard(warp, None, HazardKind::BadDescriptor, text))
    }

    fn check_descriptor(&self, warp: &Warp<'a>, operand: &SharedOperand) -> Executed<()> {
        let descriptor = Descriptor::decode(operand.bits);
        let (name, bits) = (operand.name, operand.bits);
        let fault = |text: String| Err(self.hazard(warp, None, HazardKind::BadDescriptor, text));
        if descriptor.reserved != 0 {
            return fault(format!("descriptor {bits:#018x} of {name} has reserved bits set"));
        }
        if descriptor.base_offset != 0 {
            let offset = descriptor.base_offset;
            return fault(format!("descriptor {bits:#018x} of {name} has base offset {offset}"));
        }
        let length = self.grid_state.program.shared_bytes();
        for chunk in descriptor.chunks(operand.rows, operand.outer_contiguous) {
            let offset = chunk.wrapping_sub(SHARED_BASE);
            if offset > length || 16 > length - offset {
                return fault(format!(
                    "descriptor {bits:#018x} of {name} leads to shared address {chunk:#x}, byte \
                     {} of {length}",
                    offset as i32
                ));
            }
        }
        Ok(())
    }

    fn check_product_registers(
        &self,
        warp: &mut Warp<'a>,
        d: &[Register],
        accumulate: bool,
        a: &WgmmaA,
        number: u64,
    ) -> Executed<()> {
        let operands: &[Register] = match a {
            WgmmaA::Registers(registers) => registers,
            WgmmaA::Shared { .. } => &[],
        };
        let fences = warp.shadow.fences;
        for register in d.iter().chain(operands) {
            let index = register.0 as usize;
            let (before, step) = warp.shadow.touched[index];
            let touched = before == fences + 1;
            if fences == 0 || touched {
                let text = if touched {
                    format!("register {index} was touched since the last wgmma.fence")
                } else {
                    "no wgmma.fence precedes the first product".to_owned()
                };
                let kind = HazardKind::MissingWgmmaFence;
                let hazard = self.hazard(warp, None, kind, text);
                return Err(hazard.with_other(
                    touched.then(|| self.grid_state.code.places[step as usize]).flatten(),
                ));
            }
        }
        let read = operands.iter().chain(if accumulate { d } else { &[] });
        for register in read {
            let index = register.0 as usize;
            if warp.shadow.written[index] != u32::MAX {
                let text = format!("register {index} is an operand but was never written");
                return Err(self.hazard(warp, None, HazardKind::UninitialisedRegister, text));
            }
        }
        for register in operands {
            if warp.is_accumulating(*register) {
                return Err(self.register_hazard(warp, *register, "an operand"));
            }
            warp.shadow.operand[register.0 as usize] = number;
        }
        for register in d {
            // Products may chain through the same accumulator; other overlaps are hazards.
            if warp.is_operand(*register) && warp.shadow.operand[register.0 as usize] != number {
                return Err(self.register_hazard(warp, *register, "an accumulator"));
            }
            if warp.is_accumulating(*register) {
                let earlier = warp.shadow.accumulating[register.0 as usize];
                let step = warp.shadow.product_steps[earlier as usize - 1];
                let same = matches!(&warp.code.steps[step],
                    lower::Step::Execute(Instruction::Wgmma { d: theirs, .. }) if theirs == d);
                if !same {
                    return Err(self.register_hazard(warp, *register, "an accumulator"));
                }
            }
        }
        for register in d {
            warp.shadow.accumulating[register.0 as usize] = number;
            warp.shadow.written[register.0 as usize] = u32::MAX;
        }
        warp.shadow.product_steps.push(warp.pc);
        Ok(())
    }

    /// Adds `change` to the number of operations in flight that will read each word of the
    /// product's operands.
    fn mark_product(
        &mut self,
        block: usize,
        instruction: &Instruction,
        product: &Product,
        change: i32,
    ) {
        for operand in shared_operands(instruction, product) {
            let descriptor = Descriptor::decode(operand.bits);
            for chunk in descriptor.chunks(operand.rows, operand.outer_contiguous) {
                let first = (chunk - SHARED_BASE) as usize / 4;
                for word in &mut self.cluster.blocks[block].pending_reads[first..first + 4] {
                    *word = (*word as i32 + change) as u16;
                }
            }
        }
    }

    /// Returns the step of a product in flight that reads an address of a block.
    pub(crate) fn product_reading(&self, block: usize, address: u32) -> Option<usize> {
        let per_block = self.cluster.groups.len() / self.cluster.blocks.len();
        let groups = &self.cluster.groups[block * per_block..(block + 1) * per_block];
        groups.iter().flat_map(|g| &g.queue).find_map(|product| {
            let lower::Step::Execute(instruction) = &self.grid_state.code.steps[product.step]
            else {
                return None;
            };
            let reads = shared_operands(instruction, product).iter().any(|operand| {
                let chunks =
                    Descriptor::decode(operand.bits).chunks(operand.rows, operand.outer_contiguous);
                chunks.iter().any(|chunk| *chunk < address + 4 && address < chunk + 16)
            });
            reads.then_some(product.step)
        })
    }

    pub(super) fn wait_products(&mut self, warp: &mut Warp<'a>, pending: u32) -> Executed<Flow> {
        let keep = (pending as usize).min(warp.commits.len());
        let over = warp.commits.len() - keep;
        let until = if over > 0 { warp.commits[over - 1] } else { 0 };
        warp.commits.drain(..over);
        Ok(Flow::Block(Wait::Products { until }))
    }

    /// Computes the oldest product of a warpgroup and writes its accumulator.
    pub(crate) fn finish_product(&mut self, group: usize) -> Executed<()> {
        let product = self.cluster.groups[group].queue.pop_front().expect("scheduled");
        let code = self.grid_state.code;
        let lower::Step::Execute(instruction) = &code.steps[product.step] else {
            unreachable!("products are made of wgmma");
        };
        let Instruction::Wgmma {
            n,
            a_element,
            b_element,
            accumulator,
            d,
            a,
            b_transpose,
            negate_a,
            negate_b,
            ..
        } = instruction
        else {
            unreachable!("products are made of wgmma");
        };
        let first = self.first_warp(group);
        let block = self.warp(first).block;
        if self.grid_state.checked {
            self.mark_product(block, instruction, &product, -1);
            self.check_product(group, block, instruction, &product)?;
        }
        let inner = 32 / a_element.bytes() as usize;
        let columns = *n as usize;
        let mut a_values = match a {
            WgmmaA::Shared { transpose, .. } => {
                self.shared_matrix(block, product.a, 64, *transpose, *a_element)
            }
            WgmmaA::Registers(registers) => self.register_matrix(first, registers, *a_element),
        };
        // The multiplication takes `B` as rows of the inner (K) extent.
        let b_values = self.shared_matrix(block, product.b, *n, *b_transpose, *b_element);
        let mut b_rows = vec![0.0; inner * columns];
        for column in 0..columns {
            for k in 0..inner {
                b_rows[k * columns + column] = b_values[column * inner + k];
            }
        }
        if negate_a != negate_b {
            a_values.iter_mut().for_each(|x| *x = -*x);
        }
        let truncated = inner == 32
            && *accumulator == Element::F32
            && self.grid_state.options.fp8_accumulation == Fp8Accumulation::Truncated;
        let (sums, accumulate) = if truncated {
            let old = self.accumulated(first, d, columns, product.accumulate);
            (
                multiply_fp8([*a_element, *b_element], &a_values, &b_rows, &old, inner, columns),
                false,
            )
        } else {
            (multiply(&a_values, &b_rows, inner, columns), product.accumulate)
        };
        for member in 0..4 {
            let warp = self.cluster.warps[first + member].as_mut().expect("in its place");
            for (index, register) in d.iter().enumerate() {
                let word = warp.word_mut(*register);
                for (lane, word) in word.iter_mut().enumerate() {
                    let at =
                        |row: usize, column: usize| sums[(16 * member + row) * columns + column];
                    if *accumulator == Element::F16 {
                        let row = lane / 4 + 8 * (index % 2);
                        let column = 8 * (index / 2) + 2 * (lane % 4);
                        let old = |half: u32| match accumulate {
                            true => float::from_f16((*word >> (16 * half)) as u16),
                            false => 0.0,
                        };
                        let low = float::f16_bits(old(0) + at(row, column));
                        let high = float::f16_bits(old(1) + at(row, column + 1));
                        *word = low as u32 | (high as u32) << 16;
                    } else {
                        let row = lane / 4 + 8 * (index % 4 / 2);
                        let column = 8 * (index / 4) + 2 * (lane % 4) + index % 2;
                        let sum = at(row, column);
                        let value = match accumulate {
                            true => f32::from_bits(*word) + sum,
                            false => sum,
                        };
                        *word = float::bits(value);
                    }
                }
            }
        }
        let counts = &mut self.grid_state.counts;
        counts.add(Measure::TensorOperations, 2 * 64 * *n as u64 * inner as u64);
        let shared_rows = *n as u64 + if matches!(a, WgmmaA::Shared { .. }) { 64 } else { 0 };
        counts.add(Measure::TensorBytesRead, 32 * shared_rows);
        self.grid_state.progress += 1;
        // 4096 operations per cycle on 16-bit elements, twice that on 8-bit ones.
        let cycles = (*n as u64).div_ceil(2);
        let free = &mut self.cluster.tensor_free[block];
        let start = (*free).max(product.issued_at);
        *free = start + cycles;
        let state = &mut self.cluster.groups[group];
        state.done = product.number;
        state.finished_at = start + cycles;
        if let Some(trace) = &mut self.grid_state.trace {
            let block = self.cluster.blocks[block].index;
            let name = format!("m64n{n}k{inner} of warpgroup {group}");
            let (track, end) = (Track::TensorCores, start + cycles);
            trace.push(Span { block, track, name, start, end, runs: false });
        }
        Ok(())
    }

    /// Returns the accumulator of the four warps, row by row, or zeros if the product does not
    /// accumulate.
    fn accumulated(
        &self,
        first: usize,
        d: &[Register],
        columns: usize,
        accumulate: bool,
    ) -> Vec<f32> {
        let mut old = vec![0.0; 64 * columns];
        for member in (0..4).filter(|_| accumulate) {
            let warp = self.warp(first + member);
            for (index, register) in d.iter().enumerate() {
                for (lane, word) in warp.word_of(*register).iter().enumerate() {
                    let row = 16 * member + lane / 4 + 8 * (index % 4 / 2);
                    let column = 8 * (index / 4) + 2 * (lane % 4) + index % 2;
                    old[row * columns + column] = f32::from_bits(*word);
                }
            }
        }
        old
    }

    fn check_product(
        &mut self,
        group: usize,
        block: usize,
        instruction: &Instruction,
        product: &Product,
    ) -> Executed<()> {
        let first = self.first_warp(group);
        let event = Event {
            cluster: self.cluster.index,
            component: self.cluster.product_component(group),
            clock: product.number as u32,
            proxy: Proxy::Async,
            source: Source::Product,
            place: self.grid_state.code.places[product.step],
            actor: self.actor(self.warp(first), None),
            what: "wgmma",
            since: product.since,
        };
        let event = self.grid_state.shadow.event(event);
        for operand in shared_operands(instruction, product) {
            let descriptor = Descriptor::decode(operand.bits);
            for chunk in descriptor.chunks(operand.rows, operand.outer_contiguous) {
                let offset = (chunk - SHARED_BASE) as usize;
                let target = Target::Shared { block, offset };
                let observer = Observer::operation(&product.start, event);
                self.check_access(observer, target, 16, false, product.after)?;
                let cell = *self.cluster.blocks[block].cells.at(offset);
                if let Some(written) = cell.swizzle()
                    && written != descriptor.swizzle
                {
                    let (name, here) = (operand.name, self.shared_name(chunk));
                    let text = format!(
                        "the descriptor of {name} reads {here} in swizzle {:?}, it was written in \
                         {written:?}",
                        descriptor.swizzle
                    );
                    let kind = HazardKind::SwizzleMismatch;
                    let hazard = self.event_hazard(event, NO_LANE, kind, text);
                    return Err(
                        hazard.with_other(self.grid_state.shadow.get(cell.written_by()).place)
                    );
                }
            }
        }
        Ok(())
    }

    /// Returns an operand in shared memory, by rows of the outer (M or N) extent.
    fn shared_matrix(
        &self,
        block: usize,
        bits: u64,
        rows: u32,
        outer_contiguous: bool,
        element: Element,
    ) -> Vec<f32> {
        let shared = &self.cluster.blocks[block].shared;
        let mut values = Vec::with_capacity(rows as usize * 32);
        for chunk in Descriptor::decode(bits).chunks(rows, outer_contiguous) {
            let at = (chunk - SHARED_BASE) as usize;
            decode_chunk(&shared[at..at + 16], element, &self.grid_state.small, &mut values);
        }
        if !outer_contiguous {
            return values;
        }
        let (rows, inner) = (rows as usize, 16);
        let mut by_row = vec![0.0; rows * inner];
        for k in 0..inner {
            for row in 0..rows {
                by_row[row * inner + k] = values[k * rows + row];
            }
        }
        by_row
    }

    /// Returns an `A` operand in the registers of the four warps.
    fn register_matrix(
        &self,
        first: usize,
        registers: &[Register; 4],
        element: Element,
    ) -> Vec<f32> {
        let inner = 32 / element.bytes() as usize;
        let mut values = vec![0.0; 64 * inner];
        for member in 0..4 {
            let warp = self.warp(first + member);
            let fragment: [_; 4] = registers.map(|r| *warp.word_of(r));
            spread_a(
                &fragment,
                element,
                &self.grid_state.small,
                &mut values[16 * inner * member..],
            );
        }
        values
    }

    /// Returns the first warp of a warpgroup, by its index in the cluster.
    pub(crate) fn first_warp(&self, group: usize) -> usize {
        let warps_per_block = self.grid_state.program.threads as usize / 32;
        let groups_per_block = warps_per_block.div_ceil(4);
        group / groups_per_block * warps_per_block + group % groups_per_block * 4
    }

    // ---- mma.sync -----------------------------------------------------------------

    #[allow(clippy::too_many_arguments)] // the fields of the instruction
    pub(super) fn mma(
        &mut self,
        warp: &mut Warp<'a>,
        shape: MmaShape,
        element: Element,
        accumulator: Element,
        d: &[Register],
        a: &[Register],
        b: &[Register],
        c: &[Register],
    ) {
        let inner: usize = match shape {
            MmaShape::M16N8K8 => 8,
            MmaShape::M16N8K16 => 16,
            MmaShape::M16N8K32 => 32,
        };
        let small = &self.grid_state.small;
        let mut a_values = vec![0.0; 16 * inner];
        let mut b_values = vec![0.0; inner * 8];
        let fragment: Vec<_> = a.iter().map(|r| *warp.word_of(*r)).collect();
        spread_a(&fragment, element, small, &mut a_values);
        let packed = 4 / element.bytes() as usize;
        for (index, register) in b.iter().enumerate() {
            for (lane, word) in warp.word_of(*register).iter().enumerate() {
                let k = packed * (lane % 4) + 4 * packed * index;
                for (i, value) in decode_word(*word, element, small)[..packed].iter().enumerate() {
                    b_values[(k + i) * 8 + lane / 4] = *value;
                }
            }
        }
        let sums = multiply(&a_values, &b_values, inner, 8);
        let half = accumulator == Element::F16;
        for (index, (d, c)) in d.iter().zip(c).enumerate() {
            let old = *warp.word_of(*c);
            let result: [u32; 32] = std::array::from_fn(|lane| {
                let column = 2 * (lane % 4);
                if half {
                    let row = lane / 4 + 8 * index;
                    let sum = |i: usize| {
                        let old = float::from_f16((old[lane] >> (16 * i)) as u16);
                        float::f16_bits(old + sums[row * 8 + column + i]) as u32
                    };
                    sum(0) | sum(1) << 16
                } else {
                    let row = lane / 4 + 8 * (index / 2);
                    let sum = sums[row * 8 + column + index % 2];
                    float::bits(f32::from_bits(old[lane]) + sum)
                }
            });
            warp.set_word(*d, &result);
        }
        self.grid_state.counts.add(Measure::TensorOperations, 2 * 16 * 8 * inner as u64);
        warp.time += inner as u64;
    }
}

/// Spreads a warp's `A` fragment into 16 rows: registers alternate between row `lane / 4` and the
/// row 8 below, then go on to the next columns.
fn spread_a(fragment: &[[u32; 32]], element: Element, small: &[[f32; 256]; 2], rows: &mut [f32]) {
    let packed = 4 / element.bytes() as usize;
    let inner = packed * 4 * (fragment.len() / 2);
    for (index, words) in fragment.iter().enumerate() {
        for (lane, word) in words.iter().enumerate() {
            let row = lane / 4 + 8 * (index % 2);
            let column = packed * (lane % 4) + 4 * packed * (index / 2);
            let values = decode_word(*word, element, small);
            rows[row * inner + column..][..packed].copy_from_slice(&values[..packed]);
        }
    }
}
