//! What 8-bit tensors do to answers: errors by length against f64, and needles in haystacks.
//!
//! ```sh
//! cargo run --release -p flashcore-testing --example fp8_accuracy
//! cargo run --release -p flashcore-testing --example fp8_accuracy -- 1024,131072 gpu/forward
//! ```
//!
//! The lengths, and a kernel that every call is to run (without, the best that serves it). Errors are
//! root mean squares over that of the output: of the arithmetic alone, against f64 over the numbers
//! that the tensors stand for, and in brackets against f64 over the numbers before they were rounded.

use flashcore::quantize::{Granularity, Quantized, quantize};
use flashcore::random::normal;
use flashcore::{DType, Descales, Error, Inputs, Machine, Preference, Shape, Tensor};
use flashcore_testing::reference::{self, Rows};

const QUERIES: usize = 64;
const DIM: usize = 128;
/// Heads of the search for needles: as many as queries times these are looked for.
const HEADS: usize = 4;
/// Shares of the weight that a needle may have, of all keys.
const NEEDLES: [f64; 2] = [0.02, 0.005];

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let lengths = arguments.next().unwrap_or_else(|| "1024,16384".to_owned());
    let lengths: Vec<usize> = lengths.split(',').filter_map(|it| it.trim().parse().ok()).collect();
    let preference = arguments.next().map_or_else(Preference::default, |it| Preference::named(&it));
    let machine = Machine::discover();
    for backend in machine.backends() {
        println!("{}: {}", backend.name(), backend.describe());
    }
    let run = Run { machine, preference };
    println!("\n| keys | contents | {} |", Precision::ALL.map(Precision::name).join(" | "));
    println!("| --- | --- |{}", " --- |".repeat(Precision::ALL.len()));
    for length in &lengths {
        for contents in [Contents::Even, Contents::Peaked, Contents::Outliers] {
            let haystack = contents.tensors(*length)?;
            let original = exact(&haystack)?;
            let mut cells = Vec::new();
            for precision in Precision::ALL {
                let cell = match run.answer(&haystack, precision) {
                    Ok((found, same)) => {
                        format!("{:.1e} ({:.1e})", error(&found, &same), error(&found, &original))
                    }
                    Err(error) => first_words(&error),
                };
                cells.push(cell);
            }
            println!("| {length} | {contents:?} | {} |", cells.join(" | "));
        }
    }
    println!("\nNeedles found of {}:\n", HEADS * QUERIES);
    println!("| keys | its weight | {} |", Precision::ALL.map(Precision::name).join(" | "));
    println!("| --- | --- |{}", " --- |".repeat(Precision::ALL.len()));
    let searches = lengths.iter().flat_map(|length| NEEDLES.map(|weight| (*length, weight)));
    for (length, weight) in searches {
        let (haystack, codes) = needles(length, weight)?;
        let mut cells = Vec::new();
        for precision in Precision::ALL {
            cells.push(match run.found(&haystack, precision) {
                Ok(found) => count(&found, &codes).to_string(),
                Err(error) => first_words(&error),
            });
        }
        println!("| {length} | {weight} | {} |", cells.join(" | "));
    }
    Ok(())
}

/// What tensors are made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Precision {
    /// All of them in bf16.
    Bf16,
    /// All of them in e4m3, factors of heads.
    E4m3,
    /// Keys and values in an 8-bit type, queries in bf16.
    Cache(DType, Granularity),
}

impl Precision {
    const ALL: [Precision; 6] = [
        Precision::Bf16,
        Precision::E4m3,
        Precision::Cache(DType::E4M3, Granularity::SequenceHead),
        Precision::Cache(DType::E4M3, Granularity::Token),
        Precision::Cache(DType::E5M2, Granularity::SequenceHead),
        Precision::Cache(DType::Int8, Granularity::Token),
    ];

