//! Trains a small transformer twice from the same weights, on text that is generated here: once with
//! candle's own operations for attention, once with FlashCore's. The losses are the same, step by
//! step, and fall.
//!
//! ```sh
//! cargo run --release -p flashcore-candle --example train                   # on the CPU, f32
//! cargo run --release -p flashcore-candle --example train --features cuda   # on a GPU, attention in bf16
//! ```

use std::time::Instant;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{
    AdamW, Embedding, LayerNorm, Linear, Module, Optimizer, VarBuilder, VarMap, embedding,
    layer_norm_no_bias, linear, loss, ops,
};
use flashcore_candle::flash_attn;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const WIDTH: usize = 64;
const HEAD_DIM: usize = WIDTH / HEADS;

/// Characters that a prediction sees.
const LENGTH: usize = 64;
const BATCH: usize = 4;

/// Bytes are the tokens; the text is ASCII.
const TOKENS: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Attention {
    Candle,
    FlashCore,
}

impl Attention {
    /// Causal attention over (batch, length, heads, dim).
    fn of(self, [query, key, value]: [&Tensor; 3]) -> Result<Tensor> {
        let scale = 1. / (HEAD_DIM as f64).sqrt();
        if self == Attention::FlashCore {
            // The kernels for gradients on a GPU take 16-bit floats.
            let dtype = if query.device().is_cuda() { DType::BF16 } else { query.dtype() };
            let [query, key, value] = [query, key, value].map(|tensor| tensor.to_dtype(dtype));
            return flash_attn(&query?, &key?, &value?, scale as f32, true)?.to_dtype(DType::F32);
        }
        let [query, key, value] =
            [query, key, value].map(|tensor| tensor.transpose(1, 2)?.contiguous());
        let (query, key, value) = (query?, key?, value?);
        let scores = (query.matmul(&key.t()?.contiguous()?)? * scale)?;
        let length = query.dim(2)?;
        let hidden: Vec<f32> = (0..length * length)
            .map(|place| if place % length > place / length { f32::NEG_INFINITY } else { 0. })
            .collect();
        let hidden = Tensor::from_vec(hidden, (length, length), query.device())?;
        let weights = ops::softmax(&scores.broadcast_add(&hidden)?, D::Minus1)?;
        weights.matmul(&value)?.transpose(1, 2)
    }
}

/// Attention and two linear layers, each with a norm before it and added to what came in.
struct Layer {
    norms: [LayerNorm; 2],
    inward: Linear,
    outward: Linear,
    wider: Linear,
    narrower: Linear,
}

impl Layer {
    fn new(variables: VarBuilder<'_>) -> Result<Self> {
        let norm = |name: &str| layer_norm_no_bias(WIDTH, 1e-5, variables.pp(name));
        Ok(Layer {
            norms: [norm("norm.0")?, norm("norm.1")?],
            inward: linear(WIDTH, 3 * WIDTH, variables.pp("inward"))?,
            outward: linear(WIDTH, WIDTH, variables.pp("outward"))?,
            wider: linear(WIDTH, 4 * WIDTH, variables.pp("wider"))?,
            narrower: linear(4 * WIDTH, WIDTH, variables.pp("narrower"))?,
        })
    }

    fn forward(&self, input: &Tensor, attention: Attention) -> Result<Tensor> {
        let (batch, length, _) = input.dims3()?;
        let fused = self.inward.forward(&self.norms[0].forward(input)?)?;
        let fused = fused.reshape((batch, length, 3, HEADS, HEAD_DIM))?;
        let [query, key, value] = [0, 1, 2].map(|index| fused.narrow(2, index, 1)?.squeeze(2));
        let attended = attention.of([&query?, &key?, &value?])?;
        let attended = attended.reshape((batch, length, WIDTH))?;
        let input = (input + self.outward.forward(&attended)?)?;
        let wide = self.wider.forward(&self.norms[1].forward(&input)?)?.gelu()?;
        input + self.narrower.forward(&wide)?
    }
}

struct Model {
    tokens: Embedding,
    positions: Embedding,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Linear,
}

impl Model {
    fn new(variables: VarBuilder<'_>) -> Result<Self> {
        let layer = |index: usize| Layer::new(variables.pp(format!("layer.{index}")));
        Ok(Model {
            tokens: embedding(TOKENS, WIDTH, variables.pp("tokens"))?,
            positions: embedding(LENGTH, WIDTH, variables.pp("positions"))?,
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
            norm: layer_norm_no_bias(WIDTH, 1e-5, variables.pp("norm"))?,
            head: linear(WIDTH, TOKENS, variables.pp("head"))?,
        })
    }

