//! A small Llama with random weights, with candle's attention and with FlashCore's: the logits of
//! both are as near to those in f32.
//!
//! ```sh
//! cargo run --manifest-path examples/llama/Cargo.toml
//! cargo run --manifest-path examples/llama/Cargo.toml --features cuda
//! ```
//!
//! The model of candle-transformers calls `candle_flash_attn::flash_attn` when it is built for a GPU
//! and told to, and `examples/Cargo.toml` puts FlashCore in that crate's place: the second command compares
//! the untouched model with itself. Without a GPU that call is not compiled in, so the first command
//! compares it with the model in `swapped.rs`, which reads the same weights and differs in one line.

mod swapped;

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama::{Cache, Config, Llama};

use swapped::Swapped;

/// Tokens before the first answer, and answers.
const PROMPT: usize = 61;
const ANSWERS: usize = 8;

/// How much farther from the logits in f32 the swapped attention may be than candle's own, which
/// differs from it in the order of its sums and in what it rounds.
const BOUND: f64 = 1.2;
/// Where everything is in f32 and candle's own attention has no error.
const SMALLEST: f64 = 1e-5;

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    // On a GPU the tensor cores are to be seen, and everything between two layers is rounded.
    let types = match device.is_cuda() {
        true => vec![DType::BF16, DType::F16],
        false => vec![DType::F32],
    };
    let weights = weights(&config())?;
    types.into_iter().try_for_each(|dtype| check(&weights, dtype, &device))
}

/// Compares the logits with candle's attention and with FlashCore's in one type, by how far they
/// are from those in f32 over the same weights.
fn check(weights: &HashMap<String, Tensor>, dtype: DType, device: &Device) -> Result<()> {
    let round = |(name, weight): (&String, &Tensor)| Ok((name.clone(), weight.to_dtype(dtype)?));
    let rounded = weights.iter().map(round).collect::<Result<HashMap<_, _>>>()?;
    let weights = |dtype| VarBuilder::from_tensors(rounded.clone(), dtype, device);
    let untouched = |dtype, config: &Config| {
        let model = Llama::load(weights(dtype), config)?;
        let mut cache = Cache::new(true, dtype, config, device)?;
        logits(device, |tokens, position| model.forward(tokens, position, &mut cache))
    };
    let config = config();
    let expected = untouched(DType::F32, &config)?;
    let own = error(&untouched(dtype, &config)?, &expected)?;
    let judge = |what: &str, found: Tensor| {
        let error = error(&found, &expected)?;
        println!("{dtype:?}, {what}: off by {error:.1e} of the logits' spread, candle {own:.1e}");
        let bound = BOUND * own + SMALLEST;
        if error.is_nan() || error > bound {
            candle_core::bail!("{dtype:?}, {what}: that is more than {bound:.1e}");
        }
        Ok(())
    };

    let mut model = Swapped::load(weights(dtype), &config)?;
    let found = logits(device, |tokens, position| model.forward(tokens, position))?;
    judge("attention swapped", found)?;
    if cfg!(feature = "cuda") {
        let config = Config { use_flash_attn: true, ..config };
        judge("told to use flash attention", untouched(dtype, &config)?)?;
    }
    Ok(())
}

/// Random weights. They are drawn on the CPU, since candle draws no half precision on a GPU.
fn weights(config: &Config) -> Result<HashMap<String, Tensor>> {
    let drawn = VarMap::new();
    Llama::load(VarBuilder::from_varmap(&drawn, DType::F32, &Device::Cpu), config)?;
    let drawn = drawn.data().lock().expect("no thread panicked");
    Ok(drawn.iter().map(|(name, weight)| (name.clone(), weight.as_detached_tensor())).collect())
}

/// Four query heads for each key/value head, as in Llama 3.
fn config() -> Config {
    Config {
        hidden_size: 512,
        intermediate_size: 1024,
        vocab_size: 1000,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 128,
        tie_word_embeddings: false,
    }
}

/// The logits after a prompt and after each of the tokens that follow it one by one.
fn logits(
    device: &Device,
    mut forward: impl FnMut(&Tensor, usize) -> Result<Tensor>,
) -> Result<Tensor> {
    let tokens: Vec<u32> = (0..(PROMPT + ANSWERS) as u32).map(|i| i * 7919 % 1000).collect();
    let (prompt, answers) = tokens.split_at(PROMPT);
    let mut logits = vec![forward(&Tensor::new(prompt, device)?.unsqueeze(0)?, 0)?];
    for (token, position) in answers.iter().zip(PROMPT..) {
        let token = Tensor::new(&[*token], device)?.unsqueeze(0)?;
        logits.push(forward(&token, position)?);
    }
    Tensor::stack(&logits, 0)?.to_dtype(DType::F32)
}

/// The root mean square of the differences, in units of the expected logits' standard deviation.
fn error(found: &Tensor, expected: &Tensor) -> Result<f64> {
    let spread = expected.flatten_all()?.var(0)?.to_scalar::<f32>()?;
    let square = (found - expected)?.sqr()?.mean_all()?.to_scalar::<f32>()?;
    Ok(f64::from(square / spread).sqrt())
}