    fn name(self) -> String {
        match self {
            Precision::Bf16 => "bf16".to_owned(),
            Precision::E4m3 => "all e4m3".to_owned(),
            Precision::Cache(dtype, Granularity::Token) => format!("{dtype} cache, per token"),
            Precision::Cache(dtype, _) => format!("{dtype} cache"),
        }
    }
}

/// Queries, keys and values before they are rounded.
struct Haystack {
    query: Tensor,
    key: Tensor,
    value: Tensor,
}

/// How attention is distributed.
#[derive(Clone, Copy, Debug)]
enum Contents {
    /// Standard normal queries and keys; every column of the values has a mean of a half.
    Even,
    /// Queries four times as long: few keys have most of the weight.
    Peaked,
    /// The same as even, with one number in 97 of keys and values 50 times as large.
    Outliers,
}

impl Contents {
    fn tensors(self, length: usize) -> Result<Haystack, Error> {
        let stretch = if matches!(self, Contents::Peaked) { 4.0 } else { 1.0 };
        let large = |index: u64| match self {
            Contents::Outliers if index.is_multiple_of(97) => 50.0,
            _ => 1.0,
        };
        let tensor = |length: usize, number: &dyn Fn(u64) -> f32| {
            let at =
                |[_, position, _, element]: [usize; 4]| number((position * DIM + element) as u64);
            Tensor::from_fn(DType::F32, Shape::new(1, length, 1, DIM), at)
        };
        Ok(Haystack {
            query: tensor(QUERIES, &|at| stretch * normal(1, at))?,
            key: tensor(length, &|at| large(at) * normal(2, at))?,
            value: tensor(length, &|at| 0.5 + large(at + 13) * normal(3, at))?,
        })
    }
}

struct Run {
    machine: Machine,
    preference: Preference,
}

/// Tensors of a call, with what holds their factors.
struct Given {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    descales: Descales<Option<Tensor>>,
}

impl Given {
    fn new(haystack: &Haystack, precision: Precision) -> Result<Self, Error> {
        let bf16 =
            |tensor: &Tensor| Tensor::from_f32(DType::BF16, tensor.shape(), &tensor.to_f32());
        let Haystack { query, key, value } = haystack;
        let heads = Granularity::SequenceHead;
        let (dtype, granularity) = match precision {
            Precision::Bf16 => {
                let (query, key, value) = (bf16(query)?, bf16(key)?, bf16(value)?);
                return Ok(Given { query, key, value, descales: Descales::default() });
            }
            Precision::E4m3 => (DType::E4M3, heads),
            Precision::Cache(dtype, granularity) => (dtype, granularity),
        };
        let [key, value] = [key, value].map(|it| quantize(it, dtype, granularity));
        let (Quantized { tensor: key, descale: of_key }, value) = (key?, value?);
        let (query, of_query) = match precision {
            Precision::E4m3 => {
                let Quantized { tensor, descale } = quantize(query, dtype, heads)?;
                (tensor, Some(descale))
            }
            _ => (bf16(query)?, None),
        };
        let descales = Descales { query: of_query, key: Some(of_key), value: Some(value.descale) };
        Ok(Given { query, key, value: value.tensor, descales })
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs::new(&self.query, &self.key, &self.value)
            .with_descales(self.descales.each_ref().map(Option::as_ref))
    }
}

impl Run {
    /// What comes out.
    fn found(&self, haystack: &Haystack, precision: Precision) -> Result<Vec<f32>, Error> {
        let given = Given::new(haystack, precision)?;
        let problem = given.inputs().problem()?;
        let result = self.machine.attend(&problem, given.inputs(), &self.preference, None)?;
        Ok(result.output.to_f32())
    }

    /// The same, and what f64 makes of the same numbers.
    fn answer(
        &self,
        haystack: &Haystack,
        precision: Precision,
    ) -> Result<(Vec<f32>, Vec<f64>), Error> {
        let found = self.found(haystack, precision)?;
        let given = Given::new(haystack, precision)?;
        let problem = given.inputs().problem()?;
        let exact = reference::attention(&problem, given.inputs(), &Rows::all(&problem), None)?;
        Ok((found, exact.output))
    }
}

