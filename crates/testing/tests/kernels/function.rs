//! Mask and score functions in the simulator: random ones, by themselves and in attention.

use flashcore::random::mix;
use flashcore_testing::composition::{self, Composition};
use flashcore_testing::scene::{Call, PlacementKind, Ragged};
use kernels::attention::function::rules as function_rules;
use kernels::attention::function::{Function, Here, HostTensor, Kind, Row, Stored};
use kernels::backward::tuned_backward;
use kernels::forward::{Form, every_prefill, every_tuned};
use kernels::mma::tuned_backward as tuned_backward_mma;
use kernels::parameter::{Captured, CapturedPart, Number, Parameter, Tensor};
use kernels::{Batch, Configuration, Decode, Forward, Mma, Prefill, Rules, Scalar};
use ptx::{Element, Target};
use sim::{Argument, BufferId, Launch, Measure, Memory, Mode, Options, Policy};

use crate::every_schedule;
use crate::mma::small;

/// A source of random expressions from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 >> 33) as usize % most
    }

    fn word<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len())]
    }

    /// Returns a random integer expression.
    fn integer(&mut self, depth: usize) -> String {
        if depth == 0 {
            return match self.below(6) {
                0 => (self.below(41) as i32 - 20).to_string(),
                1 => self.word(&["0", "-1", "2147483647", "-2147483648", "16"]).to_owned(),
                2 => self.word(&["batch", "head", "query_length", "key_length"]).to_owned(),
                _ => self.word(&["query", "key"]).to_owned(),
            };
        }
        let [a, b] = [self.integer(depth - 1), self.integer(depth - 1)];
        match self.below(18) {
            0..10 => {
                let operations =
                    ["add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor"];
                format!("({} {a} {b})", self.word(&operations))
            }
            // Small positive constants, the usual divisors.
            10 => format!("({} {a} {})", self.word(&["div", "rem"]), 1 + self.below(20)),
            11 => format!("({} {a} {b})", self.word(&["shl", "shr"])),
            12 => format!("({} {a})", self.word(&["neg", "abs", "not"])),
            13 => format!("(select {} {a} {b})", self.truth(depth - 1)),
            14 => format!("(i32 (load floats {a} {b}))"),
            15 => format!("(load long {a} {b} 1)"),
            16 => format!("(load bytes {a})"),
            _ => format!("(load ids {a})"),
        }
    }

    fn truth(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.word(&["true", "false", "(ge query key)", "(lt key 9)"]).to_owned();
        }
        match self.below(7) {
            0 => format!("(not {})", self.truth(depth - 1)),
            6 => format!("(load truths query {})", self.integer(depth - 1)),
            1 | 2 => {
                let [a, b] = [self.truth(depth - 1), self.truth(depth - 1)];
                format!("({} {a} {b})", self.word(&["and", "or", "xor"]))
            }
            3 => {
                let [a, b] = [self.exact_float(), self.exact_float()];
                format!("({} {a} {b})", self.word(&["eq", "ne", "lt", "le", "gt", "ge"]))
            }
            _ => {
                let [a, b] = [self.integer(depth - 1), self.integer(depth - 1)];
                format!("({} {a} {b})", self.word(&["eq", "ne", "lt", "le", "gt", "ge"]))
            }
        }
    }

    /// Returns a float expression without rounding errors, which comparisons may use.
    fn exact_float(&mut self) -> String {
        match self.below(4) {
            0 => self.word(&["0.0", "1.5", "-2.0", "inf", "-inf", "NaN"]).to_owned(),
            1 => "(load floats query key)".to_owned(),
            2 => "(load halves key)".to_owned(),
            _ => format!("(f32 {})", self.word(&["query", "key", "(sub query key)"])),
        }
    }

    /// Returns a float expression of moderate magnitude, so that its error is bounded.
    fn float(&mut self, depth: usize, score: bool) -> String {
        if depth == 0 {
            return match self.below(5) {
                0 => format!("{:?}", self.below(400) as f32 / 100.0 - 2.0),
                1 => "(load floats query key)".to_owned(),
                2 => "(load halves key)".to_owned(),
                3 => "(f32 (rem (sub query key) 8))".to_owned(),
                _ => (if score { "score" } else { "1.0" }).to_owned(),
            };
        }
        let [a, b] = [self.float(depth - 1, score), self.float(depth - 1, score)];
        match self.below(9) {
            0 | 1 => format!("({} {a} {b})", self.word(&["add", "sub", "min", "max"])),
            2 => format!("(max -8.0 (min (mul {a} {b}) 8.0))"),
            3 => format!("(div {a} (add (abs {b}) 1.0))"),
            4 => format!("(exp2 (tanh {a}))"),
            5 => format!("(log2 (add (abs {a}) 1.0))"),
            6 => format!("({} {a})", self.word(&["neg", "abs", "tanh"])),
            _ => format!("(select {} {a} {b})", self.truth(depth - 1)),
        }
    }

    fn function(&mut self, kind: Kind) -> Function {
        let body = match kind {
            Kind::Mask => self.truth(3),
            Kind::Score => self.float(4, true),
        };
        let tensors = "(tensor ids i32 1) (tensor floats f32 2) (tensor long i64 3) \
                       (tensor halves bf16 1) (tensor bytes u8 1) (tensor truths bool 2)";
        let text = format!("({} random {tensors} {body})", kind.name());
        text.parse().unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

const SIZES: [usize; 4] = [2, 3, 19, 22];

fn tensors() -> Vec<HostTensor> {
    let integers: Vec<i32> = (0..17).map(|it| (it * it * 7) % 11 - 5).collect();
    let floats: Vec<f32> = (0..24).map(|it| ((it * 5) % 13) as f32 * 0.25 - 1.5).collect();
    let long: Vec<i64> = (0..60).map(|it| (it * 31) % 100 - 50 + ((it % 3) << 33)).collect();
    let long = long.iter().flat_map(|it| it.to_le_bytes()).collect();
    let halves: Vec<u8> =
        floats[..9].iter().flat_map(|it| ((it.to_bits() >> 16) as u16).to_le_bytes()).collect();
    vec![
        HostTensor::integers("ids", &integers, &[17]),
        // Broadcast over the first index, and with a gap.
        HostTensor::floats("floats", &floats, &[20, 12]).with_strides(&[0, 2]),
        HostTensor::new("long", Stored::I64, &[5, 6, 2], long),
        HostTensor::new("halves", Stored::BF16, &[9], halves),
        HostTensor::new(
            "bytes",
            Stored::U8,
            &[11],
            (0..11).map(|it| it * 37 % 256).map(|it| it as u8).collect(),
        ),
        HostTensor::truths("truths", &[true, false, false, true, true, false, true], &[15, 7])
            .with_strides(&[0, 1]),
    ]
}

/// Runs the kernel that tabulates a function in the simulator, and returns the table.
fn simulated(function: Function, tensors: &[HostTensor], scores: &[f32]) -> Vec<f32> {
    let program = function.table(Target::SM_80).unwrap();
    let mut memory = Memory::new();
    let before = memory.input_f32("before", scores);
    let after = memory.output("after", 4 * scores.len());
    let captured: Vec<_> =
        tensors.iter().map(|it| memory.input(&it.name, it.bytes.clone())).collect();
    let argument = |parameter: &Parameter| match *parameter {
        Parameter::Tensor(Tensor::Query) => Argument::Address(before, 0),
        Parameter::Tensor(_) => Argument::Address(after, 0),
        Parameter::Number(number) => Argument::U32(match number {
            Number::Batch => SIZES[0],
            Number::QueryHeads => SIZES[1],
            Number::QueryLength => SIZES[2],
            _ => SIZES[3],
        } as u32),
        Parameter::Captured(it) => passed(it, function, tensors, &captured),
        other => panic!("{other}"),
    };
    let parameters = Parameter::of(&program.parameters).unwrap();
    let arguments = parameters.iter().map(argument).collect();
    let launch = Launch { program: &program, grid: 1, arguments };
    let text = function.text();
    sim::run(&launch, &mut memory, &Options::default()).unwrap_or_else(|it| panic!("{text}: {it}"));
    memory.f32(after)
}

/// Returns the launch argument for a part of a captured tensor.
pub(crate) fn passed(
    Captured { index, part, .. }: Captured,
    function: Function,
    tensors: &[HostTensor],
    buffers: &[BufferId],
) -> Argument {
    let name = &function.tensors()[index as usize].name;
    let index = tensors.iter().position(|it| it.name == *name).unwrap();
    match part {
        CapturedPart::Address => Argument::Address(buffers[index], 0),
        CapturedPart::Extent(it) => Argument::U32(tensors[index].extents[it as usize] as u32),
        CapturedPart::Stride(it) => Argument::U64(tensors[index].strides[it as usize] as u64),
    }
}

/// A thousand random functions are the same when printed and parsed, and evaluate to the same on
/// the host and in a kernel.
#[test]
fn random_functions_are_the_same_everywhere() {
    let [batch, heads, queries, keys] = SIZES;
    let tensors = tensors();
    let scores: Vec<f32> = (0..batch * heads * queries * keys)
        .map(|index| (mix(index as u64) % 1000) as f32 / 250.0 - 2.0)
        .collect();
    for seed in 0..1000 {
        let kind = Kind::ALL[seed as usize % 2];
        let function = Dice(seed).function(kind);
        assert_eq!(function.text().parse::<Function>().unwrap(), function);
        let found = simulated(function, &tensors, &scores);
        for (row, (found, scores)) in found.chunks(keys).zip(scores.chunks(keys)).enumerate() {
            let here = Here {
                batch: (row / queries / heads) as i32,
                head: (row / queries % heads) as i32,
                query: (row % queries) as i32,
                query_length: queries as i32,
                key_length: keys as i32,
            };
            let mut expected = Row::new(function, &tensors, here);
            for (key, (found, score)) in found.iter().zip(scores).enumerate() {
                let score = f64::from(*score);
                let expected = match kind {
                    Kind::Score => expected.score(key, score),
                    Kind::Mask if expected.sees(key) => score,
                    Kind::Mask => f64::NEG_INFINITY,
                };
                let found = f64::from(*found);
                let near = found == expected || (found - expected).abs() < 1e-3;
                assert!(near, "{function} is {found}, not {expected}, at {here:?}, key {key}");
            }
        }
    }
}

/// Rules with a mask of every kind of dependence, and a score.
fn rules() -> Vec<Rules> {
    let causal = Function::mask("causal", |at| at.position().ge(at.key()));
    let documents = Function::mask("documents", |at| {
        let ids = at.integers("ids");
        ids.load([at.batch(), at.query()]).eq(ids.load([at.batch(), at.key()]))
    });
    let dilated = Function::mask("dilated", |at| ((at.query() - at.key()) % 3).eq(at.head()));
    let nothing = Function::mask("nothing", |at| at.query().lt(0));
    let capped = Function::score("capped", |score, _| 1.5 * (score / 1.5).tanh());
    let biased = Function::score("biased", |score, at| {
        score + at.floats("bias").load([at.head(), at.query(), at.key()])
    });
    let cooled = Function::score("cooled", |score, at| {
        score * at.floats("temperature").load([at.head()]) - 0.01 * at.key().to_f32()
    });
    let with = |mask: Option<Function>, score: Option<Function>, rules: Rules| Rules {
        mask_function: mask,
        score_function: score,
        ..rules
    };
    vec![
        with(Some(causal), None, Rules::DENSE),
        with(Some(documents), None, Rules::CAUSAL),
        with(Some(dilated), Some(capped), Rules::DENSE),
        with(Some(nothing), None, Rules::DENSE),
        with(None, Some(biased), Rules { alibi: true, ..Rules::LOCAL }),
        with(Some(documents), Some(cooled), Rules { softcap: true, alibi: true, ..Rules::DENSE }),
        with(Some(dilated), Some(biased), Rules { sinks: true, ..Rules::CAUSAL }),
    ]
}

/// Returns the tensors that the rules load from; some are shorter than sequences, so that loads are
/// out of bounds.
fn captured(rules: &Rules) -> Vec<HostTensor> {
    let ids: Vec<i32> = (0..2 * 120).map(|it| it % 120 / 37).collect();
    let number = |index: usize| (mix(index as u64) % 100) as f32 / 50.0 - 1.0;
    // Rows with an odd number of elements are not loaded in pairs.
    let row = if rules.sinks { 101 } else { 100 };
    let bias: Vec<f32> = (0..90 * row).map(number).collect();
    let upper = |it: &f32| ((it.to_bits() >> 16) as u16).to_le_bytes();
    let halves = bias[..70 * 100].iter().flat_map(upper).collect();
    let all = [
        HostTensor::integers("ids", &ids, &[2, 120]),
        HostTensor::floats("bias", &bias, &[2, 90, 100]).with_strides(&[0, row, 1]),
        HostTensor::floats("temperature", &[0.5, 1.25], &[2]),
        HostTensor::new("halves", Stored::BF16, &[70, 100], halves),
    ];
    let loaded = |it: &HostTensor| {
        rules.functions().any(|function| function.tensors().iter().any(|spec| spec.name == it.name))
    };
    all.into_iter().filter(loaded).collect()
}

fn checked(call: Call, rules: &Rules) {
    let call = Call { captured: captured(rules), ..call };
    every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
}

const SIZE: ([usize; 2], [usize; 2]) = ([70, 130], [2, 1]);

#[test]
fn scalar_follows_functions() {
    for rules in rules() {
        let (target, element) = (Target::SM_80, Element::F16);
        let scalar = Scalar { target, element, head_dim: 16, value_head_dim: 8, rules };
        checked(Call::new(Configuration::Scalar(scalar), 2, [13, 50], [2, 1]), &rules);
    }
}

fn mma(rules: Rules) -> Mma {
    Mma { rules, ..small() }
}

#[test]
fn mma_follows_functions() {
    for rules in rules() {
        let (lengths, heads) = SIZE;
        checked(Call::new(Configuration::Mma(mma(rules)), 2, lengths, heads), &rules);
    }
}

#[test]
fn split_and_ragged_mma_follow_functions() {
    let rules = rules();
    let split = Mma { split: true, ..mma(rules[2]) };
    checked(Call::new(Configuration::Mma(split), 1, [40, 200], [2, 1]), &rules[2]);
    let ragged = Ragged::new(vec![2, 67, 1, 0], vec![1, 68, 0, 5]);
    for (batch, place) in
        [(Batch::Ragged, PlacementKind::PackedWithGaps), (Batch::Paged, PlacementKind::Paged(5))]
    {
        let mma = Mma { batch, ..mma(rules[1]) };
        let call = Call::ragged(Configuration::Mma(mma), ragged.over(place), [2, 1]);
        checked(call, &rules[1]);
    }
}

/// The decode kernel over equal lengths split among teams, over ragged batches, and over pages.
#[test]
fn decode_follows_functions() {
    for (index, rules) in rules().into_iter().enumerate() {
        let rules = Rules { mask: kernels::MaskKind::Local, ..rules };
        let decode =
            Decode { rules, page_rows: (index % 3 == 2).then_some(1), ..crate::decode::small() };
        let kernel = Configuration::Decode(decode);
        let ragged = Ragged::new(vec![2, 3, 1, 0], vec![83, 68, 0, 5]);
        let call = match index % 3 {
            0 => Call::new(kernel, 2, [3, 90], [2, 1]).with_multiprocessors(4),
            1 => Call::ragged(kernel, ragged.over(PlacementKind::PackedWithGaps), [2, 1]),
            _ => Call::ragged(kernel, ragged.over(PlacementKind::Paged(5)), [2, 1]),
        };
        let call = Call { captured: captured(&rules), ..call };
        let scene = call.scene().unwrap();
        let (memory, _) = scene.run(&Options::default()).unwrap();
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{}: {accuracy}", scene.program.name);
    }
}

/// Returns rules whose loads for neighbouring keys are not neighbours in their tensor, and rules
/// with pairs of 16-bit elements.
fn loads_of_keys() -> [Rules; 2] {
    let skewed = Function::score("skewed", |score, at| {
        let row = (at.query() - at.key()).abs();
        score + at.floats("bias").load([at.head(), row, at.key()])
    });
    let halves = Function::score("halves", |score, at| {
        score + at.floats("halves").stored(Stored::BF16).load([at.query(), at.key()])
    });
    [skewed, halves].map(|it| Rules { score_function: Some(it), ..Rules::CAUSAL })
}

#[test]
fn forward_follows_functions() {
    for (index, rules) in rules().into_iter().chain(loads_of_keys()).enumerate() {
        let forward = Forward {
            element: Element::BF16,
            output: Element::BF16,
            head_dim: 64,
            value_head_dim: 64,
            rules,
            warpgroups: 1 + index as u32 % 2,
            key_block: 32,
            stages: 2,
            query_buffers: 1,
            form: if index == 2 { Form::COMPACT } else { Form::FULL },
            ..every_tuned()[0]
        };
        let (lengths, heads) = SIZE;
        let call = Call::new(Configuration::Forward(forward), 2, lengths, heads);
        // Every second call has its block lists made on the host from the tensors' contents.
        checked(Call { contents_known: index % 2 == 1, ..call }, &rules);
    }
}

/// Key blocks that no row of a tile sees are skipped: there are as many products as with the same
/// mask by name.
#[test]
fn blocks_that_a_function_hides_are_not_walked() {
    let causal = Function::mask("causal", |at| at.position().ge(at.key()));
    let window = Function::mask("window", |at| {
        let before = at.position() - at.key();
        before.ge(-14) & before.le(66)
    });
    let by_function = |function| Rules { mask_function: Some(function), ..Rules::DENSE };
    let products = |kernel: Configuration| {
        let scene = Call::new(kernel, 1, [130, 130], [1, 1]).scene().unwrap();
        let (memory, report) = scene.run(&Options::values(Policy::Earliest, 0)).unwrap();
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{accuracy}");
        report.counts.get(Measure::TensorOperations)
    };
    let forward = |rules| {
        let tile = Forward { rules, warpgroups: 1, key_block: 32, ..every_tuned()[0] };
        let tile = Forward { element: Element::BF16, output: Element::BF16, ..tile };
        Configuration::Forward(Forward { head_dim: 64, value_head_dim: 64, ..tile })
    };
    // Warps of a tile may differ in whether they see a block; tiles of one warp give exact counts.
    let narrow = |rules| Configuration::Mma(Mma { row_tiles: 1, ..mma(rules) });
    let dense = products(forward(Rules::DENSE));
    for (function, rules) in [(causal, Rules::CAUSAL), (window, Rules::LOCAL)] {
        let by_name = products(forward(rules));
        assert!(by_name < dense);
        assert_eq!(products(forward(by_function(function))), by_name);
        assert!(products(narrow(by_function(function))) < products(narrow(Rules::DENSE)));
    }
}

/// Gradients skip them too: as many products as with the mask by name, and with documents only the
/// products within each document.
#[test]
fn gradients_of_blocks_that_a_function_hides_are_not_walked() {
    let products = |call: Call| {
        let scene = call.scene().unwrap();
        let (memory, report) = scene.run(&Options::values(Policy::Earliest, 0)).unwrap();
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{accuracy}");
        report.counts.get(Measure::TensorOperations)
    };
    let equal = |kernel, length| Call::new(kernel, 1, [length; 2], [1, 1]);
    let prefix = Function::mask("prefix", |at| at.key().lt(1) | at.position().ge(at.key()));
    let prefix = Rules { mask_function: Some(prefix), ..Rules::DENSE };
    let ids: Vec<i32> = (0..256).map(|it| it / 128).collect();
    for family in [hopper, ampere] {
        let dense = products(equal(family(64, Rules::DENSE), 256));
        let by_name = products(equal(family(64, Rules::CAUSAL), 256));
        assert!(by_name < dense);
        assert_eq!(products(equal(family(64, prefix), 256)), by_name);
        let documents = Rules { mask_function: Some(function_rules::documents()), ..Rules::DENSE };
        let captured = vec![HostTensor::integers("ids", &ids, &[1, 256])];
        let call = equal(family(64, documents), 256);
        // Blocks are found on the device, and on the host.
        for contents_known in [false, true] {
            let call = Call { contents_known, captured: captured.clone(), ..call.clone() };
            assert_eq!(products(call), dense / 2);
        }
    }
}

#[test]
fn prefill_follows_functions() {
    for rules in rules().into_iter().skip(4) {
        let rules = Rules { mask: kernels::MaskKind::Local, ..rules };
        let tile = Forward {
            element: Element::BF16,
            output: Element::BF16,
            head_dim: 64,
            value_head_dim: 64,
            rules,
            warpgroups: 1,
            key_block: 32,
            ..every_prefill()[0].tile
        };
        let ragged =
            Ragged::new(vec![2, 67, 1, 0], vec![1, 68, 0, 5]).over(PlacementKind::PackedWithGaps);
        let prefill = Prefill { tile, page_rows: None, single_tile: false };
        checked(Call::ragged(Configuration::Prefill(prefill), ragged, [2, 1]), &rules);
    }
}

/// Hides keys from 60 on, and all keys of query 1, by adding a large negative number.
fn hiding(score: &str, added: &str) -> Function {
    let of_row = format!("(select (eq query 1) {added} 0.0)");
    let text = format!("(score hidden (add {score} (select (ge key 60) {added} {of_row})))");
    text.parse().unwrap()
}

/// A function may hide keys by adding a large negative number. Whole blocks of such keys, which
/// kernels walk first, must not spoil the keys that are left; and a row of such keys sees none, in
/// every kernel.
#[test]
fn large_negative_scores_hide_keys() {
    // Softmaxes take the scores of the first function before their scale.
    for (score, added) in [("score", "-1e9"), ("score", "-1e10"), ("(mul score 1.5)", "-1e20")] {
        let function = hiding(score, added);
        for element in [Element::F16, Element::BF16] {
            let rules = Rules { score_function: Some(function), ..Rules::DENSE };
            let tile = Forward {
                element,
                output: element,
                head_dim: 64,
                value_head_dim: 64,
                rules,
                warpgroups: 1,
                key_block: 32,
                ..every_tuned()[0]
            };
            let local = Rules { mask: kernels::MaskKind::Local, ..rules };
            let ragged = Ragged::new(vec![2, 67], vec![130, 80]);
            let tile_of_ragged = Forward { rules: local, ..tile };
            let prefill = Prefill { tile: tile_of_ragged, page_rows: None, single_tile: false };
            let ragged = ragged.over(PlacementKind::PackedWithGaps);
            runs_right(&Call::ragged(Configuration::Prefill(prefill), ragged, [2, 1]));
            for kernel in [
                Configuration::Forward(tile),
                Configuration::Mma(Mma { element, ..mma(rules) }),
                Configuration::Decode(Decode { rules: local, ..crate::decode::small() }),
                Configuration::Scalar(Scalar {
                    target: Target::SM_80,
                    element,
                    head_dim: 16,
                    value_head_dim: 16,
                    rules,
                }),
            ] {
                is_right(kernel, &[], (1, [5, 130]));
            }
        }
        let rules = Rules { score_function: Some(function), ..Rules::DENSE };
        for kernel in [hopper(64, rules), ampere(64, rules)] {
            is_right(kernel, &[], (1, [70, 130]));
        }
    }
}

/// Runs the scene of a kernel once and judges its results.
fn is_right(kernel: Configuration, captured: &[HostTensor], (batch, lengths): (usize, [usize; 2])) {
    runs_right(&Call { captured: captured.to_vec(), ..Call::new(kernel, batch, lengths, [2, 1]) });
}

fn runs_right(call: &Call) {
    let scene = call.scene().unwrap();
    let (memory, _) = scene.run(&Options::default()).unwrap_or_else(|failure| {
        panic!("{}: {failure}", scene.program.name);
    });
    let accuracy = scene.judge(&memory);
    assert!(accuracy.passed(), "{}: {accuracy}", scene.program.name);
}

fn hopper(dim: u32, rules: Rules) -> Configuration {
    Configuration::Backward(tuned_backward(Element::BF16, dim, dim, rules).unwrap())
}

fn ampere(dim: u32, rules: Rules) -> Configuration {
    let (target, element) = (Target::SM_80, Element::BF16);
    let found = tuned_backward_mma(target, element, dim, dim, rules, false, Batch::Equal);
    Configuration::BackwardMma(found.unwrap())
}

/// Gradients under score functions and mask functions.
#[test]
fn gradients_follow_functions() {
    for (index, rules) in rules().into_iter().enumerate() {
        // A softcap by name together with a score function has no gradients.
        let rules = Rules { softcap: false, ..rules };
        let (captured, size) = (captured(&rules), (1, [70, 130]));
        // Beyond 128 one warpgroup has weights, the other their gradients.
        is_right(hopper([64, 128, 256][index % 3], rules), &captured, size);
        is_right(ampere(64, rules), &captured, (2, [40, 70]));
    }
    let size = (2, [200, 260]);
    for (dim, rules) in [(64, rules()[1]), (256, rules()[2])] {
        // Lists of documents are made from what is in them, and those of heads are of both.
        let captured = captured(&rules);
        for deterministic in [false, true] {
            let known = |kernel| Call {
                contents_known: dim == 64,
                captured: captured.clone(),
                ..Call::new(kernel, size.0, size.1, [2, 1])
            };
            let found = tuned_backward(Element::BF16, dim, dim, rules).unwrap();
            let found = kernels::Backward { deterministic, ..found };
            runs_right(&known(Configuration::Backward(found)));
            let (target, element) = (Target::SM_80, Element::BF16);
            let found =
                tuned_backward_mma(target, element, 64, 64, rules, deterministic, Batch::Equal);
            runs_right(&known(Configuration::BackwardMma(found.unwrap())));
        }
    }
    let capped = Rules { score_function: Some(composition::scores()[0]), ..Rules::CAUSAL };
    is_right(hopper(256, capped), &[], (1, [70, 70]));
}

/// Ready-made rules, and random compositions of them, in every family.
#[test]
fn families_follow_ready_made_rules() {
    const SIZES: [usize; 4] = [1, 2, 17, 40];
    let masks = composition::masks();
    let scores = composition::scores();
    let pairs = masks.iter().enumerate().map(|(index, mask)| {
        let (mask, score) = (Some(*mask), Some(scores[index % scores.len()]));
        let tensors = composition::tensors_of(mask.into_iter().chain(score), SIZES);
        Composition { mask, score, tensors }
    });
    let random = (0..3).map(|seed| Composition::of(seed, SIZES));
    for (index, it) in pairs.chain(random).enumerate() {
        let Composition { mask, score, tensors } = it;
        let rules = Rules { mask_function: mask, score_function: score, ..Rules::DENSE };
        let (target, element) = (Target::SM_80, Element::F16);
        let scalar = Scalar { target, element, head_dim: 16, value_head_dim: 8, rules };
        let tile = Forward { rules, warpgroups: 1, key_block: 32, ..every_tuned()[0] };
        let tile = Forward { element: Element::BF16, output: Element::BF16, ..tile };
        let forward = Forward { head_dim: 64, value_head_dim: 64, form: Form::COMPACT, ..tile };
        let decode = Decode {
            rules: Rules { mask: kernels::MaskKind::Local, ..rules },
            ..crate::decode::small()
        };
        let size = (SIZES[0], [SIZES[2], SIZES[3]]);
        is_right(Configuration::Scalar(scalar), &tensors, size);
        is_right(Configuration::Mma(mma(rules)), &tensors, size);
        is_right(Configuration::Forward(forward), &tensors, size);
        is_right(Configuration::Decode(decode), &tensors, size);
        // Each score once.
        match index {
            0 | 2 | 4 => is_right(hopper(64, rules), &tensors, size),
            1 | 3 | 5 => is_right(ampere(64, rules), &tensors, size),
            _ => {}
        }
    }
}
