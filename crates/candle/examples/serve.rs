//! The attention layer of a Llama in an inference engine: prompts of unequal lengths in one call, then one
//! token of each at a time, over a paged cache. What it answers is compared with attention over each whole
//! sequence by candle's own operations.
//!
//! ```sh
//! cargo run --release -p flashcore-candle --example serve
//! ```

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::rotary_emb::rope_thd;
use flashcore_candle::{Mask, Options, Placement, Rotary, Sequences, append, attend_sequences};

const HEADS: usize = 8;
const KEY_HEADS: usize = 2;
const DIM: usize = 64;
const WIDTH: usize = HEADS * DIM;
/// Positions of a page, and pages of a sequence.
const PAGE: usize = 16;
const COLUMNS: usize = 4;

const PROMPTS: [usize; 3] = [5, 40, 17];
const ANSWERS: usize = 4;

/// The weights, and the angles of all positions.
struct Layer {
    /// Queries, keys and values in one product: (width, heads of all three times head dim).
    before: Tensor,
    after: Tensor,
    rotary: Rotary,
}

/// The pages of all sequences: (pages, page size, key heads, head dim).
struct Cache {
    key: Tensor,
    value: Tensor,
    table: Tensor,
}

impl Layer {
    fn random(device: &Device) -> Result<Layer> {
        let pairs = DIM / 2;
        let frequencies = (0..pairs).map(|pair| 1e4f32.powf(-(pair as f32) / pairs as f32));
        let frequencies = Tensor::from_iter(frequencies, device)?.reshape((1, pairs))?;
        let positions = Tensor::arange(0f32, (PAGE * COLUMNS) as f32, device)?.unsqueeze(1)?;
        let angles = positions.matmul(&frequencies)?;
        let heads = HEADS + 2 * KEY_HEADS;
        Ok(Layer {
            before: Tensor::randn(0f32, 0.05, (WIDTH, heads * DIM), device)?,
            after: Tensor::randn(0f32, 0.05, (WIDTH, WIDTH), device)?,
            rotary: Rotary { cosines: angles.cos()?, sines: angles.sin()?, interleaved: false },
        })
    }

    /// Queries, keys and values of rows, (rows, heads, head dim) each.
    fn project(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let heads = x.matmul(&self.before)?.reshape((x.dim(0)?, HEADS + 2 * KEY_HEADS, DIM))?;
        Ok([
            heads.narrow(1, 0, HEADS)?,
            heads.narrow(1, HEADS, KEY_HEADS)?,
            heads.narrow(1, HEADS + KEY_HEADS, KEY_HEADS)?,
        ])
    }

    /// Rotates rows by the angles of their positions.
    fn rotate(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let [cosines, sines] =
            [&self.rotary.cosines, &self.rotary.sines].map(|it| it.index_select(positions, 0));
        rope_thd(&x.contiguous()?.unsqueeze(0)?, &cosines?, &sines?)?.squeeze(0)
    }

    /// The layer over new rows of all sequences, one sequence after the other: whole prompts, parts of
    /// them, single tokens, or some of each. `new` is how many rows each sequence has, `lengths` how
    /// many it had before.
    fn serve(&self, x: &Tensor, cache: &Cache, new: &[usize], lengths: &[u32]) -> Result<Tensor> {
        let device = x.device();
        let (mut starts, mut positions) = (vec![0], Vec::new());
        for (&rows, &length) in new.iter().zip(lengths) {
            positions.extend(length..length + rows as u32);
            starts.push(positions.len() as u32);
        }
        let longest = new.iter().copied().max().unwrap_or(0);
        let rows = Placement::packed(&Tensor::new(starts, device)?, longest);
        let lengths = Tensor::new(lengths, device)?;

        // Keys are rotated on the way into the cache, whose new lengths are returned.
        let [query, key, value] = self.project(x)?;
        let query = self.rotate(&query, &Tensor::new(positions, device)?)?;
        let place = Placement::paged(&lengths, &cache.table);
        let caches = (&cache.key, &cache.value);
        let lengths = append(caches, &place, (&key, &value), &rows, Some(&self.rotary))?;

        let keys = Placement::paged(&lengths, &cache.table);
        let sequences = Sequences { queries: rows, keys };
        let options = Options { mask: Mask::CAUSAL, ..Options::default() };
        let attention = attend_sequences(&query, &cache.key, &cache.value, &sequences, &options)?;
        attention.output.flatten_from(D::Minus2)?.matmul(&self.after)
    }

