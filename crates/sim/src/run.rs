//! The entry point of the simulator: checks a launch, lowers the program, and runs the schedule.

use ptx::{ParameterKind, Program, Type};

use crate::hazard::HazardKind;
use crate::lower::Code;
use crate::machine::GridState;
use crate::schedule;
use crate::{Argument, Failure, Launch, Memory, Options, Report, TensorMapArgument};

/// Runs a launch to its end, or to the first hazard.
///
/// ```
/// use flashcore_sim::ptx::{Builder, Expression, F32, GlobalAddress, Target};
/// use flashcore_sim::{Argument, Launch, Measure, Memory, Options, run};
///
/// // out[i] = 2 * in[i]
/// let mut k = Builder::new("double", Target::SM_75, 32);
/// let input = k.parameter::<GlobalAddress>("input");
/// let output = k.parameter::<GlobalAddress>("output");
/// let thread = k.thread_index();
/// let offset = k.eval(thread.convert() * 4);
/// let x = k.load::<F32, _>(input + offset);
/// k.store(output + offset, x * 2.0);
/// let program = k.finish().unwrap();
///
/// let mut memory = Memory::new();
/// let values: Vec<f32> = (0..32).map(|i| i as f32).collect();
/// let input = memory.input_f32("input", &values);
/// let output = memory.output("output", 128);
/// let arguments = vec![Argument::Address(input, 0), Argument::Address(output, 0)];
/// let launch = Launch { program: &program, grid: 1, arguments };
/// let report = run(&launch, &mut memory, &Options::default()).unwrap();
/// assert_eq!(memory.f32(output)[7], 14.0);
/// assert_eq!(report.counts.get(Measure::GlobalBytesRead), 128);
/// ```
///
/// # Errors
/// Returns a [`Failure`] for an invalid launch, a hazard, or an exceeded budget.
///
/// # Panics
/// If the program is malformed: it names registers or parameters that it does not have, or gives an
/// instruction registers of the wrong width. Programs that [`ptx::validate`] accepts never panic,
/// nor do such programs with statements removed or moved.
pub fn run(launch: &Launch<'_>, memory: &mut Memory, options: &Options) -> Result<Report, Failure> {
    let program = launch.program;
    check_launch(launch)?;
    let mut parameters = Vec::new();
    let mut maps = Vec::new();
    for (index, (parameter, argument)) in
        program.parameters.iter().zip(&launch.arguments).enumerate()
    {
        let mismatch = || {
            let (name, kind) = (&parameter.name, &parameter.kind);
            Failure::Launch(format!("parameter {index} ({name}) is {kind:?}, given {argument:?}"))
        };
        let mut map = None;
        parameters.push(match (&parameter.kind, argument) {
            (ParameterKind::Scalar(Type::U32), Argument::U32(value)) => *value as u64,
            (ParameterKind::Scalar(Type::S32), Argument::S32(value)) => *value as u32 as u64,
            (ParameterKind::Scalar(Type::U64), Argument::U64(value)) => *value,
            (ParameterKind::Scalar(Type::S64), Argument::S64(value)) => *value as u64,
            (ParameterKind::Scalar(Type::F32), Argument::F32(value)) => value.to_bits() as u64,
            (ParameterKind::Address, Argument::Address(buffer, offset)) => {
                Memory::address(*buffer, *offset)
            }
            // An address outside of every buffer; kernels take 0 for an absent one.
            (ParameterKind::Address, Argument::U64(address)) => *address,
            (ParameterKind::TensorMap(tensor_box), Argument::TensorMap(given)) => {
                if let Some(text) = map_fault(tensor_box, given) {
                    return Err(Failure::Launch(format!("tensor map {}: {text}", parameter.name)));
                }
                map = Some(given.clone());
                0
            }
            _ => return Err(mismatch()),
        });
        maps.push(map);
    }
    let code = Code::lower(program);
    let mut grid_state = GridState::new(launch, &code, memory, options, parameters, maps);
    let limit = program.target.shared_memory_limit();
    if program.shared_bytes() > limit {
        let (bytes, target) = (program.shared_bytes(), program.target);
        let text = format!("{bytes} bytes of shared memory, {target} has {limit} for a block");
        return Err(grid_state.hazard(HazardKind::SharedMemoryLimit, text).into());
    }
    schedule::run(&mut grid_state)?;
    let (counts, trace) = (grid_state.counts, grid_state.trace);
    let reached = code.instructions().map(|step| grid_state.reached[step]).collect();
    if let Some((measure, found, limit)) = options.budget.exceeded(&counts) {
        return Err(Failure::OverBudget { measure, found, limit });
    }
    Ok(Report { counts, trace, reached })
}

fn check_launch(launch: &Launch<'_>) -> Result<(), Failure> {
    let Program { threads, cluster, parameters, .. } = launch.program;
    let fault = |text: String| Err(Failure::Launch(text));
    if *threads == 0 || threads % 32 != 0 || *threads > 1024 {
        return fault(format!("a block of {threads} threads"));
    }
    if launch.grid == 0 || !launch.grid.is_multiple_of((*cluster).max(1)) {
        return fault(format!("a grid of {} blocks in clusters of {cluster}", launch.grid));
    }
    if parameters.len() != launch.arguments.len() {
        let (wanted, given) = (parameters.len(), launch.arguments.len());
        return fault(format!("{given} arguments for {wanted} parameters"));
    }
    Ok(())
}

/// Returns the reason why the driver would refuse a tensor map, or the kernel could not use it.
fn map_fault(wanted: &ptx::TensorBox, given: &TensorMapArgument) -> Option<String> {
    let rank = given.dimensions.len();
    if *wanted != given.tensor_box {
        return Some(format!("the kernel wants {wanted:?}, given {:?}", given.tensor_box));
    }
    if rank != given.tensor_box.extent.len() || given.strides.len() + 1 != rank {
        let strides = given.strides.len();
        return Some(format!("{rank} dimensions with {strides} strides for the box"));
    }
    if let Some(stride) = given.strides.iter().find(|s| *s % 16 != 0) {
        return Some(format!("a stride of {stride} bytes: not a multiple of 16"));
    }
    if !given.offset.is_multiple_of(16) {
        return Some(format!("starts at byte {}: not a multiple of 16", given.offset));
    }
    given.dimensions.contains(&0).then(|| "an extent of 0".to_owned())
}
