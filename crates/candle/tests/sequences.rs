//! Sequences of unequal lengths over candle tensors, against FlashCore's reference.

use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor, Var};
use flashcore::serving::{self, CacheScales, Pages};
use flashcore::{Alibi, InputTensors, Output, Problem, Report, Shape};
use flashcore_candle::candle_flash_attn::*;
use flashcore_candle::{
    Attention, Mask, Options, Placement, Rotary, Sequences, append, append_scaled, attend,
    attend_sequences, combine, plan_sequences,
};
use testing::compare_sequences;
use testing::reference::{self, Rows};

/// A list of u32 on the CPU.
fn list(numbers: &[u32]) -> Result<Tensor> {
    Tensor::new(numbers, &Device::Cpu)
}

fn random(dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)
}

/// The largest difference between two tensors.
fn distance(one: &Tensor, other: &Tensor) -> Result<f64> {
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64);
    (wide(one)? - wide(other)?)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// The same elements as a tensor of FlashCore's; packed rows are one batch entry.
fn ours(tensor: &Tensor) -> flashcore::Tensor {
    let dtype = match tensor.dtype() {
        DType::F32 => flashcore::DType::F32,
        DType::F16 => flashcore::DType::F16,
        DType::F8E4M3 => flashcore::DType::E4M3,
        _ => flashcore::DType::BF16,
    };
    let shape = match *tensor.dims() {
        [rows, heads, dim] => Shape::new(1, rows, heads, dim),
        [batch, length, heads, dim] => Shape::new(batch, length, heads, dim),
        _ => panic!("{:?}", tensor.shape()),
    };
    let elements = tensor.to_dtype(DType::F32).and_then(|it| it.flatten_all()?.to_vec1::<f32>());
    flashcore::Tensor::from_f32(dtype, shape, &elements.unwrap()).unwrap()
}

/// Candle tensors, and where their sequences are in two languages.
struct Case {
    tensors: [Tensor; 3],
    sequences: Sequences,
    placements: [serving::Placement; 2],
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 24;
const VALUE_DIM: usize = 16;

impl Case {
    fn new(
        dtype: DType,
        [query, keys]: [&[usize]; 2],
        (queries, query_placement): (Placement, serving::Placement),
        (key_placement, placement): (Placement, serving::Placement),
    ) -> Result<Case> {
        Ok(Case {
            tensors: [
                random(dtype, &[query, &[HEADS, DIM]].concat())?,
                random(dtype, &[keys, &[KV_HEADS, DIM]].concat())?,
                random(dtype, &[keys, &[KV_HEADS, VALUE_DIM]].concat())?,
            ],
            sequences: Sequences { queries, keys: key_placement },
            placements: [query_placement, placement],
        })
    }

    /// Each way in which rows can lie, with empty sequences among them.
    fn every(dtype: DType) -> Result<Vec<Case>> {
        let packed = |starts: &[u32]| {
            let longest = starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
            let numbers = starts.iter().map(|start| *start as usize).collect();
            let here = Placement::packed(&list(starts)?, longest as usize);
            Ok::<_, candle_core::Error>((here, serving::Placement::packed(numbers)))
        };
        let full = |count: usize, room: usize| {
            (Placement::padded(), serving::Placement::padded(vec![room; count]))
        };
        let table = Tensor::new(&[[7u32, 0, 2, 5], [3, 3, 9, 9], [1, 8, 4, 4]], &Device::Cpu)?;
        let pages = || Pages::new(8, 4, vec![7, 0, 2, 5, 3, 3, 9, 9, 1, 8, 4, 4]).unwrap();
        let paged = (
            Placement::paged(&list(&[29, 0, 13])?, &table),
            serving::Placement::paged(vec![29, 0, 13], pages()),
        );
        let slots = (
            Placement::entries(&list(&[4, 0, 3])?)
                .with_lengths(&list(&[20, 11, 9])?)
                .with_left_padding(&list(&[3, 0, 9])?),
            serving::Placement::entries(vec![20, 11, 9], vec![4, 0, 3])
                .with_left_padding(vec![3, 0, 9]),
        );
        let used = (
            Placement::padded().with_lengths(&list(&[2, 0, 5])?),
            serving::Placement::padded(vec![2, 0, 5]),
        );
        let queries = [0, 9, 9, 14];
        Ok(vec![
            Case::new(dtype, [&[14], &[40]], packed(&queries)?, packed(&[0, 17, 23, 40])?)?,
            Case::new(dtype, [&[14], &[10, 8]], packed(&queries)?, paged.clone())?,
            Case::new(dtype, [&[3, 1], &[10, 8]], full(3, 1), paged)?,
            Case::new(dtype, [&[3, 2], &[6, 21]], full(3, 2), slots.clone())?,
            Case::new(dtype, [&[3, 5], &[6, 21]], used, slots)?,
        ])
    }

