//! The planner's choice of kernel and configuration for many calls on several GPUs. The choice must
//! be the same however a call is described, and the same as in the table `data/choices.txt`, so
//! that a change of choice shows in review. Other front ends are tested against the same table.
//!
//! `INSTA_UPDATE=always` rewrites the table.

use std::fmt::Write;
use std::path::Path;

use flashcore::family::tuning::TuningFile;
use flashcore::gpu::{Chip, DeviceAddress, DeviceTensor, Tensors};
use flashcore::plan::Arrangement;
use flashcore::serving::{Pages, Placement, Sequences};
use flashcore::{
    Inputs, Layout, Plan, Preference, Problem, Shape, Storage, Strides, Tensor, TensorError,
};
use ptx::Target;

/// A memory layout of tensors; each may be a reason to choose another kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    /// (batch, length, heads, dim) without gaps.
    Contiguous,
    /// (batch, heads, length, dim) without gaps.
    HeadsFirst,
    /// Gaps of 8 elements after every vector and row.
    Gaps,
    /// Gaps of 4 elements after every vector.
    OddGaps,
    /// Without gaps, at an address that is not a multiple of 16.
    Unaligned,
}

impl Order {
    fn name(self) -> &'static str {
        match self {
            Order::Contiguous => "contiguous",
            Order::HeadsFirst => "heads first",
            Order::Gaps => "gaps of 8",
            Order::OddGaps => "gaps of 4",
            Order::Unaligned => "address + 8",
        }
    }

    fn layout(self, shape: Shape) -> Result<Layout, TensorError> {
        let gaps = |gap: usize| {
            let heads = shape.dim + gap;
            let length = heads * shape.heads + gap;
            Layout::strided(shape, Strides { batch: length * shape.length, length, heads })
        };
        match self {
            Order::Contiguous | Order::Unaligned => Layout::contiguous(shape),
            Order::HeadsFirst => Layout::heads_first(shape),
            Order::Gaps => gaps(8),
            Order::OddGaps => gaps(4),
        }
    }
}

