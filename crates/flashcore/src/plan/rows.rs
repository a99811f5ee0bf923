//! Tensors as one list of rows, which is how kernels for ragged batches address them.

use kernels::parameter::Tensor;

use super::arrangement::{self, Arrangement};
use crate::problem::Problem;
use crate::tensor::Strides;

/// A tensor of batch entries as one list of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Distance between rows, in bytes.
    pub(crate) row_bytes: u64,
    /// Distance between heads, in bytes.
    pub(crate) head_bytes: u64,
    /// Distance between batch entries, in rows.
    pub(crate) entry_rows: u32,
    /// Number of rows, gaps between batch entries included.
    pub(crate) count: u32,
}

/// Row numbers have 31 bits, with room for a sequence after the last row.
const MOST_ROWS: usize = 1 << 30;
/// A stride that the copy engine accepts, for dimensions along which no step is taken.
const ANY_STRIDE: u64 = 16;

impl Rows {
    /// Describes a tensor, or says why it is not a list of rows.
    pub(crate) fn of(
        problem: &Problem,
        arrangement: &Arrangement,
        tensor: Tensor,
    ) -> Result<Self, String> {
        let shape = arrangement::shape(problem, tensor);
        let extents = [shape.batch, shape.length, shape.heads];
        let bytes = arrangement::element_bytes(problem, tensor);
        Rows::new(arrangement.strides(tensor), bytes, extents)
            .map_err(|reason| format!("the {} tensor: {reason}", arrangement::name(tensor)))
    }

    /// Checks that query, key, value and output are lists of rows; keys and values must have the
    /// same distance between batch entries.
    pub(crate) fn check(problem: &Problem, arrangement: &Arrangement) -> Result<(), String> {
        let [_, key, value, _] =
            arrangement::TENSORS.map(|tensor| Rows::of(problem, arrangement, tensor));
        let (key, value) = (key?, value?);
        for tensor in [Tensor::Query, Tensor::Output] {
            Rows::of(problem, arrangement, tensor)?;
        }
        if key.entry_rows != value.entry_rows {
            return Err(format!(
                "the value tensor: a batch entry is {} rows from the next, and {} in the key \
                 tensor: both must be alike",
                value.entry_rows, key.entry_rows
            ));
        }
        Ok(())
    }

    /// Refuses tensors whose rows are 4 GiB apart or more, for kernels that count the bytes between
    /// rows in 32 bits.
    pub(crate) fn check_offsets(
        problem: &Problem,
        arrangement: &Arrangement,
    ) -> Result<(), String> {
        for tensor in arrangement::tensors(problem) {
            let bytes = match problem.has_equal_lengths() {
                true => arrangement.steps(problem, tensor)[0].1,
                false => Rows::of(problem, arrangement, tensor)?.row_bytes,
            };
            if bytes > u64::from(u32::MAX) {
                return Err(format!("a length stride of {bytes} bytes is not below 4 GiB"));
            }
        }
        Ok(())
    }

    fn new(
        strides: Strides,
        element_bytes: usize,
        [entries, rows, heads]: [usize; 3],
    ) -> Result<Self, String> {
        let Strides { batch, length, heads: head } = strides;
        // With one row per entry, the entries themselves are the rows.
        let (step, entry_rows) = match (entries, rows) {
            (0 | 1, 0 | 1) => (0, 0),
            (_, 0 | 1) => (batch, 1),
            (0 | 1, _) => (length, 0),
            _ if length != 0 && batch.is_multiple_of(length) => (length, batch / length),
            _ => {
                return Err(format!(
                    "its batch stride of {batch} elements is no multiple of its length stride of \
                     {length}"
                ));
            }
        };
        let count = (entries.max(1) - 1).checked_mul(entry_rows);
        let count = count.and_then(|before| before.checked_add(rows));
        let Some(count) = count.filter(|count| *count <= MOST_ROWS) else {
            return Err("it has too many rows".to_owned());
        };
        let bytes = |stride: usize, used: bool| match used {
            true => stride as u64 * element_bytes as u64,
            false => ANY_STRIDE,
        };
        let row_bytes = bytes(step, count > 1);
        let head_bytes = bytes(head, heads > 1);
        for (name, stride) in [("length", row_bytes), ("heads", head_bytes)] {
            if stride == 0 || stride >= 1 << 34 {
                return Err(format!("its {name} stride of {stride} bytes cannot be walked"));
            }
        }
        Ok(Rows { row_bytes, head_bytes, entry_rows: entry_rows as u32, count: count as u32 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(strides: [usize; 3], extents: [usize; 3]) -> Result<Rows, String> {
        let [batch, length, heads] = strides;
        Rows::new(Strides { batch, length, heads }, 2, extents)
    }

    #[test]
    fn entries_are_runs_of_rows() {
        // (batch, length, heads, dim) and (batch, heads, length, dim).
        let plain = rows([6400, 128, 64], [3, 50, 2]).unwrap();
        let expected = Rows { row_bytes: 256, head_bytes: 128, entry_rows: 50, count: 150 };
        assert_eq!(plain, expected);
        let by_heads = rows([6400, 64, 3200], [3, 50, 2]).unwrap();
        let expected = Rows { row_bytes: 128, head_bytes: 6400, entry_rows: 100, count: 250 };
        assert_eq!(by_heads, expected);
    }

    #[test]
    fn what_is_alone_has_no_stride_to_speak_of() {
        let one_query = rows([128, 7, 64], [3, 1, 2]).unwrap();
        assert_eq!((one_query.row_bytes, one_query.entry_rows, one_query.count), (256, 1, 3));
        let one_entry = rows([7, 128, 0], [1, 50, 1]).unwrap();
        assert_eq!((one_entry.head_bytes, one_entry.entry_rows, one_entry.count), (16, 0, 50));
        assert_eq!(rows([0, 0, 0], [1, 1, 1]).unwrap().count, 1);
    }

    #[test]
    fn what_cannot_be_walked_is_refused() {
        let odd = rows([6401, 128, 64], [3, 50, 2]).unwrap_err();
        assert!(odd.contains("batch stride of 6401 elements is no multiple"), "{odd}");
        let still = rows([6400, 0, 64], [1, 50, 2]).unwrap_err();
        assert!(still.contains("length stride of 0 bytes cannot be walked"), "{still}");
        let many = rows([1 << 40, 1, 64], [3, 50, 2]).unwrap_err();
        assert!(many.contains("too many rows"), "{many}");
    }
}
