//! Scenes of the attention kernels.

use std::ops::Range;

use kernels::forward::{Divisor, TileLists};
use kernels::{Combine, Forward, Mma, Scalar};
use ptx::{Element, Program, TileLayout};

use super::{Expected, Random, Scene, SceneError, encode, round};
use crate::{Argument, BufferId, Memory, TensorMapArgument};

/// The extents of an attention problem; the kernel's configuration has the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSize {
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys of a sequence.
    pub keys: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub key_heads: usize,
}

impl AttentionSize {
    /// Small, for the kernel with ordinary arithmetic: a block and a bit.
    pub const SCALAR: AttentionSize =
        AttentionSize { batch: 1, queries: 11, keys: 21, heads: 2, key_heads: 1 };

    /// Small, for a forward kernel: a tile that is not full, three blocks of
    /// keys of which the last is hardly begun.
    pub fn small(forward: &Forward) -> Self {
        let queries = forward.query_rows() as usize - 3;
        let keys = 2 * forward.key_block as usize + 5;
        AttentionSize { batch: 1, queries, keys, heads: 1, key_heads: 1 }
    }

    /// The same for a kernel with `mma.sync`.
    pub fn small_mma(mma: &Mma) -> Self {
        let queries = mma.query_rows() as usize - 3;
        let keys = 2 * mma.key_block as usize + 5;
        AttentionSize { batch: 1, queries, keys, heads: 1, key_heads: 1 }
    }

    fn group(&self) -> usize {
        self.heads / self.key_heads
    }
}

/// How many key blocks a split has: few, so that small problems have several.
const KEY_BLOCKS_OF_A_SPLIT: u32 = 2;

/// How many multiprocessors tiles are shared out over: fewer than most
/// problems have tiles, so that blocks go from one tile to the next.
const PROCESSORS: u32 = 2;

impl Scene {
    /// Attention with ordinary arithmetic.
    pub fn scalar(configuration: Scalar, size: &AttentionSize) -> Result<Self, SceneError> {
        let program = configuration.program()?;
        let stage = Stage::new(
            configuration.element,
            (configuration.head_dim, configuration.value_head_dim),
            configuration.causal,
            None,
            size,
        )?;
        let AttentionSize { batch, queries, heads, .. } = *size;
        let blocks = Scalar::blocks(queries as u32, heads as u32, batch as u32);
        let grid = u32::try_from(blocks).map_err(|_| too_large())?;
        let arguments = stage.arguments(&program, |name| stage.scalar_argument(name))?;
        Ok(stage.scene(program, grid, arguments))
    }

    /// Attention with `mma.sync`.
    pub fn mma(configuration: Mma, size: &AttentionSize) -> Result<Self, SceneError> {
        let program = configuration.program()?;
        let mut stage = Stage::new(
            configuration.element,
            (configuration.head_dim, configuration.value_head_dim),
            configuration.causal,
            configuration
                .split
                .then_some((KEY_BLOCKS_OF_A_SPLIT * configuration.key_block) as usize),
            size,
        )?;
        if configuration.accumulate == Element::F16 {
            stage.allow_half_sums();
        }
        let AttentionSize { batch, queries, heads, .. } = *size;
        let row_tiles = (queries as u32).div_ceil(configuration.query_rows());
        let grid = row_tiles as u64 * heads as u64 * batch as u64 * stage.splits as u64;
        let grid = u32::try_from(grid).map_err(|_| too_large())?;
        let arguments = stage.arguments(&program, |name| match name {
            "BlocksPerSplit" => Some(Argument::U32(KEY_BLOCKS_OF_A_SPLIT)),
            _ => {
                let by_divisor = stage.divisor_argument(row_tiles, name);
                by_divisor.or_else(|| stage.scalar_argument(name))
            }
        })?;
        Ok(stage.scene(program, grid, arguments))
    }

