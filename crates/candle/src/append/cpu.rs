//! Appending new keys and values to a cache in host memory.

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, DType, Device, InplaceOp2, Layout, Result, Storage, Tensor, WithDType,
};
use flashcore::{Descale, E4M3, Shape, quantize, serving};
use float8::F8E4M3;

use super::{Append, Cache, Factors};
use crate::arguments::refusal;
use crate::cpu::begin;
use crate::{Rotary, wrap};

/// Writes the new rows, and returns the new lengths.
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
    for (name, cache) in [("k_descale", keys), ("v_descale", values)] {
        cache.factors.as_ref().map_or(Ok(()), |it| it.check(name))?;
    }
    for (cache, rotary) in [(keys, tables.as_ref()), (values, None)] {
        let rows = Rows { grown: &grown, new: &new, cache, rotary };
        if let Some(Factors { descale: Descale::PerToken, tensor, .. }) = &cache.factors {
            tensor.inplace_op2(cache.new, &FoundFactors(&rows))?;
        }
        cache.cache.inplace_op2(cache.new, &rows)?;
    }
    let lengths: Vec<u32> = grown.ends().iter().map(|length| *length as u32).collect();
    Tensor::from_vec(lengths, count, &Device::Cpu)
}

/// The rows that are written to one cache.
struct Rows<'a> {
    /// Where the sequences are, including their new rows.
    grown: &'a serving::Placement,
    new: &'a serving::Placement,
    cache: &'a Cache<'a>,
    rotary: Option<&'a Tables>,
}

/// The source and the destination of a new row.
struct Row {
    sequence: usize,
    /// Batch entry, row and head in the new tensor, and in the cache.
    from: [usize; 3],
    to: [usize; 3],
    /// Position for the rotary angle, which includes left padding, as lengths do.
    angle: usize,
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
    fn each(&self, mut take: impl FnMut(Row)) {
        for sequence in 0..self.new.sequences() {
            let added = self.new.length(sequence);
            for index in 0..added {
                let (entry, row) = self.new.locate(sequence, index);
                let position = self.grown.length(sequence) - added + index;
                let (page, place) = self.grown.locate(sequence, position);
                let angle = self.grown.ends()[sequence] - added + index;
                for head in 0..self.cache.layout.shape().heads {
                    let (from, to) = ([entry, row, head], [page, place, head]);
                    take(Row { sequence, from, to, angle });
                }
            }
        }
    }

    fn from<'n, T>(&self, new: &'n [T], row: &Row) -> &'n [T] {
        &new[at(self.cache.new_layout, row.from)..][..self.cache.layout.shape().dim]
    }

    fn to<'c, T>(&self, cache: &'c mut [T], row: &Row) -> &'c mut [T] {
        &mut cache[at(self.cache.layout, row.to)..][..self.cache.layout.shape().dim]
    }

    /// Returns a new row in f32, rotated.
    fn numbers<T: WithDType>(&self, new: &[T], row: &Row) -> Vec<f32> {
        let from = self.from(new, row).iter();
        let mut numbers: Vec<f32> = from.map(|element| element.to_f64() as f32).collect();
        if let Some(tables) = self.rotary {
            tables.rotary().turn(&mut numbers, row.angle);
        }
        numbers
    }

    fn write<T: WithDType>(&self, cache: &mut [T], new: &[T]) {
        self.each(|row| {
            let to = self.to(cache, &row);
            if self.rotary.is_none() {
                to.copy_from_slice(self.from(new, &row));
                return;
            }
            for (element, number) in to.iter_mut().zip(self.numbers(new, &row)) {
                *element = T::from_f64(f64::from(number));
            }
        });
    }

    /// Like `write`, rounding to 8 bits.
    fn narrow<T: WithDType>(&self, cache: &mut [F8E4M3], new: &[T]) -> Result<()> {
        let mut write = |divide: &dyn Fn(&mut [f32], &Row)| {
            self.each(|row| {
                let mut numbers = self.numbers(new, &row);
                divide(&mut numbers, &row);
                for (element, number) in self.to(cache, &row).iter_mut().zip(numbers) {
                    *element = F8E4M3::from_bits(E4M3::from_f32(number).to_bits());
                }
            });
        };
        let Some(factors) = &self.cache.factors else {
            write(&|_, _| ());
            return Ok(());
        };
        let Factors { descale, layout, .. } = factors;
        factors.read(|all| {
            write(&|numbers, row| {
                let place = match descale {
                    Descale::PerToken => row.to,
                    _ => [row.sequence, 0, row.to[2]],
                };
                quantize::divide(numbers, all[at(*layout, place)]);
            });
        })
    }
}

