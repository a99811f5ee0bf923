//! The configurations that represent each family: small, but with every feature of the family.
//!
//! The shipped configurations have the same statements with larger tiles, which take longer to
//! simulate and show nothing more.

use kernels::append::Rotary;
use kernels::attention::function::Function;
use kernels::backward::{BackwardPass, Rounding, RowSums, SinkGradients};
use kernels::decode::Splits;
use kernels::forward::Form;
use kernels::mma::BackwardMma;
use kernels::product::Source;
use kernels::sequencer::Tiles;
use kernels::{
    Append, Backward, Batch, Cache, Combine, Configuration, Decode, Forward, MaskKind, Mma,
    Prefill, Rules, Scales, Sequencer, Widen,
};
use ptx::{Element, Target};

use crate::small;

/// Returns the families whose mutants are counted.
pub fn families() -> Vec<&'static str> {
    let mut families: Vec<&'static str> = subjects().iter().map(Configuration::family).collect();
    families.dedup();
    families
}

/// Returns the configurations that represent the families, family by family.
pub fn subjects() -> Vec<Configuration> {
    let mut all = Vec::new();
    all.extend(forwards().map(Configuration::Forward));
    all.extend(prefills().map(Configuration::Prefill));
    all.extend(mmas().map(Configuration::Mma));
    all.extend(decodes().map(Configuration::Decode));
    all.extend(appends().map(Configuration::Append));
    all.extend(widens().map(Configuration::Widen));
    all.extend(combines().map(Configuration::Combine));
    all.extend(sequencers().map(Configuration::Sequencer));
    all.extend(row_sums().map(Configuration::RowSums));
    all.extend(backwards().map(Configuration::Backward));
    all.extend(backward_mmas().map(Configuration::BackwardMma));
    all.extend(roundings().map(Configuration::Rounding));
    all.extend(sink_gradients().map(Configuration::SinkGradients));
    all
}

/// Returns rules with a mask function and a score function that divide by numbers of every sign,
/// and by zero.
fn functions() -> Rules {
    let bands = Function::mask("bands", |at| ((at.query() - at.key()) / (at.head() - 2) % 2).eq(0));
    let leaning = Function::score("leaning", |score, at| {
        let apart = (at.position() - at.key()) % (at.head() - 2);
        score * 0.5 - apart.to_f32() * 0.5 * (at.batch() + 1).to_f32()
    });
    Rules { mask_function: Some(bands), score_function: Some(leaning), ..Rules::DENSE }
}

/// An 8-bit cache with both kinds of scales.
const NARROW: Cache =
    Cache { element: Element::E4M3, key_scales: Scales::PerHead, value_scales: Scales::PerToken };

fn forwards() -> [Forward; 8] {
    let dense = Forward { ping_pong: false, ..small::forward() };
    let causal = Forward { rules: Rules::CAUSAL, ..dense };
    [
        dense,
        Forward { ping_pong: true, form: Form::COMPACT, ..causal },
        Forward {
            query_source: Source::Registers,
            warpgroups: 1,
            query_buffers: 2,
            stages: 3,
            ..causal
        },
        Forward { rules: Rules::EVERY, warpgroups: 1, stages: 3, ..dense },
        Forward { rules: functions(), warpgroups: 1, ..dense },
        Forward { rules: listed(64), warpgroups: 1, ..dense },
        Forward { stream_k: true, ..dense },
        // 8-bit values are transposed on their way to the product.
        Forward { element: Element::E4M3, form: Form::COMPACT, warpgroups: 1, ..causal },
    ]
}

fn prefills() -> [Prefill; 3] {
    let [dense, ..] = forwards();
    let tile = Forward { rules: Rules::LOCAL, warpgroups: 1, ..dense };
    let plain = Prefill { tile, page_rows: None, single_tile: false };
    let turns = Forward { warpgroups: 2, ping_pong: true, query_buffers: 2, ..tile };
    let compact = Forward { form: Form::COMPACT, rules: Rules::EVERY, ..tile };
    let paged = Prefill { tile: compact, page_rows: Some(16), ..plain };
    [plain, Prefill { tile: turns, ..plain }, paged]
}

fn mmas() -> [Mma; 5] {
    let dense = Mma { row_tiles: 1, ..small::mma() };
    let causal = Mma { rules: Rules::CAUSAL, ..dense };
    [
        dense,
        Mma { query_source: Source::Registers, ..causal },
        Mma { split: true, ..dense },
        Mma { rules: Rules::LOCAL, batch: Batch::Paged, warps: 4, ..dense },
        Mma { rules: listed(32), ..dense },
    ]
}

fn decodes() -> [Decode; 6] {
    let plain = small::decode();
    let rules = Rules { mask: MaskKind::Local, ..Rules::EVERY };
    let every = Decode { page_rows: Some(1), stages: 3, rows: 16, rules, ..plain };
    let fixed = Decode { splits: Splits::Fixed { tiles_per_warp: 1 }, ..plain };
    let narrow = Decode { target: Target::SM_89, cache: NARROW, head_dim: 32, ..plain };
    let aligned = Decode { page_rows: Some(16), ..plain };
    // Twice as many rows do not fit into registers, so their running sums are kept in global
    // memory.
    let capped = Decode { rows: 16, rules: Rules::LOCAL.capped(), ..fixed };
    [plain, every, aligned, narrow, fixed, capped]
}