    /// Partial attention put together: `parts` of them, of which some rows saw
    /// nothing. Only batch, queries and heads of the size matter.
    pub fn combine(
        configuration: Combine,
        size: &AttentionSize,
        parts: usize,
    ) -> Result<Self, SceneError> {
        let program = configuration.program()?;
        let AttentionSize { batch, queries, heads, .. } = *size;
        let dim = configuration.value_head_dim as usize;
        let rows = batch * heads * queries;
        if rows == 0 || parts == 0 {
            return Err(SceneError::Size("the problem is empty".to_owned()));
        }
        let all = rows.checked_mul(parts).and_then(|rows| rows.checked_mul(dim));
        if all.is_none_or(|elements| elements > 1 << 28) {
            return Err(too_large());
        }
        let mut random = Random::new(7);
        let o = random.numbers(configuration.partial, parts * rows * dim, 2.0);
        // Every third part of a row saw nothing, and every fourth row nothing at all.
        let mut lse = random.numbers(Element::F32, parts * rows, 20.0);
        for (index, log_sum) in lse.iter_mut().enumerate() {
            if (index / rows + index).is_multiple_of(3) || (index % rows).is_multiple_of(4) {
                *log_sum = f64::NEG_INFINITY;
            }
        }
        let mut memory = Memory::new();
        let partial_outputs = memory.input("partial outputs", encode(configuration.partial, &o));
        let partial_lse = memory.input("partial lse", encode(Element::F32, &lse));
        let output = memory.output("output", configuration.element.bytes() as usize * rows * dim);
        let lse_out = memory.output("lse", 4 * rows);
        let results = combined(configuration.element, &o, &lse, (rows, dim), output, lse_out);
        let argument = |name: &str| {
            let number = |number: usize| Some(Argument::U32(number as u32));
            let wide = |number: usize| Some(Argument::U64(number as u64));
            match name {
                "PartialOutput" => Some(Argument::Address(partial_outputs, 0)),
                "PartialOutput part stride" => wide(rows * dim),
                "PartialOutput batch stride" | "Output batch stride" => wide(heads * queries * dim),
                "PartialOutput head stride" | "Output head stride" => wide(queries * dim),
                "PartialOutput row stride" | "Output row stride" => wide(dim),
                "PartialLse" => Some(Argument::Address(partial_lse, 0)),
                "PartialLse part stride" => wide(rows),
                "PartialLse batch stride" | "Lse batch stride" => wide(heads * queries),
                "PartialLse head stride" | "Lse head stride" => wide(queries),
                "PartialLse row stride" | "Lse row stride" => wide(1),
                "Output" => Some(Argument::Address(output, 0)),
                "Lse" => Some(Argument::Address(lse_out, 0)),
                "QueryLength" => number(queries),
                "QueryHeads" => number(heads),
                "AllRows" => number(rows),
                "Parts" => number(parts),
                _ => None,
            }
        };
        let arguments = (program.parameters.iter())
            .map(|parameter| {
                let name = &parameter.name;
                let unknown = || SceneError::Size(format!("nothing is known for `{name}`"));
                argument(name).ok_or_else(unknown)
            })
            .collect::<Result<_, _>>()?;
        let grid = u32::try_from(configuration.blocks(rows as u64)).map_err(|_| too_large())?;
        let size = format!("batch {batch}, {queries} queries, {heads} heads, {parts} parts");
        Ok(Scene { program, grid, arguments, memory, results, size })
    }

    /// Attention on Hopper.
    pub fn forward(configuration: Forward, size: &AttentionSize) -> Result<Self, SceneError> {
        if size.keys == 0 {
            return Err(SceneError::Size("the forward kernel needs at least one key".to_owned()));
        }
        let program = configuration.program()?;
        let mut stage = Stage::new(
            configuration.element,
            (configuration.head_dim, configuration.value_head_dim),
            configuration.causal,
            None,
            size,
        )?;
        let AttentionSize { batch, queries, keys, heads, key_heads } = *size;
        let lists = TileLists::new(
            &configuration,
            [queries, keys].map(|length| length as u32),
            [heads, key_heads, batch].map(|count| count as u32),
            PROCESSORS,
            1 << 20,
        );
        let list_buffer = stage.memory.input_u32("tile lists", &lists.words);
        let arguments = stage.arguments(&program, |name| match name {
            "TileLists" => Some(Argument::Address(list_buffer, 0)),
            _ => stage.forward_argument(&configuration, name),
        })?;
        Ok(stage.scene(program, lists.blocks, arguments))
    }
}

fn too_large() -> SceneError {
    SceneError::Size("the problem is too large to simulate".to_owned())
}

