//! Programmatic dependent launch: a kernel that waits for the earlier grids on its stream may begin
//! before they have ended. Here they always have; what is checked is that nothing relies on it.

use crate::hazard::HazardKind;
use crate::machine::{Executed, Executor, GridWait};
use crate::warp::{Warp, lanes_of};

impl<'a> Executor<'_, 'a> {
    /// Records that the active lanes have waited for earlier grids.
    pub(super) fn wait_for_grids(&mut self, warp: &mut Warp<'a>) {
        warp.waited_for_grids |= warp.active;
        let (component, clock, lanes) = (warp.clock.component, warp.clock.now, warp.active);
        let waits = &mut self.cluster.blocks[warp.block].grid_waits;
        waits.push(GridWait { component, clock, lanes });
    }

    /// Checks an access to global memory, in a kernel that waits for earlier grids: this thread has
    /// waited, or another one of the block before it.
    pub(crate) fn check_after_grids(&self, warp: &Warp<'_>, lane: u32) -> Executed<()> {
        let checked = self.grid_state.checked && self.grid_state.waits_for_grids;
        if !checked || warp.waited_for_grids >> lane & 1 == 1 {
            return Ok(());
        }
        let known = &warp.clock.view(1 << lane).known;
        let before = |wait: &GridWait| {
            let entry = known.get(wait.component);
            lanes_of(wait.lanes).any(|waiter| entry.covers(wait.clock, 1 << waiter))
        };
        if self.cluster.blocks[warp.block].grid_waits.iter().any(before) {
            return Ok(());
        }
        let text = "global memory is accessed, and nothing orders that after a wait for the grids \
                    before this one";
        Err(self.hazard(warp, Some(lane), HazardKind::BeforeEarlierGrids, text.to_owned()))
    }

    /// Checks, at the end of a block, that it has waited for earlier grids, where the kernel does: the
    /// grids after this one wait for its end alone.
    pub(super) fn check_grid_waits(&self, warp: &Warp<'a>) -> Executed<()> {
        let waited = !self.cluster.blocks[warp.block].grid_waits.is_empty();
        if !self.grid_state.waits_for_grids || waited {
            return Ok(());
        }
        let text = "the block ends without having waited for the grids before this one: those after \
                    it may begin before them";
        Err(self.hazard(warp, None, HazardKind::BeforeEarlierGrids, text.to_owned()))
    }
}
