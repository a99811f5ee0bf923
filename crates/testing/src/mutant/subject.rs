//! The configurations that stand for a family: small, and with every part that the family has.
//!
//! What is shipped is the same statements with larger tiles, which take longer to simulate and show
//! nothing more.

use kernels::append::Rotary;
use kernels::backward::{Rounding, RowSums};
use kernels::forward::{Form, every_tuned};
use kernels::mma::BackwardMma;
use kernels::product::Source;
use kernels::sequencer::Tiles;
use kernels::{
    Append, Backward, Batch, Cache, Combine, Configuration, Decode, Forward, MaskKind, Mma,
    Prefill, Rules, Sequencer,
};
use ptx::{Element, Target};

/// The families whose mutants are counted.
pub fn families() -> Vec<&'static str> {
    let mut families: Vec<&'static str> = subjects().iter().map(Configuration::family).collect();
    families.dedup();
    families
}

/// The configurations that stand for the families, family by family.
pub fn subjects() -> Vec<Configuration> {
    let mut all = Vec::new();
    all.extend(forwards().map(Configuration::Forward));
    all.extend(prefills().map(Configuration::Prefill));
    all.extend(mmas().map(Configuration::Mma));
    all.extend(decodes().map(Configuration::Decode));
    all.extend(appends().map(Configuration::Append));
    all.extend(combines().map(Configuration::Combine));
    all.extend(sequencers().map(Configuration::Sequencer));
    all.extend(row_sums().map(Configuration::RowSums));
    all.extend(backwards().map(Configuration::Backward));
    all.extend(backward_mmas().map(Configuration::BackwardMma));
    all.extend(roundings().map(Configuration::Rounding));
    all
}

fn forwards() -> [Forward; 4] {
    let dense = Forward {
        element: Element::BF16,
        output: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        rules: Rules::DENSE,
        warpgroups: 2,
        key_block: 32,
        stages: 2,
        query_buffers: 1,
        ping_pong: false,
        ..every_tuned()[0]
    };
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
    ]
}

fn prefills() -> [Prefill; 3] {
    let [dense, ..] = forwards();
    let tile = Forward { rules: Rules::LOCAL, warpgroups: 1, ..dense };
    let plain = Prefill { tile, page_rows: None };
    let turns = Forward { warpgroups: 2, ping_pong: true, query_buffers: 2, ..tile };
    let compact = Forward { form: Form::COMPACT, rules: Rules::EVERY, ..tile };
    [plain, Prefill { tile: turns, ..plain }, Prefill { tile: compact, page_rows: Some(16) }]
}

fn mmas() -> [Mma; 4] {
    let dense = Mma {
        target: Target::SM_80,
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        rules: Rules::DENSE,
        batch: Batch::Equal,
        warps: 2,
        row_tiles: 1,
        key_block: 32,
        ahead: 1,
        query_source: Source::Shared,
        residents: 1,
        accumulate: Element::F32,
        split: false,
    };
    let causal = Mma { rules: Rules::CAUSAL, ..dense };
    [
        dense,
        Mma { query_source: Source::Registers, ahead: 2, ..causal },
        Mma { split: true, ..dense },
        Mma { rules: Rules::LOCAL, batch: Batch::Paged, warps: 4, ..dense },
    ]
}

fn decodes() -> [Decode; 2] {
    let plain = Decode {
        target: Target::SM_80,
        element: Element::BF16,
        cache: Cache::plain(Element::BF16),
        head_dim: 64,
        value_head_dim: 64,
        rows: 8,
        paged: false,
        rules: Rules::LOCAL,
        warps: 2,
        tile_keys: 16,
        stages: 2,
        blocks: 1,
    };
    let rules = Rules { mask: MaskKind::Local, ..Rules::EVERY };
    [plain, Decode { paged: true, stages: 3, rows: 16, rules, ..plain }]
}

fn appends() -> [Append; 2] {
    let plain = Append {
        target: Target::SM_80,
        element: Element::BF16,
        cache: Cache::plain(Element::BF16),
        head_dim: 192,
        value_head_dim: 136,
        paged: false,
        rotary: None,
    };
    let rotary = Some(Rotary { dim: 160, interleaved: true });
    [plain, Append { paged: true, rotary, ..plain }]
}

fn combines() -> [Combine; 2] {
    let (target, element) = (Target::SM_80, Element::BF16);
    let wide = Combine { target, partial: Element::F32, element, value_head_dim: 64 };
    [wide, Combine { partial: element, value_head_dim: 8, ..wide }]
}

fn sequencers() -> [Sequencer; 3] {
    [Tiles::Queries(MaskKind::Local), Tiles::Queries(MaskKind::Chunked), Tiles::Keys]
        .map(|tiles| Sequencer { target: Target::SM_90A, tiles })
}

/// Steps of two parts in two stages, and of one in three.
fn backwards() -> [Backward; 2] {
    let narrow = Backward {
        element: Element::BF16,
        head_dim: 16,
        value_head_dim: 16,
        rules: Rules::CAUSAL,
        query_block: 128,
        batch: Batch::Equal,
        deterministic: false,
    };
    let rules = Rules { mask: MaskKind::Local, alibi: true, ..Rules::DENSE };
    [narrow, Backward { head_dim: 72, value_head_dim: 24, rules, query_block: 64, ..narrow }]
}

/// Few warps, two that share their keys.
fn backward_mmas() -> [BackwardMma; 2] {
    backwards().map(|it| BackwardMma {
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
        deterministic: false,
        batch: it.batch,
    })
}

fn row_sums() -> [RowSums; 2] {
    backwards().map(|it| it.pass().row_sums())
}

fn roundings() -> [Rounding; 2] {
    backwards().map(|it| it.pass().rounding())
}
