//! Launches over sequences: decode and prefill, in whatever order their keys lie.

use kernels::{Decode, Prefill, Sequencer, Shipped};
use ptx::{Parameter, Program};

use super::{LaunchDescription, Passed, TensorRole, assemble, swizzled_bytes};
use crate::gpu::binding::{Number, Stride};
use crate::gpu::decode::{self, Grid};
use crate::gpu::prefill::{self, Outline};
use crate::gpu::serving::{ListRole, Slot};
use crate::gpu::{Chip, GpuError, ServingSize};
use crate::problem::Problem;
use crate::tensor::{Layout, Shape, Strides};

/// How sequences lie in tensors without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order<'a> {
    /// A batch entry for each.
    Plain,
    /// The same keys taken for pages of so many positions: each sequence's own, in an order that is
    /// not theirs. A query that sees every key of its sequence sees the same keys.
    Pages(usize),
    /// Sequences of these lengths one after the other, queries and keys alike, in one batch entry
    /// that has the rows of all.
    Packed(&'a [usize]),
}

/// The tensors, by the numbers that slots have for them.
const TENSORS: [TensorRole; 4] =
    [TensorRole::Query, TensorRole::Key, TensorRole::Value, TensorRole::Output];

impl Order<'_> {
    /// What a plan over these sequences is made for.
    pub fn size(&self, problem: &Problem) -> Result<ServingSize, GpuError> {
        let refuse = |reason: &str| {
            let (kernel, reason) = ("sequences", reason.to_owned());
            Err(GpuError::Unsupported { kernel, reason })
        };
        let mut size = ServingSize::new(problem.clone());
        match *self {
            Order::Plain => {}
            Order::Pages(page) => {
                if page == 0 || !problem.key_length.is_multiple_of(page) {
                    return refuse("keys are not a whole number of pages");
                }
                let columns = problem.key_length / page;
                size = size.with_pages(page, columns, problem.batch * columns);
            }
            Order::Packed(lengths) => {
                let (rows, all) = (problem.query_length, lengths.iter().sum::<usize>());
                if problem.batch != 1 || [all, problem.key_length] != [rows; 2] {
                    return refuse("the rows are not those of all sequences");
                }
                size.problem.batch = lengths.len();
                size.problem.query_length = lengths.iter().copied().max().unwrap_or(0);
                size.problem.key_length = size.problem.query_length;
                size = size.with_packed_queries(rows).with_packed_keys(rows);
            }
        }
        Ok(size)
    }

    /// The strides of a tensor.
    fn strides(&self, problem: &Problem, role: usize) -> Option<Strides> {
        let mut shape = TENSORS[role].shape(problem);
        if let (Order::Pages(page), 1 | 2) = (self, role) {
            let batch = problem.batch * (problem.key_length / page);
            shape = Shape { batch, length: *page, ..shape };
        }
        let mut strides = Layout::contiguous(shape).ok()?.strides();
        if matches!(self, Order::Packed(_)) {
            strides.batch = 0;
        }
        Some(strides)
    }

    /// A list of the launch; nothing where there is none.
    fn list(&self, problem: &Problem, role: ListRole) -> Passed {
        match (role, *self) {
            (ListRole::Lse, _) => Passed::Address { tensor: TensorRole::Lse },
            (ListRole::BlockTable, Order::Pages(page)) => {
                let columns = problem.key_length / page;
                let order = shuffled(columns);
                let row = |sequence: usize| {
                    order.iter().map(move |column| (sequence * columns + column) as u32)
                };
                Passed::Words { values: (0..problem.batch).flat_map(row).collect() }
            }
            (ListRole::QueryStarts | ListRole::KeyStarts, Order::Packed(lengths)) => {
                let start = |count: usize| lengths[..count].iter().sum::<usize>() as u32;
                Passed::Words { values: (0..=lengths.len()).map(start).collect() }
            }
            _ => Passed::U64 { value: 0 },
        }
    }

    /// What is passed for a slot.
    fn passed(&self, problem: &Problem, slot: Slot) -> Option<Passed> {
        Some(match slot {
            Slot::Fixed(Number::U32(value)) => Passed::U32 { value },
            Slot::Fixed(Number::I32(value)) => Passed::U32 { value: value as u32 },
            Slot::Fixed(Number::U64(value)) => Passed::U64 { value },
            Slot::Fixed(Number::F32(value)) => Passed::F32 { value },
            Slot::Fixed(Number::Address(address)) => Passed::U64 { value: address.0 },
            Slot::Tensor(role) => Passed::Address { tensor: TENSORS[role] },
            Slot::Stride(role, stride) => {
                let strides = self.strides(problem, role)?;
                let elements = match stride {
                    Stride::Batch => strides.batch,
                    Stride::Row => strides.length,
                    Stride::Head => strides.heads,
                };
                Passed::U64 { value: elements as u64 }
            }
            Slot::List(role) => self.list(problem, role),
        })
    }
}

