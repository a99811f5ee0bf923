//! The parser: PTX text, as [`print`](crate::print()) writes it, as a program again.
//!
//! With it, what runs in the simulator can be the text that a driver would compile. The parser reads
//! only what the printer writes, and checks itself: a program is returned only if it prints as the
//! text that it was parsed from. The spellings are those of the printer, which are defined once, there.
//!
//! Three things are not in the text: the source locations of statements (all are a line of this
//! file), the box of a tensor map (which the caller of the kernel knows), and, among register types of
//! one width, those that make no difference to the text. Conversions name their types, so a register
//! that is converted has the type that it had.

mod arithmetic;
mod instruction;
mod operand;

use std::fmt;
use std::ops::Range;
use std::panic::Location;

use crate::{
    Block, Element, Instruction, Parameter, ParameterId, ParameterKind, Program, Register,
    SharedRegion, SourceLocation, Statement, StatementKind, Swizzle, Target, TensorBox, Type,
    print,
};
use instruction::Line;

/// The error of a text that is not a program as the printer writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The number of the line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for ParseError {}

/// Parses a program from the PTX text that [`print`](crate::print()) made of it.
///
/// The tensor maps among its parameters have an empty box.
///
/// ```
/// use flashcore_ptx::*;
///
/// let mut k = Builder::new("double", Target::SM_90A, 32);
/// let data = k.parameter::<GlobalAddress>("data");
/// let value = k.load::<F32, _>(data);
/// k.store(data, value * 2.0);
/// let text = print(&k.finish()?);
///
/// let program = parse(&text)?;
/// assert_eq!((program.name.as_str(), program.instruction_count()), ("double", 4));
/// assert_eq!(print(&program), text);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn parse(text: &str) -> Result<Program, ParseError> {
    let mut parser = Parser { lines: text.lines().map(str::trim).collect(), ..Parser::default() };
    let program = parser.program().map_err(|reason| ParseError { line: parser.at, reason })?;
    let printed = print(&program);
    let differ = |(a, b): (&str, &str)| a != b;
    if printed == text {
        return Ok(program);
    }
    let line = text.lines().zip(printed.lines()).position(differ);
    let line = line.unwrap_or_else(|| text.lines().count().min(printed.lines().count()));
    let reason = match printed.lines().nth(line) {
        Some(read) => format!("understood as `{}`", read.trim()),
        None => "more than was understood".to_owned(),
    };
    Err(ParseError { line: line + 1, reason })
}

/// A result whose error is the reason; the line is the parser's.
type Parsed<T> = Result<T, String>;

#[derive(Default)]
struct Parser<'a> {
    lines: Vec<&'a str>,
    /// The number of lines read.
    at: usize,
    parameters: Vec<Parameter>,
    /// The type of each register, once it is known.
    types: Vec<Option<Type>>,
}

impl<'a> Parser<'a> {
    // ---- lines --------------------------------------------------------------

