//! New keys and values into a cache in host memory.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Tensor, WithDType};
use flashcore::serving;

use super::Append;
use crate::{Rotary, wrap};

/// Writes the rows, and returns the lengths with them.
pub(super) fn append(append: &Append<'_>) -> Result<Tensor> {
    let [keys, values] = &append.caches;
    let count = append.sequences;
    let place = append.place.read(count, keys.layout.shape())?;
    let new = append.new.read(count, keys.new_layout.shape())?;
    let grown = (0..count).map(|sequence| place.ends()[sequence] + new.length(sequence)).collect();
    let grown = place.with_lengths(grown);
    grown.validate().map_err(wrap)?;
    grown.fits(keys.layout.shape()).map_err(wrap)?;
    let longest = grown.ends().iter().copied().max().unwrap_or(0);
    let tables = append.rotary.map(Tables::new).transpose()?;
    if let Some(tables) = &tables {
        tables.rotary().validate(keys.layout.shape().dim, longest).map_err(wrap)?;
    }
    for (cache, rotary) in [(keys, tables.as_ref()), (values, None)] {
        let rows = Rows {
            grown: &grown,
            new: &new,
            layout: cache.layout,
            new_layout: cache.new_layout,
            rotary,
        };
        cache.cache.inplace_op2(cache.new, &rows)?;
    }
    let lengths: Vec<u32> = grown.ends().iter().map(|length| *length as u32).collect();
    Tensor::from_vec(lengths, count, &Device::Cpu)
}

/// The rows of one tensor that are written.
struct Rows<'a> {
    /// Where the sequences are with their new rows.
    grown: &'a serving::Placement,
    new: &'a serving::Placement,
    layout: flashcore::Layout,
    new_layout: flashcore::Layout,
    rotary: Option<&'a Tables>,
}

/// A rotary embedding in f32.
struct Tables {
    dim: usize,
    interleaved: bool,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Tables {
    fn new(rotary: &Rotary) -> Result<Self> {
        let numbers = |table: &Tensor| table.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        Ok(Tables {
            dim: 2 * rotary.cosines.dim(1)?,
            interleaved: rotary.interleaved,
            cosines: numbers(&rotary.cosines)?,
            sines: numbers(&rotary.sines)?,
        })
    }

    fn rotary(&self) -> serving::Rotary<'_> {
        let Tables { dim, interleaved, cosines, sines } = self;
        serving::Rotary { dim: *dim, interleaved: *interleaved, cosines, sines }
    }
}

impl Rows<'_> {
    fn write<T: WithDType>(&self, cache: &mut [T], new: &[T]) {
        let (heads, dim) = (self.layout.shape().heads, self.layout.shape().dim);
        let mut rotated = vec![0f32; dim];
        for sequence in 0..self.new.sequences() {
            let added = self.new.length(sequence);
            for index in 0..added {
                let (entry, row) = self.new.locate(sequence, index);
                let position = self.grown.length(sequence) - added + index;
                let (page, place) = self.grown.locate(sequence, position);
                for head in 0..heads {
                    let from = &new[self.new_layout.offset(entry, row, head)..][..dim];
                    let to = &mut cache[self.layout.offset(page, place, head)..][..dim];
                    let Some(tables) = self.rotary else {
                        to.copy_from_slice(from);
                        continue;
                    };
                    for (rotated, element) in rotated.iter_mut().zip(from) {
                        *rotated = element.to_f64() as f32;
                    }
                    // Angles count left padding, as lengths do.
                    let position = self.grown.ends()[sequence] - added + index;
                    tables.rotary().turn(&mut rotated, position);
                    for (element, rotated) in to.iter_mut().zip(&rotated) {
                        *element = T::from_f64(f64::from(*rotated));
                    }
                }
            }
        }
    }
}

impl InplaceOp2 for Rows<'_> {
    fn name(&self) -> &'static str {
        "flashcore-append"
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        of_cache: &Layout,
        new: &CpuStorage,
        of_new: &Layout,
    ) -> Result<()> {
        let (begin, from) = (of_cache.start_offset(), of_new.start_offset());
        match (cache, new) {
            (CpuStorage::F32(cache), CpuStorage::F32(new)) => {
                self.write(&mut cache[begin..], &new[from..]);
            }
            (CpuStorage::F16(cache), CpuStorage::F16(new)) => {
                self.write(&mut cache[begin..], &new[from..]);
            }
            (CpuStorage::BF16(cache), CpuStorage::BF16(new)) => {
                self.write(&mut cache[begin..], &new[from..]);
            }
            (cache, _) => candle_core::bail!("append takes no {:?}", cache.dtype()),
        }
        Ok(())
    }
}