/// The tensors of a problem, (batch, position, head, dimension), contiguous.
struct Stage {
    size: AttentionSize,
    element: Element,
    dim: usize,
    value_dim: usize,
    scale: f32,
    memory: Memory,
    queries: BufferId,
    keys: BufferId,
    values: BufferId,
    output: BufferId,
    lse: BufferId,
    /// Over how many blocks of threads keys are split.
    splits: usize,
    results: Vec<Expected>,
}

impl Stage {
    /// With `split`, results are partial: of so many keys each, in `f32`.
    fn new(
        element: Element,
        (dim, value_dim): (u32, u32),
        causal: bool,
        split: Option<usize>,
        size: &AttentionSize,
    ) -> Result<Self, SceneError> {
        let AttentionSize { batch, queries, keys, heads, key_heads } = *size;
        if batch == 0 || queries == 0 || heads == 0 || key_heads == 0 {
            return Err(SceneError::Size("the problem is empty".to_owned()));
        }
        if !heads.is_multiple_of(key_heads) {
            let text = format!("{heads} query heads cannot be divided among {key_heads} key heads");
            return Err(SceneError::Size(text));
        }
        // All numbers and every address fit 32 bits in what one would wait for.
        let largest = [batch, queries.max(keys).max(1), heads, dim.max(value_dim) as usize];
        let elements = largest.into_iter().try_fold(1usize, |product, n| product.checked_mul(n));
        if elements.is_none_or(|elements| elements > 1 << 28) {
            return Err(too_large());
        }
        let (dim, value_dim) = (dim as usize, value_dim as usize);
        let mut random = Random::new(5);
        let mut memory = Memory::new();
        let mut tensor = |name: &str, positions: usize, heads: usize, dim: usize| {
            // Up to 2: scores far enough apart that the maximum moves.
            let values = random.numbers(element, batch * positions * heads * dim, 2.0);
            (memory.input(name, encode(element, &values)), values)
        };
        let (query_buffer, q) = tensor("queries", queries, heads, dim);
        let (key_buffer, k) = tensor("keys", keys, key_heads, dim);
        let (value_buffer, v) = tensor("values", keys, key_heads, value_dim);
        let parts: Vec<Range<usize>> = match split {
            None => std::iter::once(0..keys).collect(),
            Some(length) => {
                (0..keys.max(1)).step_by(length).map(|k| k..(k + length).min(keys)).collect()
            }
        };
        let rows = parts.len() * batch * heads * queries;
        let result = if split.is_some() { Element::F32 } else { element };
        let output = memory.output("output", result.bytes() as usize * rows * value_dim);
        let lse = memory.output("lse", 4 * rows);
        let scale = 1.0 / (dim as f32).sqrt();
        let inputs = Inputs { q, k, v, size: *size, dim, value_dim, causal, scale: scale as f64 };
        let results = match split {
            None => expected(&inputs, element, output, lse),
            Some(_) => expected_parts(&inputs, element, &parts, output, lse),
        };
        Ok(Stage {
            size: *size,
            element,
            dim,
            value_dim,
            scale,
            memory,
            queries: query_buffer,
            keys: key_buffer,
            values: value_buffer,
            output,
            lse,
            splits: parts.len(),
            results,
        })
    }

    /// Scores are added up in `f16`: rounded once for every 16 dimensions, and
    /// in size near the log-sum-exps, whose error they become.
    fn allow_half_sums(&mut self) {
        let roundings = self.dim.div_ceil(16) as f64;
        for result in self.results.iter_mut().filter(|result| result.name == "lse") {
            let finite = result.exact.iter().filter(|value| value.is_finite());
            let largest = finite.fold(1f64, |top, value| top.max(value.abs()));
            result.tolerance.fill(roundings * 2f64.powi(-11) * largest);
        }
    }

    /// An argument for each parameter, by its name: their order is the
    /// kernel's own business.
    fn arguments(
        &self,
        program: &Program,
        named: impl Fn(&str) -> Option<Argument>,
    ) -> Result<Vec<Argument>, SceneError> {
        let argument = |name: &str| {
            let number = |number: usize| Some(Argument::U32(number as u32));
            let found = named(name).or_else(|| match name {
                "Lse" | "PartialLse" => Some(Argument::Address(self.lse, 0)),
                "QueryLength" => number(self.size.queries),
                "KeyLength" => number(self.size.keys),
                "ScaleLog2" => Some(Argument::F32(self.scale * std::f32::consts::LOG2_E)),
                _ => None,
            });
            found.ok_or_else(|| SceneError::Size(format!("nothing is known for `{name}`")))
        };
        program.parameters.iter().map(|parameter| argument(&parameter.name)).collect()
    }

