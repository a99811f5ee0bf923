//! The printer: a program as PTX text.
//!
//! This is the only place where instructions become text. The printer takes validated programs and
//! makes no decisions: a statement becomes one line or a few, registers keep their numbers, and the
//! same program always gives the same text, so that it can be hashed and compared.

mod compiler;
pub(crate) mod instruction;

pub use compiler::{Compiler, print_for};

use std::fmt::Write;

use crate::{
    Accumulate, Address, Block, Instruction, Operand, ParameterKind, Program, Register,
    StatementKind, Type,
};

/// Prints a program as PTX.
pub fn print(program: &Program) -> String {
    let mut printer = Printer { program, text: String::new(), labels: 0, loops: Vec::new() };
    printer.module();
    printer.text
}

struct Printer<'a> {
    program: &'a Program,
    text: String,
    labels: u32,
    /// The labels after the loops being printed, innermost last.
    loops: Vec<u32>,
}

impl Printer<'_> {
    fn module(&mut self) {
        let program = self.program;
        let mut head = String::new();
        let _ = writeln!(head, ".version {}", program.version());
        let _ = writeln!(head, ".target {}", program.target);
        let _ = writeln!(head, ".address_size 64");
        if !program.shared.is_empty() {
            let alignment = program.shared.iter().map(|r| r.alignment).max().unwrap_or(1).max(16);
            let _ =
                writeln!(head, "\n// {} bytes of dynamic shared memory", program.shared_bytes());
            for region in &program.shared {
                let _ = writeln!(
                    head,
                    "//   {:>6} {:>6}  {}",
                    region.offset, region.bytes, region.name
                );
            }
            let _ = writeln!(head, ".extern .shared .align {alignment} .b8 shared[];");
        }
        let parameters: Vec<String> = (program.parameters.iter().enumerate())
            .map(|(index, parameter)| match &parameter.kind {
                ParameterKind::Scalar(ty) => {
                    format!("\t.param .{} p{index} // {}", scalar_type(*ty), parameter.name)
                }
                ParameterKind::Address => {
                    format!("\t.param .u64 p{index} // {}", parameter.name)
                }
                ParameterKind::TensorMap(_) => {
                    format!("\t.param .align 64 .b8 p{index}[128] // {}", parameter.name)
                }
            })
            .collect();
        let _ = writeln!(head, "\n.visible .entry {}(", program.name);
        for (index, parameter) in parameters.iter().enumerate() {
            let last = index + 1 == parameters.len();
            // The comma goes before the comment.
            let line = if last { parameter.clone() } else { parameter.replacen(" //", ", //", 1) };
            let _ = writeln!(head, "{line}");
        }
        let _ = writeln!(head, ")");
        let _ = writeln!(head, ".maxntid {}, 1, 1", program.threads);
        if let Some(blocks) = program.blocks_per_multiprocessor {
            let _ = writeln!(head, ".minnctapersm {blocks}");
        }
        if program.cluster > 1 {
            let _ = writeln!(head, ".explicitcluster");
            let _ = writeln!(head, ".reqnctapercluster {}, 1, 1", program.cluster);
        }
        let _ = writeln!(head, "{{");
        self.text = head;
        self.declarations();
        self.block(&program.body, 1);
        self.line(1, "ret;");
        self.text.push_str("}\n");
    }

    fn declarations(&mut self) {
        for class in [".pred", ".b16", ".b32", ".f32", ".b64"] {
            let count = self.program.registers.iter().filter(|ty| class_of(**ty) == class).count();
            if count > 0 {
                // Registers keep their index in the program, so each class is declared with the
                // full range; unused names cost nothing.
                let (prefix, total) = (prefix_of_class(class), self.program.registers.len());
                self.line(1, &format!(".reg {class} {prefix}<{total}>;"));
            }
        }
        let mut constants = false;
        self.program.visit(&mut |statement| {
            constants |= matches!(
                &statement.kind,
                StatementKind::Instruction(Instruction::Wgmma {
                    accumulate: Accumulate::No | Accumulate::Yes,
                    ..
                })
            );
        });
        if constants {
            self.line(1, ".reg .pred %true, %false;");
            self.line(1, "setp.eq.u32 %true, 0, 0;");
            self.line(1, "setp.ne.u32 %false, 0, 0;");
        }
    }

    fn block(&mut self, block: &Block, depth: usize) {
        for statement in block {
            match &statement.kind {
                StatementKind::Instruction(instruction) => {
                    for line in self.instruction(instruction) {
                        self.line(depth, &line);
                    }
                }
                StatementKind::If { condition, then, otherwise } => {
                    self.branch(*condition, then, otherwise, depth);
                }
                StatementKind::Role { name, warps, member, body } => {
                    let (first, last) = (warps.start, warps.end);
                    self.line(depth, &format!("// role {name}: warps {first} to {last}"));
                    self.branch(*member, body, &Vec::new(), depth);
                }
                StatementKind::Loop { body } => {
                    let label = self.label();
                    self.loops.push(label);
                    self.line(0, &format!("$loop_{label}:"));
                    self.block(body, depth + 1);
                    self.line(depth + 1, &format!("bra $loop_{label};"));
                    self.line(0, &format!("$behind_{label}:"));
                    self.loops.pop();
                }
                StatementKind::Break { condition } => {
                    let label = self.loops.last().expect("validated: a break is in a loop");
                    let line = format!("@{} bra $behind_{label};", self.name(*condition));
                    self.line(depth, &line);
                }
            }
        }
    }

    fn branch(&mut self, condition: Register, then: &Block, otherwise: &Block, depth: usize) {
        let predicate = self.name(condition);
        // A single instruction is predicated instead of branched over.
        if let ([statement], []) = (then.as_slice(), otherwise.as_slice())
            && let StatementKind::Instruction(instruction) = &statement.kind
        {
            let lines = self.instruction(instruction);
            if let [line] = lines.as_slice() {
                self.line(depth, &format!("@{predicate} {line}"));
                return;
            }
        }
        let label = self.label();
        self.line(depth, &format!("@!{predicate} bra $else_{label};"));
        self.block(then, depth + 1);
        if otherwise.is_empty() {
            self.line(0, &format!("$else_{label}:"));
        } else {
            self.line(depth, &format!("bra $end_{label};"));
            self.line(0, &format!("$else_{label}:"));
            self.block(otherwise, depth + 1);
            self.line(0, &format!("$end_{label}:"));
        }
    }

    fn label(&mut self) -> u32 {
        self.labels += 1;
        self.labels
    }

    fn line(&mut self, depth: usize, line: &str) {
        for _ in 0..if line.starts_with('$') { 0 } else { depth } {
            self.text.push('\t');
        }
        self.text.push_str(line);
        self.text.push('\n');
    }

    // ---- operands -----------------------------------------------------------

    fn name(&self, register: Register) -> String {
        let class = class_of(self.program.type_of(register));
        format!("{}{}", prefix_of_class(class), register.0)
    }

    fn operand(&self, operand: Operand, ty: Type) -> String {
        match operand {
            Operand::Register(register) => self.name(register),
            Operand::Immediate(bits) => match ty {
                Type::F32 => format!("0f{:08X}", bits as u32),
                Type::S32 => format!("{}", bits as u32 as i32),
                Type::S64 => format!("{}", bits as i64),
                Type::U64 if bits > u32::MAX as u64 => format!("0x{bits:X}"),
                _ => format!("{bits}"),
            },
        }
    }

    fn address(&self, address: Address) -> String {
        let base = self.name(address.base);
        match address.offset {
            0 => format!("[{base}]"),
            offset => format!("[{base}{offset:+}]"),
        }
    }

    /// Returns `{a, b, c}`, always in braces.
    fn list(&self, registers: &[Register]) -> String {
        let names: Vec<_> = registers.iter().map(|r| self.name(*r)).collect();
        format!("{{{}}}", names.join(", "))
    }

    /// Returns one register without braces or several in braces, with the matching `.v2` or `.v4`.
    fn vector(&self, registers: &[Register]) -> (String, &'static str) {
        match registers {
            [single] => (self.name(*single), ""),
            several => (self.list(several), if several.len() == 2 { ".v2" } else { ".v4" }),
        }
    }
}