    fn check(&self, options: &Options) -> Result<()> {
        let [query, key, value] = &self.tensors;
        let found = attend_sequences(query, key, value, &self.sequences, options)?;
        assert_eq!(found.output.dims()[..query.rank() - 1], query.dims()[..query.rank() - 1]);
        let lse = found.lse.expect("it was asked for");
        let rows = match *query.dims() {
            [rows, heads, _] => vec![heads, rows],
            [batch, length, heads, _] => vec![batch, heads, length],
            _ => unreachable!("no such tensor is made"),
        };
        assert_eq!(lse.dims(), rows);

        let numbers = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let tensors = InputTensors {
            query: ours(query),
            key: ours(key),
            value: ours(value),
            slopes: options.slopes.as_ref().map(numbers).transpose()?,
            sinks: options.sinks.as_ref().map(numbers).transpose()?,
            descales: Default::default(),
        };
        let mut problem = Problem::new(0, HEADS, 0, DIM)
            .with_kv_heads(KV_HEADS)
            .with_value_head_dim(VALUE_DIM)
            .with_dtype(tensors.query.dtype())
            .with_mask(options.mask);
        problem.scores.softcap = options.softcap;
        problem.scores.scale = options.softmax_scale;
        problem.scores.alibi = match &options.slopes {
            None => Alibi::None,
            Some(slopes) if slopes.rank() == 2 => Alibi::PerSequence,
            Some(_) => Alibi::PerHead,
        };
        problem.scores.sinks = options.sinks.is_some();
        let [queries, keys] = self.placements.clone();
        let sequences = serving::Sequences::new(problem, queries, keys).unwrap();
        let (problem, inputs) = sequences.over(tensors.inputs()).unwrap();
        let rows = Rows::of(&sequences);
        let expected = reference::attention(&problem, inputs, &rows, None).unwrap();
        let baseline = reference::baseline(&problem, inputs, &rows, None).unwrap();
        let output = Output {
            output: ours(&found.output),
            lse: numbers(&lse)?,
            report: Report {
                backend: "candle",
                kernel: "",
                configuration: None,
                reason: String::new(),
                kernel_time: Duration::ZERO,
                first_result_time: Duration::ZERO,
                total_time: Duration::ZERO,
                notes: Vec::new(),
            },
        };
        let verdict = compare_sequences(&sequences, &output, &expected, &baseline).unwrap();
        assert!(verdict.passed, "{:?} {options:?}: {verdict}", self.sequences);
        assert_eq!(verdict.rows, sequences.rows());
        let plan = plan_sequences(query, key, value, &self.sequences, options)?;
        assert_eq!(plan.chosen.full_name(), "cpu/blocked");
        Ok(())
    }
}

#[test]
fn sequences_agree_with_the_reference() -> Result<()> {
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?;
    let of_sequences = Tensor::randn(0f32, 1., (3, HEADS), &Device::Cpu)?.abs()?;
    let sinks = Tensor::randn(0f32, 1., HEADS, &Device::Cpu)?;
    let plain = Options { lse: true, ..Options::default() };
    let causal = Options { mask: Mask::CAUSAL, ..plain.clone() };
    let every_option = [
        plain.clone(),
        causal.clone(),
        Options { mask: Mask::window(Some(6), Some(1)), softmax_scale: Some(0.3), ..plain.clone() },
        Options { mask: Mask::CAUSAL.with_chunk(7), ..plain.clone() },
        Options { softcap: Some(2.0), slopes: Some(slopes), ..causal.clone() },
        Options { slopes: Some(of_sequences), sinks: Some(sinks), ..causal },
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for case in Case::every(dtype)? {
            for options in &every_option {
                case.check(options)?;
            }
        }
    }
    Ok(())
}

/// Lists may be i32, as elsewhere, and tensors views of larger ones.
#[test]
fn other_integers_and_strides_will_do() -> Result<()> {
    let [query, key, value] = [HEADS, KV_HEADS, KV_HEADS]
        .map(|heads| random(DType::F32, &[14, heads, DIM]))
        .map(|tensor| tensor.expect("a tensor"));
    let call = |query: &Tensor, key: &Tensor, starts: &Tensor| {
        flash_attn_varlen(query, key, &value, starts, starts, 9, 9, 0.2, true)
    };
    let expected = call(&query, &key, &list(&[0, 5, 14])?)?;
    let starts = Tensor::new(&[0i32, 5, 14], &Device::Cpu)?;
    assert_eq!(distance(&call(&query, &key, &starts)?, &expected)?, 0.);
    let key = key.pad_with_zeros(0, 3, 2)?.pad_with_zeros(1, 1, 0)?;
    let key = key.narrow(0, 3, 14)?.narrow(1, 1, KV_HEADS)?;
    assert!(!key.is_contiguous());
    assert_eq!(distance(&call(&query, &key, &starts)?, &expected)?, 0.);
    Ok(())
}

/// Engines fill what a sequence does not use of a block table.
#[test]
fn pages_that_are_not_used_may_be_any_number() -> Result<()> {
    let query = random(DType::F32, &[2, 1, HEADS, DIM])?;
    let cache = random(DType::F32, &[6, 16, KV_HEADS, DIM])?;
    let lengths = list(&[20, 5])?;
    let call = |table: &Tensor| {
        let sequences = Sequences::paged(&lengths, table);
        attend_sequences(&query, &cache, &cache, &sequences, &Options::default())
    };
    let expected = call(&Tensor::new(&[[3u32, 1, 0], [2, 0, 0]], &Device::Cpu)?)?.output;
    let filled = call(&Tensor::new(&[[3i32, 1, -1], [2, -1, 9]], &Device::Cpu)?)?.output;
    assert_eq!(distance(&filled, &expected)?, 0.);
    assert_eq!(
        refusal(call(&Tensor::new(&[[3i32, -1, 1], [2, 0, 0]], &Device::Cpu)?)),
        "sequence 0 is in page 4294967295, and there are 6"
    );
    Ok(())
}

/// The functions of candle-flash-attn against the ones that they stand for.
#[test]
fn the_functions_of_candle_flash_attn_mean_what_they_did() -> Result<()> {
    let rows = [(0, 5), (5, 9)];
    let query = random(DType::F32, &[14, HEADS, DIM])?;
    let [key, value] = [0, 1].map(|_| random(DType::F32, &[14, KV_HEADS, DIM]).expect("a tensor"));
    let (q, k, v) = (&query, &key, &value);
    let starts = &list(&[0, 5, 14])?;
    let slopes = &Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?;
    let scale = 0.3;
    let windows = (Some(3), Some(1));
    // A sequence alone, by a function that has no sequences.
    let alone = |call: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>| {
        let parts = rows.map(|(begin, length)| {
            let part = |tensor: &Tensor| tensor.narrow(0, begin, length)?.unsqueeze(0);
            call(&part(q)?, &part(k)?, &part(v)?)?.squeeze(0)
        });
        Tensor::cat(&parts.into_iter().collect::<Result<Vec<_>>>()?, 0)
    };
    let (left, right) = windows;
    let pairs = [
        (
            flash_attn_varlen(q, k, v, starts, starts, 9, 9, scale, true)?,
            alone(&|q, k, v| flash_attn(q, k, v, scale, true))?,
        ),
        (
            flash_attn_varlen_windowed(q, k, v, starts, starts, 9, 9, scale, left, right)?,
            alone(&|q, k, v| flash_attn_windowed(q, k, v, scale, left, right))?,
        ),
        (
            flash_attn_varlen_alibi(q, k, v, slopes, starts, starts, 9, 9, scale, true)?,
            alone(&|q, k, v| flash_attn_alibi(q, k, v, slopes, scale, true))?,
        ),
        (
            flash_attn_varlen_alibi_windowed(
                q, k, v, slopes, starts, starts, 9, 9, scale, left, right,
            )?,
            alone(&|q, k, v| flash_attn_alibi_windowed(q, k, v, slopes, scale, left, right))?,
        ),
        (
            flash_attn_varlen_alibi_windowed_softcap(
                q, k, v, None, starts, starts, 9, 9, scale, left, right, 1.5,
            )?,
            alone(&|q, k, v| {
                flash_attn_alibi_windowed_softcap(q, k, v, None, scale, left, right, 1.5)
            })?,
        ),
    ];
    for (number, (found, expected)) in pairs.iter().enumerate() {
        let error = distance(found, expected)?;
        assert!(error < 1e-5, "pair {number}: off by {error}");
    }
    // Each differs from the others: no argument is ignored.
    for (one, (_, expected)) in pairs.iter().enumerate() {
        for (_, other) in &pairs[..one] {
            assert!(distance(expected, other)? > 1e-3);
        }
    }
    let without = flash_attn_alibi_windowed_softcap(
        &q.unsqueeze(0)?,
        &k.unsqueeze(0)?,
        &v.unsqueeze(0)?,
        None,
        scale,
        None,
        None,
        0.0,
    )?;
    let plain = flash_attn(&q.unsqueeze(0)?, &k.unsqueeze(0)?, &v.unsqueeze(0)?, scale, false)?;
    assert_eq!(distance(&without, &plain)?, 0.);

    // The same keys in pages of 4: rows 0 to 5 and 5 to 14, from the third page on.
    let paged = |tensor: &Tensor| {
        let (first, second) = (tensor.narrow(0, 0, 5)?, tensor.narrow(0, 5, 9)?);
        let (first, second) = (first.pad_with_zeros(0, 8, 3)?, second.pad_with_zeros(0, 0, 3)?);
        Tensor::cat(&[first, second], 0)?.reshape((7, 4, KV_HEADS, DIM))
    };
    let table = &Tensor::new(&[[2u32, 3, 0], [4, 5, 6]], &Device::Cpu)?;
    let (pages, of_values) = (&paged(k)?, &paged(v)?);
    let call = |ranges: Option<&Tensor>, size: usize| {
        flash_attn_varlen_paged_windowed(
            q, pages, of_values, starts, starts, table, ranges, 9, 9, scale, left, right, size,
            None,
        )
    };
    assert!(distance(&call(None, 4)?, &pairs[1].1)? < 1e-5);
    assert!(refusal(call(None, 8)).contains("pages of 4 positions, expected 8"));
    assert!(refusal(call(Some(table), 4)).contains("mm_prefix_ranges"));
    Ok(())
}

#[test]
fn new_keys_are_written_behind_the_old() -> Result<()> {
    let table = Tensor::new(&[[7u32, 0], [3, 1], [5, 4]], &Device::Cpu)?;
    let pages = || Pages::new(8, 2, vec![7, 0, 3, 1, 5, 4]).unwrap();
    let lengths = [6usize, 0, 8];
    let place = Placement::paged(&list(&[6, 0, 8])?, &table);
    let (positions, pairs) = (16, 8);
    let angles = Tensor::rand(0f32, 6., (positions, pairs), &Device::Cpu)?;
    let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    for (dtype, interleaved) in
        [(DType::F32, None), (DType::BF16, Some(false)), (DType::F16, Some(true))]
    {
        let (cosines, sines) = (angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?);
        // A view, as if keys and values were one tensor.
        let both = random(dtype, &[9, 2, 8, KV_HEADS, DIM])?;
        let caches = [both.narrow(1, 0, 1)?.squeeze(1)?, both.narrow(1, 1, 1)?.squeeze(1)?];
        let new = [0, 1].map(|_| random(dtype, &[6, KV_HEADS, DIM]).expect("a tensor"));
        let added = Placement::packed(&list(&[0, 3, 5, 6])?, 3);
        let [mut key, mut value] = [&caches[0], &caches[1]].map(ours);
        let [new_key, new_value] = [&new[0], &new[1]].map(ours);
        let (of_cosines, of_sines) = (numbers(&cosines)?, numbers(&sines)?);
        serving::append(
            (&mut key, &mut value),
            &serving::Placement::paged(lengths.to_vec(), pages()),
            (&new_key, &new_value),
            &serving::Placement::packed(vec![0, 3, 5, 6]),
            interleaved.map(|interleaved| serving::Rotary {
                dim: 2 * pairs,
                interleaved,
                cosines: &of_cosines,
                sines: &of_sines,
            }),
        )
        .unwrap();
        let rotary = interleaved.map(|interleaved| Rotary {
            cosines: cosines.clone(),
            sines: sines.clone(),
            interleaved,
        });
        let both_caches = (&caches[0], &caches[1]);
        let grown = append(both_caches, &place, (&new[0], &new[1]), &added, rotary.as_ref())?;
        assert_eq!(grown.to_vec1::<u32>()?, [9, 2, 9]);
        assert_eq!(ours(&caches[0]).to_f32(), key.to_f32());
        assert_eq!(ours(&caches[1]).to_f32(), value.to_f32());
    }
    let cache = random(DType::F32, &[9, 8, KV_HEADS, DIM])?;
    let long = random(DType::F32, &[3, 9, KV_HEADS, DIM])?;
    let full = append((&cache, &cache), &place, (&long, &long), &Placement::padded(), None);
    assert_eq!(refusal(full), "sequence 2 has 17 positions, and there is room for 16");
    let without = append((&cache, &cache), &Placement::padded(), (&long, &long), &place, None);
    assert_eq!(
        refusal(without),
        "attention: the placement of the cache has no room, expected pages, \
         or a list of lengths"
    );
    let other = long.to_dtype(DType::F16)?;
    let mixed = append((&cache, &cache), &place, (&long, &other), &Placement::padded(), None);
    assert_eq!(
        refusal(mixed),
        "attention: the new value has dtype F16, expected F32 like the key cache"
    );
    Ok(())
}

/// Into 8-bit caches as the library does it bit for bit: as they are, by factors of heads, and by
/// factors of tokens, which are found.
#[test]
fn wider_rows_are_rounded_into_8_bit_caches() -> Result<()> {
    let table = Tensor::new(&[[7u32, 0], [3, 1], [5, 4]], &Device::Cpu)?;
    let place = Placement::paged(&list(&[6, 0, 8])?, &table);
    let pages = Pages::new(8, 2, vec![7, 0, 3, 1, 5, 4]).unwrap();
    let library_place = serving::Placement::paged(vec![6, 0, 8], pages);
    let angles = Tensor::rand(0f32, 6., (16, 8), &Device::Cpu)?;
    for (dtype, rotated) in [(DType::F32, false), (DType::BF16, true), (DType::F16, false)] {
        for factors in ["none", "of heads", "of tokens"] {
            let cache = || random(DType::F32, &[9, 8, KV_HEADS, DIM])?.to_dtype(DType::F8E4M3);
            let caches = [cache()?, cache()?];
            let new = [0, 1].map(|_| random(dtype, &[6, KV_HEADS, DIM]).expect("a tensor"));
            // A view, as if those of keys and values were one tensor.
            let shape: &[usize] = match factors {
                "of heads" => &[2, 3, KV_HEADS],
                _ => &[2, 9, 8, KV_HEADS],
            };
            let both = Tensor::rand(0.01f32, 0.1, shape, &Device::Cpu)?;
            let descales = [both.get(0)?, both.get(1)?];
            let wide = |factors: &Tensor| match factors.rank() {
                2 => ours(&factors.unsqueeze(1).and_then(|it| it.unsqueeze(3)).unwrap()),
                _ => ours(&factors.unsqueeze(3).unwrap()),
            };
            let (cosines, sines) = (angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?);
            let numbers =
                |table: &Tensor| table.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
            let (of_cosines, of_sines) = (numbers(&cosines)?, numbers(&sines)?);
            let [mut key, mut value] = [&caches[0], &caches[1]].map(ours);
            let [new_key, new_value] = [&new[0], &new[1]].map(ours);
            let [mut of_key, mut of_value] = [&descales[0], &descales[1]].map(wide);
            serving::append_scaled(
                (&mut key, &mut value),
                &library_place,
                (&new_key, &new_value),
                &serving::Placement::packed(vec![0, 3, 5, 6]),
                rotated.then_some(serving::Rotary {
                    dim: 16,
                    interleaved: false,
                    cosines: &of_cosines,
                    sines: &of_sines,
                }),
                match factors {
                    "none" => CacheScales::None,
                    "of heads" => CacheScales::Given(&of_key, &of_value),
                    _ => CacheScales::Found(&mut of_key, &mut of_value),
                },
            )
            .unwrap();

            let rotary = Rotary { cosines, sines, interleaved: false };
            let rotary = rotated.then_some(&rotary);
            let added = Placement::packed(&list(&[0, 3, 5, 6])?, 3);
            let (to, from) = ((&caches[0], &caches[1]), (&new[0], &new[1]));
            let grown = match factors {
                "none" => append(to, &place, from, &added, rotary)?,
                _ => {
                    let descales = (&descales[0], &descales[1]);
                    append_scaled(to, &place, from, &added, rotary, descales)?
                }
            };
            assert_eq!(grown.to_vec1::<u32>()?, [9, 2, 9]);
            assert_eq!(ours(&caches[0]).to_f32(), key.to_f32(), "{dtype:?} {factors}");
            assert_eq!(ours(&caches[1]).to_f32(), value.to_f32(), "{dtype:?} {factors}");
            assert_eq!(wide(&descales[0]).to_f32(), of_key.to_f32(), "{dtype:?} {factors}");
            assert_eq!(wide(&descales[1]).to_f32(), of_value.to_f32(), "{dtype:?} {factors}");
        }
    }
    Ok(())
}

#[test]
fn wrong_factors_of_a_cache_are_refused() -> Result<()> {
    let place = Placement::padded().with_lengths(&list(&[0, 0])?);
    let cache = Tensor::zeros((2, 8, KV_HEADS, DIM), DType::F8E4M3, &Device::Cpu)?;
    let other = cache.copy()?;
    let new = random(DType::BF16, &[2, 1, KV_HEADS, DIM])?;
    let call = |new: &Tensor, key: &Tensor, value: &Tensor| {
        let (caches, rows) = ((&cache, &other), Placement::padded());
        append_scaled(caches, &place, (new, new), &rows, None, (key, value))
    };
    let one = Tensor::new(1f32, &Device::Cpu)?;
    for (number, text) in [(0., "0"), (-2., "-2"), (f32::INFINITY, "inf"), (f32::NAN, "NaN")] {
        let wrong = Tensor::new(&[[1f32, 1.], [1., number]], &Device::Cpu)?;
        let expected = format!(
            "attention: the v_descale is {text} for sequence 1 and head 1, expected a finite \
             number above zero"
        );
        assert_eq!(refusal(call(&new, &one, &wrong)), expected);
    }
    let three = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    assert_eq!(
        refusal(call(&new, &three, &one)),
        "attention: the k_descale has shape [3], expected [], [2], [2, 2], or the keys' shape \
         without its last dimension"
    );
    assert_eq!(
        refusal(call(&cache.narrow(1, 0, 1)?.copy()?, &one, &one)),
        "attention: the k_descale is for F8E4M3 rows of the same cache, expected rows that are \
         rounded to 8 bits"
    );
    let double = new.to_dtype(DType::F64)?;
    assert_eq!(
        refusal(call(&double, &one, &one)),
        "attention: the new key has dtype F64, expected F32, F16 or BF16"
    );
    // Nothing was written on the way to an error.
    assert_eq!(cache.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.);
    call(&new, &one, &one)?;
    assert!(cache.to_dtype(DType::F32)?.abs()?.sum_all()?.to_scalar::<f32>()? > 0.);
    Ok(())
}

#[test]
fn parts_of_the_keys_combine_to_the_whole() -> Result<()> {
    let query = random(DType::F32, &[2, 3, HEADS, DIM])?;
    let [key, value] =
        [0, 1].map(|_| random(DType::F32, &[2, 50, KV_HEADS, DIM]).expect("a tensor"));
    let options = Options { lse: true, ..Options::default() };
    let whole = attend(&query, &key, &value, &options)?;
    let part = |begin: u32, end: u32| {
        let keys = Placement::padded()
            .with_lengths(&list(&[end; 2])?)
            .with_left_padding(&list(&[begin; 2])?);
        let sequences = Sequences { queries: Placement::padded(), keys };
        attend_sequences(&query, &key, &value, &sequences, &options)
    };
    let nothing = part(9, 9)?;
    let anything = Attention { output: (nothing.output.clone() / 0.)?, ..nothing.clone() };
    let combined = combine(&[anything, part(0, 17)?, part(17, 50)?])?;
    assert!(distance(&combined.output, &whole.output)? < 1e-5);
    assert!(distance(&combined.lse.unwrap(), whole.lse.as_ref().unwrap())? < 1e-5);
    let empty = combine(&[nothing.clone(), nothing])?;
    assert_eq!(empty.output.abs()?.sum_all()?.to_scalar::<f32>()?, 0.);
    assert_eq!(empty.lse.unwrap().max_all()?.to_scalar::<f32>()?, f32::NEG_INFINITY);
    assert_eq!(refusal(combine(&[])), "combine: there are no parts, expected at least one");
    let without = Attention { lse: None, ..whole.clone() };
    assert_eq!(
        refusal(combine(&[whole.clone(), without])),
        "combine: part 1 has no log-sum-exp, expected one"
    );
    let shorter =
        Attention { output: whole.output.narrow(1, 0, 2)?.contiguous()?, ..whole.clone() };
    assert_eq!(
        refusal(combine(&[whole, shorter])),
        "attention: the output of part 1 has shape [2, 2, 4, 24], expected [2, 3, 4, 24]"
    );
    Ok(())
}

/// The first line of the message, without candle's backtrace.
fn refusal<T: std::fmt::Debug>(result: Result<T>) -> String {
    let text = result.expect_err("wrong use is refused").to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn wrong_use_is_refused_with_what_was_expected() -> Result<()> {
    let query = random(DType::F32, &[14, HEADS, DIM])?;
    let key = random(DType::F32, &[14, KV_HEADS, DIM])?;
    let starts = list(&[0, 5, 14])?;
    let call = |sequences: &Sequences, options: &Options| {
        refusal(attend_sequences(&query, &key, &key, sequences, options))
    };
    let with = |starts: &Tensor, longest: usize, other: &Tensor| {
        call(&Sequences::ragged((starts, longest), (other, 9)), &Options::default())
    };
    assert_eq!(
        with(&starts, 8, &starts),
        "attention: the list of starts has a sequence of 9 rows, expected 8 at most, as given"
    );
    assert_eq!(with(&list(&[0, 5, 15])?, 10, &starts), "sequence 1 is in row 14, and there are 14");
    assert_eq!(
        with(&starts, 9, &list(&[0, 14])?),
        "attention: the placement of keys is of 1 sequences, expected 2 like the queries'"
    );
    assert_eq!(
        with(&starts.to_dtype(DType::F32)?, 9, &starts),
        "attention: the list of starts has dtype F32, expected U32 or I32"
    );
    assert_eq!(
        with(&Tensor::new(&[0i32, -5, 14], &Device::Cpu)?, 9, &starts),
        "attention: the list has -5, expected no negative number"
    );
    let ragged = Sequences::ragged((&starts, 9), (&starts, 9));
    let left = ragged.queries.clone().with_left_padding(&list(&[0, 0])?);
    assert_eq!(
        call(&Sequences { queries: left, ..ragged.clone() }, &Options::default()),
        "attention: the placement of queries is of keys, expected padded or packed, without left \
         padding"
    );
    assert_eq!(
        call(&Sequences::paged(&list(&[5, 9])?, &starts), &Options::default()),
        "attention: the query has shape [14, 4, 24], expected four dimensions: (batch, length, \
         heads, dim)"
    );
    let slopes = |slopes: Tensor| Options { slopes: Some(slopes), ..Options::default() };
    assert_eq!(
        call(&ragged, &slopes(Tensor::zeros(3, DType::F32, &Device::Cpu)?)),
        "attention: the list of slopes has shape [3], expected [4]"
    );
    let variable = Var::zeros(HEADS, DType::F32, &Device::Cpu)?;
    assert_eq!(
        call(&ragged, &slopes(variable.as_tensor().clone())),
        "attention: the list of slopes depends on a variable, expected none: `detach` it"
    );
    Ok(())
}