    fn peek(&self) -> &'a str {
        self.lines.get(self.at).copied().unwrap_or("")
    }

    fn next(&mut self) -> Parsed<&'a str> {
        let line = self.lines.get(self.at).copied();
        self.at += 1;
        line.ok_or_else(|| "the text ends here".to_owned())
    }

    /// Takes the next line if it is this one.
    fn take(&mut self, line: &str) -> bool {
        let is_next = self.lines.get(self.at) == Some(&line);
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, line: &str) -> Parsed<()> {
        match self.next()? {
            found if found == line => Ok(()),
            found => Err(format!("`{found}`, expected `{line}`")),
        }
    }

    // ---- the module -----------------------------------------------------------

    fn program(&mut self) -> Parsed<Program> {
        self.next_after(".version ")?;
        let target = target(self.next_after(".target ")?)?;
        self.expect(".address_size 64")?;
        self.expect("")?;
        let shared = self.shared()?;
        let name = self.next_after(".visible .entry ")?.trim_end_matches('(').to_owned();
        while self.peek() != ")" {
            let parameter = parameter(self.next()?)?;
            self.parameters.push(parameter);
        }
        self.expect(")")?;
        let threads = first_number(self.next_after(".maxntid ")?)?;
        let blocks_per_multiprocessor = match self.peek().strip_prefix(".minnctapersm ") {
            Some(blocks) => {
                self.at += 1;
                Some(number(blocks)?)
            }
            None => None,
        };
        let cluster = match self.take(".explicitcluster") {
            true => first_number(self.next_after(".reqnctapercluster ")?)?,
            false => 1,
        };
        self.expect("{")?;
        let unused = self.declarations()?;
        let body = self.block(&["ret;"])?;
        self.expect("ret;")?;
        self.expect("}")?;
        let registers = self.types.iter().map(|ty| ty.unwrap_or(unused)).collect();
        let parameters = std::mem::take(&mut self.parameters);
        Ok(Program {
            name,
            target,
            parameters,
            registers,
            shared,
            threads,
            blocks_per_multiprocessor,
            cluster,
            body,
        })
    }

    fn next_after(&mut self, prefix: &str) -> Parsed<&'a str> {
        let line = self.next()?;
        line.strip_prefix(prefix).ok_or_else(|| format!("`{line}`, expected `{prefix}...`"))
    }

    /// Parses the regions of shared memory. Only the largest of their alignments is in the text.
    fn shared(&mut self) -> Parsed<Vec<SharedRegion>> {
        let mut regions = Vec::new();
        if !self.peek().starts_with("//") {
            return Ok(regions);
        }
        self.next()?;
        while let Some(region) = self.peek().strip_prefix("//") {
            self.next()?;
            let mut words = region.trim().splitn(2, ' ');
            let (Some(offset), Some(rest)) = (words.next(), words.next()) else {
                return Err("expected a region of shared memory".to_owned());
            };
            let (bytes, name) = rest.trim().split_once("  ").ok_or("expected a region's name")?;
            let (offset, bytes, name) = (number(offset)?, number(bytes)?, name.to_owned());
            regions.push(SharedRegion { name, offset, bytes, alignment: 1 });
        }
        let alignment = self.next_after(".extern .shared .align ")?;
        let alignment = alignment.split(' ').next().unwrap_or_default();
        if let Some(first) = regions.first_mut() {
            first.alignment = number(alignment)?;
        }
        self.expect("")?;
        Ok(regions)
    }

    /// Parses the declarations of registers; returns the type of those that nothing uses.
    fn declarations(&mut self) -> Parsed<Type> {
        let mut unused = Type::U32;
        while let Some(declared) = self.peek().strip_prefix(".reg ") {
            self.next()?;
            if declared == ".pred %true, %false;" {
                self.expect("setp.eq.u32 %true, 0, 0;")?;
                self.expect("setp.ne.u32 %false, 0, 0;")?;
                break;
            }
            let (class, names) = declared.split_once(' ').ok_or("expected a class of registers")?;
            let count = names.split(['<', '>']).nth(1).ok_or("expected a number of registers")?;
            self.types = vec![None; number(count)? as usize];
            unused = Type::ALL
                .into_iter()
                .find(|ty| crate::print::class_of(*ty) == class)
                .ok_or_else(|| format!("there is no class of registers `{class}`"))?;
        }
        Ok(unused)
    }

    // ---- statements -------------------------------------------------------------

    /// Parses statements up to a line that is one of `ends`, which is not taken.
    fn block(&mut self, ends: &[&str]) -> Parsed<Block> {
        let mut block = Block::new();
        while !ends.contains(&self.peek()) {
            let kind = self.statement()?;
            block.push(Statement { kind, place: PLACE });
        }
        Ok(block)
    }

    fn statement(&mut self) -> Parsed<StatementKind> {
        let line = self.next()?;
        if let Some(role) = line.strip_prefix("// role ") {
            let (name, warps) = role.rsplit_once(": warps ").ok_or("expected a role's warps")?;
            let (first, last) = warps.split_once(" to ").ok_or("expected a range of warps")?;
            let warps = number(first)?..number(last)?;
            return self.role(name.to_owned(), warps);
        }
        if let Some(label) = line.strip_prefix("$loop_").and_then(|it| it.strip_suffix(':')) {
            let again = format!("bra $loop_{label};");
            let body = self.block(&[&again])?;
            self.expect(&again)?;
            self.expect(&format!("$behind_{label}:"))?;
            return Ok(StatementKind::Loop { body });
        }
        let Some(guarded) = line.strip_prefix('@') else {
            return self.instruction(line).map(StatementKind::Instruction);
        };
        let (guard, rest) = guarded.split_once(' ').ok_or("expected a guarded instruction")?;
        if let Some(predicate) = guard.strip_prefix('!') {
            let condition = self.register(predicate)?;
            let label = rest.strip_prefix("bra $else_").and_then(|it| it.strip_suffix(';'));
            let (then, otherwise) = self.branches(label.ok_or("expected a branch")?)?;
            return Ok(StatementKind::If { condition, then, otherwise });
        }
        let condition = self.register(guard)?;
        if rest.starts_with("bra $behind_") {
            return Ok(StatementKind::Break { condition });
        }
        let kind = StatementKind::Instruction(self.instruction(rest)?);
        let then = vec![Statement { kind, place: PLACE }];
        Ok(StatementKind::If { condition, then, otherwise: Block::new() })
    }

    /// Parses a role, which is printed as a branch without an `else`.
    fn role(&mut self, name: String, warps: Range<u32>) -> Parsed<StatementKind> {
        match self.statement()? {
            StatementKind::If { condition: member, then: body, .. } => {
                Ok(StatementKind::Role { name, warps, member, body })
            }
            _ => Err("expected the branch of a role".to_owned()),
        }
    }

    fn branches(&mut self, label: &str) -> Parsed<(Block, Block)> {
        let (otherwise, end) = (format!("$else_{label}:"), format!("bra $end_{label};"));
        let then = self.block(&[&otherwise, &end])?;
        let has_else = self.take(&end);
        self.expect(&otherwise)?;
        if !has_else {
            return Ok((then, Block::new()));
        }
        let end = format!("$end_{label}:");
        let otherwise = self.block(&[&end])?;
        self.expect(&end)?;
        Ok((then, otherwise))
    }

    /// Parses an instruction that begins on `line`; most have one line.
    fn instruction(&mut self, line: &str) -> Parsed<Instruction> {
        if line == "{" {
            let instruction = self.braced()?;
            self.expect("}")?;
            return Ok(instruction);
        }
        let line = Line::new(line)?;
        if let Some(instruction) = self.address_of_space(&line)? {
            return Ok(instruction);
        }
        self.instruction_on(&line)
    }

    /// Parses what takes a second line that converts an address, or adds to it.
    fn address_of_space(&mut self, line: &Line<'_>) -> Parsed<Option<Instruction>> {
        let (mnemonic, [dst, source]) = (line.mnemonic, line.operands.as_slice()) else {
            return Ok(None);
        };
        match (mnemonic, *source) {
            ("mov.u32", "shared") => {
                let add = format!("add.u32 {dst}, {dst}, ");
                let offset = match self.peek().strip_prefix(&add) {
                    Some(offset) if !offset.starts_with('%') => {
                        self.next()?;
                        number(offset.trim_end_matches(';'))?
                    }
                    _ => 0,
                };
                Ok(Some(Instruction::SharedBase { dst: self.register(dst)?, offset }))
            }
            ("mov.b64", source) if source.starts_with('p') => {
                let parameter = self.parameter(source)?;
                let dst_register = self.register(dst)?;
                self.expect(&format!("cvta.param.u64 {dst}, {dst};"))?;
                Ok(Some(Instruction::TensorMapAddress { dst: dst_register, parameter }))
            }
            (_, source) if mnemonic.starts_with("ld.param.") => {
                let parameter = self.parameter(source.trim_matches(['[', ']']))?;
                let converted = format!("cvta.to.global.u64 {dst}, {dst};");
                let dst = self.register(dst)?;
                let kind = &mut self.parameters[parameter.0 as usize].kind;
                if self.lines.get(self.at) == Some(&converted.as_str()) {
                    self.at += 1;
                    *kind = ParameterKind::Address;
                }
                if let ParameterKind::Scalar(ty) = *kind {
                    self.typed(dst, ty)?;
                }
                Ok(Some(Instruction::ReadParameter { dst, parameter }))
            }
            _ => Ok(None),
        }
    }

    fn parameter(&self, name: &str) -> Parsed<ParameterId> {
        let index = name.strip_prefix('p').map(number).transpose()?;
        let index = index.filter(|index| (*index as usize) < self.parameters.len());
        index.map(ParameterId).ok_or_else(|| format!("there is no parameter `{name}`"))
    }

    /// Sets the type of a register, which must be of the class of its name.
    fn typed(&mut self, register: Register, ty: Type) -> Parsed<()> {
        let slot = &mut self.types[register.0 as usize];
        match slot {
            Some(old) if crate::print::class_of(*old) != crate::print::class_of(ty) => {
                Err(format!("register {} is {old:?}, used as {ty:?}", register.0))
            }
            _ => {
                *slot = Some(ty);
                Ok(())
            }
        }
    }
}

