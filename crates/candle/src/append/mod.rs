//! New keys and values into a cache.

mod cpu;

use candle_core::{Device, Result, Tensor};

use crate::arguments::{check_alike, element, layout, no_device, refusal};
use crate::placement::check_place;
use crate::{Placement, Rotary};

/// Writes new keys and values behind the sequences of a cache, in place; bit for bit where nothing
/// is rotated. `cache` says where the sequences are and how long they were, `new` where the new rows
/// are: row `i` of a sequence becomes its position `length + i`. Returns the lengths with the new
/// rows in u32, as the attention that follows takes them.
///
/// On a GPU this is one launch, for f16 and bf16. Rows that a sequence has no room for are not
/// written there; on the CPU they are an error.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashcore_candle::{Mask, Options, Placement, Sequences, append, attend_sequences};
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
/// let caches = (&key_cache, &value_cache);
/// let cache = Placement::paged(&lengths, &table);
/// let lengths = append(caches, &cache, (&key, &value), &Placement::padded(), None)?;
/// assert_eq!(lengths.to_vec1::<u32>()?, [41, 26]);
///
/// let query = Tensor::randn(0f32, 1., (2, 1, 8, 64), &device)?;
/// let sequences = Sequences::paged(&lengths, &table);
/// let options = Options { mask: Mask::CAUSAL, ..Options::default() };
/// let attention = attend_sequences(&query, &key_cache, &value_cache, &sequences, &options)?;
/// # Ok(())
/// # }
/// ```
pub fn append(
    (key_cache, value_cache): (&Tensor, &Tensor),
    cache: &Placement,
    (key, value): (&Tensor, &Tensor),
    new: &Placement,
    rotary: Option<&Rotary>,
) -> Result<Tensor> {
    let append = Append::new([key_cache, value_cache], cache, [key, value], new, rotary)?;
    match key_cache.device() {
        Device::Cpu => cpu::append(&append),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => crate::cuda::append::append(&append),
        other => Err(no_device(other)),
    }
}

/// All that a call asks for.
pub(crate) struct Append<'a> {
    /// Keys and values.
    pub(crate) caches: [Cache<'a>; 2],
    /// Where the sequences are, and how long they were.
    pub(crate) place: &'a Placement,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU reads the placement"))]
    pub(crate) lengths: &'a Tensor,
    /// Where the new rows are.
    pub(crate) new: &'a Placement,
    pub(crate) sequences: usize,
    /// Of the keys.
    pub(crate) rotary: Option<&'a Rotary>,
}

/// A cache, and what is added to it.
pub(crate) struct Cache<'a> {
    pub(crate) cache: &'a Tensor,
    pub(crate) layout: flashcore::Layout,
    pub(crate) new: &'a Tensor,
    pub(crate) new_layout: flashcore::Layout,
}

impl<'a> Append<'a> {
    fn new(
        [key_cache, value_cache]: [&'a Tensor; 2],
        place: &'a Placement,
        [key, value]: [&'a Tensor; 2],
        new: &'a Placement,
        rotary: Option<&'a Rotary>,
    ) -> Result<Self> {
        let device = key_cache.device();
        let of_keys = ("key cache", key_cache);
        element(of_keys.0, key_cache)?;
        for tensor in [("value cache", value_cache), ("new key", key), ("new value", value)] {
            check_alike(tensor, of_keys)?;
        }
        let Some(lengths) = place.lengths.as_ref().filter(|_| !place.is_packed()) else {
            let expected = "pages, or a list of lengths";
            return Err(refusal("placement of the cache", "has no room", expected));
        };
        let caches = [
            Cache::new("key", key_cache, key, new.is_packed())?,
            Cache::new("value", value_cache, value, new.is_packed())?,
        ];
        let [keys, values] = [&caches[0], &caches[1]];
        for (name, one, other) in [
            ("value cache", values.layout.shape(), keys.layout.shape()),
            ("new value", values.new_layout.shape(), keys.new_layout.shape()),
        ] {
            if (one.batch, one.length, one.heads) != (other.batch, other.length, other.heads) {
                let expected = format!("the key's {other} but for the head dim");
                return Err(refusal(name, format!("has shape {one}"), expected));
            }
        }
        let sequences = place.sequences(keys.layout.shape(), device)?;
        let added = new.sequences(keys.new_layout.shape(), device)?;
        if added != sequences || !new.serves_queries() {
            let given = format!("is of {added} sequences");
            let expected =
                format!("{sequences} like the cache's, padded or packed without left padding");
            return Err(refusal("placement of new rows", given, expected));
        }
        if let Some(Rotary { cosines, sines, .. }) = rotary {
            for (name, table) in [("table of cosines", cosines), ("table of sines", sines)] {
                check_alike((name, table), of_keys)?;
                let (positions, pairs) = cosines.dims2()?;
                check_place(name, table, &[positions, pairs], device)?;
            }
        }
        Ok(Append { caches, place, lengths, new, sequences, rotary })
    }
}

impl<'a> Cache<'a> {
    fn new(name: &str, cache: &'a Tensor, new: &'a Tensor, packed: bool) -> Result<Self> {
        let layout_of_cache = layout(&format!("{name} cache"), cache.layout(), false)?;
        let new_layout = layout(&format!("new {name}"), new.layout(), packed)?;
        let (room, given) = (layout_of_cache.shape(), new_layout.shape());
        if (given.heads, given.dim) != (room.heads, room.dim) {
            let expected = format!("heads and dim of the cache's {room}");
            return Err(refusal(&format!("new {name}"), format!("has shape {given}"), expected));
        }
        Ok(Cache { cache, layout: layout_of_cache, new, new_layout })
    }
}
