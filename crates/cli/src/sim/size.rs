//! The size of the simulated problem.

use ::sim::scene::{AttentionSize, Scene};
use clap::Args;
use kernels::Shipped;

/// What is not given is small. An option that the kernel has no use for is refused.
#[derive(Args)]
#[command(next_help_heading = "Size")]
pub(super) struct SizeArguments {
    /// Rows of a product
    #[arg(long, value_name = "COUNT")]
    rows: Option<u32>,
    /// Inner extent of a product
    #[arg(long, value_name = "COUNT")]
    inner: Option<u32>,
    /// Rounds of the ceiling loop
    #[arg(long, value_name = "COUNT")]
    rounds: Option<u32>,
    /// Sequences of attention
    #[arg(long, value_name = "COUNT")]
    batch: Option<u32>,
    /// Queries of a sequence
    #[arg(long, value_name = "COUNT")]
    seq: Option<u32>,
    /// Keys of a sequence
    #[arg(long, value_name = "COUNT")]
    kv_seq: Option<u32>,
    /// Query heads
    #[arg(long, value_name = "COUNT")]
    heads: Option<u32>,
    /// Key and value heads
    #[arg(long, value_name = "COUNT")]
    kv_heads: Option<u32>,
    /// Partial results that are put together
    #[arg(long, value_name = "COUNT")]
    parts: Option<u32>,
}

impl SizeArguments {
    /// The kernel on a problem of this size.
    pub(super) fn scene(&self, kernel: &Shipped) -> Result<Scene, String> {
        let taken: &[&str] = match kernel {
            Shipped::Product(_) => &["rows", "inner"],
            Shipped::Ceiling(_) => &["rounds"],
            Shipped::Scalar(_) | Shipped::Mma(_) | Shipped::Forward(_) => {
                &["batch", "seq", "kv-seq", "heads", "kv-heads"]
            }
            Shipped::Combine(_) => &["batch", "seq", "heads", "parts"],
            _ => &[],
        };
        if let Some((name, _)) = self.given().find(|(name, _)| !taken.contains(name)) {
            let family = kernel.family();
            return Err(format!("--{name} means nothing to the {family} kernel"));
        }
        let scene = match kernel {
            Shipped::Product(product) => {
                let (rows, inner) = Scene::PRODUCT;
                Scene::product(*product, self.rows.unwrap_or(rows), self.inner.unwrap_or(inner))
            }
            Shipped::Ceiling(ceiling) => {
                Scene::ceiling(*ceiling, self.rounds.unwrap_or(Scene::CEILING_ROUNDS))
            }
            Shipped::Scalar(scalar) => {
                Scene::scalar(*scalar, &self.attention(AttentionSize::SCALAR))
            }
            Shipped::Mma(mma) => Scene::mma(*mma, &self.attention(AttentionSize::small_mma(mma))),
            Shipped::Combine(combine) => {
                let parts = self.parts.map_or(Scene::COMBINE_PARTS, |parts| parts as usize);
                Scene::combine(*combine, &self.attention(AttentionSize::SCALAR), parts)
            }
            Shipped::Forward(forward) => {
                Scene::forward(*forward, &self.attention(AttentionSize::small(forward)))
            }
            other => Scene::small(other),
        };
        scene.map_err(|error| error.to_string())
    }

    fn attention(&self, small: AttentionSize) -> AttentionSize {
        let or = |given: Option<u32>, small| given.map_or(small, |given| given as usize);
        let heads = or(self.heads, small.heads);
        // Some heads and no word on key heads: as many.
        let key_heads = if self.heads.is_some() { heads } else { small.key_heads };
        AttentionSize {
            batch: or(self.batch, small.batch),
            queries: or(self.seq, small.queries),
            keys: or(self.kv_seq, self.seq.map_or(small.keys, |seq| seq as usize)),
            heads,
            key_heads: or(self.kv_heads, key_heads),
        }
    }

    /// The options that were given, as one would type them again.
    pub(super) fn describe(&self) -> String {
        self.given().map(|(name, value)| format!(" --{name} {value}")).collect()
    }

    fn given(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let all = [
            ("rows", self.rows),
            ("inner", self.inner),
            ("rounds", self.rounds),
            ("batch", self.batch),
            ("seq", self.seq),
            ("kv-seq", self.kv_seq),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("parts", self.parts),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }
}
