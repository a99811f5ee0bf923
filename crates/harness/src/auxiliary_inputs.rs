//! The inputs of a problem besides query, key and value: lengths and storage of each sequence,
//! slopes, sinks and descale factors. All of it is derived from the problem, so that everyone who
//! measures or judges the problem uses the same.

use flashcore::gpu::{self, GpuError};
use flashcore::serving::{Pages, Placement, Sequences};
use flashcore::{
    Descales, InputTensors, Inputs, Lists, Problem, Shape, Storage, Tensor, random_descales,
};
use kernels::parameter::List;
use testing::scene::{PlacementKind, Ragged};

use crate::Error;
use crate::statistics::Random;

/// The bytes of query, key, value, output and log-sum-exps, contiguous; nothing where they cannot be counted.
pub fn tensor_bytes(problem: &Problem) -> Option<[usize; 5]> {
    let types = problem.dtypes;
    let bytes = |shape: flashcore::Shape, dtype: flashcore::DType| {
        shape.elements()?.checked_mul(dtype.bytes())
    };
    Some([
        bytes(problem.query_shape(), types.query)?,
        bytes(problem.key_shape(), types.key)?,
        bytes(problem.value_shape(), types.value)?,
        bytes(problem.output_shape(), types.output)?,
        problem.rows().checked_mul(4)?,
    ])
}

/// [`tensor_bytes`], none of which may be zero.
pub(crate) fn nonzero_tensor_bytes(problem: &Problem) -> Result<[usize; 5], Error> {
    let bytes = tensor_bytes(problem).filter(|bytes| bytes.iter().all(|it| *it > 0));
    let refused = || Error::Impossible(format!("a tensor of {problem} is empty or endless"));
    bytes.ok_or_else(refused)
}

/// The inputs of a problem besides query, key and value.
#[derive(Debug, Clone)]
pub struct AuxiliaryInputs {
    /// Where the queries of each sequence are; nothing where all lengths are the problem's.
    pub queries: Option<Placement>,
    /// Where the keys are.
    pub keys: Option<Placement>,
    /// ALiBi slopes.
    pub slopes: Option<Vec<f32>>,
    /// Sinks.
    pub sinks: Option<Vec<f32>>,
    /// Descale factors of 8-bit tensors.
    pub descales: Descales<Option<Tensor>>,
}

