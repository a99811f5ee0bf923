//! A small Llama with random weights, with candle's attention and with FlashCore's: the same logits.
//!
//! ```sh
//! cargo run --manifest-path examples/llama/Cargo.toml
//! cargo run --manifest-path examples/llama/Cargo.toml --features cuda
//! ```
//!
//! The model of candle-transformers calls `candle_flash_attn::flash_attn` when it is built for a GPU
//! and told to, and `Cargo.toml` puts FlashCore in that crate's place: the second command compares
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

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    // On a GPU the tensor cores are to be seen, and everything between two layers is rounded.
    let types = match device.is_cuda() {
        true => vec![(DType::BF16, 5e-2), (DType::F16, 1e-2)],
        false => vec![(DType::F32, 1e-4)],
    };
    let weights = weights(&config())?;
    for (dtype, bound) in types {
        let builder = VarBuilder::from_tensors(weights.clone(), dtype, &device);
        check(builder, bound)?;
    }
    Ok(())
}

/// The logits with candle's attention and with FlashCore's, in the type of the weights.
fn check(weights: VarBuilder, bound: f64) -> Result<()> {
    let (dtype, device) = (weights.dtype(), weights.device());
    let untouched = |config: &Config| {
        let model = Llama::load(weights.clone(), config)?;
        let mut cache = Cache::new(true, dtype, config, device)?;
        logits(device, |tokens, position| model.forward(tokens, position, &mut cache))
    };
    let config = config();
    let expected = untouched(&config)?;

    let mut model = Swapped::load(weights.clone(), &config)?;
    let found = logits(device, |tokens, position| model.forward(tokens, position))?;
    compare(&format!("{dtype:?}, attention swapped"), &found, &expected, bound)?;
    if cfg!(feature = "cuda") {
        let found = untouched(&Config { use_flash_attn: true, ..config })?;
        compare(&format!("{dtype:?}, told to use flash attention"), &found, &expected, bound)?;
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
) -> Result<Vec<Tensor>> {
    let tokens: Vec<u32> = (0..(PROMPT + ANSWERS) as u32).map(|i| i * 7919 % 1000).collect();
    let (prompt, answers) = tokens.split_at(PROMPT);
    let mut logits = vec![forward(&Tensor::new(prompt, device)?.unsqueeze(0)?, 0)?];
    for (token, position) in answers.iter().zip(PROMPT..) {
        let token = Tensor::new(&[*token], device)?.unsqueeze(0)?;
        logits.push(forward(&token, position)?);
    }
    Ok(logits)
}

/// An error if logits differ by more than a bound, in units of their standard deviation.
fn compare(what: &str, found: &[Tensor], expected: &[Tensor], bound: f64) -> Result<()> {
    let (found, expected) = (Tensor::stack(found, 0)?, Tensor::stack(expected, 0)?);
    let spread = f64::from(expected.flatten_all()?.var(0)?.to_scalar::<f32>()?).sqrt();
    let error = (found - expected)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    let error = f64::from(error) / spread;
    println!("{what}: logits differ by {error:.1e} of their spread at most");
    if error.is_nan() || error > bound {
        candle_core::bail!("{what}: that is more than {bound:.0e}");
    }
    Ok(())
}