/// Returns the class that a register is declared in.
pub(crate) fn class_of(ty: Type) -> &'static str {
    match ty {
        Type::Pred => ".pred",
        Type::F32 => ".f32",
        _ => match ty.bits() {
            16 => ".b16",
            32 => ".b32",
            _ => ".b64",
        },
    }
}

fn prefix_of_class(class: &str) -> &'static str {
    match class {
        ".pred" => "%p",
        ".b16" => "%h",
        ".b32" => "%r",
        ".f32" => "%f",
        _ => "%d",
    }
}

/// Returns the type suffix of arithmetic instructions.
pub(crate) fn scalar_type(ty: Type) -> &'static str {
    match ty {
        Type::Pred => "pred",
        Type::F16 => "f16",
        Type::BF16 => "bf16",
        Type::E4M3x2 => "e4m3x2",
        Type::E5M2x2 => "e5m2x2",
        Type::U32 => "u32",
        Type::S32 => "s32",
        Type::F32 => "f32",
        Type::F16x2 => "f16x2",
        Type::BF16x2 => "bf16x2",
        Type::U64 => "u64",
        Type::S64 => "s64",
    }
}

/// Returns the type suffix where only the width matters.
pub(crate) fn bits_type(ty: Type) -> &'static str {
    match ty {
        Type::Pred => "pred",
        Type::F32 => "f32",
        _ => match ty.bits() {
            16 => "b16",
            32 => "b32",
            _ => "b64",
        },
    }
}

#[cfg(test)]
mod tests {
    use crate::{Builder, Expression, F32, GlobalAddress, Select, Target, U32};

    #[test]
    fn what_differs_from_nan_is_all_floats() {
        let mut k = Builder::new("kernel", Target::SM_80, 32);
        let out = k.parameter::<GlobalAddress>("out");
        let (number, float) = (k.load::<U32, _>(out), k.load::<F32, _>(out + 4));
        let numbers = k.eval(number.differs(1).select::<U32>(1, 0));
        let floats = k.eval(float.differs(1.0).select::<U32>(1, 0));
        k.store(out, numbers + floats);
        let text = super::print(&k.finish().unwrap());
        assert!(text.contains("setp.ne.u32") && text.contains("setp.neu.f32"), "{text}");
    }
}
