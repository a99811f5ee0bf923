//! Operands of instructions: registers, constants, addresses and lists of them.

use super::{Parsed, Parser};
use crate::{Address, Operand, Register, Type};

impl Parser<'_> {
    /// Parses a register. Until an instruction says more, its type is the first of its class.
    pub(super) fn register(&mut self, name: &str) -> Parsed<Register> {
        let unknown = || format!("there is no register `{name}`");
        let ty = match name.as_bytes() {
            [b'%', b'p', ..] => Type::Pred,
            [b'%', b'h', ..] => Type::F16,
            [b'%', b'r', ..] => Type::U32,
            [b'%', b'f', ..] => Type::F32,
            [b'%', b'd', ..] => Type::U64,
            _ => return Err(unknown()),
        };
        let index: u32 = name[2..].parse().map_err(|_| unknown())?;
        let slot = self.types.get_mut(index as usize).ok_or_else(unknown)?;
        let known = *slot.get_or_insert(ty);
        if crate::print::class_of(known) != crate::print::class_of(ty) {
            return Err(format!("register {index} is {known:?} elsewhere"));
        }
        Ok(Register(index))
    }

    /// Parses a register or a constant of a type.
    pub(super) fn operand(&mut self, text: &str, ty: Type) -> Parsed<Operand> {
        if text.starts_with('%') {
            return self.register(text).map(Operand::Register);
        }
        let bits = if let Some(bits) = text.strip_prefix("0f") {
            u64::from_str_radix(bits, 16).ok()
        } else if let Some(bits) = text.strip_prefix("0x") {
            u64::from_str_radix(bits, 16).ok()
        } else if text.starts_with('-') {
            let negative: Option<i64> = text.parse().ok();
            negative.map(|it| if ty.bits() == 64 { it as u64 } else { it as i32 as u32 as u64 })
        } else {
            text.parse().ok()
        };
        bits.map(Operand::Immediate).ok_or_else(|| format!("`{text}`, expected an operand"))
    }

    pub(super) fn operands<const N: usize>(
        &mut self,
        texts: [&str; N],
        ty: Type,
    ) -> Parsed<[Operand; N]> {
        let mut operands = [Operand::Immediate(0); N];
        for (operand, text) in operands.iter_mut().zip(texts) {
            *operand = self.operand(text, ty)?;
        }
        Ok(operands)
    }

    /// Parses `[base]` or `[base+offset]`.
    pub(super) fn address(&mut self, text: &str) -> Parsed<Address> {
        let inner = text.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        let inner = inner.ok_or_else(|| format!("`{text}`, expected an address"))?;
        let (base, offset) = match inner.find(['+', '-']) {
            Some(at) => inner.split_at(at),
            None => (inner, "0"),
        };
        let offset = offset.parse().map_err(|_| format!("`{offset}`, expected an offset"))?;
        Ok(Address { base: self.register(base)?, offset })
    }

    pub(super) fn addresses<const N: usize>(&mut self, texts: [&str; N]) -> Parsed<[Address; N]> {
        let mut addresses = [Address { base: Register(0), offset: 0 }; N];
        for (address, text) in addresses.iter_mut().zip(texts) {
            *address = self.address(text)?;
        }
        Ok(addresses)
    }

    /// Parses one register, or several in braces.
    pub(super) fn list(&mut self, text: &str) -> Parsed<Vec<Register>> {
        items(text).into_iter().map(|name| self.register(name)).collect()
    }

    /// Parses `[map, {coordinates}]`.
    pub(super) fn tensor(&mut self, text: &str) -> Parsed<(Register, Vec<Operand>)> {
        let inner = text.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        let (map, coordinates) = inner
            .and_then(|inner| inner.split_once(", "))
            .ok_or_else(|| format!("`{text}`, expected a tensor"))?;
        let map = self.register(map)?;
        let coordinates = items(coordinates);
        let coordinates = coordinates.into_iter().map(|it| self.operand(it, Type::S32));
        Ok((map, coordinates.collect::<Parsed<_>>()?))
    }
}

/// Returns the items of a list in braces, or the one item of a text without them.
fn items(text: &str) -> Vec<&str> {
    match text.strip_prefix('{').and_then(|it| it.strip_suffix('}')) {
        Some(list) => list.split(", ").collect(),
        None => vec![text],
    }
}

/// Splits operands at the commas that are not inside of braces or brackets.
pub(super) fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            b',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text.is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}
