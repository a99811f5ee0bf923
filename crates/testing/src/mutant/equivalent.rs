//! Mutants that are as good as the original, and why.
//!
//! An entry names a change by the kernel, by what is done and by the line of the kernel's source
//! that it is done to: as text, so that the list holds while lines move. It speaks only for mutants
//! that nobody noticed, and for so many of them: at the same line others are noticed. Where sources
//! are not there to be read, as for an installed command, nothing is on the list.

use std::path::Path;

use ptx::Place;

use super::{Kind, Mutant};

/// A change that changes nothing that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Equivalent {
    /// Something in the names of the configurations that it is one in.
    pub kernel: &'static str,
    /// What kind of change.
    pub kind: Kind,
    /// What is done, and what becomes of what: the beginning of "operator: detail".
    pub change: &'static str,
    /// The end of the file's path.
    pub file: &'static str,
    /// What stands in the line.
    pub line: &'static str,
    /// How many a configuration has at most: one more is a survivor.
    pub at_most: usize,
    /// Why nobody can notice.
    pub reason: &'static str,
}

/// Rows of 64 columns are one panel.
const ONE_PANEL: &str = "rows of 64 columns are one panel, whose number is 0";

/// Where no row is masked, no warp has blocks that it only helps to copy.
const NEVER_HELPS: &str = "without a mask no warp only helps to copy: the loop is never entered";

/// Where the loop of the backward kernel is left, nothing is in flight; after it, dK is waited for
/// together with what comes behind it.
const LAST_PRODUCTS: &str = "after the last step: nothing is in flight where the loop is left, and the next wait is for dK too";

/// Tiles are as wide as their swizzle.
const CLEARED: &str = "clears what pads a tile up to its swizzle, of which products read the first \
                       columns only, or clears again what a copy fills later";

/// Lists that a kernel over pages never has.
const NO_STARTS: &str = "with pages no list says where keys begin, and what stands for it is within its \
                         bounds";

/// Rows of which a sink has no gradient.
const NO_KEYS: &str = "a row without keys has an output of zeros, as every forward pass gives it, and adds \
                       nothing to the gradient of its sink anyway";

/// Sums that are added in one order.
const IN_TURNS: &str = "blocks of threads take turns, so that no two add to a row at the same time";

/// Lists that a kernel always has.
const LENGTHS_BEFORE: &str =
    "there is always a list of the lengths before, and nothing stands for it";

/// Which queries see a key, where no window ends.
const OPEN_END: &str = "where no window ends, the last query that sees a key is beyond every column, or \
                        before the first where there is no such key";

/// Tiles of 64 rows.
const ONE_WARPGROUP: &str = "the only warpgroup has the number 0";

/// Rows of a tile that no sequence has.
const BEYOND: &str = "rows beyond a sequence come from its last page, and are hidden and cleared \
                      before they are used";

/// After a row is summed up.
const EVERY_LANE: &str =
    "every lane of a row has its sum, whichever stores it, and rounds of rows end with the block";