impl AuxiliaryInputs {
    /// Of a problem. Packed sequences have log-normal lengths, many short ones and a few long; the
    /// lengths of a list are of all sizes; pages are in a shuffled order.
    ///
    /// ```
    /// use flashcore_harness::auxiliary_inputs::AuxiliaryInputs;
    ///
    /// let problem = "b=20,h=16,s=900,d=128,bf16,queries=packed:4096,keys=packed:4096".parse()?;
    /// let queries = AuxiliaryInputs::of(&problem)?.queries.unwrap();
    /// assert_eq!((0..20).map(|it| queries.length(it)).sum::<usize>(), 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(problem: &Problem) -> Result<Self, Error> {
        let mut single = problem.clone().with_storage(Storage::Padded, Storage::Padded);
        (single.query_length, single.key_length, single.lists) = (0, 0, Lists::default());
        (single.head_dim, single.value_head_dim) = (1, 1);
        let InputTensors { slopes, sinks, .. } = InputTensors::random(&single, 0)?;
        let descales =
            random_descales(problem.descale_shapes(), 0).map_err(flashcore::Error::from)?;
        let mut auxiliary = AuxiliaryInputs { queries: None, keys: None, slopes, sinks, descales };
        if !problem.has_equal_lengths() {
            let mut draw = Draw { random: Random::new(0x5e90_e2ce), batch: problem.batch };
            let (queries, keys) = draw.placements(problem);
            // What contradicts itself is told here, and not by an index out of bounds.
            let wrong = |error: flashcore::serving::ServingError| Error::Library(error.into());
            for (placement, shape) in
                [(&queries, problem.query_shape()), (&keys, problem.key_shape())]
            {
                placement.validate().and_then(|()| placement.fits(shape)).map_err(wrong)?;
            }
            (auxiliary.queries, auxiliary.keys) = (Some(queries), Some(keys));
        }
        Ok(auxiliary)
    }

    /// Tensors with these.
    pub fn inputs<'a>(&'a self, tensors: &'a InputTensors) -> Inputs<'a> {
        Inputs {
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            queries: self.queries.as_ref(),
            keys: self.keys.as_ref(),
            descales: self.descales.each_ref().map(|it| it.as_ref().map(Tensor::view)),
            ..tensors.inputs()
        }
    }

    /// The words of a list; nothing where the problem has none.
    pub fn list(&self, problem: &Problem, list: List) -> Option<Vec<u32>> {
        self.inputs(&nothing()).list(problem, list)
    }

    /// Puts all of it on a device, for tensors there.
    pub fn on_device(
        &self,
        problem: &Problem,
        lists: &mut gpu::DeviceLists<'_>,
        tensors: &mut gpu::Tensors,
    ) -> Result<(), GpuError> {
        lists.of_call(problem, self.inputs(&nothing()), tensors)
    }

    /// The same sequences for a scene of the simulator; nothing where all lengths are the problem's.
    pub fn ragged(&self, problem: &Problem) -> Option<Ragged> {
        let (queries, keys) = (self.queries.as_ref()?, self.keys.as_ref()?);
        let place = |storage: Storage| match storage {
            Storage::Padded => PlacementKind::Padded,
            Storage::Entries(_) => PlacementKind::Entries,
            Storage::Packed(_) => PlacementKind::Packed,
            Storage::Paged { size, .. } => PlacementKind::Paged(size),
        };
        let lengths = |of: &Placement| (0..of.sequences()).map(|it| of.length(it)).collect();
        Some(Ragged {
            queries: lengths(queries),
            keys: lengths(keys),
            padding: keys.left_padding().to_vec(),
            query_place: place(problem.queries),
            key_place: place(problem.keys),
        })
    }

    /// The plain problem that each sequence is by itself, or the whole where all are alike.
    fn parts(&self, problem: &Problem) -> Vec<Problem> {
        let (Some(queries), Some(keys)) = (&self.queries, &self.keys) else {
            return vec![problem.clone()];
        };
        let sequences = Sequences::new(problem.clone(), queries.clone(), keys.clone());
        let of = |it: &Sequences| (0..it.len()).map(|sequence| it.alone(sequence)).collect();
        sequences.as_ref().map_or_else(|_| Vec::new(), of)
    }

    /// Rows of the softmax that belong to no sequence.
    pub(crate) fn unused_rows(&self, problem: &Problem) -> usize {
        problem.rows() - self.parts(problem).iter().map(Problem::rows).sum::<usize>()
    }

    /// Floating-point operations: by the published convention ([`Problem::flops`]) or another.
    pub fn flops(&self, problem: &Problem, count: fn(&Problem) -> f64) -> f64 {
        self.parts(problem).iter().map(count).sum()
    }

    /// Bytes that must cross the memory bus at least once.
    pub(crate) fn least_bytes(&self, problem: &Problem) -> f64 {
        let bytes = |part: &Problem| {
            tensor_bytes(part).map_or(f64::MAX, |all| all.iter().sum::<usize>() as f64)
        };
        self.parts(problem).iter().map(bytes).sum()
    }
}

/// Tensors without elements, where only what goes with them is asked for.
fn nothing() -> InputTensors {
    let empty = Tensor::zeros(flashcore::DType::F16, Shape::new(0, 0, 0, 0));
    let empty = empty.expect("nothing can be allocated");
    InputTensors::new(empty.clone(), empty.clone(), empty)
}

/// Draws lengths and tables.
struct Draw {
    random: Random,
    batch: usize,
}

impl Draw {
    fn placements(&mut self, problem: &Problem) -> (Placement, Placement) {
        let Problem { lists, query_length, key_length, .. } = *problem;
        let queries = match problem.queries {
            Storage::Packed(rows) => Placement::packed(starts(&self.packed(rows, query_length))),
            _ => Placement::padded(vec![query_length; self.batch]),
        };
        let keys = match problem.keys {
            // As many keys as queries, where there is room for as many.
            Storage::Packed(_) if problem.keys == problem.queries && key_length == query_length => {
                queries.clone()
            }
            Storage::Packed(rows) => Placement::packed(starts(&self.packed(rows, key_length))),
            Storage::Paged { size, columns, pages } => {
                let table = self.table(self.batch * columns, pages);
                let pages = Pages::new(size, columns, table).expect("rows of whole pages");
                Placement::paged(vec![key_length; self.batch], pages)
            }
            Storage::Entries(entries) if lists.batch_index => {
                let entries = self.table(self.batch, entries).into_iter().map(|it| it as usize);
                Placement::entries(vec![key_length; self.batch], entries.collect())
            }
            _ => Placement::padded(vec![key_length; self.batch]),
        };
        let queries = if lists.query_lengths { self.used(queries) } else { queries };
        let keys = if lists.key_lengths { self.used(keys) } else { keys };
        let padding = |random: &mut Random, room: &usize| random.below(1 + room / 4);
        match lists.left_padding {
            true => {
                let padding = keys.ends().iter().map(|it| padding(&mut self.random, it)).collect();
                (queries, keys.with_left_padding(padding))
            }
            false => (queries, keys),
        }
    }

