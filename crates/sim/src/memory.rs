//! Global memory: named buffers, separated by unmapped addresses.

/// A buffer of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(u32);

impl BufferId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The number of address bits of a buffer: each has 64 GiB of addresses to itself, so that an
/// access past its end never lands in another buffer.
const BUFFER_SHIFT: u32 = 36;
/// The offset of a buffer in its addresses, so that an access before its start does not land in
/// another buffer either.
const BUFFER_START: u64 = 1 << 20;

/// The global memory of the simulated device.
///
/// ```
/// use flashcore_sim::Memory;
/// let mut memory = Memory::new();
/// let input = memory.input_f32("input", &[1.0, 2.0]);
/// let output = memory.output("output", 8);
/// assert_eq!(memory.f32(input), [1.0, 2.0]);
/// assert_eq!(memory.unwritten(output), 8);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Memory {
    buffers: Vec<Buffer>,
}

#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    /// Whether a kernel has written each byte; `None` where this is not tracked.
    written: Option<Vec<bool>>,
    /// Whether the whole buffer is initialised from the start.
    filled: bool,
    /// The number of writes to bytes that had already been written.
    rewritten: usize,
    /// Whether additions to the buffer must be ordered ([`Memory::adds_in_order`]).
    pub(crate) in_order: bool,
    /// Whether the buffer was freed; it then has no bytes.
    freed: bool,
}

impl Memory {
    /// Creates a memory without buffers.
    pub fn new() -> Self {
        Memory::default()
    }

    /// Adds a buffer with these bytes.
    pub fn input(&mut self, name: &str, bytes: Vec<u8>) -> BufferId {
        self.add(name, bytes, None, true)
    }

    /// Adds a buffer with these bytes, some of which the kernel will write, and tracks writes to
    /// it: see [`rewritten`](Memory::rewritten).
    pub fn result(&mut self, name: &str, bytes: Vec<u8>) -> BufferId {
        let written = Some(vec![false; bytes.len()]);
        self.add(name, bytes, written, true)
    }

