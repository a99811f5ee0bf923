//! Checks of the launch: name, target, block and cluster size, shared memory, parameters, roles and
//! their register budgets.

use std::ops::Range;

use super::error::{Fault, ValidationError};
use crate::{
    Block, Capability, Instruction, ParameterKind, Program, RegisterChange, Statement,
    StatementKind, Swizzle, Target, TensorBox,
};

pub(super) fn check(program: &Program) -> Result<(), ValidationError> {
    let launch = |text: String| Err(ValidationError::from(Fault::Launch { text }));
    let mut characters = program.name.chars();
    let starts = characters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    if !starts || !characters.all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return launch(format!("{:?} is not a name for an entry point", program.name));
    }
    if !exists(program.target) {
        return launch(format!("there is no target {}, or it is too old", program.target));
    }
    if program.threads == 0 || program.threads > 1024 || !program.threads.is_multiple_of(32) {
        let threads = program.threads;
        return launch(format!("a block of {threads} threads: not 32 to 1024 in whole warps"));
    }
    if !(1..=8).contains(&program.cluster) {
        return launch(format!("a cluster of {} blocks: not 1 to 8", program.cluster));
    }
    if program.cluster > 1 && !program.target.has(Capability::Clusters) {
        let (capability, target) = (Capability::Clusters, program.target);
        return Err(Fault::Capability { capability, target }.into());
    }
    if let Some(blocks) = program.blocks_per_multiprocessor {
        let threads = blocks.saturating_mul(program.threads);
        if blocks == 0 || threads > 2048 {
            return launch(format!(
                "{blocks} blocks of {} threads do not fit a multiprocessor",
                program.threads
            ));
        }
    }
    check_shared(program)?;
    check_parameters(program)?;
    check_budgets(program)
}

/// Returns whether assemblers support the target, with architecture-specific features if it asks
/// for them.
fn exists(target: Target) -> bool {
    match target.architecture {
        75 | 80 | 86 | 87 | 88 | 89 => !target.specific,
        90 | 100 | 101 | 103 | 110 | 120 | 121 => true,
        _ => false,
    }
}

/// Checks that a name is printable ASCII: names are printed as comments, which end with the line,
/// and assemblers accept only ASCII even there.
fn name_fault(name: &str) -> Option<Fault> {
    let prints = |c: char| c == ' ' || c.is_ascii_graphic();
    (!name.chars().all(prints)).then(|| Fault::Launch {
        text: format!("{name:?} is no name: it has more than printable ASCII"),
    })
}

fn check_shared(program: &Program) -> Result<(), ValidationError> {
    let fault = |text: String| Err(ValidationError::from(Fault::SharedMemory { text }));
    let mut end = 0u64;
    for region in &program.shared {
        if let Some(fault) = name_fault(&region.name) {
            return Err(fault.into());
        }
        let (name, offset, alignment) = (&region.name, region.offset, region.alignment);
        if !alignment.is_power_of_two() {
            return fault(format!("{name}: an alignment of {alignment}, which is no power of two"));
        }
        if offset % alignment != 0 {
            return fault(format!("{name} at {offset} is not aligned to {alignment}"));
        }
        if (region.offset as u64) < end {
            return fault(format!("{} overlaps the region before it", region.name));
        }
        end = region.offset as u64 + region.bytes as u64;
    }
    let limit = program.target.shared_memory_limit();
    if end > limit as u64 {
        let target = program.target;
        return fault(format!("{end} bytes of shared memory, {target} has {limit} for a block"));
    }
    Ok(())
}