    /// Log-normal lengths, none above the longest, that fill the rows where they can.
    fn packed(&mut self, rows: usize, longest: usize) -> Vec<usize> {
        let weights: Vec<f64> = (0..self.batch).map(|_| self.random.normal().exp()).collect();
        let scale = rows.saturating_sub(self.batch) as f64 / weights.iter().sum::<f64>().max(1e-9);
        let mut left = rows;
        let mut lengths: Vec<usize> = Vec::new();
        for weight in weights {
            let length = (1 + (weight * scale) as usize).min(longest).min(left);
            left -= length;
            lengths.push(length);
        }
        for length in &mut lengths {
            let more = left.min(longest - *length);
            *length += more;
            left -= more;
        }
        lengths
    }

    /// The first sequence uses all of its place, the others some of it.
    fn used(&mut self, placement: Placement) -> Placement {
        let rooms = placement.ends().iter().enumerate();
        let used = |(index, room): (usize, &usize)| match index {
            0 => *room,
            _ => *room - self.random.below(1 + room / 2),
        };
        let lengths = rooms.map(used).collect();
        placement.with_lengths(lengths)
    }

    /// So many numbers below a bound, in a shuffled order; again from the first where they do not
    /// suffice.
    fn table(&mut self, count: usize, below: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..below as u32).collect();
        self.random.shuffle(&mut order);
        order.into_iter().cycle().take(count).collect()
    }
}

/// Cumulative lengths.
fn starts(lengths: &[usize]) -> Vec<usize> {
    let mut starts = vec![0];
    starts.extend(lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    }));
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auxiliary(text: &str) -> (Problem, AuxiliaryInputs) {
        let problem = text.parse().unwrap();
        let auxiliary = AuxiliaryInputs::of(&problem).unwrap();
        (problem, auxiliary)
    }

    #[test]
    fn packed_sequences_are_of_all_lengths() {
        let rows = "queries=packed:32768,keys=packed:32768";
        let (problem, packed) = auxiliary(&format!("b=64,h=16,s=4096,d=128,bf16,causal,{rows}"));
        let queries = packed.queries.as_ref().unwrap();
        assert_eq!(packed.queries, packed.keys);
        let lengths = queries.ends();
        assert_eq!(lengths.iter().sum::<usize>(), 32_768);
        let (longest, shortest) = (*lengths.iter().max().unwrap(), *lengths.iter().min().unwrap());
        assert!((1500..=4096).contains(&longest) && (1..150).contains(&shortest), "{lengths:?}");
        let whole: Problem = "b=1,h=16,s=32768,d=128,bf16,causal".parse().unwrap();
        assert!(packed.flops(&problem, Problem::flops) < whole.flops() / 10.0);
        assert!(
            packed.least_bytes(&problem)
                <= tensor_bytes(&whole).unwrap().iter().sum::<usize>() as f64
        );
    }

    #[test]
    fn pages_are_shuffled_and_every_list_is_there() {
        let (_, paged) = auxiliary("b=3,h=8,s=1,sk=100,d=64,keys=pages:16:7:21,key_lengths");
        let keys = paged.keys.unwrap();
        let mut table = keys.pages().unwrap().table().to_vec();
        assert!(!table.is_sorted());
        table.sort_unstable();
        assert_eq!(table, (0..21).collect::<Vec<u32>>());
        assert!(keys.ends().iter().all(|length| (50..=100).contains(length)), "{keys:?}");
        let (problem, all) = auxiliary(
            "b=3,h=8,s=5,sk=40,d=64,alibi,sinks,keys=entries:4,query_lengths,key_lengths,\
             left_padding,batch_index",
        );
        assert_eq!(all.keys.as_ref().unwrap().left_padding().len(), 3);
        assert_eq!((all.slopes.unwrap().len(), all.sinks.unwrap().len()), (8, 8));
        assert_eq!(problem.text().parse::<Problem>().unwrap(), problem);
    }

    /// A tensor that has no room for its sequences is refused, and nothing panics.
    #[test]
    fn what_does_not_fit_is_refused() {
        let problem: Problem = "b=4,h=1,s=5,d=8,keys=entries:2".parse().unwrap();
        let message = AuxiliaryInputs::of(&problem).unwrap_err().to_string();
        assert!(message.contains("batch entry"), "{message}");
    }
}