    /// Adds a buffer of single-precision floats.
    pub fn input_f32(&mut self, name: &str, values: &[f32]) -> BufferId {
        self.input(name, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Adds a buffer of 32-bit values.
    pub fn input_u32(&mut self, name: &str, values: &[u32]) -> BufferId {
        self.input(name, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Adds an uninitialised buffer, filled with ones, which are NaN in every float format.
    pub fn output(&mut self, name: &str, bytes: usize) -> BufferId {
        let written = Some(vec![false; bytes]);
        let bytes = vec![0xFF; bytes];
        self.add(name, bytes, written, false)
    }

    /// Makes unordered float additions of threads to a buffer conflict. The sum depends on their
    /// order, so a kernel that promises the same bits in every run must not leave the order open.
    pub fn adds_in_order(&mut self, buffer: BufferId) {
        self.buffers[buffer.index()].in_order = true;
    }

    /// Restores a buffer to its state in another memory, which must have the same buffers.
    pub fn restore(&mut self, buffer: BufferId, from: &Memory) {
        self.buffers[buffer.index()] = from.buffers[buffer.index()].clone();
    }

    /// Returns the number of writes to bytes of a result or output that had already been written.
    pub fn rewritten(&self, buffer: BufferId) -> usize {
        self.buffers[buffer.index()].rewritten
    }

    fn add(
        &mut self,
        name: &str,
        bytes: Vec<u8>,
        written: Option<Vec<bool>>,
        filled: bool,
    ) -> BufferId {
        let name = name.to_owned();
        let (in_order, freed) = (false, false);
        let buffer = Buffer { name, bytes, written, filled, rewritten: 0, in_order, freed };
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }

    /// Returns every buffer, in the order in which they were added.
    pub fn ids(&self) -> impl Iterator<Item = BufferId> {
        (0..self.buffers.len() as u32).map(BufferId)
    }

    /// Returns the bytes of a buffer.
    pub fn bytes(&self, buffer: BufferId) -> &[u8] {
        &self.buffers[buffer.index()].bytes
    }

    /// Returns a buffer as single-precision floats.
    pub fn f32(&self, buffer: BufferId) -> Vec<f32> {
        self.u32(buffer).into_iter().map(f32::from_bits).collect()
    }

    /// Returns a buffer as 32-bit values.
    pub fn u32(&self, buffer: BufferId) -> Vec<u32> {
        let chunks = self.bytes(buffer).chunks_exact(4);
        chunks.map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    /// Returns the number of bytes of an output that nothing has written.
    pub fn unwritten(&self, buffer: BufferId) -> usize {
        let buffer = &self.buffers[buffer.index()];
        let written = buffer.written.as_ref().filter(|_| !buffer.filled);
        written.map_or(0, |written| written.iter().filter(|w| !**w).count())
    }

    // ---- addresses ------------------------------------------------------------

    /// Returns the address of a byte of a buffer, as kernels see it. It is a multiple of 2^20 for
    /// the first byte, and never that of another buffer, not even of one that was freed.
    ///
    /// ```
    /// use flashcore_sim::Memory;
    /// let mut memory = Memory::new();
    /// let buffer = memory.input_u32("numbers", &[1, 2, 3]);
    /// let address = Memory::address(buffer, 4);
    /// assert_eq!(Memory::place(address), (buffer, 4));
    /// assert_eq!(memory.read(address, 4), Ok(&[2, 0, 0, 0][..]));
    /// memory.write_at(address, &[7, 0, 0, 0])?;
    /// assert_eq!(memory.u32(buffer), [1, 7, 3]);
    /// memory.free(buffer);
    /// assert!(memory.read(address, 4).unwrap_err().contains("freed"));
    /// # Ok::<(), String>(())
    /// ```
    pub fn address(buffer: BufferId, offset: u64) -> u64 {
        let start = (u64::from(buffer.0) + 1) << BUFFER_SHIFT;
        start.wrapping_add(BUFFER_START).wrapping_add(offset)
    }

    /// Returns the buffer and the offset that an address means, the inverse of
    /// [`address`](Memory::address). Whether there is such a buffer, and such a byte of it, is not
    /// checked; a byte before the start of a buffer has an offset that wrapped around.
    pub fn place(address: u64) -> (BufferId, u64) {
        let index = (address >> BUFFER_SHIFT).wrapping_sub(1);
        let offset = (address & ((1 << BUFFER_SHIFT) - 1)).wrapping_sub(BUFFER_START);
        (BufferId(index as u32), offset)
    }

    /// Returns the bytes at an address.
    ///
    /// # Errors
    /// Says what is wrong, if they are not all in one buffer.
    pub fn read(&self, address: u64, bytes: u64) -> Result<&[u8], String> {
        let (buffer, offset) = self.locate(address, bytes)?;
        Ok(&self.buffers[buffer].bytes[offset..offset + bytes as usize])
    }

    /// Writes bytes to an address. They count as written, as if by a kernel.
    ///
    /// # Errors
    /// Says what is wrong, if they are not all in one buffer.
    pub fn write_at(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let (buffer, offset) = self.locate(address, bytes.len() as u64)?;
        self.write(buffer, offset, bytes);
        Ok(())
    }

    /// Copies bytes from one address to another. Uninitialised bytes stay uninitialised.
    ///
    /// # Errors
    /// Says what is wrong, if the source or the destination is not all in one buffer.
    pub fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), String> {
        let (source, start) = self.locate(from, bytes)?;
        let (target, offset) = self.locate(to, bytes)?;
        let range = start..start + bytes as usize;
        let copied = self.buffers[source].bytes[range.clone()].to_vec();
        let source = &self.buffers[source];
        let written = source.written.as_ref().filter(|_| !source.filled);
        let written = written.map(|written| written[range].to_vec());
        self.write(target, offset, &copied);
        if let (Some(from), Some(to)) = (written, &mut self.buffers[target].written) {
            to[offset..offset + bytes as usize].copy_from_slice(&from);
        }
        Ok(())
    }

    /// Frees a buffer: any further access to it is an error, and its addresses are not used again.
    pub fn free(&mut self, buffer: BufferId) {
        let buffer = &mut self.buffers[buffer.index()];
        (buffer.bytes, buffer.freed) = (Vec::new(), true);
        buffer.written = buffer.written.take().map(|_| Vec::new());
    }

    /// Returns the buffer and the offset of `bytes` bytes at an address.
    pub(crate) fn locate(&self, address: u64, bytes: u64) -> Result<(usize, usize), String> {
        let (index, offset) = Memory::place(address);
        let Some(buffer) = self.buffers.get(index.index()) else {
            return Err(format!("address {address:#x}, which is in no buffer"));
        };
        let length = buffer.bytes.len() as u64;
        if offset < length && bytes <= length - offset {
            return Ok((index.index(), offset as usize));
        }
        let (name, offset) = (&buffer.name, offset as i64);
        if buffer.freed {
            return Err(format!(
                "{bytes} bytes at byte {offset} of buffer {name:?}, which was freed"
            ));
        }
        Err(format!("{bytes} bytes at byte {offset} of buffer {name:?}, which has {length}"))
    }

    pub(crate) fn buffer(&self, index: usize) -> &Buffer {
        &self.buffers[index]
    }

    pub(crate) fn count(&self) -> usize {
        self.buffers.len()
    }

    pub(crate) fn write(&mut self, buffer: usize, offset: usize, bytes: &[u8]) {
        let buffer = &mut self.buffers[buffer];
        buffer.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        if let Some(written) = &mut buffer.written {
            let written = &mut written[offset..offset + bytes.len()];
            buffer.rewritten += written.iter().filter(|it| **it).count();
            written.fill(true);
        }
    }

    /// Returns the first byte of a range that nothing has written.
    pub(crate) fn first_unwritten(
        &self,
        buffer: usize,
        offset: usize,
        bytes: usize,
    ) -> Option<usize> {
        let buffer = &self.buffers[buffer];
        let written = buffer.written.as_ref().filter(|_| !buffer.filled)?;
        written[offset..offset + bytes].iter().position(|w| !w).map(|at| offset + at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_one_buffer() {
        let mut memory = Memory::new();
        let (first, second) = (memory.output("first", 8), memory.output("second", 8));
        for (buffer, offset) in [(first, 0), (first, 7), (second, 3), (second, u64::MAX)] {
            let address = Memory::address(buffer, offset);
            assert_eq!(Memory::place(address), (buffer, offset));
            assert_eq!(memory.read(address, 1).is_ok(), offset < 8);
        }
        assert!(memory.read(Memory::address(first, 4), 5).unwrap_err().contains("which has 8"));
        assert!(memory.write_at(Memory::address(second, 8), &[1]).is_err());
        for nowhere in [0, 1, u64::MAX, Memory::address(BufferId(2), 0)] {
            assert!(memory.read(nowhere, 1).unwrap_err().contains("in no buffer"), "{nowhere:#x}");
        }
    }

    #[test]
    fn copies_keep_what_is_not_written() {
        let mut memory = Memory::new();
        let (from, to) = (memory.output("from", 8), memory.output("to", 8));
        memory.write_at(Memory::address(from, 2), &[1, 2]).unwrap();
        memory.copy(Memory::address(from, 0), Memory::address(to, 4), 4).unwrap();
        assert_eq!(memory.bytes(to)[6..], [1, 2]);
        assert_eq!(memory.unwritten(to), 6);
        assert_eq!(memory.first_unwritten(to.index(), 6, 2), None);
        // From a buffer that is initialised from the start, all of it is.
        let input = memory.input_u32("input", &[5]);
        memory.copy(Memory::address(input, 0), Memory::address(to, 0), 4).unwrap();
        assert_eq!(memory.unwritten(to), 2);
        assert!(memory.copy(Memory::address(from, 5), Memory::address(to, 0), 4).is_err());
    }

    #[test]
    fn freed_buffers_are_gone() {
        let mut memory = Memory::new();
        let first = memory.output("first", 8);
        memory.free(first);
        let error = memory.write_at(Memory::address(first, 0), &[1]).unwrap_err();
        assert_eq!(error, "1 bytes at byte 0 of buffer \"first\", which was freed");
        assert_ne!(memory.output("second", 8), first);
    }
}
