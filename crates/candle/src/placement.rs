//! Where the rows of sequences are in a tensor, given by lists that are tensors too.

use candle_core::{DType, Device, Result, Tensor};
use flashcore::serving::{self, Pages};
use flashcore::{Shape, Storage};

use crate::arguments::{check_location, refusal};
use crate::wrap;

/// How long each sequence is and where its rows are in a tensor.
///
/// | constructor | location of position `p` of sequence `i` | the tensor |
/// | --- | --- | --- |
/// | [`padded`](Placement::padded) | batch entry `i`, row `p` | (sequences, room, heads, dim) |
/// | [`entries`](Placement::entries) | batch entry `entries[i]`, row `p` | (entries, room, heads, dim) |
/// | [`packed`](Placement::packed) | row `starts[i] + p` | (rows, heads, dim) |
/// | [`paged`](Placement::paged) | page `table[i][p / size]`, row `p % size` | (pages, size, heads, dim) |
///
/// Lists are contiguous tensors of u32 or i32, on the device of the tensors. On a GPU they are read
/// when the kernel runs: the host does not synchronize, and a graph uses whatever they hold when it
/// is replayed. Numbers out of range are clamped there; on the CPU they are an error.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    rows: Rows,
    pub(crate) lengths: Option<Tensor>,
    pub(crate) left_padding: Option<Tensor>,
}

#[derive(Debug, Clone)]
enum Rows {
    Padded { entries: Option<Tensor> },
    Packed { starts: Tensor, longest: usize },
    Paged { table: Tensor },
}

impl Placement {
    /// Places sequence `i` in batch entry `i`, all of it.
    pub fn padded() -> Self {
        Placement::default()
    }

    /// Places sequence `i` in batch entry `entries[i]`, all of it: the slots of a cache.
    pub fn entries(entries: &Tensor) -> Self {
        Rows::Padded { entries: Some(entries.clone()) }.into()
    }

    /// Places sequence `i` in the rows from `starts[i]` to `starts[i + 1]`: cumulative lengths. No
    /// sequence has more than `longest` rows, which the host could not find out without
    /// synchronizing.
    pub fn packed(starts: &Tensor, longest: usize) -> Self {
        Rows::Packed { starts: starts.clone(), longest }.into()
    }

    /// Places sequence `i` in the first `lengths[i]` positions of the pages in row `i` of the block
    /// table, of shape (sequences, pages per sequence). Pages beyond those may be any number.
    pub fn paged(lengths: &Tensor, table: &Tensor) -> Self {
        Placement::from(Rows::Paged { table: table.clone() }).with_lengths(lengths)
    }

    /// Uses only the first `lengths[i]` rows of each sequence's place.
    pub fn with_lengths(self, lengths: &Tensor) -> Self {
        Placement { lengths: Some(lengths.clone()), ..self }
    }

    /// Skips the first `skipped[i]` rows of each sequence's place; its length includes them. For
    /// keys.
    pub fn with_left_padding(self, skipped: &Tensor) -> Self {
        Placement { left_padding: Some(skipped.clone()), ..self }
    }

    pub(crate) fn is_packed(&self) -> bool {
        self.starts().is_some()
    }

    /// Tells whether every sequence is all of the batch entry of its index.
    pub(crate) fn is_plain(&self) -> bool {
        let lists = [&self.lengths, &self.left_padding];
        matches!(self.rows, Rows::Padded { entries: None }) && lists.iter().all(|it| it.is_none())
    }

    /// Returns the batch entries of sequences, if a list names them.
    pub(crate) fn batch_index(&self) -> Option<&Tensor> {
        match &self.rows {
            Rows::Padded { entries } => entries.as_ref(),
            _ => None,
        }
    }

    /// Returns the cumulative lengths of packed sequences.
    pub(crate) fn starts(&self) -> Option<&Tensor> {
        match &self.rows {
            Rows::Packed { starts, .. } => Some(starts),
            _ => None,
        }
    }

    /// Returns the block table.
    #[cfg(feature = "cuda")]
    pub(crate) fn table(&self) -> Option<&Tensor> {
        match &self.rows {
            Rows::Paged { table } => Some(table),
            _ => None,
        }
    }

    /// Returns the storage of `sequences` sequences in a tensor.
    pub(crate) fn storage(&self, tensor: Shape, sequences: usize) -> Storage {
        match &self.rows {
            Rows::Padded { entries: None } if tensor.batch == sequences => Storage::Padded,
            Rows::Padded { .. } => Storage::Entries(tensor.batch),
            Rows::Packed { .. } => Storage::Packed(tensor.length),
            Rows::Paged { table } => {
                let (size, columns) = (tensor.length, table.dims()[1]);
                Storage::Paged { size, columns, pages: tensor.batch }
            }
        }
    }

    /// Tells whether kernels support this placement for queries.
    pub(crate) fn serves_queries(&self) -> bool {
        let rows = matches!(self.rows, Rows::Padded { entries: None } | Rows::Packed { .. });
        rows && self.left_padding.is_none()
    }

    /// Returns the maximum number of rows of a sequence in a tensor.
    pub(crate) fn longest(&self, tensor: Shape) -> usize {
        match &self.rows {
            Rows::Padded { .. } => tensor.length,
            Rows::Packed { longest, .. } => (*longest).min(tensor.length),
            Rows::Paged { table } => table.dims()[1].saturating_mul(tensor.length),
        }
    }