    fn scalar_argument(&self, name: &str) -> Option<Argument> {
        let AttentionSize { batch, queries, keys, heads, key_heads } = self.size;
        let address = |buffer| Some(Argument::Address(buffer, 0));
        match name {
            "Query" => return address(self.queries),
            "Key" => return address(self.keys),
            "Value" => return address(self.values),
            "Output" | "PartialOutput" => return address(self.output),
            "QueryHeads" => return Some(Argument::U32(heads as u32)),
            "GroupSize" => return Some(Argument::U32(self.size.group() as u32)),
            "Batch" => return Some(Argument::U32(batch as u32)),
            _ => {}
        }
        let (tensor, stride) = name.split_once(' ')?;
        let (positions, heads, dim) = match tensor {
            "Query" => (queries, heads, self.dim),
            "Key" => (keys, key_heads, self.dim),
            "Value" => (keys, key_heads, self.value_dim),
            "Output" => (queries, heads, self.value_dim),
            _ => return None,
        };
        let elements = match stride {
            "batch stride" => positions * heads * dim,
            "row stride" => heads * dim,
            "head stride" => dim,
            _ => return None,
        };
        Some(Argument::U64(elements as u64))
    }

    fn forward_argument(&self, forward: &Forward, name: &str) -> Option<Argument> {
        let AttentionSize { batch, queries, keys, heads, key_heads } = self.size;
        let (dim, value_dim) = (self.dim, self.value_dim);
        let map = |buffer, positions: usize, heads: usize, dim: usize, layout: TileLayout| {
            let strides = [heads * dim, dim, positions * heads * dim];
            Some(Argument::TensorMap(TensorMapArgument {
                buffer,
                offset: 0,
                dimensions: [dim, positions, heads, batch].map(|n| n as u64).to_vec(),
                strides: strides.map(|n| (n as u32 * self.element.bytes()) as u64).to_vec(),
                tensor_box: layout.tensor_box(4),
            }))
        };
        let row_tiles = (queries as u32).div_ceil(forward.query_rows());
        match name {
            "Query" => map(self.queries, queries, heads, dim, forward.query_layout()),
            "Key" => map(self.keys, keys, key_heads, dim, forward.key_layout()),
            "Value" => map(self.values, keys, key_heads, value_dim, forward.value_layout()),
            "Output" => map(self.output, queries, heads, value_dim, forward.output_layout()),
            "Tiles" => Some(Argument::U32(row_tiles * (heads * batch) as u32)),
            _ => self.divisor_argument(row_tiles, name),
        }
    }

    /// The numbers that kernels divide by, each in three parts.
    fn divisor_argument(&self, row_tiles: u32, name: &str) -> Option<Argument> {
        let (what, part) = name.split_once(", ").unwrap_or((name, "number"));
        let number = match what {
            "TilesPerHead" => row_tiles,
            // Groups of tiles that come longest first: the heads of a sequence.
            "TilesPerGroup" => row_tiles * self.size.heads as u32,
            "HeadsPerGroup" => self.size.heads as u32,
            "QueryHeads" => self.size.heads as u32,
            "GroupSize" => self.size.group() as u32,
            "Splits" => self.splits as u32,
            _ => return None,
        };
        let Divisor { number, multiplier, shift } = Divisor::new(number);
        match part {
            "number" => Some(Argument::U32(number)),
            "multiplier" => Some(Argument::U32(multiplier)),
            "shift" => Some(Argument::U32(shift)),
            _ => None,
        }
    }

    fn scene(self, program: Program, grid: u32, arguments: Vec<Argument>) -> Scene {
        let AttentionSize { batch, queries, keys, heads, key_heads } = self.size;
        let size = format!(
            "batch {batch}, {queries} queries, {keys} keys, {heads} query and {key_heads} key heads"
        );
        Scene { program, grid, arguments, memory: self.memory, results: self.results, size }
    }
}