/// The chips, with the names that their lines of the table have.
fn chips() -> [(&'static str, Chip); 4] {
    [
        ("H200", Chip::H200),
        ("sm_80", Chip::typical(Target::SM_80)),
        ("sm_89", Chip::typical(Target::SM_89)),
        ("sm_75", Chip::typical(Target::SM_75)),
    ]
}

/// Returns the calls of the table, parsed from their texts.
fn calls() -> Vec<(Problem, Order)> {
    let mut calls: Vec<(String, Order)> = Vec::new();
    let mut plain = |text: &str| calls.push((text.to_owned(), Order::Contiguous));
    // Lengths, dims, masks and types of equal batches.
    for length in [1, 31, 32, 128, 1000, 4096, 16384] {
        for (heads, dim) in [(16, 64), (16, 128), (4, 256)] {
            for mask in ["", ",causal"] {
                plain(&format!("b=1,h={heads},hk=4,s={length},d={dim},bf16{mask}"));
            }
        }
    }
    for text in [
        "b=8,h=16,s=512,d=128,f16,causal",
        "b=64,h=2,s=77,d=96,f16",
        "b=1,h=4,s=1,sk=32768,d=128,bf16",
        "b=32,h=32,hk=8,s=1,sk=2048,d=128,bf16,causal",
        "b=1,h=2,s=3,sk=9000,d=64,f16,causal",
        "b=2,h=8,s=300,sk=100,d=64,f16,causal",
        "b=2,h=8,s=300,d=192,dv=128,bf16,causal",
        "b=2,h=8,s=300,d=64,dv=24,f16",
        "b=2,h=8,s=300,d=8,f16",
        "b=2,h=8,s=300,d=20,f16",
        "b=2,h=8,s=300,d=7,dv=33,f16",
        "b=2,h=8,s=300,d=320,bf16",
        "b=2,h=8,s=300,d=128,f32,causal",
        "b=1,h=8,s=1,sk=500,d=128,f32",
        "b=2,h=2,s=9,sk=0,d=64,f16",
        // Scales that the guarded softmax does not support.
        "b=2,h=2,s=90,d=64,f16,scale=0",
        "b=2,h=2,s=90,d=64,f16,scale=-0.125",
        "b=2,h=2,s=90,d=64,f16,scale=3",
        // Windows, some of which hide nothing.
        "b=1,h=8,s=4096,d=128,bf16,window=1024:0",
        "b=1,h=8,s=4096,d=128,bf16,window=:5",
        "b=1,h=8,s=4096,d=128,bf16,window=5000:0",
        "b=1,h=8,s=4096,d=128,bf16,window=4095:4095",
        "b=1,h=8,s=1,sk=4096,d=128,bf16,window=1024:0",
        "b=1,h=8,s=4096,d=64,bf16,causal,chunk=512",
        "b=1,h=8,s=4096,d=64,bf16,chunk=8192",
        "b=1,h=8,s=1,sk=4096,d=64,bf16,causal,chunk=512",
        "b=1,h=8,s=100,d=64,f32,window=9:0,chunk=32",
        // Rules that change scores.
        "b=1,h=8,s=2048,d=128,bf16,causal,softcap=30",
        "b=1,h=8,s=2048,d=128,bf16,causal,alibi",
        "b=2,h=8,s=2048,d=64,f16,alibi=sequences",
        "b=1,h=8,s=2048,d=64,bf16,window=128:0,sinks",
        "b=2,h=8,s=700,d=256,f16,window=128:3,chunk=300,softcap=5,alibi,sinks",
        "b=4,h=16,hk=2,s=1,sk=2048,d=128,bf16,causal,softcap=30,alibi,sinks",
        "b=2,h=4,s=50,d=40,f32,causal,softcap=5,alibi,sinks",
        // Packed sequences.
        "b=4,h=16,hk=4,s=1000,d=128,bf16,causal,queries=packed:3000,keys=packed:3000",
        "b=4,h=16,hk=4,s=1000,d=64,f16,queries=packed:3000,keys=packed:3000",
        "b=4,h=16,hk=4,s=100,sk=900,d=256,bf16,causal,queries=packed:300,keys=packed:3000",
        "b=8,h=16,hk=4,s=1,sk=900,d=128,bf16,causal,queries=packed:8,keys=packed:3000",
        "b=4,h=8,s=300,d=64,bf16,window=64:0,sinks,queries=packed:900,keys=packed:900",
        "b=4,h=8,s=300,d=64,bf16,causal,chunk=64,queries=packed:900,keys=packed:900",
        "b=4,h=8,s=300,d=64,bf16,queries=packed:900,keys=packed:900,query_lengths,key_lengths",
        "b=4,h=8,s=300,d=64,bf16,queries=packed:900,keys=packed:900,key_lengths,left_padding",
        "b=4,h=8,s=300,d=20,f16,queries=packed:900,keys=packed:900",
        "b=4,h=8,s=300,d=64,f32,queries=packed:900,keys=packed:900",
        // Padded batches with lists of lengths.
        "b=4,h=8,s=300,d=64,f16,causal,key_lengths",
        "b=4,h=8,s=300,d=64,f16,causal,query_lengths,key_lengths",
        "b=4,h=8,hk=2,s=1,sk=3000,d=128,bf16,causal,key_lengths",
        "b=4,h=8,hk=2,s=1,sk=3000,d=128,bf16,left_padding",
        "b=4,h=8,hk=2,s=1,sk=3000,d=128,bf16,keys=entries:6,batch_index",
        "b=4,h=8,hk=2,s=200,sk=900,d=128,bf16,causal,keys=entries:6,key_lengths,batch_index",
        // Pages.
        "b=4,h=32,hk=8,s=1,sk=1024,d=128,bf16,causal,keys=pages:16:64:300,key_lengths",
        "b=4,h=32,hk=8,s=3,sk=1024,d=64,f16,causal,keys=pages:1:1024:5000,key_lengths",
        "b=4,h=8,s=1,sk=1024,d=192,dv=128,f16,softcap=9,keys=pages:64:16:99,key_lengths",
        "b=4,h=8,s=1,sk=1024,d=64,f16,chunk=100,sinks,keys=pages:64:16:99,key_lengths",
        "b=4,h=8,s=200,sk=1024,d=128,bf16,causal,keys=pages:64:16:99,key_lengths",
        "b=4,h=8,s=200,sk=1024,d=128,bf16,causal,keys=pages:4:256:1999,key_lengths",
        "b=4,h=8,s=99,sk=1024,d=64,f16,queries=packed:300,keys=pages:256:4:99,key_lengths",
        "b=4,h=8,s=99,sk=960,d=64,f16,queries=packed:300,keys=pages:48:20:99,key_lengths",
        "b=4,h=8,s=1,sk=1024,d=64,f16,keys=pages:64:16:99,key_lengths,left_padding",
        "b=4,h=8,s=99,sk=1024,d=64,f16,keys=pages:64:16:99,key_lengths,left_padding",
    ] {
        plain(text);
    }
    for order in [Order::HeadsFirst, Order::Gaps, Order::OddGaps, Order::Unaligned] {
        for text in [
            "b=2,h=8,hk=2,s=700,d=128,bf16,causal",
            "b=2,h=8,hk=2,s=1,sk=700,d=128,bf16,causal",
            "b=2,h=8,s=300,d=64,f32",
            "b=4,h=8,s=300,d=64,f16,causal,queries=packed:900,keys=packed:900",
            "b=4,h=8,s=1,sk=1024,d=64,f16,keys=pages:64:16:99,key_lengths",
        ] {
            calls.push((text.to_owned(), order));
        }
    }
    calls.into_iter().map(|(text, order)| (text.parse().unwrap(), order)).collect()
}

/// Describes the kernel and configuration that a plan chose.
fn chosen(plan: Result<Plan, flashcore::Error>) -> String {
    match plan {
        Ok(plan) => {
            let Some(configuration) = plan.chosen.configuration else { panic!("{}", plan.problem) };
            format!("{}, {configuration}", plan.chosen.kernel)
        }
        Err(_) => "none".to_owned(),
    }
}

/// Returns the choice for a call, after checking that every description of the call gives the same.
fn choose(chip: &Chip, problem: &Problem, order: Order, host: Option<&Host>) -> String {
    let preference = Preference::default();
    let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
    let strides = shapes.map(|shape| order.layout(shape).unwrap().strides());
    let output = Layout::contiguous(problem.output_shape()).unwrap().strides();
    let address = DeviceAddress(if order == Order::Unaligned { 4104 } else { 4096 });
    let [query, key, value, output] = [strides[0], strides[1], strides[2], output]
        .map(|strides| DeviceTensor { address, strides });

    // Tensors on the device.
    let tensors = Tensors::new([query, key, value, output], None);
    let on_device = chosen(Plan::on_gpu(chip, problem, &tensors.arrangement(), &preference));

    // The problem as text, with strides.
    let text: Problem = problem.text().parse().unwrap();
    assert_eq!(text, *problem);
    let mut arrangement = Arrangement::contiguous(&text).unwrap();
    [arrangement.query, arrangement.key, arrangement.value] = strides;
    arrangement.aligned = order != Order::Unaligned;
    let by_text = chosen(Plan::on_gpu(chip, &text, &arrangement, &preference));
    assert_eq!(by_text, on_device, "{}", problem.text());
    if order == Order::Contiguous {
        // A plan that may fall back to the CPU.
        let planned = Plan::on_chip(chip, &text, &preference).unwrap();
        match planned.chosen.backend {
            "gpu" => assert_eq!(chosen(Ok(planned)), on_device, "{}", problem.text()),
            _ => assert_eq!(on_device, "none", "{}", problem.text()),
        }
    }

    // Tensors in host memory.
    if let Some(host) = host {
        let (described, inputs) = host.call(problem);
        assert_eq!(described.text(), problem.text());
        let arrangement = inputs.arrangement(&described).unwrap();
        let by_tensors = chosen(Plan::on_gpu(chip, &described, &arrangement, &preference));
        assert_eq!(by_tensors, on_device, "{}", problem.text());
    }
    on_device
}

/// The tensors of a call in host memory.
struct Host {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    sequences: Option<Sequences>,
}

impl Host {
    /// Creates tensors of zeros; `None` if they would be too large.
    fn new(problem: &Problem, order: Order) -> Option<Self> {
        let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
        let large = |shape: &Shape| shape.elements().is_none_or(|elements| elements > 1 << 24);
        if order == Order::Unaligned || shapes.iter().any(large) {
            return None;
        }
        let [query, key, value] = shapes.map(|shape| {
            Tensor::filled(problem.dtype(), order.layout(shape).unwrap(), 0.0).unwrap()
        });
        let per_sequence = problem.scores.alibi == flashcore::Alibi::PerSequence;
        let slopes = problem.query_heads * if per_sequence { problem.batch } else { 1 };
        let sequences = (!problem.has_equal_lengths()).then(|| {
            let (queries, keys) = (queries(problem), keys(problem));
            Sequences::new(problem.clone(), queries, keys).unwrap()
        });
        let (slopes, sinks) = (vec![0.1; slopes], vec![0.0; problem.query_heads]);
        Some(Host { query, key, value, slopes, sinks, sequences })
    }

    /// Returns the problem that the tensors pose, and the inputs. Masks, scales and caps, which
    /// tensors do not determine, come from `asked`.
    fn call(&self, asked: &Problem) -> (Problem, Inputs<'_>) {
        let mut inputs = Inputs::new(&self.query, &self.key, &self.value);
        if asked.scores.has_alibi() {
            inputs = inputs.with_slopes(&self.slopes);
        }
        if asked.scores.sinks {
            inputs = inputs.with_sinks(&self.sinks);
        }
        if let Some(sequences) = &self.sequences {
            return sequences.over(inputs).unwrap();
        }
        let mut problem = inputs.problem().unwrap().with_mask(asked.mask);
        (problem.scores.scale, problem.scores.softcap) = (asked.scores.scale, asked.scores.softcap);
        (problem, inputs)
    }
}

/// Returns lengths of packed sequences with `rows` rows in total, one of them of the longest
/// length.
fn lengths(problem: &Problem, rows: usize, longest: usize) -> Vec<usize> {
    let mut rest = rows;
    let lengths = (0..problem.batch).map(|_| {
        let length = longest.min(rest);
        rest -= length;
        length
    });
    lengths.collect()
}

fn starts(lengths: &[usize]) -> Vec<usize> {
    (0..=lengths.len()).map(|count| lengths[..count].iter().sum()).collect()
}

/// Makes one of the sequences, not the first, a row shorter than its room.
fn shorter(mut lengths: Vec<usize>) -> Vec<usize> {
    let shortened = lengths.iter().skip(1).position(|length| *length > 0).unwrap() + 1;
    lengths[shortened] -= 1;
    lengths
}

fn queries(problem: &Problem) -> Placement {
    let (placement, lengths) = match problem.queries {
        Storage::Packed(rows) => {
            let lengths = lengths(problem, rows, problem.query_length);
            (Placement::packed(starts(&lengths)), lengths)
        }
        _ => {
            let lengths = vec![problem.query_length; problem.batch];
            (Placement::padded(lengths.clone()), lengths)
        }
    };
    match problem.lists.query_lengths {
        true => placement.with_lengths(shorter(lengths)),
        false => placement,
    }
}

fn keys(problem: &Problem) -> Placement {
    let full = vec![problem.key_length; problem.batch];
    let (placement, lengths) = match problem.keys {
        Storage::Packed(rows) => {
            let lengths = lengths(problem, rows, problem.key_length);
            (Placement::packed(starts(&lengths)), lengths)
        }
        Storage::Paged { size, columns, pages } => {
            let table = (0..problem.batch * columns).map(|entry| (entry % pages) as u32);
            let pages = Pages::new(size, columns, table.collect()).unwrap();
            (Placement::paged(full.clone(), pages), full)
        }
        Storage::Entries(entries) => {
            let order = (0..problem.batch).map(|sequence| entries - 1 - sequence);
            (Placement::entries(full.clone(), order.collect()), full)
        }
        Storage::Padded => (Placement::padded(full.clone()), full),
    };
    let placement = match problem.lists.key_lengths {
        true => placement.with_lengths(shorter(lengths)),
        false => placement,
    };
    match problem.lists.left_padding {
        true => {
            let padding = placement.ends().iter().map(|end| 1.min(*end)).collect();
            placement.with_left_padding(padding)
        }
        false => placement,
    }
}

#[test]
fn every_way_of_describing_a_call_chooses_the_same() {
    let mut table = "\
# Which kernel runs, and in which configuration: chip | how tensors lie | problem -> choice.
# Written by the test `choices` of flashcore-testing with INSTA_UPDATE=always.
"
    .to_owned();
    let (mut count, mut on_the_host) = (0, 0);
    for (problem, order) in calls() {
        let host = Host::new(&problem, order);
        for (name, chip) in chips() {
            let choice = choose(&chip, &problem, order, host.as_ref());
            let (order, text) = (order.name(), problem.text());
            writeln!(table, "{name} | {order} | {text} -> {choice}").unwrap();
            count += 1;
            on_the_host += usize::from(host.is_some());
        }
    }
    assert!(count >= 400 && on_the_host >= 300, "{count}, {on_the_host} of them on the host");

    if TuningFile::location().is_some_and(|path| path.exists()) {
        return eprintln!("skipped: what was tuned on this machine changes choices");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/choices.txt");
    if std::env::var("INSTA_UPDATE").is_ok_and(|value| value == "always") {
        std::fs::write(&path, &table).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    let changes: Vec<String> = (table.lines().filter(|line| !known.lines().any(|it| it == *line)))
        .map(|line| format!("+ {line}"))
        .chain(
            (known.lines().filter(|line| !table.lines().any(|it| it == *line)))
                .map(|line| format!("- {line}")),
        )
        .collect();
    assert!(table == known, "{} differs:\n{}", path.display(), changes.join("\n"));
}