    /// The mean cross-entropy of the next tokens.
    fn loss(&self, text: &Tensor, attention: Attention) -> Result<Tensor> {
        let tokens = text.narrow(1, 0, LENGTH)?.contiguous()?;
        let positions = Tensor::arange(0, LENGTH as u32, text.device())?;
        let positions = self.positions.forward(&positions)?;
        let mut state = self.tokens.forward(&tokens)?.broadcast_add(&positions)?;
        for layer in &self.layers {
            state = layer.forward(&state, attention)?;
        }
        let logits = self.head.forward(&self.norm.forward(&state)?)?.flatten_to(1)?;
        loss::cross_entropy(&logits, &text.narrow(1, 1, LENGTH)?.flatten_all()?)
    }
}

/// Sentences in which what comes last follows from what came first.
struct Text(u64);

impl Text {
    fn word<'a>(&mut self, words: &[&'a str]) -> &'a str {
        // Constants of Knuth's generator; its high bits are the good ones.
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        words[(self.0 >> 33) as usize % words.len()]
    }

    fn sentence(&mut self) -> String {
        let who = self.word(&["anna", "bert", "clara", "david", "emma"]);
        let verb = self.word(&["takes", "sees", "finds", "paints"]);
        let what = self.word(&["the red ball", "a blue boat", "the old house", "a green tree"]);
        let place = self.word(&["at home", "by the sea", "in town"]);
        format!("{who} {verb} {what} {place}, and {what} is what {who} {verb}. ")
    }

    /// (batch, length + 1) tokens.
    fn batch(&mut self, device: &Device) -> Result<Tensor> {
        let mut tokens = Vec::with_capacity(BATCH * (LENGTH + 1));
        for _ in 0..BATCH {
            let mut text = self.sentence();
            while text.len() <= LENGTH {
                text += &self.sentence();
            }
            tokens.extend(text.bytes().take(LENGTH + 1).map(u32::from));
        }
        Tensor::from_vec(tokens, (BATCH, LENGTH + 1), device)
    }
}

/// The losses of so many steps with each attention, from the same weights over the same text.
fn train(device: &Device, steps: usize) -> Result<[Vec<f32>; 2]> {
    let weights = VarMap::new();
    Model::new(VarBuilder::from_varmap(&weights, DType::F32, device))?;
    let run = |attention: Attention| {
        let variables = VarMap::new();
        let model = Model::new(VarBuilder::from_varmap(&variables, DType::F32, device))?;
        for (name, variable) in variables.data().lock().expect("no thread failed").iter() {
            let weights = weights.data().lock().expect("no thread failed");
            variable.set(weights[name].as_tensor())?;
        }
        let mut optimizer = AdamW::new_lr(variables.all_vars(), 1e-3)?;
        let mut text = Text(1);
        let mut losses = Vec::with_capacity(steps);
        let begun = Instant::now();
        for _ in 0..steps {
            let loss = model.loss(&text.batch(device)?, attention)?;
            optimizer.backward_step(&loss)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        println!("{attention:?}: {steps} steps in {:.1} s", begun.elapsed().as_secs_f64());
        Ok::<_, candle_core::Error>(losses)
    };
    Ok([run(Attention::Candle)?, run(Attention::FlashCore)?])
}

/// The largest difference between two curves.
fn apart([one, other]: &[Vec<f32>; 2]) -> f32 {
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0., f32::max)
}

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let steps = 400;
    let losses = train(&device, steps)?;
    println!("\nstep   candle  FlashCore");
    for step in (0..steps).filter(|step| step % 40 == 0 || step + 1 == steps) {
        println!("{step:4}  {:7.4}    {:7.4}", losses[0][step], losses[1][step]);
    }
    println!("\nthe losses differ by {:.1e} at most", apart(&losses));
    Ok(())
}

#[test]
fn both_learn_the_same() -> Result<()> {
    let losses = train(&Device::Cpu, 12)?;
    assert!(apart(&losses) < 1e-3, "{losses:?}");
    for losses in &losses {
        assert!(losses[11] < 0.8 * losses[0], "{losses:?}");
    }
    Ok(())
}
