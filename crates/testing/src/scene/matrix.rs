//! Scenes of the matrix kernels: one `wgmma` and pipelined products.

use kernels::product::{self, Contiguous};
use kernels::{Product, Single};
use ptx::{Element, TileLayout};

use super::{Expected, KernelLaunch, Scene, SceneError, admit, encode, numbers};
use sim::{Argument, BufferId, Memory, TensorMapArgument};

impl Scene {
    /// The rows and the inner (K) extent of a small product: neither is a whole number of tiles,
    /// and there are more steps than any configuration has stages.
    pub const PRODUCT: (u32, u32) = (100, 328);

    /// Creates a scene of one `wgmma`.
    pub fn single(configuration: Single) -> Result<Self, SceneError> {
        let element = configuration.element;
        let [a, b] = [1, 2].map(|seed| Matrix::random(element, (64, 16), seed));
        let mut memory = Memory::new();
        let inputs = [("a", &a), ("b", &b)].map(|(name, it)| memory.input(name, it.bytes()));
        let output = memory.output("d", 4 * 64 * 64);
        let expected = Expected::product(output, (64, 64, 16), |row, column, inner| {
            (a.at(row, inner), b.at(column, inner))
        });
        let buffers = [inputs[0], inputs[1], output];
        let step = KernelLaunch {
            program: configuration.program()?,
            grid: 1,
            arguments: buffers.map(|buffer| Argument::Address(buffer, 0)).to_vec(),
        };
        Ok(Scene::single_launch(step, memory, vec![expected], "64 x 64 x 16".to_owned()))
    }

    /// Creates a scene of a matrix product with `rows` rows and an inner extent of `inner`.
    pub fn product(configuration: Product, rows: u32, inner: u32) -> Result<Self, SceneError> {
        let Product { element, columns, cluster, .. } = configuration;
        if rows == 0 || inner == 0 {
            return Err(SceneError::Size(format!("a product of {rows} rows by {inner} is empty")));
        }
        let [m, n, k] = [rows, columns, inner].map(|extent| extent as usize);
        admit([m.checked_mul(k), n.checked_mul(k), m.checked_mul(n)])?;
        let shape = |contiguous, outer| match contiguous {
            Contiguous::Inner => (outer, inner),
            Contiguous::Outer => (inner, outer),
        };
        let a = Matrix::random(element, shape(configuration.a, rows), 1);
        let b = Matrix::random(element, shape(configuration.b, columns), 2);
        let mut memory = Memory::new();
        let a_map = a.map(&mut memory, "a", configuration.a_layout());
        let b_map = b.map(&mut memory, "b", configuration.b_part_layout());
        let output = memory.output("d", 4 * rows as usize * columns as usize);
        let at = |matrix: &Matrix, contiguous, outer, inner| match contiguous {
            Contiguous::Inner => matrix.at(outer, inner),
            Contiguous::Outer => matrix.at(inner, outer),
        };
        let extents = (rows as usize, columns as usize, inner as usize);
        let expected = Expected::product(output, extents, |row, column, inner| {
            (at(&a, configuration.a, row, inner), at(&b, configuration.b, column, inner))
        });
        let step = KernelLaunch {
            program: configuration.program()?,
            grid: rows.div_ceil(product::ROWS).next_multiple_of(cluster),
            arguments: vec![
                Argument::TensorMap(a_map),
                Argument::TensorMap(b_map),
                Argument::Address(output, 0),
                Argument::U32(rows),
                Argument::U32(inner),
            ],
        };
        let size = format!("{rows} x {columns} x {inner}");
        Ok(Scene::single_launch(step, memory, vec![expected], size))
    }
}

impl Expected {
    /// Creates the expected result of a product of `rows` by `columns`. The tensor cores round toward
    /// zero each time they add 16 products, so the tolerance is, relative to the sum of magnitudes,
    /// one unit in the last place for each such addition and three more.
    fn product(
        buffer: BufferId,
        (rows, columns, inner): (usize, usize, usize),
        factors: impl Fn(usize, usize, usize) -> (f64, f64),
    ) -> Self {
        let units = inner.div_ceil(16) as f64 + 3.0;
        let (mut exact, mut magnitude) = (Vec::new(), Vec::new());
        for row in 0..rows {
            for column in 0..columns {
                let (mut sum, mut size) = (0.0, 0.0);
                for index in 0..inner {
                    let (a, b) = factors(row, column, index);
                    sum += a * b;
                    size += (a * b).abs();
                }
                exact.push(sum);
                magnitude.push(size);
            }
        }
        let tolerance = magnitude.iter().map(|size| size * units * f32::EPSILON as f64).collect();
        Expected { name: "d", buffer, element: Element::F32, exact, magnitude, tolerance }
    }
}

/// A matrix in memory, with contiguous rows.
struct Matrix {
    element: Element,
    rows: u32,
    columns: u32,
    values: Vec<f64>,
}

impl Matrix {
    fn random(element: Element, (rows, columns): (u32, u32), seed: u64) -> Self {
        let count = rows as usize * columns as usize;
        let values = numbers(seed, element, count, 1.0);
        Matrix { element, rows, columns, values }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns as usize + column]
    }

    fn bytes(&self) -> Vec<u8> {
        encode(self.element, &self.values)
    }

    /// Puts the matrix into memory and returns a tensor map over it. Rows are padded with NaN to
    /// the multiple of 16 bytes that TMA requires.
    fn map(&self, memory: &mut Memory, name: &str, layout: TileLayout) -> TensorMapArgument {
        let pitch = (self.columns * self.element.bytes()).next_multiple_of(16) as usize;
        let mut bytes = Vec::new();
        for row in self.values.chunks(self.columns as usize) {
            let end = bytes.len() + pitch;
            bytes.extend(encode(self.element, row));
            bytes.resize(end, 0xFF);
        }
        TensorMapArgument {
            buffer: memory.input(name, bytes),
            offset: 0,
            dimensions: vec![self.columns as u64, self.rows as u64],
            strides: vec![pitch as u64],
            tensor_box: layout.tensor_box(2),
        }
    }
}
