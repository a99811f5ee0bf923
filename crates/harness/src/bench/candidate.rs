//! Who takes part: kernels of ours by name, and peers.

use std::fmt;

use flashcore::backend::gpu as kernels_of_gpu;
use flashcore::gpu::{Chip, Gpu, LaunchDescription, Order, decode, serving};
use flashcore::{Mask, Plan, Preference, Problem};
use kernels::{Decode, Shipped, shipped};
use ptx::Target;

use crate::Error;
use crate::problems::Workload;
use crate::subject::Source;

/// Someone to be measured, under a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The name in tables.
    pub name: String,
    /// Who it is.
    pub who: Who,
}

/// What is measured.
#[derive(Debug, Clone, PartialEq)]
pub enum Who {
    /// Whatever our planner chooses for a problem.
    Planned,
    /// A kernel of ours by its name, in the configuration that is best for a problem.
    Named(&'static str),
    /// One configuration of ours; it has no part in problems that it does not serve.
    Kernel(Shipped),
    /// Our decode over the same keys in pages of so many positions, in an order of their own.
    Pages(usize),
    /// Somebody else's.
    Peer(Peer),
}

/// The kernels that can be asked for by name.
const NAMED: [&str; 6] = ["forward", "prefill", "decode", "mma", "mma-half", "scalar"];

/// Other people's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peer {
    /// NVIDIA's library, through PyTorch.
    CuDnn,
    /// FlashAttention-2, as PyTorch has it.
    FlashAttention2,
    /// FlashAttention-3, from the wheel `fa3-fwd`.
    FlashAttention3,
    /// Memory-efficient attention, as PyTorch has it.
    Efficient,
    /// PyTorch's FlexAttention, compiled.
    Flex,
    /// JAX's kernel in Mosaic GPU.
    Jax,
}

impl Peer {
    /// Every peer.
    pub const ALL: [Peer; 6] = [
        Peer::CuDnn,
        Peer::FlashAttention2,
        Peer::FlashAttention3,
        Peer::Efficient,
        Peer::Flex,
        Peer::Jax,
    ];

    /// Its name in commands and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Peer::CuDnn => "cudnn",
            Peer::FlashAttention2 => "fa2",
            Peer::FlashAttention3 => "fa3",
            Peer::Efficient => "efficient",
            Peer::Flex => "flex",
            Peer::Jax => "jax",
        }
    }

    /// What it is.
    pub const fn about(self) -> &'static str {
        match self {
            Peer::CuDnn => "cuDNN through PyTorch's scaled_dot_product_attention",
            Peer::FlashAttention2 => {
                "FlashAttention-2 through PyTorch's scaled_dot_product_attention"
            }
            Peer::FlashAttention3 => "FlashAttention-3, the wheel fa3-fwd",
            Peer::Efficient => "memory-efficient attention through PyTorch",
            Peer::Flex => "PyTorch's FlexAttention, compiled",
            Peer::Jax => "JAX's attention in Mosaic GPU, host clock",
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Candidate {
    /// The candidate of a name: `flashcore`, a kernel such as `mma`, a configuration, a peer; with
    /// `label=` in front it goes by another name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (label, name) = match text.split_once('=') {
            Some((label, name)) => (label.trim(), name.trim()),
            None => (text.trim(), text.trim()),
        };
        let peer = Peer::ALL.into_iter().find(|peer| peer.name() == name).map(Who::Peer);
        let named = NAMED.into_iter().find(|it| *it == name).map(Who::Named);
        let size = name.strip_prefix("page").and_then(|size| size.parse().ok());
        let who = match peer.or(named).or(size.map(Who::Pages)) {
            Some(who) => who,
            None if name == "flashcore" => Who::Planned,
            None => Who::Kernel(configuration(name)?),
        };
        Ok(Candidate { name: label.to_owned(), who })
    }

    /// The peer, if it is one.
    pub fn peer(&self) -> Option<Peer> {
        match self.who {
            Who::Peer(peer) => Some(peer),
            _ => None,
        }
    }

    /// What it is, in a few words.
    pub fn about(&self) -> String {
        match &self.who {
            Who::Planned => "what FlashCore's planner chooses".to_owned(),
            Who::Named(kernel) => format!("FlashCore's `{kernel}`"),
            Who::Kernel(kernel) => kernel.name(),
            Who::Pages(size) => format!("FlashCore's decode over pages of {size}, shuffled"),
            Who::Peer(peer) => peer.about().to_owned(),
        }
    }

    /// The kernel of ours that runs for a problem, or why it has no part in it.
    pub fn kernel(&self, problem: &Problem, chip: &Chip) -> Result<Shipped, String> {
        let named = |kernel: &str| {
            kernels_of_gpu::configuration(chip, problem, kernel)
                .ok_or_else(|| format!("no configuration of `{kernel}` serves it"))
        };
        match &self.who {
            Who::Planned => {
                let preference = Preference { backend: Some("gpu".to_owned()), kernel: None };
                let plan = Plan::on_chip(chip, problem, &preference);
                named(&plan.map_err(|error| error.to_string())?.chosen.kernel)
            }
            Who::Named(kernel) => named(kernel),
            Who::Kernel(kernel) if serves(kernel, problem) => Ok(*kernel),
            Who::Kernel(_) => Err("it is for another element, head dim or mask".to_owned()),
            Who::Pages(_) => {
                let chosen = decode::choose(chip, problem, true)?;
                Ok(Shipped::Decode(chosen.configuration))
            }
            Who::Peer(peer) => Err(format!("{peer} is not ours")),
        }
    }
}