    /// The layer over one whole sequence, without a cache and by candle alone.
    fn plain(&self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let positions = Tensor::arange(0, rows as u32, x.device())?;
        let [query, key, value] = self.project(x)?;
        let heads_first = |x: Tensor| x.transpose(0, 1)?.contiguous();
        // Query heads that share a key head are a dimension of their own.
        let query = heads_first(self.rotate(&query, &positions)?)?;
        let query = query.reshape((KEY_HEADS, HEADS / KEY_HEADS, rows, DIM))?;
        let key = heads_first(self.rotate(&key, &positions)?)?.unsqueeze(1)?;
        let value = heads_first(value)?.unsqueeze(1)?;
        let scores = (query.broadcast_matmul(&key.t()?)? / (DIM as f64).sqrt())?;
        let unseen = (0..rows * rows).map(|at| at % rows > at / rows);
        let unseen = unseen.map(|it| if it { f32::NEG_INFINITY } else { 0.0 });
        let unseen = Tensor::from_iter(unseen, x.device())?.reshape((rows, rows))?;
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(&unseen)?, D::Minus1)?;
        let output = weights.broadcast_matmul(&value)?.reshape((HEADS, rows, DIM))?;
        output.transpose(0, 1)?.flatten_from(1)?.matmul(&self.after)
    }
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let layer = Layer::random(&device)?;
    let count = PROMPTS.len();
    let pages = (count * COLUMNS, PAGE, KEY_HEADS, DIM);
    // An engine hands out pages as sequences grow; here each has all of its own.
    let table = Tensor::from_iter((0..pages.0 as u32).rev(), &device)?;
    let cache = Cache {
        key: Tensor::zeros(pages, DType::F32, &device)?,
        value: Tensor::zeros(pages, DType::F32, &device)?,
        table: table.reshape((count, COLUMNS))?,
    };
    let random = |prompt: &usize| Tensor::randn(0f32, 1., (prompt + ANSWERS, WIDTH), &device);
    let tokens: Vec<Tensor> = PROMPTS.iter().map(random).collect::<Result<_>>()?;

    let mut lengths = [0; PROMPTS.len()];
    let mut answers = vec![Vec::new(); count];
    for step in 0..=ANSWERS {
        let new = if step == 0 { PROMPTS } else { [1; PROMPTS.len()] };
        let rows = |at: usize| tokens[at].narrow(0, lengths[at] as usize, new[at]);
        let x = Tensor::cat(&(0..count).map(rows).collect::<Result<Vec<_>>>()?, 0)?;
        let output = layer.serve(&x, &cache, &new, &lengths)?;
        let mut from = 0;
        for at in 0..count {
            answers[at].push(output.narrow(0, from, new[at])?);
            from += new[at];
            lengths[at] += new[at] as u32;
        }
    }
    for (answer, tokens) in answers.iter().zip(&tokens) {
        let expected = layer.plain(tokens)?;
        let apart = (Tensor::cat(answer, 0)? - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        println!("{} positions: off by {apart:.1e} at most", expected.dim(0)?);
        if apart.is_nan() || apart > 1e-4 {
            candle_core::bail!("the cached layer is not the one without a cache");
        }
    }
    Ok(())
}

#[test]
fn the_cached_layer_is_that_without_a_cache() -> Result<()> {
    main()
}
