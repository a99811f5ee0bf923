//! Llama over the weights of candle-transformers' model, with FlashCore's attention.

use candle_core::{D, IndexOp, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder, linear_no_bias, rms_norm};
use candle_transformers::models::llama::Config;
use flashcore_candle::{Mask, Options, attend};

pub struct Swapped {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    feed_forward_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Cosines and sines of the rotation at each position.
    rotation: [Tensor; 2],
    /// Keys and values so far, (batch, length, heads, dim).
    cache: Option<[Tensor; 2]>,
}

impl Swapped {
    pub fn load(weights: VarBuilder, config: &Config) -> Result<Self> {
        let model = weights.pp("model");
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let layers = (0..config.num_hidden_layers).map(|layer| model.pp("layers").pp(layer));
        Ok(Swapped {
            embedding: candle_nn::embedding(vocabulary, hidden, model.pp("embed_tokens"))?,
            blocks: layers.map(|layer| Block::load(layer, config)).collect::<Result<_>>()?,
            norm: rms_norm(hidden, config.rms_norm_eps, model.pp("norm"))?,
            head: linear_no_bias(hidden, vocabulary, weights.pp("lm_head"))?,
        })
    }

    /// The logits after the last of these tokens, which stand at `position` and after.
    pub fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
        let mut hidden = self.embedding.forward(tokens)?;
        for block in &mut self.blocks {
            hidden = block.forward(&hidden, position)?;
        }
        let last = hidden.i((.., hidden.dim(1)? - 1, ..))?.contiguous()?;
        self.head.forward(&self.norm.forward(&last)?)?.to_dtype(candle_core::DType::F32)
    }
}

impl Block {
    fn load(weights: VarBuilder, config: &Config) -> Result<Self> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let norm = |name| rms_norm(hidden, config.rms_norm_eps, weights.pp(name));
        let mlp = weights.pp("mlp");
        Ok(Block {
            attention_norm: norm("input_layernorm")?,
            attention: Attention::load(weights.pp("self_attn"), config)?,
            feed_forward_norm: norm("post_attention_layernorm")?,
            gate: linear_no_bias(hidden, wide, mlp.pp("gate_proj"))?,
            up: linear_no_bias(hidden, wide, mlp.pp("up_proj"))?,
            down: linear_no_bias(wide, hidden, mlp.pp("down_proj"))?,
        })
    }

    fn forward(&mut self, hidden: &Tensor, position: usize) -> Result<Tensor> {
        let normed = self.attention_norm.forward(hidden)?;
        let hidden = (hidden + self.attention.forward(&normed, position)?)?;
        let normed = self.feed_forward_norm.forward(&hidden)?;
        let gated = (self.gate.forward(&normed)?.silu()? * self.up.forward(&normed)?)?;
        hidden + self.down.forward(&gated)?
    }
}

impl Attention {
    fn load(weights: VarBuilder, config: &Config) -> Result<Self> {
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let head_dim = config.hidden_size / heads;
        let linear = |name, of, to| linear_no_bias(of, to, weights.pp(name));
        let (device, dtype) = (weights.device(), weights.dtype());
        let frequencies: Vec<f32> = (0..head_dim)
            .step_by(2)
            .map(|i| config.rope_theta.powf(-(i as f32) / head_dim as f32))
            .collect();
        let frequencies = Tensor::new(frequencies, device)?.unsqueeze(0)?;
        let positions = Tensor::arange(0f32, config.max_position_embeddings as f32, device)?;
        let angles = positions.unsqueeze(D::Minus1)?.matmul(&frequencies)?;
        Ok(Attention {
            query: linear("q_proj", config.hidden_size, heads * head_dim)?,
            key: linear("k_proj", config.hidden_size, kv_heads * head_dim)?,
            value: linear("v_proj", config.hidden_size, kv_heads * head_dim)?,
            output: linear("o_proj", heads * head_dim, config.hidden_size)?,
            heads,
            kv_heads,
            head_dim,
            rotation: [angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?],
            cache: None,
        })
    }

    fn forward(&mut self, hidden: &Tensor, position: usize) -> Result<Tensor> {
        let (batch, length, _) = hidden.dims3()?;
        let split = |tensor: Tensor, heads| tensor.reshape((batch, length, heads, self.head_dim));
        let query = self.rotate(&split(self.query.forward(hidden)?, self.heads)?, position)?;
        let mut key = self.rotate(&split(self.key.forward(hidden)?, self.kv_heads)?, position)?;
        let mut value = split(self.value.forward(hidden)?, self.kv_heads)?;
        if let Some([keys, values]) = &self.cache {
            key = Tensor::cat(&[keys, &key], 1)?;
            value = Tensor::cat(&[values, &value], 1)?;
        }
        self.cache = Some([key.clone(), value.clone()]);
        let options = Options { mask: Mask::CAUSAL, ..Options::default() };
        let output = attend(&query, &key, &value, &options)?.output;
        self.output.forward(&output.reshape((batch, length, self.heads * self.head_dim))?)
    }

    fn rotate(&self, tensor: &Tensor, position: usize) -> Result<Tensor> {
        let length = tensor.dim(1)?;
        let [cosines, sines] = &self.rotation;
        let (cosines, sines) =
            (cosines.narrow(0, position, length)?, sines.narrow(0, position, length)?);
        // Candle rotates (batch, heads, length, dim).
        let heads_first = tensor.transpose(1, 2)?.contiguous()?;
        candle_nn::rotary_emb::rope(&heads_first, &cosines, &sines)?.transpose(1, 2)
    }
}