impl Candidate {
    /// What of ours is launched for a workload, launch after launch, or why it has no part in it.
    pub fn describe(
        &self,
        workload: &Workload,
        chip: &Chip,
    ) -> Result<Vec<(Shipped, LaunchDescription)>, String> {
        let Workload { problem, lengths } = workload;
        let order = match self.who {
            Who::Pages(_) if problem.query_length > 1 => {
                return Err("keys in another order are the same to one query alone".to_owned());
            }
            Who::Pages(size) => Order::Pages(size),
            _ if workload.is_packed() => Order::Packed(lengths),
            _ => Order::Plain,
        };
        let kernel = match (&self.who, order) {
            (Who::Planned, Order::Packed(_)) => {
                let size = order.size(problem).map_err(|error| error.to_string())?;
                serving::choose(chip, &size)?
            }
            _ => self.kernel(problem, chip)?,
        };
        let described = LaunchDescription::of_sequences(&kernel, problem, chip, order);
        described.map_err(|error| error.to_string())
    }
}

impl Source for Candidate {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn launch(&self, gpu: &Gpu, problem: &Problem) -> Result<(String, LaunchDescription), Error> {
        let launches =
            self.describe(&problem.clone().into(), &gpu.chip()).map_err(Error::Impossible)?;
        match &launches[..] {
            [(kernel, description)] => Ok((ptx::print(&kernel.program()?), description.clone())),
            _ => Err(Error::Impossible("several launches are measured beside a peer".to_owned())),
        }
    }
}

/// Whether a configuration is for a problem's element, dims and mask.
pub fn serves(kernel: &Shipped, problem: &Problem) -> bool {
    let dims = (problem.head_dim as u32, problem.value_head_dim as u32);
    let wanted = (problem.dtype.element(), dims, problem.mask == Mask::Causal);
    match kernel {
        Shipped::Forward(it) => (it.element, (it.head_dim, it.value_head_dim), it.causal) == wanted,
        Shipped::Mma(it) => (it.element, (it.head_dim, it.value_head_dim), it.causal) == wanted,
        Shipped::Scalar(it) => (it.element, (it.head_dim, it.value_head_dim), it.causal) == wanted,
        // Masks are numbers to what serves sequences.
        Shipped::Decode(it) => {
            let scores = (it.softcap, it.alibi, it.sinks);
            (it.element, (it.head_dim, it.value_head_dim)) == (wanted.0, wanted.1)
                && scores == (problem.softcap.is_some(), problem.alibi, problem.sinks)
                && !it.paged
        }
        Shipped::Prefill(it) => {
            let (tile, scores) = (&it.tile, (it.softcap, it.alibi, it.sinks));
            (tile.element, (tile.head_dim, tile.value_head_dim)) == (wanted.0, wanted.1)
                && scores == (problem.softcap.is_some(), problem.alibi, problem.sinks)
                && it.page_rows.is_none()
        }
        _ => false,
    }
}

/// The configuration of a name: a shipped one, or any that the tuner could try.
pub fn configuration(name: &str) -> Result<Shipped, String> {
    let shipped = shipped(Target::SM_90A).into_iter().find(|it| it.name() == name);
    let found = shipped
        .or_else(|| crate::tune::space::find(name).map(Shipped::Forward))
        .or_else(|| decode_shape(name).map(Shipped::Decode));
    found.ok_or_else(|| {
        let peers = Peer::ALL.map(Peer::name).join(", ");
        let kernels = NAMED.join(", ");
        format!(
            "there is no candidate `{name}`; there are flashcore, the kernels {kernels}, \
             configurations as `flashcore inspect --all` lists them, and the peers {peers}"
        )
    })
}