impl LaunchDescription {
    /// The launches of a kernel over sequences that lie like this, in their order, each with what
    /// it launches. Slopes and sinks have no place among the tensors.
    pub fn of_sequences(
        kernel: &Shipped,
        problem: &Problem,
        chip: &Chip,
        order: Order<'_>,
    ) -> Result<Vec<(Shipped, Self)>, GpuError> {
        Ok(match kernel {
            Shipped::Decode(configuration) => {
                vec![(*kernel, decode(configuration, problem, chip, order)?)]
            }
            Shipped::Prefill(configuration) => {
                let first = Sequencer { target: chip.target };
                let [before, launch] = prefill(configuration, first, problem, chip, order)?;
                vec![(Shipped::Sequencer(first), before), (*kernel, launch)]
            }
            other if order == Order::Plain => {
                vec![(*kernel, LaunchDescription::of(other, problem, chip)?)]
            }
            other => {
                let reason = "it serves neither pages nor packed sequences".to_owned();
                return Err(GpuError::Unsupported { kernel: other.family(), reason });
            }
        })
    }
}

fn check(
    kernel: &'static str,
    problem: &Problem,
    size: &ServingSize,
    (softcap, paged): (bool, bool),
) -> Result<(), GpuError> {
    size.validate(kernel)?;
    let given = (problem.softcap.is_some(), size.pages.is_some());
    if (softcap, paged) != given || problem.alibi || problem.sinks {
        let reason = "pages, softcap, slopes or sinks are not the configuration's".to_owned();
        return Err(GpuError::Unsupported { kernel, reason });
    }
    Ok(())
}

pub(super) fn decode(
    configuration: &Decode,
    problem: &Problem,
    chip: &Chip,
    order: Order<'_>,
) -> Result<LaunchDescription, GpuError> {
    let size = order.size(problem)?;
    check("decode", problem, &size, (configuration.softcap, configuration.paged))?;
    let grid = Grid::new(chip, configuration, &size, None)?;
    let argument = |(_, parameter): (usize, &Parameter)| {
        let memory = |name, which: usize| match grid.workspace {
            Some(bytes) => Passed::Memory { name, bytes: bytes[which] },
            None => Passed::U64 { value: 0 },
        };
        match parameter.name.as_str() {
            "Partials" => Some(memory("Partials", 0)),
            "Counters" => Some(memory("Counters", 1)),
            name => {
                let slot = decode::describe(configuration, &size, grid, name)?;
                order.passed(problem, slot)
            }
        }
    };
    assemble(&configuration.program()?, grid.blocks(), argument)
}

