//! The other first kernels: scalar attention, one wgmma, the ceiling loop.

use flashcore_sim as sim;
use kernels::{Ceiling, Scalar, Single};
use ptx::{Element, Target};
use sim::{Argument, Launch, Memory, Mode, Options, Policy, TensorMapArgument};

use crate::{Random, every_schedule, succeed};

#[test]
fn one_wgmma() {
    let program = Single { element: Element::F16 }.program().unwrap();
    let mut random = Random::new(3);
    let mut matrix =
        || -> Vec<u16> { (0..64 * 16).map(|_| sim::float::f16_bits(random.next())).collect() };
    let (a, b) = (matrix(), matrix());
    let mut memory = Memory::new();
    let buffers = [memory.input_u16("a", &a), memory.input_u16("b", &b)];
    let output = memory.output("d", 4 * 64 * 64);
    let arguments =
        [buffers[0], buffers[1], output].map(|buffer| Argument::Address(buffer, 0)).to_vec();
    let launch = Launch { program: &program, grid: 1, arguments };
    every_schedule(&launch, &memory, Mode::Checked, 32, |memory| {
        let d = memory.f32(output);
        for row in 0..64 {
            for column in 0..64 {
                let sum: f32 = (0..16)
                    .map(|k| {
                        sim::float::from_f16(a[row * 16 + k])
                            * sim::float::from_f16(b[column * 16 + k])
                    })
                    .sum();
                assert!((d[row * 64 + column] - sum).abs() < 1e-5);
            }
        }
    });
}

/// The smallest product still needs each of its fences and waits.
#[test]
fn one_wgmma_with_a_statement_missing() {
    use ptx::Instruction as I;
    use sim::HazardKind as H;
    let program = Single { element: Element::F16 }.program().unwrap();
    for site in sim::mutate::sites(&program) {
        let expected: &[H] = match &site.instruction {
            I::Fence(_) => &[H::MissingProxyFence],
            I::BarrierSync { .. } => &[H::DataRace, H::OverwrittenInFlight, H::UninitialisedMemory],
            I::WgmmaFence => &[H::MissingWgmmaFence],
            I::WgmmaCommit | I::WgmmaWait { .. } => &[H::AccumulatorInFlight],
            other => panic!("no expectation for {other:?}"),
        };
        let mutant = sim::mutate::without(&program, site.index);
        let mut memory = Memory::new();
        let zeros = vec![0; 64 * 16];
        let [a, b] = ["a", "b"].map(|name| memory.input_u16(name, &zeros));
        let d = memory.output("d", 4 * 64 * 64);
        let arguments = [a, b, d].map(|buffer| Argument::Address(buffer, 0)).to_vec();
        let launch = Launch { program: &mutant, grid: 1, arguments };
        for policy in Policy::HOSTILE {
            for seed in 0..8 {
                let mut memory = memory.clone();
                let result = sim::run(&launch, &mut memory, &Options::checked(policy, seed));
                let failure = result.expect_err("something is missing");
                let kind = failure.hazard().expect("a hazard").kind;
                assert!(expected.contains(&kind), "{:?}: {failure}", site.instruction);
            }
        }
    }
}

#[test]
fn ceiling() {
    let configuration = Ceiling { element: Element::BF16, unroll: 1, warpgroups: 2 };
    let program = configuration.program().unwrap();
    let mut memory = Memory::new();
    let mut map = |name: &str, rows: u32, layout: ptx::TileLayout| TensorMapArgument {
        buffer: memory.input_u16(name, &vec![sim::float::bf16_bits(1.0); 64 * rows as usize]),
        offset: 0,
        dimensions: vec![64, rows as u64],
        strides: vec![128],
        tensor_box: layout.tensor_box(2),
    };
    let a = map("a", configuration.rows(), configuration.a_layout());
    let b = map("b", 256, configuration.b_layout());
    let output = memory.output("d", 4 * 256 * configuration.rows() as usize);
    let arguments = vec![
        Argument::TensorMap(a),
        Argument::TensorMap(b),
        Argument::Address(output, 0),
        Argument::U32(3),
    ];
    let launch = Launch { program: &program, grid: 1, arguments };
    for policy in Policy::HOSTILE {
        let mut memory = memory.clone();
        succeed(sim::run(&launch, &mut memory, &Options::checked(policy, 1)));
        assert!(memory.f32(output).iter().all(|x| *x == 192.0));
    }
}

