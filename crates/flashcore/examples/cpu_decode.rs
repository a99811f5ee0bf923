//! What the CPU back end reaches with one query for each sequence, beside reading the same bytes.
//!
//! ```sh
//! cargo run --release -p flashcore --example cpu_decode
//! cargo run --release -p flashcore --example cpu_decode -- 8192 bf16   # keys, element type
//! ```

use std::hint::black_box;
use std::time::Instant;

use flashcore::serving::{Pages, Placement, Sequences};
use flashcore::{
    Backend, CpuBackend, DType, Error, Inputs, Layout, Mask, Problem, RunOptions, Shape, Tensor,
};
use rayon::prelude::*;

/// Rounds over everything. The best of each counts: whatever else the machine does can only make a
/// run slower.
const ROUNDS: usize = 10;

/// Positions of a page.
const PAGE: usize = 64;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let keys = arguments.next().and_then(|keys| keys.parse().ok()).unwrap_or(32_768);
    let only = arguments.next();
    println!("{}; one query, {keys} keys, head dim 128", CpuBackend::new().describe());
    println!("type  heads  cache       ms   GB/s  of reading");
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::E4M3] {
        if only.as_ref().is_some_and(|only| *only != dtype.to_string()) {
            continue;
        }
        for (heads, kv_heads) in [(32, 8), (32, 32), (64, 8)] {
            measure(dtype, heads, kv_heads, keys)?;
        }
    }
    Ok(())
}

/// Measures a contiguous cache, and the same one in pages of which neighbours lie apart.
fn measure(dtype: DType, heads: usize, kv_heads: usize, keys: usize) -> Result<(), Error> {
    let wide = if dtype.bytes() == 1 { DType::BF16 } else { dtype };
    let keys = keys.next_multiple_of(PAGE);
    let problem = Problem::new(1, heads, 1, 128)
        .with_kv_heads(kv_heads)
        .with_key_length(keys)
        .with_dtype(wide)
        .with_kv_dtype(dtype)
        .with_mask(Mask::CAUSAL);
    let query = Tensor::random(wide, Shape::new(1, 1, heads, 128), 0)?;
    let cache = |seed| Tensor::random(dtype, Shape::new(1, keys, kv_heads, 128), seed);
    let (key, value) = (cache(1)?, cache(2)?);
    let contiguous = Inputs::new(&query, &key, &value);

    let pages = keys / PAGE;
    let in_pages = Layout::contiguous(Shape::new(pages, PAGE, kv_heads, 128))?;
    let paged = |tensor: &Tensor| Tensor::from_bytes(dtype, in_pages, tensor.bytes());
    let (paged_key, paged_value) = (paged(&key)?, paged(&value)?);
    let table = (0..pages).map(|page| (page / 2 + page % 2 * pages.div_ceil(2)) as u32).collect();
    let sequences = Sequences::new(
        problem.clone(),
        Placement::padded(vec![1]),
        Placement::paged(vec![keys], Pages::new(PAGE, pages, table)?),
    )?;
    let (paged_problem, paged) = sequences.over(Inputs::new(&query, &paged_key, &paged_value))?;

    let (backend, options) = (CpuBackend::new(), RunOptions::default());
    let time = |work: &dyn Fn() -> Result<(), Error>| -> Result<f64, Error> {
        let begin = Instant::now();
        work()?;
        Ok(begin.elapsed().as_secs_f64())
    };
    let mut best = [f64::INFINITY; 3];
    for _ in 0..ROUNDS {
        let rounds: [&dyn Fn() -> Result<(), Error>; 3] = [
            &|| {
                black_box(sum(key.bytes()).wrapping_add(sum(value.bytes())));
                Ok(())
            },
            &|| backend.run(&problem, contiguous, &options).map(|it| drop(black_box(it))),
            &|| backend.run(&paged_problem, paged, &options).map(|it| drop(black_box(it))),
        ];
        for (best, work) in best.iter_mut().zip(rounds) {
            *best = best.min(time(work)?);
        }
    }
    let bytes = (key.bytes().len() + value.bytes().len()) as f64;
    for (cache, seconds) in [("contiguous", best[1]), ("paged", best[2])] {
        let (milliseconds, rate) = (seconds * 1e3, bytes / seconds / 1e9);
        let share = best[0] / seconds;
        println!(
            "{dtype:5} {heads:2}/{kv_heads:2}  {cache:10} {milliseconds:7.2} {rate:6.1} {share:11.2}"
        );
    }
    Ok(())
}

/// Reads bytes and does next to nothing with them, on all threads.
fn sum(bytes: &[u8]) -> u64 {
    let words = |bytes: &[u8]| {
        let words = bytes.as_chunks::<8>().0.iter();
        words.fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
    };
    bytes.par_chunks(1 << 18).map(words).reduce(|| 0, u64::wrapping_add)
}
