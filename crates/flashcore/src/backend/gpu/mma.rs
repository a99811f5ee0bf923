//! Attention with tensor cores, on Ampere and later.

use kernels::{Combine, Mma};

use super::Candidate;
use crate::gpu::Chip;
use crate::gpu::mma::{Geometry, Sums, check_layouts, choose, combine};
use crate::inputs::InputLayouts;
use crate::problem::Problem;

/// The kernel's name.
pub(crate) const NAME: &str = Sums::F32.kernel();
/// Its name with sums in f16.
pub(crate) const HALF_NAME: &str = Sums::F16.kernel();

pub(super) fn candidate(
    chip: &Chip,
    problem: &Problem,
    layouts: &InputLayouts,
    sums: Sums,
) -> Candidate {
    let served = choose(chip, problem, sums).and_then(|chosen| {
        check_layouts(problem, layouts)?;
        let geometry = Geometry::new(&chosen.configuration, chosen.splits, problem, chip);
        Ok((chosen, geometry.map_err(|error| error.to_string())?))
    });
    let served = served.map(|(chosen, geometry)| {
        let mut reason = chosen.reason.to_owned();
        if geometry.splits > 1 {
            let Geometry { tiles, splits, .. } = geometry;
            reason += &format!("; {tiles} tiles leave places empty: keys split {splits} ways");
        }
        (chosen.configuration.name(), reason)
    });
    Candidate { on_request: sums != Sums::F32, ..super::candidate(sums.kernel(), served) }
}

/// What would be built, and what puts its parts together.
pub(super) fn configurations(
    chip: &Chip,
    problem: &Problem,
    sums: Sums,
) -> Option<(Mma, Option<Combine>)> {
    let configuration = choose(chip, problem, sums).ok()?.configuration;
    Some((configuration, combine(&configuration)))
}