#[test]
fn scalar_attention() {
    let (queries, keys, heads, dim) = (5usize, 9usize, 2usize, 40usize);
    for (element, causal) in [(Element::F32, false), (Element::BF16, true), (Element::F16, false)] {
        let scalar = Scalar {
            target: Target::SM_80,
            element,
            head_dim: dim as u32,
            value_head_dim: dim as u32,
            causal,
        };
        let program = scalar.program().unwrap();
        let mut random = Random::new(11);
        let mut tensor = |rows: usize| -> Vec<f32> {
            (0..rows * heads * dim)
                .map(|_| match element {
                    Element::F16 => sim::float::from_f16(sim::float::f16_bits(random.next())),
                    Element::BF16 => sim::float::from_bf16(sim::float::bf16_bits(random.next())),
                    _ => random.next(),
                })
                .collect()
        };
        let (q, k, v) = (tensor(queries), tensor(keys), tensor(keys));
        let mut memory = Memory::new();
        let bytes = element.bytes() as usize;
        let mut put = |name: &str, values: &[f32]| match element {
            Element::F16 => memory.input_u16(
                name,
                &values.iter().map(|x| sim::float::f16_bits(*x)).collect::<Vec<_>>(),
            ),
            Element::BF16 => memory.input_u16(
                name,
                &values.iter().map(|x| sim::float::bf16_bits(*x)).collect::<Vec<_>>(),
            ),
            _ => memory.input_f32(name, values),
        };
        let inputs = [put("q", &q), put("k", &k), put("v", &v)];
        let output = memory.output("o", queries * heads * dim * bytes);
        let lse = memory.output("lse", queries * heads * 4);
        let mut arguments: Vec<Argument> =
            inputs.iter().map(|buffer| Argument::Address(*buffer, 0)).collect();
        arguments.push(Argument::Address(output, 0));
        arguments.push(Argument::Address(lse, 0));
        for rows in [queries, keys, keys, queries] {
            let row = (heads * dim) as u64;
            let strides = [row * rows as u64, row, dim as u64];
            arguments.extend(strides.map(Argument::U64));
        }
        let scale = 1.0 / (dim as f32).sqrt();
        let numbers = [queries as u32, keys as u32, heads as u32, 1, 1];
        arguments.extend(numbers.map(Argument::U32));
        arguments.push(Argument::F32(scale * std::f32::consts::LOG2_E));
        let grid = Scalar::blocks(queries as u32, heads as u32, 1) as u32;
        let launch = Launch { program: &program, grid, arguments };
        let check = |memory: &Memory| {
            let found: Vec<f32> = match element {
                Element::F16 => memory.u16(output).into_iter().map(sim::float::from_f16).collect(),
                Element::BF16 => {
                    memory.u16(output).into_iter().map(sim::float::from_bf16).collect()
                }
                _ => memory.f32(output),
            };
            let tolerance = if element == Element::F32 { 1e-5 } else { 1e-2 };
            for i in 0..queries {
                for h in 0..heads {
                    let at = |row: usize| (row * heads + h) * dim;
                    let visible = if causal { i + 1 + keys - queries } else { keys };
                    let scores: Vec<f64> = (0..visible)
                        .map(|j| {
                            let dot: f64 =
                                (0..dim).map(|d| q[at(i) + d] as f64 * k[at(j) + d] as f64).sum();
                            (dot * scale as f64).exp()
                        })
                        .collect();
                    let total: f64 = scores.iter().sum();
                    for d in 0..dim {
                        let o: f64 =
                            (0..visible).map(|j| scores[j] * v[at(j) + d] as f64).sum::<f64>()
                                / total;
                        assert!((found[at(i) + d] as f64 - o).abs() < tolerance);
                    }
                    let log_sum = memory.f32(lse)[h * queries + i] as f64;
                    assert!((log_sum - total.ln()).abs() < 1e-4);
                }
            }
        };
        every_schedule(&launch, &memory, Mode::Checked, 4, check);
    }
}
