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
        let buffer = Buffer { name, bytes, written, filled, rewritten: 0, in_order: false };
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

    /// Returns a buffer as 16-bit values.
    pub fn u16(&self, buffer: BufferId) -> Vec<u16> {
        self.bytes(buffer).chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect()
    }

    /// Returns the number of bytes of an output that nothing has written.
    pub fn unwritten(&self, buffer: BufferId) -> usize {
        let buffer = &self.buffers[buffer.index()];
        let written = buffer.written.as_ref().filter(|_| !buffer.filled);
        written.map_or(0, |written| written.iter().filter(|w| !**w).count())
    }

    // ---- addresses ------------------------------------------------------------

    /// Returns the address of a byte of a buffer.
    pub(crate) fn address(buffer: BufferId, offset: u64) -> u64 {
        ((buffer.0 as u64 + 1) << BUFFER_SHIFT) + BUFFER_START + offset
    }

    /// Returns the buffer and the offset of `bytes` bytes at an address.
    pub(crate) fn locate(&self, address: u64, bytes: u64) -> Result<(usize, usize), String> {
        let index = (address >> BUFFER_SHIFT).wrapping_sub(1);
        let offset = (address & ((1 << BUFFER_SHIFT) - 1)).wrapping_sub(BUFFER_START);
        let Some(buffer) = self.buffers.get(index as usize) else {
            return Err(format!("address {address:#x}, which is in no buffer"));
        };
        let length = buffer.bytes.len() as u64;
        if offset < length && bytes <= length - offset {
            return Ok((index as usize, offset as usize));
        }
        let (name, offset) = (&buffer.name, offset as i64);
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
