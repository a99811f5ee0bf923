//! Checks of the matrix kernels, the steps between scalar attention and the fast kernels, each
//! against a product in `f64`.

use cuda::{Arguments, TensorMap};
use kernels::product::{Contiguous, Product};
use kernels::single::Single;
use kernels::{Configuration, shipped};
use ptx::{Element, TensorBox};
use rayon::prelude::*;
use serde::Serialize;

use flashcore::Progress;
use flashcore::gpu::{Gpu, GpuError, GuardedBuffer};
use flashcore::random::uniform;

/// The outcome of one configuration of a matrix kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MatrixOutcome {
    /// The family of the kernel.
    pub family: &'static str,
    /// The name of the configuration.
    pub name: String,
    /// Whether every element is within its tolerance, every element was written, and nothing else
    /// was.
    pub passed: bool,
    /// The largest error of an element.
    pub max_error: f64,
    /// The mean error of the elements.
    pub mean_error: f64,
    /// The largest fraction of an element's tolerance that was used up.
    pub tolerance_used: f64,
    /// A description of any other mistake.
    pub complaint: Option<String>,
}

/// Runs matrix kernels, one after the other, and judges each.
pub fn run(
    gpu: &Gpu,
    configurations: &[Configuration],
    progress: &dyn Progress,
) -> Result<Vec<MatrixOutcome>, GpuError> {
    // Compiling takes the cores of the host.
    configurations
        .par_iter()
        .try_for_each(|configuration| gpu.compiled(configuration).map(|_| ()))?;
    let mut outcomes = Vec::new();
    for configuration in configurations {
        outcomes.push(match *configuration {
            Configuration::Single(single) => check_single(gpu, single)?,
            Configuration::Product(product) => check_product(gpu, product)?,
            _ => continue,
        });
        progress.advance(1);
    }
    Ok(outcomes)
}

/// Returns the matrix kernels that the GPU can run.
pub fn configurations(gpu: &Gpu) -> Vec<Configuration> {
    let all = shipped(gpu.target()).into_iter();
    let is_matrix =
        |it: &Configuration| matches!(it, Configuration::Single(_) | Configuration::Product(_));
    all.filter(is_matrix).collect()
}

fn check_single(gpu: &Gpu, configuration: Single) -> Result<MatrixOutcome, GpuError> {
    let a = Operand::random(configuration.element, 64, 16, 1);
    let b = Operand::random(configuration.element, 64, 16, 2);
    let kernel = gpu.compiled(&Configuration::Single(configuration))?;
    let (device_a, device_b) = (gpu.upload(&a.bytes)?, gpu.upload(&b.bytes)?);
    let d = GuardedMatrix::new(gpu, 64 * 64)?;
    let mut arguments = Arguments::new();
    arguments.push(device_a.address()).push(device_b.address()).push(d.address());
    kernel.launch(gpu.stream(), 1, &arguments)?;
    let (values, intact) = d.read(gpu)?;
    let expected =
        |row: usize, column: usize| dot((0..16).map(|i| (a.at(row, i), b.at(column, i))));
    Ok(judge("single", configuration.name(), &values, intact, (64, 16), expected))
}

fn check_product(gpu: &Gpu, configuration: Product) -> Result<MatrixOutcome, GpuError> {
    // Neither extent is a whole number of tiles; elements beyond the ends are read as zeros.
    let (rows, inner) = (200u32, 328u32);
    let columns = configuration.columns;
    let element = configuration.element;
    let shape = |contiguous, outer| match contiguous {
        Contiguous::Inner => (outer, inner),
        Contiguous::Outer => (inner, outer),
    };
    let (a_rows, a_columns) = shape(configuration.a, rows);
    let (b_rows, b_columns) = shape(configuration.b, columns);
    let a = Operand::random(element, a_rows, a_columns, 1);
    let b = Operand::random(element, b_rows, b_columns, 2);
    let kernel = gpu.compiled(&Configuration::Product(configuration))?;
    let (device_a, device_b) = (gpu.upload(&a.bytes)?, gpu.upload(&b.bytes)?);
    let d = GuardedMatrix::new(gpu, (rows * columns) as usize)?;
    let mut arguments = Arguments::new();
    arguments
        .push(a.map(&configuration.a_layout().tensor_box(2), &device_a)?)
        .push(b.map(&configuration.b_part_layout().tensor_box(2), &device_b)?)
        .push(d.address())
        .push(rows)
        .push(inner);
    let blocks = rows.div_ceil(kernels::product::ROWS).next_multiple_of(configuration.cluster);
    kernel.launch(gpu.stream(), blocks, &arguments)?;
    let (values, intact) = d.read(gpu)?;
    let expected = |row: usize, column: usize| {
        dot((0..inner as usize).map(|i| {
            let a = match configuration.a {
                Contiguous::Inner => a.at(row, i),
                Contiguous::Outer => a.at(i, row),
            };
            let b = match configuration.b {
                Contiguous::Inner => b.at(column, i),
                Contiguous::Outer => b.at(i, column),
            };
            (a, b)
        }))
    };
    let extent = (columns as usize, inner as usize);
    Ok(judge("product", configuration.name(), &values, intact, extent, expected))
}

