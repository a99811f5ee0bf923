//! Global memory: named buffers with nothing between them.

/// A buffer of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(u32);

impl BufferId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Each buffer has its own 64 GiB of addresses, so that running past the end
/// of one never lands in another.
const BUFFER_SHIFT: u32 = 36;
/// Where in its addresses a buffer starts, so that running before its start
/// does not land in another either.
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
    /// Which bytes a kernel has written; `None` where nobody asks.
    written: Option<Vec<bool>>,
    /// Whether all of it holds something from the start.
    filled: bool,
    /// How many bytes were written when they had been already.
    rewritten: usize,
    /// Whether numbers must be added to it in one order.
    pub(crate) in_order: bool,
}

impl Memory {
    /// No buffers yet.
    pub fn new() -> Self {
        Memory::default()
    }

    /// A buffer with these bytes.
    pub fn input(&mut self, name: &str, bytes: Vec<u8>) -> BufferId {
        self.add(name, bytes, None, true)
    }

    /// A buffer with these bytes, of which some will be written: see
    /// [`rewritten`](Memory::rewritten).
    pub fn result(&mut self, name: &str, bytes: Vec<u8>) -> BufferId {
        let written = Some(vec![false; bytes.len()]);
        self.add(name, bytes, written, true)
    }

    /// A buffer of single-precision floats.
    pub fn input_f32(&mut self, name: &str, values: &[f32]) -> BufferId {
        self.input(name, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A buffer of 16-bit values.
    pub fn input_u16(&mut self, name: &str, values: &[u16]) -> BufferId {
        self.input(name, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A buffer of 32-bit values.
    pub fn input_u32(&mut self, name: &str, values: &[u32]) -> BufferId {
        self.input(name, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A buffer that nobody has written: poisoned with ones, which is NaN in
    /// every float format.
    pub fn output(&mut self, name: &str, bytes: usize) -> BufferId {
        let written = Some(vec![false; bytes]);
        let bytes = vec![0xFF; bytes];
        self.add(name, bytes, written, false)
    }

    /// Lets threads' additions of floats to a buffer conflict where nothing orders them: the sum
    /// depends on the order, and a kernel that promises the same bits every time must not leave it
    /// open.
    pub fn adds_in_order(&mut self, buffer: BufferId) {
        self.buffers[buffer.index()].in_order = true;
    }

    /// Makes a buffer what it is in another memory, which has the same ones.
    pub fn restore(&mut self, buffer: BufferId, from: &Memory) {
        self.buffers[buffer.index()] = from.buffers[buffer.index()].clone();
    }

    /// How many bytes of a result or output were written again.
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

    /// Every buffer, in the order they were made.
    pub fn ids(&self) -> impl Iterator<Item = BufferId> {
        (0..self.buffers.len() as u32).map(BufferId)
    }

    /// The bytes of a buffer.
    pub fn bytes(&self, buffer: BufferId) -> &[u8] {
        &self.buffers[buffer.index()].bytes
    }

    /// A buffer as single-precision floats.
    pub fn f32(&self, buffer: BufferId) -> Vec<f32> {
        self.u32(buffer).into_iter().map(f32::from_bits).collect()
    }

    /// A buffer as 32-bit values.
    pub fn u32(&self, buffer: BufferId) -> Vec<u32> {
        let chunks = self.bytes(buffer).chunks_exact(4);
        chunks.map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    /// A buffer as 16-bit values.
    pub fn u16(&self, buffer: BufferId) -> Vec<u16> {
        self.bytes(buffer).chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect()
    }

    /// How many bytes of a buffer nobody has written.
    pub fn unwritten(&self, buffer: BufferId) -> usize {
        let buffer = &self.buffers[buffer.index()];
        let written = buffer.written.as_ref().filter(|_| !buffer.filled);
        written.map_or(0, |written| written.iter().filter(|w| !**w).count())
    }

    // ---- addresses ------------------------------------------------------------

    /// The address of a byte of a buffer.
    pub(crate) fn address(buffer: BufferId, offset: u64) -> u64 {
        ((buffer.0 as u64 + 1) << BUFFER_SHIFT) + BUFFER_START + offset
    }

    /// The buffer and offset of `bytes` bytes at an address.
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

    /// The first byte of a range that nobody has written.
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
