//! Attention of many queries over 8-bit caches, which a kernel widens to 16 bits first.

use flashcore::Mask;
use flashcore_testing::scene::{Call, PlacementKind, Ragged, Scene};
use kernels::forward::{Workload, every_prefill, tuned};
use kernels::{Batch, Cache, Configuration, Prefill, Rules, Scales, Widen, mma};
use ptx::{Element, Target};
use sim::Mode;

use crate::every_schedule;

const TARGET: Target = Target::SM_89;

fn widen(element: Element, narrow: Element, scales: [Scales; 2], paged: bool) -> Configuration {
    let [key_scales, value_scales] = scales;
    Configuration::Widen(Widen {
        target: TARGET,
        element,
        cache: Cache { element: narrow, key_scales, value_scales },
        head_dim: 64,
        value_head_dim: 48,
        paged,
    })
}

#[test]
fn widened_caches_are_attended() {
    use Element::{BF16, E4M3, E5M2, F16, Int8};
    use Scales::{One, PerHead, PerToken};
    for configuration in [
        widen(F16, E4M3, [One, One], false),
        widen(BF16, E4M3, [PerHead, PerToken], true),
        widen(F16, E5M2, [PerToken, PerHead], true),
        widen(BF16, E5M2, [PerToken, PerToken], false),
        widen(BF16, Int8, [PerToken, PerHead], true),
        widen(F16, Int8, [One, One], false),
    ] {
        every_schedule(&Scene::small(&configuration).unwrap(), Mode::Checked, 1);
    }
}

/// Equal lengths, packed sequences, batch entries and left padding.
#[test]
fn every_storage_is_widened() {
    let workload = Workload {
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        rules: Rules::CAUSAL,
        query_length: 64,
        key_length: 512,
        heads: 4,
        multiprocessors: 2,
    };
    let kernel = |batch, rules| {
        let workload = Workload { rules, ..workload };
        let tuned = mma::tuned_batch(TARGET, &workload, Element::F32, batch).unwrap();
        Configuration::Mma(tuned.configuration)
    };
    let equal = mma::tuned(TARGET, &workload, Element::F32).unwrap().configuration;
    let cache = |scales| Cache { element: Element::E4M3, key_scales: scales, value_scales: scales };
    let ragged = |queries: Vec<usize>, keys: Vec<usize>, place| {
        let ragged = Ragged::new(queries, keys).over(place);
        Call::ragged(kernel(Batch::Ragged, Rules::LOCAL), ragged, [4, 2])
            .with(|it| it.with_mask(Mask::CAUSAL))
    };
    let (queries, keys) = (vec![7, 3, 0, 2], vec![90, 64, 3, 1]);
    // On Hopper, TMA loads from the widened cache.
    let tile = every_prefill()[0].tile;
    let prefill = Configuration::Prefill(Prefill { tile, page_rows: None, single_tile: false });
    let paged = Ragged::new(queries.clone(), keys.clone()).over(PlacementKind::Paged(16));
    let prefill = Call::ragged(prefill, paged, [2, 1]);
    let workload = Workload { rules: Rules::DENSE, ..workload };
    let forward = Configuration::Forward(tuned(&workload).unwrap().configuration);
    let padded = Ragged { padding: vec![5, 0, 2, 1], ..Ragged::new(queries.clone(), keys.clone()) };
    let padded = Call::ragged(kernel(Batch::Ragged, Rules::LOCAL), padded, [2, 1]);
    for call in [
        Call::new(Configuration::Mma(equal), 2, [5, 77], [4, 2]).over_cache(cache(Scales::PerHead)),
        ragged(queries.clone(), keys.clone(), PlacementKind::Packed)
            .over_cache(cache(Scales::PerToken)),
        ragged(queries.clone(), keys.clone(), PlacementKind::Entries)
            .over_cache(cache(Scales::PerToken)),
        ragged(queries, keys, PlacementKind::Paged(16)).over_cache(cache(Scales::PerHead)),
        padded.over_cache(cache(Scales::One)),
        prefill.over_cache(cache(Scales::PerToken)),
        Call::new(forward, 2, [70, 130], [2, 1]).over_cache(cache(Scales::PerHead)),
    ] {
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
        let hostile = Call { hostile: true, ..call };
        every_schedule(&hostile.scene().unwrap(), Mode::Checked, 1);
    }
}