/// A matrix of uniform numbers between -1 and 1, rounded to its element.
struct Operand {
    element: Element,
    rows: u32,
    columns: u32,
    values: Vec<f64>,
    bytes: Vec<u8>,
}

impl Operand {
    fn random(element: Element, rows: u32, columns: u32, seed: u64) -> Self {
        let mut values = Vec::new();
        let mut bytes = Vec::new();
        for index in 0..rows as u64 * columns as u64 {
            let number = uniform(seed, index);
            let (bits, value) = match element {
                Element::BF16 => {
                    let rounded = half::bf16::from_f32(number);
                    (rounded.to_bits(), rounded.to_f64())
                }
                _ => {
                    let rounded = half::f16::from_f32(number);
                    (rounded.to_bits(), rounded.to_f64())
                }
            };
            values.push(value);
            bytes.extend_from_slice(&bits.to_le_bytes());
        }
        Operand { element, rows, columns, values, bytes }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns as usize + column]
    }

    /// Returns a tensor map over the whole matrix.
    fn map(&self, tensor_box: &TensorBox, buffer: &cuda::Buffer) -> Result<TensorMap, GpuError> {
        let dimensions = [self.columns as u64, self.rows as u64];
        let stride = self.columns as u64 * self.element.bytes() as u64;
        Ok(TensorMap::encode(
            buffer.device(),
            tensor_box,
            buffer.address(),
            &dimensions,
            &[stride],
        )?)
    }
}

/// A device buffer for a matrix of `f32`, between guard zones.
struct GuardedMatrix {
    buffer: GuardedBuffer,
    elements: usize,
}

impl GuardedMatrix {
    fn new(gpu: &Gpu, elements: usize) -> Result<Self, GpuError> {
        Ok(GuardedMatrix { buffer: GuardedBuffer::new(gpu, 4 * elements)?, elements })
    }

    fn address(&self) -> cuda::DeviceAddress {
        self.buffer.address()
    }

    /// Returns the values, and whether the guard zones are intact.
    fn read(&self, gpu: &Gpu) -> Result<(Vec<f32>, bool), GpuError> {
        let mut values = vec![0.0; self.elements];
        self.buffer.read(gpu, &mut values)?;
        Ok((values, self.buffer.is_intact(gpu)?))
    }
}

/// Returns the exact dot product of two vectors, and that of their magnitudes.
fn dot(pairs: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    pairs.fold((0.0, 0.0), |(sum, magnitude), (a, b)| (sum + a * b, magnitude + (a * b).abs()))
}

/// Judges a result. Inputs are exact, so the only error is that of summing in `f32`. The tensor
/// cores round toward zero each time they add 16 products, so errors accumulate: the tolerance is,
/// relative to the sum of magnitudes, one unit in the last place for each such addition and three
/// more.
fn judge(
    family: &'static str,
    name: String,
    values: &[f32],
    intact: bool,
    (width, inner): (usize, usize),
    expected: impl Fn(usize, usize) -> (f64, f64),
) -> MatrixOutcome {
    let units = inner.div_ceil(16) as f64 + 3.0;
    let (mut max_error, mut sum, mut used) = (0f64, 0f64, 0f64);
    let mut unwritten = 0usize;
    for (index, value) in values.iter().enumerate() {
        let (exact, magnitude) = expected(index / width, index % width);
        let error = (*value as f64 - exact).abs();
        if error.is_nan() {
            unwritten += 1;
            continue;
        }
        max_error = max_error.max(error);
        sum += error;
        used = used.max(error / (magnitude * units * f32::EPSILON as f64));
    }
    let complaint = if unwritten > 0 {
        Some(format!("{unwritten} of {} elements are NaN or were never written", values.len()))
    } else if !intact {
        Some("memory beside the result was written".to_owned())
    } else {
        None
    };
    let passed = complaint.is_none() && used <= 1.0;
    let mean_error = sum / values.len() as f64;
    MatrixOutcome { family, name, passed, max_error, mean_error, tolerance_used: used, complaint }
}