fn at(layout: flashcore::Layout, [entry, row, head]: [usize; 3]) -> usize {
    layout.offset(entry, row, head)
}

impl InplaceOp2 for Rows<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        of_cache: &Layout,
        new: &CpuStorage,
        of_new: &Layout,
    ) -> Result<()> {
        use CpuStorage as S;
        let (begin, from) = (begin(of_cache), begin(of_new));
        match (cache, new) {
            (S::F32(cache), S::F32(new)) => self.write(&mut cache[begin..], &new[from..]),
            (S::F16(cache), S::F16(new)) => self.write(&mut cache[begin..], &new[from..]),
            (S::BF16(cache), S::BF16(new)) => self.write(&mut cache[begin..], &new[from..]),
            (S::F8E4M3(cache), S::F8E4M3(new)) => self.write(&mut cache[begin..], &new[from..]),
            (S::F8E4M3(cache), S::F32(new)) => self.narrow(&mut cache[begin..], &new[from..])?,
            (S::F8E4M3(cache), S::F16(new)) => self.narrow(&mut cache[begin..], &new[from..])?,
            (S::F8E4M3(cache), S::BF16(new)) => self.narrow(&mut cache[begin..], &new[from..])?,
            (cache, _) => candle_core::bail!("append takes no {:?}", cache.dtype()),
        }
        Ok(())
    }
}

impl Factors {
    /// Passes all factors, from the first element on, to a function.
    fn read<T>(&self, read: impl FnOnce(&[f32]) -> T) -> Result<T> {
        let (memory, of) = self.tensor.storage_and_layout();
        match &*memory {
            Storage::Cpu(CpuStorage::F32(all)) => Ok(read(&all[begin(of)..])),
            _ => candle_core::bail!("append: descale factors are not f32 in host memory"),
        }
    }

    /// Refuses factors per head by which nothing can be divided.
    fn check(&self, name: &str) -> Result<()> {
        if self.descale == Descale::PerToken {
            return Ok(());
        }
        let Shape { batch, heads, .. } = self.layout.shape();
        let places = (0..batch).flat_map(|batch| (0..heads).map(move |head| [batch, 0, head]));
        let found = self.read(|all| {
            let mut factors = places.map(|place| (place, all[at(self.layout, place)]));
            factors.find(|(_, factor)| !factor.is_finite() || *factor <= 0.0)
        })?;
        match found {
            None => Ok(()),
            Some(([sequence, _, head], factor)) => {
                let given = format!("is {factor} for sequence {sequence} and head {head}");
                Err(refusal(name, given, "a finite number above zero"))
            }
        }
    }
}

/// The operation that computes the factors of new rows and writes them to the factors of the cache.
struct FoundFactors<'a>(&'a Rows<'a>);

impl FoundFactors<'_> {
    fn write<T: WithDType>(&self, factors: &mut [f32], new: &[T]) {
        let FoundFactors(rows) = self;
        let Some(Factors { layout, .. }) = &rows.cache.factors else { return };
        rows.each(|row| {
            let numbers = rows.numbers(new, &row);
            factors[at(*layout, row.to)] = quantize::row_factor(&numbers, flashcore::DType::E4M3);
        });
    }
}

impl InplaceOp2 for FoundFactors<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        factors: &mut CpuStorage,
        of_factors: &Layout,
        new: &CpuStorage,
        of_new: &Layout,
    ) -> Result<()> {
        let (begin, from) = (begin(of_factors), begin(of_new));
        let CpuStorage::F32(factors) = factors else {
            candle_core::bail!("descale factors are not f32")
        };
        match new {
            CpuStorage::F32(new) => self.write(&mut factors[begin..], &new[from..]),
            CpuStorage::F16(new) => self.write(&mut factors[begin..], &new[from..]),
            CpuStorage::BF16(new) => self.write(&mut factors[begin..], &new[from..]),
            other => candle_core::bail!("append rounds no {:?}", other.dtype()),
        }
        Ok(())
    }
}

/// Name of the operations, for candle's errors.
const NAME: &str = "flashcore-append";
