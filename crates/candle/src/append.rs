//! New keys and values into a cache.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor, WithDType};
use flashcore::serving;

use crate::arguments::{layout, refusal};
use crate::placement::check_place;
use crate::{Placement, wrap};

/// Rotary embedding: pairs of columns of a new key are turned by the angle that its position has.
/// Twice as many columns are turned as the tables have, the first ones.
#[derive(Debug, Clone)]
pub struct Rotary {
    /// (positions, pairs) in f32, on the keys' device.
    pub cosines: Tensor,
    /// Of the shape of the cosines.
    pub sines: Tensor,
    /// Whether neighbours are pairs; else the first column of a pair is in the first half of those
    /// that are turned, and the second in the second.
    pub interleaved: bool,
}

/// Writes new keys and values behind the sequences of a cache, in place; bit for bit where nothing
/// is turned. `cache` says where the sequences are and how long they were, `new` where the new rows
/// are: row `i` of a sequence becomes its position `length + i`.
///
/// On the CPU. On a GPU it is refused.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashcore_candle::{Placement, append};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let key_cache = Tensor::zeros((10, 16, 2, 64), DType::F32, &device)?;
/// let value_cache = Tensor::zeros((10, 16, 2, 64), DType::F32, &device)?;
/// let lengths = Tensor::new(&[40u32, 25], &device)?;
/// let table = Tensor::new(&[[7u32, 0, 2], [5, 1, 1]], &device)?;
///
/// // One new token for each of two sequences.
/// let key = Tensor::randn(0f32, 1., (2, 1, 2, 64), &device)?;
/// let value = Tensor::randn(0f32, 1., (2, 1, 2, 64), &device)?;
/// let cache = Placement::paged(&lengths, &table);
/// append((&key_cache, &value_cache), &cache, (&key, &value), &Placement::padded(), None)?;
/// # Ok(())
/// # }
/// ```
pub fn append(
    (key_cache, value_cache): (&Tensor, &Tensor),
    cache: &Placement,
    (key, value): (&Tensor, &Tensor),
    new: &Placement,
    rotary: Option<&Rotary>,
) -> Result<()> {
    let device = key_cache.device();
    if !device.is_cpu() {
        let given = format!("is on {:?}", device.location());
        return Err(refusal("key cache", given, "Cpu: append is not served on a GPU"));
    }
    for (name, tensor, like) in [
        ("value cache", value_cache, key_cache),
        ("new key", key, key_cache),
        ("new value", value, key_cache),
    ] {
        if tensor.dtype() != like.dtype() {
            let expected = format!("{:?} like the key cache", like.dtype());
            return Err(refusal(name, format!("has dtype {:?}", tensor.dtype()), expected));
        }
        if !tensor.device().is_cpu() {
            let given = format!("is on {:?}", tensor.device().location());
            return Err(refusal(name, given, "Cpu like the key cache"));
        }
    }
    let keys = Rows::new("key", key_cache, cache, key, new, rotary)?;
    let values = Rows::new("value", value_cache, cache, value, new, None)?;
    key_cache.inplace_op2(key, &keys)?;
    value_cache.inplace_op2(value, &values)
}

/// The rows of one tensor that are written.
struct Rows {
    /// Where the sequences are with their new rows.
    grown: serving::Placement,
    new: serving::Placement,
    cache_layout: flashcore::Layout,
    layout: flashcore::Layout,
    rotary: Option<Tables>,
}

/// A rotary embedding on the host.
struct Tables {
    dim: usize,
    interleaved: bool,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Rows {
    fn new(
        name: &str,
        cache: &Tensor,
        place: &Placement,
        tensor: &Tensor,
        new: &Placement,
        rotary: Option<&Rotary>,
    ) -> Result<Self> {
        let device = cache.device();
        let cache_layout = layout(&format!("{name} cache"), cache.layout(), place.is_packed())?;
        let layout = layout(&format!("new {name}"), tensor.layout(), new.is_packed())?;
        let (room, given) = (cache_layout.shape(), layout.shape());
        if (given.heads, given.dim) != (room.heads, room.dim) {
            let expected = format!("heads and dim of the cache's {room}");
            return Err(refusal(&format!("new {name}"), format!("has shape {given}"), expected));
        }
        let count = place.sequences(room, device)?;
        let sequences = new.sequences(given, device)?;
        if sequences != count {
            let given = format!("is of {sequences} sequences");
            let expected = format!("{count} like the cache's");
            return Err(refusal(&format!("placement of the new {name}"), given, expected));
        }
        let place = place.read(count, room)?;
        let new = new.read(count, given)?;
        let lengths = (0..count).map(|sequence| place.ends()[sequence] + new.length(sequence));
        let grown = place.clone().with_lengths(lengths.collect());
        grown.validate().map_err(wrap)?;
        grown.fits(room).map_err(wrap)?;
        let rotary = rotary.map(Tables::new).transpose()?;
        if let Some(rotary) = &rotary {
            let positions = grown.ends().iter().copied().max().unwrap_or(0);
            rotary.rotary().validate(room.dim, positions).map_err(wrap)?;
        }
        Ok(Rows { grown, new, cache_layout, layout, rotary })
    }

    fn write<T: WithDType>(&self, cache: &mut [T], new: &[T]) {
        let (heads, dim) = (self.layout.shape().heads, self.layout.shape().dim);
        let mut turned = vec![0f32; dim];
        for sequence in 0..self.new.sequences() {
            let added = self.new.length(sequence);
            for index in 0..added {
                let (entry, from) = self.new.locate(sequence, index);
                let position = self.grown.length(sequence) - added + index;
                let (page, to) = self.grown.locate(sequence, position);
                for head in 0..heads {
                    let from = &new[self.layout.offset(entry, from, head)..][..dim];
                    let to = &mut cache[self.cache_layout.offset(page, to, head)..][..dim];
                    let Some(rotary) = &self.rotary else {
                        to.copy_from_slice(from);
                        continue;
                    };
                    for (turned, element) in turned.iter_mut().zip(from) {
                        *turned = element.to_f64() as f32;
                    }
                    let position = self.grown.ends()[sequence] - added + index;
                    rotary.rotary().turn(&mut turned, position);
                    for (element, turned) in to.iter_mut().zip(&turned) {
                        *element = T::from_f64(f64::from(*turned));
                    }
                }
            }
        }
    }
}

impl Tables {
    fn new(rotary: &Rotary) -> Result<Self> {
        let Rotary { cosines, sines, interleaved } = rotary;
        let (_, pairs) = cosines.dims2()?;
        for (name, table) in [("table of cosines", cosines), ("table of sines", sines)] {
            if table.dtype() != DType::F32 {
                return Err(refusal(name, format!("has dtype {:?}", table.dtype()), "F32"));
            }
            check_place(name, table, cosines.dims(), &candle_core::Device::Cpu)?;
        }
        Ok(Tables {
            dim: 2 * pairs,
            interleaved: *interleaved,
            cosines: cosines.flatten_all()?.to_vec1()?,
            sines: sines.flatten_all()?.to_vec1()?,
        })
    }

    fn rotary(&self) -> serving::Rotary<'_> {
        let Tables { dim, interleaved, cosines, sines } = self;
        serving::Rotary { dim: *dim, interleaved: *interleaved, cosines, sines }
    }
}

impl InplaceOp2 for Rows {
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