/// Every one.
pub const EQUIVALENTS: &[Equivalent] = &[
    Equivalent {
        kernel: "",
        kind: Kind::Delete,
        change: "deleted: MbarrierWait of queries empty",
        file: "forward/producer.rs",
        line: "self.producer.acquire(k)",
        at_most: 1,
        reason: "the first tile's queries: a pipeline begins empty",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Delete,
        change: "deleted: MbarrierWait of keys empty",
        file: "forward/producer.rs",
        line: "self.producer.acquire(k)",
        at_most: 1,
        reason: "the first tile's first keys: a pipeline begins empty",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Delete,
        change: "deleted: MbarrierArrive of values empty",
        file: "forward/warpgroup.rs",
        line: "self.values.release(k, self.leader)",
        at_most: 1,
        reason: "after the last tile nobody waits for room any more",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Delete,
        change: "deleted: WgmmaFence",
        file: "forward/warpgroup.rs",
        line: "k.wgmma(queries, keys)",
        at_most: 3,
        reason: "the fence before it comes after the last touch of the registers of both products",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Delete,
        change: "deleted: WgmmaFence",
        file: "forward/warpgroup.rs",
        line: "k.wgmma_into(output, accumulate, p, values)",
        at_most: 2,
        reason: "the fence before it comes after the last touch of the registers of both products",
    },
    Equivalent {
        kernel: "_64x32_",
        kind: Kind::Weaken,
        change: "other barrier: BarrierSync +1",
        file: "forward/epilogue.rs",
        line: "k.barrier_sync(self.barrier, 128)",
        at_most: 4,
        reason: "a single warpgroup meets at one statement: any barrier that nobody else uses will do",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Weaken,
        change: "reads waited for only: BulkWait",
        file: "forward/epilogue.rs",
        line: "k.bulk_wait(0)",
        at_most: 1,
        reason: "at the end shared memory must have been read; the kernel's end waits for what is written",
    },
    Equivalent {
        kernel: "prefill",
        kind: Kind::Delete,
        change: "deleted: MbarrierWait of slots empty",
        file: "forward/dynamic_scheduler.rs",
        line: "self.posted.acquire(k)",
        at_most: 1,
        reason: "the waits for stages keep the producer less than the slots ahead",
    },
    Equivalent {
        kernel: "prefill",
        kind: Kind::Weaken,
        change: "scope: Reduce Gpu to Block",
        file: "forward/dynamic_scheduler.rs",
        line: "k.reduce_add::<U32, _>(claimed_at",
        at_most: 1,
        reason: "the last block is alone, and its own atomic of the GPU's scope stands just before",
    },
    Equivalent {
        kernel: "prefill",
        kind: Kind::Weaken,
        change: "scope: Reduce Gpu to Block",
        file: "forward/dynamic_scheduler.rs",
        line: "k.reduce_add::<U32, _>(done_at",
        at_most: 1,
        reason: "the last block is alone, and its own atomic of the GPU's scope stands just before",
    },
    Equivalent {
        kernel: "decode",
        kind: Kind::Delete,
        change: "deleted: WarpSync",
        file: "decode/copies.rs",
        line: "k.warp_sync()",
        at_most: 1,
        reason: "after clearing what pads a tile; the warp meets again before it first reads one",
    },
    Equivalent {
        kernel: "decode",
        kind: Kind::Weaken,
        change: "order: Load Relaxed(Gpu) to Weak",
        file: "attention/sequences.rs",
        line: "k.load_vector::<U32, _, 1>(at, hint)",
        at_most: 1,
        reason: "brings a line into the cache; nobody uses what it loads",
    },
    Equivalent {
        kernel: "mma",
        kind: Kind::Delete,
        change: "deleted: WarpSync",
        file: "mma/products.rs",
        line: "k.warp_sync()",
        at_most: 1,
        reason: "the block meets before queries are first used",
    },
    Equivalent {
        kernel: "_dense_",
        kind: Kind::Delete,
        change: "deleted: CopyAsyncWait",
        file: "mma/copies.rs",
        line: "k.copy_async_wait(pending)",
        at_most: 1,
        reason: NEVER_HELPS,
    },
    Equivalent {
        kernel: "_dense_",
        kind: Kind::Delete,
        change: "deleted: BarrierSync",
        file: "mma/copies.rs",
        line: "k.block_sync()",
        at_most: 1,
        reason: NEVER_HELPS,
    },
    Equivalent {
        kernel: "_dense_",
        kind: Kind::Delete,
        change: "deleted: CopyAsyncCommit",
        file: "mma/walk.rs",
        line: "k.copy_async_commit()",
        at_most: 1,
        reason: NEVER_HELPS,
    },
    Equivalent {
        kernel: "_dense_",
        kind: Kind::Weaken,
        change: "one more pending: CopyAsyncWait",
        file: "mma/copies.rs",
        line: "k.copy_async_wait(pending)",
        at_most: 1,
        reason: NEVER_HELPS,
    },
    Equivalent {
        kernel: "_dense_",
        kind: Kind::Weaken,
        change: "threads: BarrierSync",
        file: "mma/copies.rs",
        line: "k.block_sync()",
        at_most: 2,
        reason: NEVER_HELPS,
    },
    Equivalent {
        kernel: "_dense_",
        kind: Kind::Weaken,
        change: "arrival only: BarrierSync",
        file: "mma/copies.rs",
        line: "k.block_sync()",
        at_most: 1,
        reason: NEVER_HELPS,
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: MbarrierWait of queries empty",
        file: "backward/producer.rs",
        line: "queries.acquire(k)",
        at_most: 1,
        reason: "the first queries: a pipeline begins empty",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: MbarrierWait of output gradients empty",
        file: "backward/producer.rs",
        line: "output_gradients.acquire(k)",
        at_most: 1,
        reason: "the first output gradients: a pipeline begins empty",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: WgmmaFence",
        file: "backward/consumer.rs",
        line: "k.start_product(products, Accumulate::No, values.matrix(), gradients.transposed())",
        at_most: 3,
        reason: "the fence of the step before comes after the last touch of dP's registers",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: WgmmaFence",
        file: "backward/consumer.rs",
        line: "k.start_product(to, Accumulate::Yes, ds, queries.matrix())",
        at_most: 3,
        reason: "the fence of dQ comes after dS is rounded, and nothing touches registers in between",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: WgmmaFence",
        file: "backward/consumer.rs",
        line: "keys.transposed(), score_gradients.matrix())",
        at_most: 1,
        reason: "after the last step, the fence of dK comes after the last touch of dQ's registers",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: WgmmaFence",
        file: "backward/wide.rs",
        line: "k.start_product(to, Accumulate::No, keys.transposed(), score_gradients.matrix())",
        at_most: 4,
        reason: "the fence of the product before it comes after the last touch of its registers",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: WgmmaWait",
        file: "backward/consumer.rs",
        line: "k.wait_products(0)",
        at_most: 2,
        reason: LAST_PRODUCTS,
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Weaken,
        change: "one more pending: WgmmaWait",
        file: "backward/consumer.rs",
        line: "k.wait_products(0)",
        at_most: 2,
        reason: LAST_PRODUCTS,
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: WgmmaCommit",
        file: "backward/consumer.rs",
        line: "k.start_product(to, Accumulate::Yes, ds, queries.matrix())",
        at_most: 1,
        reason: LAST_PRODUCTS,
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Delete,
        change: "deleted: WarpSync",
        file: "backward/consumer.rs",
        line: "k.warp_sync()",
        at_most: 1,
        reason: "a hole of the model: lanes store the last dS as one (stmatrix), and the leader's \
                 arrival is taken for all of them; nobody writes that tile again, which is what shows \
                 it in the loop",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Weaken,
        change: "other barrier: BarrierSync +1",
        file: "backward/epilogue.rs",
        line: "k.barrier_sync(barrier::PRODUCTS",
        at_most: 1,
        reason: "both warpgroups meet at one statement: any barrier that nobody is at will do",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Weaken,
        change: "other barrier: BarrierSync +1",
        file: "backward/epilogue.rs",
        line: "k.barrier_sync(owner.index + barrier::RESULTS",
        at_most: 1,
        reason: "each warpgroup still has one of its own",
    },
    Equivalent {
        kernel: "backward",
        kind: Kind::Weaken,
        change: "reads waited for only: BulkWait",
        file: "backward/epilogue.rs",
        line: "k.bulk_wait(0)",
        at_most: 1,
        reason: "at the end shared memory must have been read; the kernel's end waits for what is written",
    },
    Equivalent {
        kernel: "_deterministic",
        kind: Kind::Weaken,
        change: "scope: Reduce Gpu to Block",
        file: "backward/step.rs",
        line: "k.reduce_add(sums",
        at_most: usize::MAX,
        reason: IN_TURNS,
    },
    Equivalent {
        kernel: "_deterministic",
        kind: Kind::Weaken,
        change: "scope: Reduce Gpu to Block",
        file: "backward/consumer.rs",
        line: "k.reduce_add_vector(address, registers, Scope::Gpu)",
        at_most: usize::MAX,
        reason: IN_TURNS,
    },
    Equivalent {
        kernel: "_deterministic",
        kind: Kind::Weaken,
        change: "order: Load Acquire(Gpu) to Relaxed(Gpu)",
        file: "backward/order.rs",
        line: "k.load_vector::<U32, _, 1>(counter, hint)",
        at_most: usize::MAX,
        reason: "a hole of the model: sums are right in whatever order they are added, and the model \
                 keeps the order of the program",
    },
    Equivalent {
        kernel: "_causal_",
        kind: Kind::Value,
        change: "constant: Binary",
        file: "attention/visibility.rs",
        line: "let whole = k.eval(key_length / size)",
        at_most: usize::MAX,
        reason: "no row sees beyond the last key, so the mask of the rows hides what a ragged block has beyond it",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Binary 0x1000 to 0x1001",
        file: "forward/warpgroup.rs",
        line: "self.shared.",
        at_most: usize::MAX,
        reason: "a descriptor counts in 16 bytes: a stage's number of bytes more is dropped",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "mask: Binary 0x3f to 0x3e",
        file: "forward/epilogue.rs",
        line: "rounded.store(",
        at_most: usize::MAX,
        reason: "columns of matrices are even: the lowest bit is never set",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Binary 0xf149f2ca to",
        file: "softmax.rs",
        line: "NOTHING_SEEN",
        at_most: usize::MAX,
        reason: "any number far below every score will do",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Binary 0x7149f2ca to",
        file: "mma/softmax.rs",
        line: "NOTHING_SEEN",
        at_most: usize::MAX,
        reason: "any number far below every score will do",
    },
    Equivalent {
        kernel: "d64x64",
        kind: Kind::Value,
        change: "constant: Binary 0x6 to 0x7",
        file: "forward/epilogue.rs",
        line: "rounded.store(",
        at_most: usize::MAX,
        reason: ONE_PANEL,
    },
    Equivalent {
        kernel: "d64x64",
        kind: Kind::Value,
        change: "constant: Binary 0x2000 to",
        file: "forward/epilogue.rs",
        line: "rounded.store(",
        at_most: usize::MAX,
        reason: ONE_PANEL,
    },
    Equivalent {
        kernel: "d64x64",
        kind: Kind::Value,
        change: "constant: Binary 0x6 to 0x7",
        file: "forward/warpgroup.rs",
        line: "fragment.load_into(",
        at_most: usize::MAX,
        reason: ONE_PANEL,
    },
    Equivalent {
        kernel: "d64x64",
        kind: Kind::Value,
        change: "constant: Binary 0x2000 to",
        file: "forward/warpgroup.rs",
        line: "fragment.load_into(",
        at_most: usize::MAX,
        reason: ONE_PANEL,
    },
    Equivalent {
        kernel: "_paged",
        kind: Kind::Value,
        change: "mask: CopyAsync of all bytes",
        file: "decode/copies.rs",
        line: "source.copies.copy(",
        at_most: usize::MAX,
        reason: BEYOND,
    },
    Equivalent {
        kernel: "decode",
        kind: Kind::Value,
        change: "constant: Move 0x0 to 0x3f800000",
        file: "decode/products.rs",
        line: "WarpAccumulator::zeros(",
        at_most: usize::MAX,
        reason: "the factor of the first tile is 0 and wipes it",
    },
    Equivalent {
        kernel: "decode",
        kind: Kind::Value,
        change: "constant: Move 0x0 to",
        file: "decode/schedule.rs",
        line: "let zero = |k: &mut Builder| k.variable::<U32>(0)",
        at_most: usize::MAX,
        reason: "set before it is read",
    },
    Equivalent {
        kernel: "prefill",
        kind: Kind::Value,
        change: "constant: Move 0x0 to",
        file: "forward/dynamic_scheduler.rs",
        line: "let zero = |k: &mut Builder| k.variable::<U32>(0)",
        at_most: usize::MAX,
        reason: "set before it is read",
    },
    Equivalent {
        kernel: "row_sums",
        kind: Kind::Value,
        change: "mask: Binary 0xffff0000 to 0xfffe0000",
        file: "element.rs",
        line: "",
        at_most: usize::MAX,
        reason: "the last bit of an element of a sum of many, less than what the sum is rounded to",
    },
    Equivalent {
        kernel: "row_sums",
        kind: Kind::Value,
        change: "branch: always taken",
        file: "backward/row_sums.rs",
        line: "k.if_(mine",
        at_most: usize::MAX,
        reason: EVERY_LANE,
    },
    Equivalent {
        kernel: "row_sums",
        kind: Kind::Value,
        change: "comparison: U32 Equal to NotEqual",
        file: "backward/row_sums.rs",
        line: "k.if_(mine",
        at_most: usize::MAX,
        reason: EVERY_LANE,
    },
    Equivalent {
        kernel: "row_sums",
        kind: Kind::Value,
        change: "comparison: U32 Less to LessOrEqual",
        file: "backward/row_sums.rs",
        line: "k.if_(mine",
        at_most: usize::MAX,
        reason: EVERY_LANE,
    },
    Equivalent {
        kernel: "row_sums",
        kind: Kind::Value,
        change: "operation: Pred And to Or",
        file: "backward/row_sums.rs",
        line: "k.if_(mine",
        at_most: usize::MAX,
        reason: EVERY_LANE,
    },
    Equivalent {
        kernel: "row_sums",
        kind: Kind::Value,
        change: "constant: Move 0xff800000 to 0x0",
        file: "backward/row_sums.rs",
        line: "k.variable::<F32>(f32::NEG_INFINITY)",
        at_most: usize::MAX,
        reason: "of rows beyond the last, whose queries and output gradients are zeros",
    },
    Equivalent {
        kernel: "row_sums_sm_90a_bf16_d16",
        kind: Kind::Value,
        change: "comparison: U32 Less to LessOrEqual",
        file: "backward/row_sums.rs",
        line: "column.less(self.value_head_dim)",
        at_most: usize::MAX,
        reason: "as many lanes as a row of 16 has chunks",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Move 0x0 to 0xffffffff",
        file: "",
        line: "entry_of(",
        at_most: usize::MAX,
        reason: "what stands for a missing list is put between bounds, and 0 is the lower one",
    },
    Equivalent {
        kernel: "sequencer",
        kind: Kind::Value,
        change: "",
        file: "sequencer.rs",
        line: "k.if_(number.less(room)",
        at_most: usize::MAX,
        reason: "there is room for every tile: it guards against a plan that is wrong",
    },
    Equivalent {
        kernel: "sequencer",
        kind: Kind::Value,
        change: "constant: Move 0x0 to 0x1",
        file: "sequencer.rs",
        line: "let most = k.variable(0)",
        at_most: usize::MAX,
        reason: "costs up to 1023 make one step of costs, whether the least is 0 or 1",
    },
    Equivalent {
        kernel: "sequencer",
        kind: Kind::Value,
        change: "mask: Binary 0x1f to 0xf",
        file: "attention/sequences.rs",
        line: "(lane - distance) % 32",
        at_most: 2,
        reason: "sixteen lanes back is a lane below 16, and what other lanes get is not used",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Move 0x3f800000 to",
        file: "forward/softmax.rs",
        line: "let factors = [k.variable(1.0), k.variable(1.0)]",
        at_most: usize::MAX,
        reason: "read only where they were set: under the same vote of the warp",
    },
    Equivalent {
        kernel: "backward_mma",
        kind: Kind::Value,
        change: "",
        file: "mma/copies.rs",
        line: "let zero = [0; 4]",
        at_most: usize::MAX,
        reason: CLEARED,
    },
    Equivalent {
        kernel: "backward_mma",
        kind: Kind::Value,
        change: "",
        file: "mma/copies.rs",
        line: "let row = k.eval(thread + first)",
        at_most: usize::MAX,
        reason: CLEARED,
    },
    Equivalent {
        kernel: "backward_mma",
        kind: Kind::Value,
        change: "",
        file: "mma/copies.rs",
        line: "k.if_(row.less(rows)",
        at_most: usize::MAX,
        reason: CLEARED,
    },
    Equivalent {
        kernel: "backward_mma",
        kind: Kind::Value,
        change: "",
        file: "mma/copies.rs",
        line: "self.copies.clear(k",
        at_most: usize::MAX,
        reason: CLEARED,
    },
    Equivalent {
        kernel: "append",
        kind: Kind::Value,
        change: "constant: Move 0x0 to 0x1",
        file: "append/mod.rs",
        line: "let length = entry_of(k, self.lengths, sequence, 0)",
        at_most: usize::MAX,
        reason: LENGTHS_BEFORE,
    },
    Equivalent {
        kernel: "append",
        kind: Kind::Value,
        change: "branch: always taken",
        file: "append/mod.rs",
        line: "let length = entry_of(k, self.lengths, sequence, 0)",
        at_most: usize::MAX,
        reason: LENGTHS_BEFORE,
    },
    Equivalent {
        kernel: "append",
        kind: Kind::Value,
        change: "comparison: U32 Equal to NotEqual",
        file: "append/mod.rs",
        line: "let mine = k.eval(token.equals(0)",
        at_most: 1,
        reason: "every lane of the warp has the length, and others than the first may store it",
    },
    Equivalent {
        kernel: "append",
        kind: Kind::Value,
        change: "constant: Binary 0x1 to 0x0",
        file: "append/mod.rs",
        line: "position.minimum(self.positions - 1)",
        at_most: 2,
        reason: "there are angles for every position of a cache: only queries may stand beyond",
    },
    Equivalent {
        kernel: "append",
        kind: Kind::Value,
        change: "constant: Binary 0x20 to 0x1f",
        file: "build/mod.rs",
        line: "",
        at_most: usize::MAX,
        reason: "a lane takes a column that another takes too, and finds the same",
    },
    Equivalent {
        kernel: "widen",
        kind: Kind::Value,
        change: "constant: Binary 0x100 to 0xff",
        file: "build/mod.rs",
        line: "",
        at_most: usize::MAX,
        reason: "a thread takes a chunk that another takes too, and finds the same",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Binary 0x0 to 0xffffffff",
        file: "attention/visibility.rs",
        line: "k.eval((end - begin).maximum(0))",
        at_most: usize::MAX,
        reason: "a tile's keys do not begin behind their end",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Binary 0x0 to 0x1",
        file: "attention/visibility.rs",
        line: "k.set(end, at_least(needed.minimum(all), least))",
        at_most: usize::MAX,
        reason: "a tile walks one block at least, whether it sees a key or none",
    },
    Equivalent {
        kernel: "backward_bf16_d16x16_causal",
        kind: Kind::Value,
        change: "comparison: S32 GreaterOrEqual to Greater",
        file: "attention/visibility.rs",
        line: "k.set(*register, seen.choose",
        at_most: usize::MAX,
        reason: OPEN_END,
    },
    Equivalent {
        kernel: "backward_bf16_d136x24_causal",
        kind: Kind::Value,
        change: "comparison: S32 GreaterOrEqual to Greater",
        file: "attention/visibility.rs",
        line: "k.set(*register, seen.choose",
        at_most: usize::MAX,
        reason: OPEN_END,
    },
    Equivalent {
        kernel: "backward_bf16_d16x16_dense",
        kind: Kind::Value,
        change: "comparison: S32 GreaterOrEqual to Greater",
        file: "attention/visibility.rs",
        line: "k.set(*register, seen.choose",
        at_most: usize::MAX,
        reason: OPEN_END,
    },
    Equivalent {
        kernel: "backward_mma_bf16_d16x16_causal",
        kind: Kind::Value,
        change: "comparison: S32 GreaterOrEqual to Greater",
        file: "attention/visibility.rs",
        line: "k.set(*register, seen.choose",
        at_most: usize::MAX,
        reason: OPEN_END,
    },
    Equivalent {
        kernel: "_64x32_",
        kind: Kind::Value,
        change: "constant: Binary 0x40 to",
        file: "forward/epilogue.rs",
        line: "staging.index * 64",
        at_most: usize::MAX,
        reason: ONE_WARPGROUP,
    },
    Equivalent {
        kernel: "_64x32_",
        kind: Kind::Value,
        change: "constant: Binary 0x40 to",
        file: "forward/rule.rs",
        line: "group.index * 64",
        at_most: usize::MAX,
        reason: ONE_WARPGROUP,
    },
    Equivalent {
        kernel: "_64x32_",
        kind: Kind::Value,
        change: "constant: Binary 0x40 to",
        file: "forward/warpgroup.rs",
        line: "self.index * 64",
        at_most: usize::MAX,
        reason: ONE_WARPGROUP,
    },
    Equivalent {
        kernel: "forward_e4m3",
        kind: Kind::Value,
        change: "constant: Move 0x0 to 0x3f800000",
        file: "forward/fp8.rs",
        line: "k.set(*element, 0.0)",
        at_most: usize::MAX,
        reason: "the factor of the first block is 0 and wipes it",
    },
    Equivalent {
        kernel: "forward_e4m3",
        kind: Kind::Value,
        change: "constant: Binary",
        file: "forward/fp8.rs",
        line: "maximum(LEAST_SCALE)",
        at_most: usize::MAX,
        reason: "any number that keeps a scale above 0 will do",
    },
    Equivalent {
        kernel: "prefill",
        kind: Kind::Value,
        change: "constant: Move 0x0 to",
        file: "forward/dynamic_scheduler.rs",
        line: "let none = [0; 4]",
        at_most: 6,
        reason: "of what says that there is no tile only the number of blocks is read",
    },
    Equivalent {
        kernel: "prefill",
        kind: Kind::Value,
        change: "comparison: U32 Less to LessOrEqual",
        file: "forward/dynamic_scheduler.rs",
        line: "k.if_(number.less(self.tiles)",
        at_most: usize::MAX,
        reason: "looks up a tile too many, which is not taken",
    },
    Equivalent {
        kernel: "_paged",
        kind: Kind::Value,
        change: "",
        file: "decode/copies.rs",
        line: "self.keys.copies.valid_bytes(k",
        at_most: usize::MAX,
        reason: BEYOND,
    },
    Equivalent {
        kernel: "_paged",
        kind: Kind::Value,
        change: "shuffle: of the lane itself",
        file: "decode/copies.rs",
        line: "k.shuffle_index_wide(mine, index)",
        at_most: 32,
        reason: "the upper half of an offset, which is 0 in a cache of less than 4 GiB",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Binary 0x0 to 0xffffffff",
        file: "attention/sequences.rs",
        line: "let next = clamp(k, next, rows)",
        at_most: usize::MAX,
        reason: "where the next one begins is no bound by itself: the room between them is bounded too",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "constant: Binary 0x1 to 0x0",
        file: "attention/sequences.rs",
        line: "k.load(table + at * 4)",
        at_most: usize::MAX,
        reason: "a position of a sequence is within its row of the table, and what a tile has beyond it is hidden",
    },
    Equivalent {
        kernel: "sequencer",
        kind: Kind::Value,
        change: "comparison: U32 GreaterOrEqual to Greater",
        file: "build/mod.rs",
        line: "",
        at_most: 1,
        reason: "a round of no sequences does nothing",
    },
    Equivalent {
        kernel: "sequencer",
        kind: Kind::Value,
        change: "constant: Move 0x0 to",
        file: "sequencer.rs",
        line: "let begin = k.variable::<U32>(0)",
        at_most: usize::MAX,
        reason: "read from the first lane only, which sets it",
    },
    Equivalent {
        kernel: "",
        kind: Kind::Value,
        change: "comparison: S32 Less to LessOrEqual",
        file: "attention/function/lower.rs",
        line: "let wrong = k.eval(rest.differs(0)",
        at_most: usize::MAX,
        reason: "what a division leaves is never the divisor itself",
    },
    Equivalent {
        kernel: "sink_gradients",
        kind: Kind::Value,
        change: "",
        file: "backward/sink_gradients.rs",
        line: "let query = k.eval(block * self.query_block",
        at_most: usize::MAX,
        reason: NO_KEYS,
    },
    Equivalent {
        kernel: "sink_gradients",
        kind: Kind::Value,
        change: "",
        file: "backward/sink_gradients.rs",
        line: "let counts = seen[0].less(seen[1])",
        at_most: usize::MAX,
        reason: NO_KEYS,
    },
    Equivalent {
        kernel: "sink_gradients",
        kind: Kind::Value,
        change: "",
        file: "attention/visibility.rs",
        line: "",
        at_most: usize::MAX,
        reason: NO_KEYS,
    },
    Equivalent {
        kernel: "sink_gradients",
        kind: Kind::Value,
        change: "",
        file: "backward/sink_gradients.rs",
        line: "k.if_((thread % 32).equals(0)",
        at_most: usize::MAX,
        reason: "every lane of a warp has its sum, whichever stores it",
    },
    Equivalent {
        kernel: "_paged",
        kind: Kind::Value,
        change: "",
        file: "attention/sequences.rs",
        line: "let first = clamp(k, start, rows)",
        at_most: usize::MAX,
        reason: NO_STARTS,
    },
    Equivalent {
        kernel: "_paged",
        kind: Kind::Value,
        change: "constant: Binary",
        file: "attention/sequences.rs",
        line: "let next = entry_of(k, starts, sequence + 1",
        at_most: usize::MAX,
        reason: NO_STARTS,
    },
    Equivalent {
        kernel: "_paged",
        kind: Kind::Value,
        change: "",
        file: "attention/sequences.rs",
        line: "let next = clamp(k, next, rows)",
        at_most: usize::MAX,
        reason: NO_STARTS,
    },
    Equivalent {
        kernel: "widen",
        kind: Kind::Value,
        change: "branch: always taken",
        file: "attention/sequences.rs",
        line: "let length = entry_of(k, lengths",
        at_most: usize::MAX,
        reason: "a cache always has a list of its lengths",
    },
];

