//! Moves, conversions and arithmetic.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::instruction::Line;
use super::{Parsed, Parser};
use crate::print::instruction::*;
use crate::print::{bits_type, scalar_type};
use crate::*;

impl Parser<'_> {
    pub(super) fn move_(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let [dst, src] = line.all()?;
        if dst.starts_with('{') {
            let [low, high] = self.pair(dst)?;
            return Ok(Instruction::Split { low, high, src: self.register(src)? });
        }
        if let Some(halves) = src.strip_prefix('{').and_then(|it| it.strip_suffix('}')) {
            let (low, high) = halves.split_once(", ").ok_or("expected two halves")?;
            let [low, high] = self.operands([low, high], Type::U32)?;
            return Ok(Instruction::Join { dst: self.register(dst)?, low, high });
        }
        let dst = self.register(dst)?;
        if src.starts_with('%') && !matches!(src.as_bytes(), [_, _, b'0'..=b'9', ..]) {
            let special = SpecialRegister::all().find(|it| special_name(*it) == src);
            let special = special.ok_or_else(|| format!("there is no register `{src}`"))?;
            return Ok(Instruction::ReadSpecial { dst, special });
        }
        let ty = self.types[dst.0 as usize].unwrap_or(Type::U32);
        // Only signed constants are printed with a sign.
        let ty = match (src.starts_with('-'), ty) {
            (true, Type::U32) => Type::S32,
            (true, Type::U64) => Type::S64,
            (_, ty) => ty,
        };
        self.typed(dst, ty)?;
        Ok(Instruction::Move { dst, src: self.operand(src, ty)? })
    }

    fn pair(&mut self, text: &str) -> Parsed<[Register; 2]> {
        let list = self.list(text)?;
        list.try_into().map_err(|_| format!("`{text}`, expected two registers"))
    }

    /// Parses a conversion, whose registers have the types that it names.
    pub(super) fn convert(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let mut types = line.mnemonic.rsplit('.').map(|name| {
            let ty = Type::ALL.into_iter().find(|ty| scalar_type(*ty) == name);
            ty.ok_or_else(|| format!("there is no type `{name}`"))
        });
        let (Some(from), Some(to)) = (types.next(), types.next()) else { return line.unknown() };
        let (from, to) = (from?, to?);
        let ([dst, a], b) = line.all_and()?;
        let dst = self.register(dst)?;
        self.typed(dst, to)?;
        if let Some(b) = b {
            let [high, low] = self.operands([a, b], Type::F32)?;
            return Ok(Instruction::ConvertPair { dst, high, low });
        }
        let src = self.register(a)?;
        self.typed(src, from)?;
        if to.is_packed_fp8() || from.is_packed_fp8() {
            return Ok(Instruction::ConvertPacked { dst, src });
        }
        Ok(Instruction::Convert { dst, src })
    }

    pub(super) fn arithmetic(&mut self, line: &Line<'_>) -> Parsed<Instruction> {
        let mnemonic = line.mnemonic;
        if let Some(side) = mnemonic.strip_prefix("shf.") {
            let [dst, low, high, amount] = line.all()?;
            let [low, high, amount] = self.operands([low, high, amount], Type::U32)?;
            let left = side.starts_with('l');
            return Ok(Instruction::FunnelShift {
                left,
                dst: self.register(dst)?,
                low,
                high,
                amount,
            });
        }
        match mnemonic {
            "prmt.b32" => {
                let [dst, a, b, selector] = line.all()?;
                let [a, b, selector] = self.operands([a, b, selector], Type::U32)?;
                return Ok(Instruction::PermuteBytes { dst: self.register(dst)?, a, b, selector });
            }
            "lop3.b32" => {
                let [dst, a, b, c, table] = line.all()?;
                let [a, b, c] = self.operands([a, b, c], Type::U32)?;
                let table = table.parse().map_err(|_| format!("`{table}`, expected a table"))?;
                return Ok(Instruction::Logic3 { dst: self.register(dst)?, a, b, c, table });
            }
            _ => {}
        }
        let Some((kind, types)) = spellings().get(mnemonic) else { return line.unknown() };
        let ty = line.type_among(types);
        let dst = match line.operands.first() {
            Some(dst) => self.register(dst)?,
            None => return line.unknown(),
        };
        match *kind {
            Arithmetic::Unary(operation) => {
                let [_, a] = line.all()?;
                Ok(Instruction::Unary { operation, ty, dst, a: self.operand(a, ty)? })
            }
            Arithmetic::Binary(operation) => {
                let shifts = [BinaryOperation::ShiftLeft, BinaryOperation::ShiftRight];
                let [_, a, b] = line.all()?;
                let a = self.operand(a, ty)?;
                let b =
                    self.operand(b, if shifts.contains(&operation) { Type::U32 } else { ty })?;
                Ok(Instruction::Binary { operation, ty, dst, a, b })
            }
            Arithmetic::Compare(comparison) => {
                let [_, a, b] = line.all()?;
                let [a, b] = self.operands([a, b], ty)?;
                Ok(Instruction::Compare { comparison, ty, dst, a, b })
            }
            Arithmetic::Select => {
                let [_, a, b, condition] = line.all()?;
                let ([a, b], condition) = (self.operands([a, b], ty)?, self.register(condition)?);
                Ok(Instruction::Select { ty, dst, condition, a, b })
            }
            Arithmetic::MultiplyWide => {
                let [_, a, b] = line.all()?;
                let [a, b] = self.operands([a, b], ty)?;
                Ok(Instruction::MultiplyWide { ty, dst, a, b })
            }
            Arithmetic::MultiplyAdd => {
                let [_, a, b, c] = line.all()?;
                let [a, b, c] = self.operands([a, b, c], ty)?;
                Ok(Instruction::MultiplyAdd { ty, dst, a, b, c })
            }
        }
    }
}

/// The instructions of [`Parser::arithmetic`] that have a type.
#[derive(Clone, Copy)]
enum Arithmetic {
    Unary(UnaryOperation),
    Binary(BinaryOperation),
    Compare(Comparison),
    Select,
    MultiplyWide,
    MultiplyAdd,
}

/// Returns what each mnemonic with a type stands for, and the types that it may have.
fn spellings() -> &'static HashMap<String, (Arithmetic, Vec<Type>)> {
    static SPELLINGS: OnceLock<HashMap<String, (Arithmetic, Vec<Type>)>> = OnceLock::new();
    SPELLINGS.get_or_init(|| {
        let mut all: HashMap<String, (Arithmetic, Vec<Type>)> = HashMap::new();
        for ty in Type::ALL {
            let scalar = scalar_type(ty);
            let unary = UnaryOperation::ALL.map(|it| (unary(it, ty), Arithmetic::Unary(it)));
            let binary = BinaryOperation::ALL.map(|it| (binary(it, ty), Arithmetic::Binary(it)));
            let compare = Comparison::ALL
                .map(|it| (format!("setp.{}.{scalar}", compare(it, ty)), Arithmetic::Compare(it)));
            let others = [
                (format!("selp.{}", bits_type(ty)), Arithmetic::Select),
                (format!("mul.wide.{scalar}"), Arithmetic::MultiplyWide),
                (multiply_add(ty), Arithmetic::MultiplyAdd),
            ];
            for (spelling, kind) in unary.into_iter().chain(binary).chain(compare).chain(others) {
                all.entry(spelling).or_insert((kind, Vec::new())).1.push(ty);
            }
        }
        all
    })
}
