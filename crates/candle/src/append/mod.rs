//! Appending new keys and values to a cache.

mod cpu;

use candle_core::{Device, Result, Tensor};
use flashcore::Descale;

use crate::arguments::{
    check_alike, check_device, element, factors_of, layout, no_device, refusal, small_element,
};
use crate::placement::check_place;
use crate::{Placement, Rotary};

/// Writes new keys and values behind the sequences of a cache, in place, and bit for bit unless
/// they are rotated or rounded. `cache` says where the sequences are and how long they were, `new`
/// where the new rows are: row `i` of a sequence becomes its position `length + i`. Returns the new
/// lengths in u32, as the following attention takes them.
///
/// Caches may be `F8E4M3` while the new rows are wider: these are then rounded, without a scale
/// here, and with descale factors in [`append_scaled`].
///
/// On a GPU this is one launch, for f16 and bf16. Rows for which a sequence has no room are not
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
    run(&Append::new([key_cache, value_cache], cache, [key, value], new, rotary)?)
}

/// Like [`append`], into `F8E4M3` caches with f32 descale factors of keys and of values. Factors of
/// shape (), (key heads,) or (sequences, key heads) are read, and new rows are divided by them.
/// Factors of the cache's shape without the last dimension are computed for each new row, and
/// written there.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashcore_candle::{Options, Placement, Sequences, append_scaled, attend_sequences};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let key_cache = Tensor::zeros((2, 64, 2, 32), DType::F8E4M3, &device)?;
/// let value_cache = Tensor::zeros((2, 64, 2, 32), DType::F8E4M3, &device)?;
/// let k_descale = Tensor::ones((2, 64, 2), DType::F32, &device)?;
/// let v_descale = Tensor::ones((2, 64, 2), DType::F32, &device)?;
/// let lengths = Tensor::new(&[0u32, 0], &device)?;
///
/// let key = Tensor::randn(0f32, 30., (2, 5, 2, 32), &device)?.to_dtype(DType::BF16)?;
/// let value = Tensor::randn(0f32, 30., (2, 5, 2, 32), &device)?.to_dtype(DType::BF16)?;
/// let place = Placement::padded().with_lengths(&lengths);
/// let (caches, factors) = ((&key_cache, &value_cache), (&k_descale, &v_descale));
/// let rows = Placement::padded();
/// let lengths = append_scaled(caches, &place, (&key, &value), &rows, None, factors)?;
///
/// let query = Tensor::randn(0f32, 1., (2, 1, 4, 32), &device)?.to_dtype(DType::BF16)?;
/// let keys = Placement::padded().with_lengths(&lengths);
/// let sequences = Sequences { queries: Placement::padded(), keys };
/// let options =
///     Options { k_descale: Some(k_descale), v_descale: Some(v_descale), ..Options::default() };
/// let attention = attend_sequences(&query, &key_cache, &value_cache, &sequences, &options)?;
/// # Ok(())
/// # }
/// ```
pub fn append_scaled(
    (key_cache, value_cache): (&Tensor, &Tensor),
    cache: &Placement,
    (key, value): (&Tensor, &Tensor),
    new: &Placement,
    rotary: Option<&Rotary>,
    (k_descale, v_descale): (&Tensor, &Tensor),
) -> Result<Tensor> {
    let append = Append::new([key_cache, value_cache], cache, [key, value], new, rotary)?;
    run(&append.scaled([("k_descale", k_descale), ("v_descale", v_descale)])?)
}

fn run(append: &Append<'_>) -> Result<Tensor> {
    match append.caches[0].cache.device() {
        Device::Cpu => cpu::append(append),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => crate::cuda::append::append(append),
        other => Err(no_device(other)),
    }
}

/// A checked append.
pub(crate) struct Append<'a> {
    /// The caches of keys and values.
    pub(crate) caches: [Cache<'a>; 2],
    /// Where the sequences are, and how long they were.
    pub(crate) place: &'a Placement,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU reads the placement"))]
    pub(crate) lengths: &'a Tensor,
    /// Where the new rows are.
    pub(crate) new: &'a Placement,
    pub(crate) sequences: usize,
    /// Rotary embedding of the keys.
    pub(crate) rotary: Option<&'a Rotary>,
}

/// A cache, and the new rows that are written to it.
pub(crate) struct Cache<'a> {
    pub(crate) cache: &'a Tensor,
    pub(crate) layout: flashcore::Layout,
    pub(crate) new: &'a Tensor,
    pub(crate) new_layout: flashcore::Layout,
    pub(crate) factors: Option<Factors>,
}

/// The descale factors of an 8-bit cache.
pub(crate) struct Factors {
    /// Granularity: factors per head are given, factors per token are computed.
    pub(crate) descale: Descale,
    pub(crate) tensor: Tensor,
    /// Layout as (batch, length, heads, 1).
    pub(crate) layout: flashcore::Layout,
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
        check_alike(("value cache", value_cache), of_keys)?;
        // Wider rows may be rounded to 8 bits; otherwise types must match.
        let rounded = small_element(of_keys.0, key_cache)?.is_8_bit();
        let of_new = if rounded && key.dtype() != key_cache.dtype() {
            element("new key", key)?;
            check_device(("new key", key), of_keys)?;
            ("new key", key)
        } else {
            check_alike(("new key", key), of_keys)?;
            of_keys
        };
        check_alike(("new value", value), of_new)?;
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
                check_alike((name, table), of_new)?;
                let (positions, pairs) = cosines.dims2()?;
                check_place(name, table, &[positions, pairs], device)?;
            }
        }
        Ok(Append { caches, place, lengths, new, sequences, rotary })
    }

    /// Sets descale factors of keys and values.
    fn scaled(mut self, factors: [(&str, &Tensor); 2]) -> Result<Self> {
        let rows = self.caches[0].layout.shape();
        for (cache, (name, given)) in self.caches.iter_mut().zip(factors) {
            let device = cache.cache.device();
            if cache.cache.dtype() == cache.new.dtype() {
                let given = format!("is for {:?} rows of the same cache", cache.new.dtype());
                return Err(refusal(name, given, "rows that are rounded to 8 bits"));
            }
            let (descale, tensor, layout) =
                factors_of(name, given, self.sequences, rows, false, device)?;
            cache.factors = Some(Factors { descale, tensor, layout });
        }
        Ok(self)
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
        Ok(Cache { cache, layout: layout_of_cache, new, new_layout, factors: None })
    }
}