/// The decode configuration of a name: a shipped one's element, dims and scores in any shape that
/// can be built.
fn decode_shape(name: &str) -> Option<Decode> {
    let bases = kernels::decode::every_tuned(Target::SM_90A).into_iter();
    let bases = bases.flat_map(|base| [false, true].map(|paged| Decode { paged, ..base }));
    for base in bases.flat_map(|base| [8, 16].map(|rows| Decode { rows, ..base })) {
        // All but the shape, which is what names end with.
        let own = base.name();
        let shape = own.rfind("_w").unwrap_or(own.len());
        if !name.starts_with(&own[..shape + 2]) {
            continue;
        }
        for (warps, tile_keys) in (1..=16).flat_map(|warps| [(warps, 16), (warps, 32)]) {
            for (stages, blocks) in (1..=8).flat_map(|stages| (1..=4).map(move |it| (stages, it))) {
                let shaped = Decode { warps, tile_keys, stages, blocks, ..base };
                if shaped.name() == name && shaped.program().is_ok() {
                    return Some(shaped);
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_has_shapes_beside_the_shipped_and_pages() {
        let problem: Workload = "b=1,h=32,hk=8,s=1,sk=8192,d=128,bf16".parse().unwrap();
        let candidate = |name: &str| Candidate::parse(name).unwrap();
        let kernels = |name: &str, workload: &Workload| -> Result<Vec<String>, String> {
            let launches = candidate(name).describe(workload, &Chip::H200)?;
            Ok(launches.into_iter().map(|(kernel, _)| kernel.name()).collect())
        };
        let shipped = "decode_bf16_d128x128_r8_w8x16_s3b1";
        assert_eq!(kernels("flashcore", &problem).unwrap(), [shipped]);
        for shape in ["w4x32_s3b1", "w4x16_s3b2", "w8x16_s3b1"] {
            let name = format!("decode_bf16_d128x128_r8_{shape}");
            assert_eq!(kernels(&name, &problem).unwrap(), [name]);
        }
        let impossible = "decode_bf16_d128x128_r8_w16x32_s8b4";
        assert!(Candidate::parse(impossible).unwrap_err().contains("no candidate"));
        let paged = kernels("page16", &problem).unwrap();
        assert!(paged[0].contains("_paged_"), "{paged:?}");
        let refusal = kernels("page24", &problem).unwrap_err();
        assert!(refusal.contains("whole number of pages"), "{refusal}");

        let packed: Workload = "b=1,h=8,s=900,d=128,bf16,causal,packed=9".parse().unwrap();
        let both = kernels("flashcore", &packed).unwrap();
        assert!(both.len() == 2 && both[1].starts_with("prefill"), "{both:?}");
        assert_eq!(kernels(shipped, &packed).unwrap(), [shipped]);
        assert!(candidate("page16").describe(&packed, &Chip::H200).is_err());
    }

    #[test]
    fn names_mean_what_they_say() {
        assert_eq!(Candidate::parse("flashcore").unwrap().who, Who::Planned);
        assert_eq!(Candidate::parse("fa3").unwrap().peer(), Some(Peer::FlashAttention3));
        let labelled = Candidate::parse("again=flashcore").unwrap();
        assert_eq!((labelled.name.as_str(), labelled.who), ("again", Who::Planned));
        let message = Candidate::parse("fa4").unwrap_err();
        assert!(message.contains("no candidate `fa4`") && message.contains("cudnn"), "{message}");
    }

    #[test]
    fn a_configuration_serves_its_own_problems() {
        let problem: Problem = "b=1,h=16,s=4096,d=128,bf16".parse().unwrap();
        let planned = Candidate::parse("flashcore").unwrap();
        let kernel = planned.kernel(&problem, &Chip::H200).unwrap();
        let named = Candidate::parse(&kernel.name()).unwrap();
        assert_eq!(named.kernel(&problem, &Chip::H200), Ok(kernel));
        let causal: Problem = "b=1,h=16,s=4096,d=128,bf16,causal".parse().unwrap();
        assert!(named.kernel(&causal, &Chip::H200).unwrap_err().contains("another element"));
    }
}