/// The source location of every statement.
const PLACE: SourceLocation = Location::caller();

fn number(text: &str) -> Parsed<u32> {
    text.trim().parse().map_err(|_| format!("`{text}`, expected a number"))
}

/// Parses the first of several numbers separated by commas.
fn first_number(text: &str) -> Parsed<u32> {
    number(text.split(',').next().unwrap_or_default())
}

fn target(name: &str) -> Parsed<Target> {
    let unknown = || format!("there is no target `{name}`");
    let number = name.strip_prefix("sm_").ok_or_else(unknown)?;
    let (architecture, specific) = match number.strip_suffix('a') {
        Some(number) => (number, true),
        None => (number, false),
    };
    let architecture = architecture.parse().map_err(|_| unknown())?;
    Ok(Target { architecture, specific })
}

/// Parses a parameter. Whether a `.u64` is an address is known where the kernel reads it.
fn parameter(line: &str) -> Parsed<Parameter> {
    let (declared, name) = line.split_once(" // ").ok_or("expected a parameter")?;
    let declared = declared.trim_end_matches(',').strip_prefix(".param ");
    let ty = declared.and_then(|it| it.strip_prefix('.')?.split(' ').next());
    let scalars = [Type::U32, Type::S32, Type::U64, Type::S64, Type::F32];
    let scalar = |ty: &str| scalars.into_iter().find(|it| crate::print::scalar_type(*it) == ty);
    let kind = match ty {
        Some("align") => ParameterKind::TensorMap(TensorBox {
            element: Element::F32,
            swizzle: Swizzle::None,
            extent: Vec::new(),
        }),
        ty => ParameterKind::Scalar(ty.and_then(scalar).ok_or("expected a parameter's type")?),
    };
    Ok(Parameter { name: name.to_owned(), kind })
}