fn check_parameters(program: &Program) -> Result<(), ValidationError> {
    let mut bytes = 0u32;
    for parameter in &program.parameters {
        if let Some(fault) = name_fault(&parameter.name) {
            return Err(fault.into());
        }
        let size = match &parameter.kind {
            ParameterKind::Scalar(ty) if !ty.has_immediates() => {
                let text = format!("parameter {} cannot be passed as {ty:?}", parameter.name);
                return Err(Fault::Launch { text }.into());
            }
            ParameterKind::Scalar(ty) => ty.bits() / 8,
            ParameterKind::Address => 8,
            ParameterKind::TensorMap(tensor_box) => {
                if let Some(text) = box_fault(tensor_box) {
                    let text = format!("tensor map {}: {text}", parameter.name);
                    return Err(Fault::Launch { text }.into());
                }
                if !program.target.has(Capability::TensorCopies) {
                    let (capability, target) = (Capability::TensorCopies, program.target);
                    return Err(Fault::Capability { capability, target }.into());
                }
                128
            }
        };
        bytes = bytes.next_multiple_of(size.min(64)).saturating_add(size).min(1 << 16);
    }
    if bytes > 4096 {
        return Err(
            Fault::Launch { text: format!("{bytes} bytes of parameters: at most 4096") }.into()
        );
    }
    Ok(())
}

/// Returns the reason why TMA would refuse a box.
fn box_fault(tensor_box: &TensorBox) -> Option<String> {
    let extent = &tensor_box.extent;
    if extent.is_empty() || extent.len() > 5 {
        return Some(format!("{} dimensions: not 1 to 5", extent.len()));
    }
    if let Some(bad) = extent.iter().find(|e| !(1..=256).contains(*e)) {
        return Some(format!("a box extent of {bad}: not 1 to 256"));
    }
    let inner = extent[0] * tensor_box.element.bytes();
    if !inner.is_multiple_of(16) {
        return Some(format!("{inner} bytes along the first dimension: not a multiple of 16"));
    }
    let width = tensor_box.swizzle.width();
    if tensor_box.swizzle != Swizzle::None && inner > width {
        return Some(format!(
            "{inner} bytes along the first dimension: wider than the swizzle ({width})"
        ));
    }
    None
}

/// Checks that a role is made of whole warps of the block, and of whole warpgroups if it sets a
/// register budget.
pub(super) fn role_fault(
    program: &Program,
    name: &str,
    warps: &Range<u32>,
    body: &Block,
) -> Option<Fault> {
    if let Some(fault) = name_fault(name) {
        return Some(fault);
    }
    if warps.is_empty() || warps.end > program.threads / 32 {
        let (start, end, all) = (warps.start, warps.end, program.threads / 32);
        let text = format!("a role of warps {start} to {end} in a block of {all}");
        return Some(Fault::Launch { text });
    }
    let has_budget = budget(body).is_some();
    if has_budget && (!warps.start.is_multiple_of(4) || !warps.end.is_multiple_of(4)) {
        let text = "a register budget on part of a warpgroup".to_owned();
        return Some(Fault::Launch { text });
    }
    None
}

/// Returns the register budget that a role sets as its first statement.
fn budget(body: &Block) -> Option<(RegisterChange, u32)> {
    match body.first()? {
        Statement {
            kind: StatementKind::Instruction(Instruction::SetMaxRegisters { change, count }),
            ..
        } => Some((*change, *count)),
        _ => None,
    }
}

/// Checks that all warps together hold no more registers than the block has, and that a program
/// with register budgets bounds its registers at entry.
fn check_budgets(program: &Program) -> Result<(), ValidationError> {
    let available = program.block_registers();
    let entry = available / program.threads;
    let mut total = u64::from(available);
    let mut any = false;
    for statement in &program.body {
        if let StatementKind::Role { warps, body, .. } = &statement.kind
            && let Some((_, count)) = budget(body)
        {
            any = true;
            let warps = warps.end.saturating_sub(warps.start).min(program.threads / 32);
            let threads = u64::from(32 * warps);
            total = (total + u64::from(count) * threads).saturating_sub(u64::from(entry) * threads);
        }
    }
    if any && program.blocks_per_multiprocessor.is_none() {
        let text = "register budgets need a number of blocks per multiprocessor".to_owned();
        return Err(Fault::Launch { text }.into());
    }
    if any && total > u64::from(available) {
        let wanted = u32::try_from(total).unwrap_or(u32::MAX);
        return Err(Fault::RegisterBudget { wanted, available }.into());
    }
    Ok(())
}