    /// Returns the number of sequences in a tensor, if the lists are consistent.
    pub(crate) fn sequences(&self, tensor: Shape, device: &Device) -> Result<usize> {
        let count = match &self.rows {
            Rows::Padded { entries: Some(entries) } => entries.elem_count(),
            Rows::Padded { entries: None } => {
                self.lengths.as_ref().map_or(tensor.batch, Tensor::elem_count)
            }
            Rows::Packed { starts, .. } => match starts.elem_count() {
                0 => return Err(refusal("list of starts", "is empty", "at least one start")),
                starts => starts - 1,
            },
            Rows::Paged { table } => match table.dims() {
                [sequences, _] => *sequences,
                dims => {
                    let expected = "two dimensions: (sequences, pages of one)";
                    return Err(refusal("block table", format!("has shape {dims:?}"), expected));
                }
            },
        };
        for (name, list, entries) in [
            ("list of lengths", &self.lengths, count),
            ("list of left padding", &self.left_padding, count),
        ] {
            if let Some(list) = list {
                check_list(name, list, &[entries], device)?;
            }
        }
        match &self.rows {
            Rows::Padded { entries: Some(entries) } => {
                check_list("list of batch entries", entries, &[count], device)?;
            }
            Rows::Padded { entries: None } if count > tensor.batch => {
                let expected = format!("{} at most, one for each batch entry", tensor.batch);
                return Err(refusal("list of lengths", format!("has {count} entries"), expected));
            }
            Rows::Padded { .. } => {}
            Rows::Packed { starts, .. } => {
                check_list("list of starts", starts, &[count + 1], device)?;
            }
            Rows::Paged { table } => {
                check_list("block table", table, &[count, table.dims()[1]], device)?;
            }
        }
        Ok(count)
    }

    /// Reads the lists, which must be on the host, and checks that they fit a tensor.
    pub(crate) fn read(&self, count: usize, tensor: Shape) -> Result<serving::Placement> {
        let placement = match &self.rows {
            Rows::Padded { entries } => {
                let lengths = vec![tensor.length; count];
                match entries {
                    Some(entries) => serving::Placement::entries(lengths, numbers(entries)?),
                    None => serving::Placement::padded(lengths),
                }
            }
            Rows::Packed { starts, .. } => serving::Placement::packed(numbers(starts)?),
            Rows::Paged { table } => {
                let columns = table.dims()[1];
                let pages = Pages::new(tensor.length, columns, pages(table)?).map_err(wrap)?;
                serving::Placement::paged(vec![0; count], pages)
            }
        };
        let placement = match &self.lengths {
            Some(lengths) => placement.with_lengths(numbers(lengths)?),
            None => placement,
        };
        let placement = match &self.left_padding {
            Some(skipped) => placement.with_left_padding(numbers(skipped)?),
            None => placement,
        };
        placement.validate().map_err(wrap)?;
        placement.fits(tensor).map_err(wrap)?;
        if let Rows::Packed { longest, .. } = self.rows
            && placement.longest() > longest
        {
            let given = format!("has a sequence of {} rows", placement.longest());
            return Err(refusal("list of starts", given, format!("{longest} at most, as given")));
        }
        Ok(placement)
    }
}

impl Default for Rows {
    fn default() -> Self {
        Rows::Padded { entries: None }
    }
}

impl From<Rows> for Placement {
    fn from(rows: Rows) -> Self {
        Placement { rows, lengths: None, left_padding: None }
    }
}

/// Refuses a list that the kernels could not read.
pub(crate) fn check_list(
    name: &str,
    list: &Tensor,
    shape: &[usize],
    device: &Device,
) -> Result<()> {
    if !matches!(list.dtype(), DType::U32 | DType::I32) {
        return Err(refusal(name, format!("has dtype {:?}", list.dtype()), "U32 or I32"));
    }
    check_place(name, list, shape, device)
}

/// Refuses a tensor of another shape, with gaps, or on another device.
pub(crate) fn check_place(
    name: &str,
    tensor: &Tensor,
    shape: &[usize],
    device: &Device,
) -> Result<()> {
    if tensor.dims() != shape {
        let given = format!("has shape {:?}", tensor.dims());
        return Err(refusal(name, given, format!("{shape:?}")));
    }
    if !tensor.is_contiguous() {
        let expected = "no gaps: call `contiguous` on it";
        return Err(refusal(name, format!("has strides {:?}", tensor.stride()), expected));
    }
    check_location(name, tensor, device, "")
}

/// Reads a block table that is on the host. Engines fill what a sequence does not use, with -1 for
/// one: such a page is refused where it is used, since no tensor has so many.
fn pages(table: &Tensor) -> Result<Vec<u32>> {
    let table = table.flatten_all()?;
    if table.dtype() == DType::U32 {
        return table.to_vec1::<u32>();
    }
    Ok(table.to_vec1::<i32>()?.into_iter().map(|page| page as u32).collect())
}

/// Reads the numbers of a list that is on the host.
fn numbers(list: &Tensor) -> Result<Vec<usize>> {
    let list = list.flatten_all()?;
    if list.dtype() == DType::U32 {
        return Ok(list.to_vec1::<u32>()?.into_iter().map(|number| number as usize).collect());
    }
    let checked = |number: i32| {
        usize::try_from(number)
            .map_err(|_| refusal("list", format!("has {number}"), "no negative number"))
    };
    list.to_vec1::<i32>()?.into_iter().map(checked).collect()
}