/// The tensors as numbers.
struct Inputs {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    size: AttentionSize,
    dim: usize,
    value_dim: usize,
    causal: bool,
    scale: f64,
}

/// What attention gives.
struct Answer {
    output: Vec<f64>,
    /// Of each output, the weighted sum of the values' magnitudes.
    magnitude: Vec<f64>,
    lse: Vec<f64>,
}

impl Inputs {
    /// Attention with scores, weights and outputs stored as `store` has it:
    /// exact if it changes nothing, the plain algorithm in low precision if it
    /// rounds. Log-sum-exps are of the scores as they are. Only keys `within`
    /// are seen.
    fn attend(&self, within: Range<usize>, store: impl Fn(f64) -> f64) -> Answer {
        let AttentionSize { batch, queries, keys, heads, key_heads } = self.size;
        let (dim, value_dim) = (self.dim, self.value_dim);
        let mut output = vec![0.0; batch * queries * heads * value_dim];
        let mut magnitude = output.clone();
        let mut lse = vec![f64::NEG_INFINITY; batch * heads * queries];
        for b in 0..batch {
            for h in 0..heads {
                for i in 0..queries {
                    let visible = match self.causal {
                        true => (i + 1 + keys).saturating_sub(queries).min(keys),
                        false => keys,
                    };
                    let seen = within.start..visible.min(within.end);
                    if seen.is_empty() {
                        continue;
                    }
                    let at = (b * queries + i) * heads + h;
                    let row = |j: usize| (b * keys + j) * key_heads + h / self.size.group();
                    let q = &self.q[at * dim..][..dim];
                    let scores: Vec<f64> = (seen.clone())
                        .map(|j| {
                            let k = &self.k[row(j) * dim..][..dim];
                            self.scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
                        })
                        .collect();
                    let (_, top, sum) = softmax(scores.iter().copied());
                    lse[(b * heads + h) * queries + i] = top + sum.ln();
                    let (weights, _, sum) = softmax(scores.into_iter().map(&store));
                    let output = &mut output[at * value_dim..][..value_dim];
                    let magnitude = &mut magnitude[at * value_dim..][..value_dim];
                    for (j, weight) in seen.zip(weights) {
                        let weight = store(weight / sum);
                        let v = &self.v[row(j) * value_dim..][..value_dim];
                        for d in 0..value_dim {
                            output[d] += weight * v[d];
                            magnitude[d] += weight * v[d].abs();
                        }
                    }
                    output.iter_mut().for_each(|value| *value = store(*value));
                }
            }
        }
        Answer { output, magnitude, lse }
    }

    /// (batch, query, head, dimension) as (batch, head, query, dimension).
    fn heads_first(&self, values: &[f64]) -> Vec<f64> {
        let AttentionSize { batch, queries, heads, .. } = self.size;
        let dim = self.value_dim;
        let mut all = Vec::with_capacity(values.len());
        for b in 0..batch {
            for h in 0..heads {
                for i in 0..queries {
                    let at = (b * queries + i) * heads + h;
                    all.extend_from_slice(&values[at * dim..][..dim]);
                }
            }
        }
        all
    }
}

/// The exponentials relative to the largest, the largest, and their sum.
fn softmax(scores: impl Iterator<Item = f64> + Clone) -> (Vec<f64>, f64, f64) {
    let top = scores.clone().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.map(|score| (score - top).exp()).collect();
    let sum = weights.iter().sum();
    (weights, top, sum)
}

/// The library's rule: twice the error of the plain algorithm in the same
/// precision, and the rounding of the answer itself.
fn expected(inputs: &Inputs, element: Element, output: BufferId, lse: BufferId) -> Vec<Expected> {
    let keys = 0..inputs.size.keys;
    let exact = inputs.attend(keys.clone(), |value| value);
    let baseline = inputs.attend(keys, |value| round(element, value));
    results(exact, baseline, (element, element), output, lse)
}