/// The launch that puts tiles in order, and the one that computes them.
fn prefill(
    configuration: &Prefill,
    first: Sequencer,
    problem: &Problem,
    chip: &Chip,
    order: Order<'_>,
) -> Result<[LaunchDescription; 2], GpuError> {
    let size = order.size(problem)?;
    check("prefill", problem, &size, (configuration.softcap, configuration.page_rows.is_some()))?;
    let outline = Outline::new(chip, configuration, &size)?;
    let strides = [0, 1, 2, 3].map(|role| order.strides(problem, role));
    let [Some(query), Some(key), Some(value), Some(output)] = strides else {
        return Err(GpuError::TooLarge { what: "a tensor" });
    };
    let rows = prefill::rows(&size, [query, key, value, output])?;
    let numbers = outline.numbers(&size, cuda::DeviceAddress(0));
    let passed = |name: &str, slot: prefill::Slot| match slot {
        prefill::Slot::Shared(_) if name == "Schedule" => {
            Some(Passed::Memory { name: "Schedule", bytes: outline.schedule_bytes() })
        }
        prefill::Slot::Shared(slot) => order.passed(problem, slot),
        prefill::Slot::Count(role) => Some(Passed::U32 { value: rows[role].count }),
        prefill::Slot::EntryRows(role) => Some(Passed::U32 { value: rows[role].entry_rows }),
        prefill::Slot::Map(role) => {
            let (dimensions, strides) = prefill::map(&size, role, &rows[role]);
            let tensor_box = &configuration.boxes()[role];
            Some(Passed::Slices {
                tensor: TENSORS[role],
                dimensions: dimensions.to_vec(),
                strides: strides.to_vec(),
                extent: tensor_box.extent.clone(),
                swizzle: swizzled_bytes(tensor_box),
            })
        }
    };
    let describe = |program: &Program, blocks: u32, before: bool| {
        assemble(program, blocks, |(_, parameter)| {
            let name = parameter.name.as_str();
            let slot = match before {
                true => numbers.of_sequencer(name),
                false => numbers.of_kernel(name),
            };
            passed(name, slot?)
        })
    };
    Ok([
        describe(&first.program()?, 1, true)?,
        describe(&configuration.program()?, outline.blocks, false)?,
    ])
}

/// The numbers below a count in another order, the same every time: steps of a prime that does not
/// divide it.
fn shuffled(count: usize) -> Vec<usize> {
    let step = [1_000_003, 999_983, 7_919].into_iter().find(|prime| !count.is_multiple_of(*prime));
    (0..count).map(|index| (index * step.unwrap_or(1) + count / 2) % count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::gpu::serving::choose;
    use crate::problem::Mask;

    fn words(launch: &LaunchDescription) -> Vec<Vec<u32>> {
        let of = |passed: &Passed| match passed {
            Passed::Words { values } => Some(values.clone()),
            _ => None,
        };
        launch.arguments.iter().filter_map(of).collect()
    }

    #[test]
    fn pages_are_the_same_keys_in_another_order() {
        let problem = Problem::new(2, 8, 1, 128).with_kv_heads(2).with_key_length(640);
        for (order, tables) in [(Order::Plain, 0), (Order::Pages(16), 1)] {
            let kernel = choose(&Chip::H200, &order.size(&problem).unwrap()).unwrap();
            let launches =
                LaunchDescription::of_sequences(&kernel, &problem, &Chip::H200, order).unwrap();
            let [(_, launch)] = &launches[..] else { panic!("{launches:?}") };
            let tensors = launch.arguments.iter().filter(|it| matches!(it, Passed::Address { .. }));
            assert_eq!(tensors.count(), TensorRole::ALL.len());
            let found = words(launch);
            assert_eq!(found.len(), tables);
            for mut table in found {
                assert!(!table.is_sorted());
                table.sort_unstable();
                assert_eq!(table, (0..80).collect::<Vec<u32>>());
            }
        }
        let odd = Order::Pages(24).size(&problem).unwrap_err().to_string();
        assert!(odd.contains("whole number of pages"), "{odd}");
    }

    #[test]
    fn packed_sequences_take_a_launch_before() {
        let problem = Problem::new(1, 8, 900, 128).with_dtype(DType::BF16).with_mask(Mask::Causal);
        let order = Order::Packed(&[500, 0, 300, 100]);
        let size = order.size(&problem).unwrap();
        assert_eq!((size.problem.batch, size.problem.query_length, size.query_rows), (4, 500, 900));
        let kernel = choose(&Chip::H200, &size).unwrap();
        let launches =
            LaunchDescription::of_sequences(&kernel, &problem, &Chip::H200, order).unwrap();
        let [(_, first), (_, second)] = &launches[..] else { panic!("{launches:?}") };
        assert_eq!(words(first), [[0, 500, 500, 800, 900]; 2]);
        let shared = |launch: &LaunchDescription| {
            let is_it = |it: &&Passed| matches!(it, Passed::Memory { name: "Schedule", .. });
            launch.arguments.iter().find(is_it).cloned().unwrap()
        };
        assert_eq!(shared(first), shared(second));
        let maps = second.arguments.iter().filter(|it| matches!(it, Passed::Slices { .. }));
        assert_eq!(maps.count(), 4);
        assert!(Order::Packed(&[500, 300]).size(&problem).is_err());
    }
}