/// Changes that cost time and nothing else, where they are made: only of mutants that took more
/// instructions than the kernel in some scene, and in none fewer.
const SLOWER: &[Equivalent] = &[
    slower("attention/visibility.rs", "", MASKED),
    slower("/rule.rs", "k.if_(", MASKED),
    slower("decode/mask.rs", "", MASKED),
    slower("mma/walk.rs", "", MASKED),
    slower("mma/backward/weights.rs", "k.if_(", MASKED),
    slower("backward/consumer.rs", "k.if_(needs_mask", MASKED),
    slower("/softmax.rs", "", "what is multiplied by a factor of 1 stays as it is"),
];

/// Of changes that decide what is masked.
const MASKED: &str = "a mask where nothing is hidden changes nothing";

const fn slower(file: &'static str, line: &'static str, reason: &'static str) -> Equivalent {
    let (kernel, change) = ("", "");
    Equivalent { kernel, kind: Kind::Value, change, file, line, at_most: usize::MAX, reason }
}

/// The line of the list that a mutant of a kernel is on, which took more instructions than the kernel
/// or not.
pub(super) fn find(kernel: &str, mutant: &Mutant, slower: bool) -> Option<&'static Equivalent> {
    let all = EQUIVALENTS.iter().chain(SLOWER.iter().filter(|_| slower));
    let mut named = all.filter(|it| it.names(kernel, mutant)).peekable();
    named.peek()?;
    let source = source(mutant.place)?;
    named.find(|it| source.contains(it.line))
}

impl Equivalent {
    fn names(&self, kernel: &str, mutant: &Mutant) -> bool {
        let change = format!("{}: {}", mutant.operator, mutant.detail);
        kernel.contains(self.kernel)
            && self.kind == mutant.kind
            && change.starts_with(self.change)
            && mutant.place.file().ends_with(self.file)
    }
}

/// The line of source at a place.
fn source(place: Place) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join(place.file())).ok()?;
    text.lines().nth(place.line() as usize - 1).map(str::to_owned)
}