/// The same of each part of the keys, one after the other, each head's rows together.
fn expected_parts(
    inputs: &Inputs,
    element: Element,
    parts: &[Range<usize>],
    output: BufferId,
    lse: BufferId,
) -> Vec<Expected> {
    let of_parts = |store: &dyn Fn(f64) -> f64| {
        let mut all = Answer { output: Vec::new(), magnitude: Vec::new(), lse: Vec::new() };
        for part in parts {
            let answer = inputs.attend(part.clone(), store);
            all.output.extend(inputs.heads_first(&answer.output));
            all.magnitude.extend(inputs.heads_first(&answer.magnitude));
            all.lse.extend(answer.lse);
        }
        all
    };
    let (exact, baseline) = (of_parts(&|value| value), of_parts(&|value| round(element, value)));
    results(exact, baseline, (element, Element::F32), output, lse)
}

/// What comes out in one element after a computation in another.
fn results(
    exact: Answer,
    baseline: Answer,
    (element, stored): (Element, Element),
    output: BufferId,
    lse: BufferId,
) -> Vec<Expected> {
    let finite = |values: &[f64]| {
        values.iter().filter(|v| v.is_finite()).fold(0f64, |top, v| top.max(v.abs()))
    };
    let largest_lse = finite(&exact.lse).max(1.0);
    let differences = exact.output.iter().zip(&baseline.output).map(|(a, b)| (a - b).abs());
    let baseline_error = differences.fold(0f64, f64::max);
    let units = match element {
        Element::F16 => 2f64.powi(-10),
        Element::BF16 => 2f64.powi(-7),
        // Weights are off by what the scores, close to the log-sum-exp, are off.
        _ => 4.0 * largest_lse * f32::EPSILON as f64,
    };
    let output_tolerance = 2.0 * baseline_error + units * finite(&exact.output);
    // Room for the approximate logarithm and exponential, good to 22 bits.
    let lse_tolerance = largest_lse / (1 << 18) as f64;
    let results = [
        ("output", output, stored, exact.output, exact.magnitude, output_tolerance),
        ("lse", lse, Element::F32, exact.lse.clone(), exact.lse, lse_tolerance),
    ];
    let expected = results.map(|(name, buffer, element, exact, magnitude, tolerance)| {
        let magnitude = magnitude.into_iter().map(f64::abs).collect();
        let tolerance = vec![tolerance; exact.len()];
        Expected { name, buffer, element, exact, magnitude, tolerance }
    });
    expected.into()
}

/// Parts put together, exactly. An element of the output may be off by its own
/// rounding and by that of the weights.
fn combined(
    element: Element,
    partial: &[f64],
    partial_lse: &[f64],
    (rows, dim): (usize, usize),
    output: BufferId,
    lse: BufferId,
) -> Vec<Expected> {
    let mut exact = vec![0.0; rows * dim];
    let mut magnitude = exact.clone();
    let mut exact_lse = vec![f64::NEG_INFINITY; rows];
    for row in 0..rows {
        let parts = || (row..partial_lse.len()).step_by(rows);
        let log_sums: Vec<f64> = parts().map(|part| partial_lse[part]).collect();
        if log_sums.iter().all(|log_sum| *log_sum == f64::NEG_INFINITY) {
            continue;
        }
        let (weights, top, sum) = softmax(log_sums.iter().copied());
        exact_lse[row] = top + sum.ln();
        for (part, weight) in parts().zip(weights) {
            for d in 0..dim {
                let value = weight / sum * partial[part * dim + d];
                exact[row * dim + d] += value;
                magnitude[row * dim + d] += value.abs();
            }
        }
    }
    let unit = match element {
        Element::F16 => 2f64.powi(-11),
        Element::BF16 => 2f64.powi(-8),
        _ => 0.0,
    };
    // Log-sum-exps of up to 20 are known to 24 bits, weights so to 18.
    let weights = 2f64.powi(-18);
    let tolerance = exact.iter().zip(&magnitude).map(|(x, m)| unit * x.abs() + weights * m);
    let tolerance = tolerance.collect();
    let lse_magnitude: Vec<f64> = exact_lse.iter().map(|value| value.abs()).collect();
    let lse_tolerance = vec![20.0 * weights; rows];
    vec![
        Expected { name: "output", buffer: output, element, exact, magnitude, tolerance },
        Expected {
            name: "lse",
            buffer: lse,
            element: Element::F32,
            exact: exact_lse,
            magnitude: lse_magnitude,
            tolerance: lse_tolerance,
        },
    ]
}