/// What f64 makes of the numbers before they are rounded.
fn exact(haystack: &Haystack) -> Result<Vec<f64>, Error> {
    let inputs = Inputs::new(&haystack.query, &haystack.key, &haystack.value);
    let problem = inputs.problem()?;
    Ok(reference::attention(&problem, inputs, &Rows::all(&problem), None)?.output)
}

/// The root mean square of an error over that of the answer. One head: outputs are in the order of
/// rows.
fn error(found: &[f32], exact: &[f64]) -> f64 {
    let square = |sum: f64, number: f64| sum + number * number;
    let wrong = found.iter().zip(exact).map(|(found, exact)| f64::from(*found) - exact);
    (wrong.fold(0.0, square) / exact.iter().copied().fold(0.0, square)).sqrt()
}

/// A key of many that each query looks for, with a code of ones and minus ones on top of what every
/// value has. The query is a multiple of its key, as large as the needle's share of the weight asks.
fn needles(length: usize, weight: f64) -> Result<(Haystack, Vec<Vec<f32>>), Error> {
    // In the crowd, products with a query of c times a random key have a variance of c^2.
    let share = (weight / (1.0 - weight)).ln() + (length as f64).ln();
    let root = (DIM as f64).sqrt();
    let c = (root - (root * root - 2.0 * share).sqrt()) as f32;
    let shape = |length| Shape::new(1, length, HEADS, DIM);
    let index = |at: [usize; 4]| ((at[1] * HEADS + at[2]) * DIM + at[3]) as u64;
    // Far apart, and in an order of their own.
    let place = |query: usize| (query * 37 % QUERIES) * (length / QUERIES) + query % 3;
    let key = Tensor::from_fn(DType::F32, shape(length), |at| normal(5, index(at)))?;
    let codes: Vec<Vec<f32>> = (0..HEADS * QUERIES)
        .map(|code| (0..DIM).map(|at| normal(6, (code * DIM + at) as u64).signum()).collect())
        .collect();
    let mut value = Tensor::from_fn(DType::F32, shape(length), |at| 0.5 + normal(7, index(at)))?;
    let mut query = Tensor::zeros(DType::F32, shape(QUERIES))?;
    for head in 0..HEADS {
        for asked in 0..QUERIES {
            let found = key.head(0, head).row(place(asked));
            // Keys differ in length: the score is to be the one that was asked for.
            let square: f32 = found.iter().map(|it| it * it).sum();
            let scaled: Vec<f32> = found.iter().map(|it| it * c * DIM as f32 / square).collect();
            query.set_row([0, asked, head], &scaled);
            let code: Vec<f32> = codes[head * QUERIES + asked].iter().map(|it| 0.5 + it).collect();
            value.set_row([0, place(asked), head], &code);
        }
    }
    Ok((Haystack { query, key, value }, codes))
}

/// The needles whose code is nearer to the answer of its query than all other codes.
fn count(found: &[f32], codes: &[Vec<f32>]) -> usize {
    let nearest = |head: usize, query: usize| {
        let row = &found[(query * HEADS + head) * DIM..][..DIM];
        let mean = row.iter().sum::<f32>() / DIM as f32;
        let likeness =
            |code: &Vec<f32>| row.iter().zip(code).map(|(a, b)| (a - mean) * b).sum::<f32>();
        let own = likeness(&codes[head * QUERIES + query]);
        codes.iter().all(|code| likeness(code) <= own)
    };
    let all = (0..HEADS).flat_map(|head| (0..QUERIES).map(move |query| (head, query)));
    all.filter(|(head, query)| nearest(*head, *query)).count()
}

fn first_words(error: &Error) -> String {
    format!("not served: {}", error.to_string().split([';', '(']).next().unwrap_or_default().trim())
}