fn appends() -> [Append; 3] {
    let plain = Append {
        target: Target::SM_80,
        element: Element::BF16,
        cache: Cache::plain(Element::BF16),
        head_dim: 192,
        value_head_dim: 136,
        paged: false,
        rotary: None,
    };
    let rotary = Some(Rotary { dim: 96, interleaved: true });
    let cache = Cache { key_scales: Scales::PerToken, value_scales: Scales::PerHead, ..NARROW };
    let halves = Some(Rotary { dim: 96, interleaved: false });
    let narrow = Append { target: Target::SM_89, cache, rotary: halves, ..plain };
    [plain, Append { paged: true, rotary, ..plain }, narrow]
}

fn widens() -> [Widen; 2] {
    let plain = Widen {
        target: Target::SM_89,
        element: Element::BF16,
        cache: NARROW,
        head_dim: 80,
        value_head_dim: 96,
        paged: false,
    };
    [plain, Widen { paged: true, ..plain }]
}

fn combines() -> [Combine; 2] {
    let (target, element) = (Target::SM_80, Element::BF16);
    let wide = Combine { target, partial: Element::F32, element, value_head_dim: 64 };
    [wide, Combine { partial: element, value_head_dim: 8, ..wide }]
}

fn sequencers() -> [Sequencer; 4] {
    let [local, chunked] = [MaskKind::Local, MaskKind::Chunked].map(Tiles::Queries);
    [local, chunked, Tiles::Keys, Tiles::KeysOrQueries]
        .map(|tiles| Sequencer { target: Target::SM_90A, tiles })
}

/// Returns rules with a mask function that sees all of some blocks of this size, nothing of others,
/// and so little of most that every key matters. The mask differs between heads, and between odd
/// and even sequences.
fn listed(block: i32) -> Rules {
    let near = Function::mask("near", |at| {
        let further = at.query() / block % 3 / 2 * block;
        (at.query() - at.key()).abs().lt(at.head() + at.batch() % 2 + 2 + further)
    });
    Rules { mask_function: Some(near), ..Rules::DENSE }
}

/// Returns backward kernels with: steps of two parts in two stages, and of one part in three;
/// deterministic order; wide heads shared by two warpgroups; larger key blocks; a ragged batch,
/// without and with warps that clear and round dQ; persistent blocks, under a window and with such
/// warps; split tiles; and block lists, in any order and deterministic.
fn backwards() -> [Backward; 12] {
    let narrow = Backward {
        element: Element::BF16,
        head_dim: 16,
        value_head_dim: 16,
        rules: Rules::CAUSAL,
        query_block: 128,
        batch: Batch::Equal,
        deterministic: false,
        persistent: false,
        split: false,
        shares: false,
    };
    let rules = Rules { mask: MaskKind::Local, alibi: true, ..Rules::DENSE };
    let small = Backward { query_block: 64, ..narrow };
    [
        narrow,
        Backward { head_dim: 72, value_head_dim: 24, rules, ..small },
        Backward { deterministic: true, ..narrow },
        Backward { head_dim: 136, value_head_dim: 24, ..small },
        Backward { rules: Rules::DENSE, ..small },
        Backward { batch: Batch::Ragged, ..narrow },
        Backward { batch: Batch::Ragged, shares: true, ..narrow },
        // Under a window some tiles are seen by no query.
        Backward { rules: Rules::LOCAL, persistent: true, ..narrow },
        Backward { persistent: true, ..narrow },
        Backward { head_dim: 72, value_head_dim: 24, rules: Rules::DENSE, split: true, ..small },
        Backward { rules: listed(128), ..narrow },
        Backward { rules: listed(128), deterministic: true, ..narrow },
    ]
}

/// Returns kernels of few warps, of which two share their keys.
fn backward_mmas() -> [BackwardMma; 4] {
    let [narrow, wide, ordered, .., last] = backwards();
    [narrow, wide, ordered, Backward { rules: listed(32), ..last }].map(|it| BackwardMma {
        target: Target::SM_80,
        element: it.element,
        head_dim: it.head_dim,
        value_head_dim: it.value_head_dim,
        rules: it.rules,
        key_tiles: 1,
        key_warps: 2,
        column_warps: 2,
        query_block: 32,
        part: 16,
        ahead: 1,
        residents: 1,
        deterministic: it.deterministic,
        batch: it.batch,
    })
}

/// Returns the passes that stand for the kernels before and after the products: over equal lengths,
/// and over a ragged batch whose tiles clear and round dQ.
fn passes() -> [BackwardPass; 3] {
    let [narrow, wide, _, _, _, _, sharing, ..] = backwards();
    [narrow, wide, sharing].map(|it| it.pass())
}

fn row_sums() -> [RowSums; 4] {
    let [narrow, wide, sharing] = passes().map(|it| it.row_sums());
    [narrow, wide, sharing, RowSums { lse_gradient: true, ..narrow }]
}

fn roundings() -> [Rounding; 3] {
    passes().map(|it| it.rounding())
}

fn sink_gradients() -> [SinkGradients; 3] {
    let plain = SinkGradients {
        target: Target::SM_90A,
        mask: MaskKind::Causal,
        lse_gradient: false,
        query_block: 64,
        batch: Batch::Equal,
    };
    let local = SinkGradients { mask: MaskKind::Local, query_block: 128, ..plain };
    [plain, local, SinkGradients { lse_gradient: true, ..plain }]
}
