//! Pools in memory of this process, and the bytes that pools and arenas should have after moves.

#![allow(dead_code, reason = "each test binary uses a part of this module")]

use proptest::prelude::*;
use ritornello_device::layout::{Layout, MoveEntry, Part, Span};

/// How the tensors of a page are arranged in memory.
#[derive(Clone, Copy, Debug)]
pub enum Arrangement {
    /// Each tensor has separate memory, as vLLM's layers have.
    Separate,
    /// All tensors of a block follow each other, as in vLLM's cross-layer layout.
    Together,
    /// Two tensors alternate, as K and V do.
    Pairs,
}

/// The shape of a pool.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Bytes of each tensor in a block.
    pub pieces: Vec<u32>,
    pub arrangement: Arrangement,
    pub blocks: u32,
    /// Bytes after each block of a tensor, or of adjacent tensors, that belong to no tensor.
    pub gap: u64,
    /// Distance of the first tensor from an address that is a multiple of 4 KiB.
    pub shift: usize,
}

/// Shapes whose lengths, gaps and shifts in bytes are multiples of `word`, with pieces of 4 to
/// 72 KiB.
pub fn shapes(word: u32) -> impl Strategy<Value = Shape> {
    let piece = (4096 / word..=72 * 1024 / word).prop_map(move |words| words * word);
    let pieces = prop_oneof![
        prop::collection::vec(piece.clone(), 1..6),
        (piece, 1_usize..6).prop_map(|(piece, count)| vec![piece; count]),
    ];
    let arrangements = [Arrangement::Separate, Arrangement::Together, Arrangement::Pairs];
    let arrangement = prop::sample::select(arrangements.to_vec());
    (pieces, arrangement, 1_u32..7, 0_u32..100, 0_u32..64).prop_map(
        move |(pieces, arrangement, blocks, gap, shift)| Shape {
            pieces,
            arrangement,
            blocks,
            gap: u64::from(gap * word),
            shift: (shift * word) as usize,
        },
    )
}

/// Memory whose first byte has an address that is a multiple of 4 KiB. The initial value of each
/// byte depends on its position ([`poison`]).
pub struct Memory {
    bytes: Vec<u8>,
    skip: usize,
}

/// Bytes before and after the tensors in which a move must not write.
pub const MARGIN: usize = 8192;

pub fn poison(at: usize, seed: u8) -> u8 {
    (at as u8).wrapping_mul(151) ^ (at >> 8) as u8 ^ ((at >> 16) as u8).wrapping_mul(29) ^ seed
}

impl Memory {
    pub fn new(bytes: usize, seed: u8) -> Self {
        let mut memory = Self { bytes: vec![0; bytes + 4096], skip: 0 };
        memory.skip = memory.bytes.as_ptr().align_offset(4096);
        memory.bytes.truncate(memory.skip + bytes);
        for (at, byte) in memory.bytes_mut().iter_mut().enumerate() {
            *byte = poison(at, seed);
        }
        memory
    }
    pub fn base(&mut self) -> u64 {
        self.bytes_mut().as_mut_ptr() as u64
    }
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.skip..]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.skip..]
    }
}

/// A pool in memory of this process, with [`MARGIN`] bytes before and after its tensors.
pub struct Tensors {
    pub memory: Memory,
    pub spans: Vec<Span>,
    pub layout: Layout,
}

impl Tensors {
    pub fn new(shape: &Shape) -> Self {
        let offsets: Vec<u64> = shape
            .pieces
            .iter()
            .scan(0, |end, &piece| {
                *end += u64::from(piece);
                Some(*end - u64::from(piece))
            })
            .collect();
        let page: u64 = shape.pieces.iter().map(|&piece| u64::from(piece)).sum();
        let mut start = (MARGIN + shape.shift) as u64;
        let mut spans: Vec<Span> = Vec::new();
        for group in 0..shape.pieces.len() {
            let members = match shape.arrangement {
                Arrangement::Separate => group..group + 1,
                Arrangement::Pairs if group % 2 == 0 => group..(group + 2).min(shape.pieces.len()),
                Arrangement::Together if group == 0 => 0..shape.pieces.len(),
                _ => continue,
            };
            let bytes: u64 = shape.pieces[members.clone()].iter().map(|&p| u64::from(p)).sum();
            let stride = bytes + shape.gap;
            for member in members.clone() {
                let base = start + offsets[member] - offsets[members.start];
                spans.push(Span { base, bytes: shape.pieces[member], stride });
            }
            start += stride * u64::from(shape.blocks);
        }
        assert!(start <= MARGIN as u64 + (page + 6 * shape.gap) * u64::from(shape.blocks) + 4096);
        let mut memory = Memory::new(start as usize + MARGIN, 0x5a);
        let base = memory.base();
        spans.iter_mut().for_each(|span| span.base += base);
        let layout = Layout::new(&spans, shape.blocks).unwrap();
        Self { memory, spans, layout }
    }

    /// The bytes that the memory holds after a scatter of `part` from an arena.
    pub fn after_scatter(&self, part: &Part, moves: &[MoveEntry], arena: &[u8]) -> Vec<u8> {
        let base = self.memory.bytes().as_ptr() as u64;
        let mut expected = self.memory.bytes().to_vec();
        for entry in moves {
            for (address, offset, bytes) in self.layout.pieces(part, entry.block) {
                let (to, from) = ((address - base) as usize, slot(entry) + offset as usize);
                let bytes = bytes as usize;
                expected[to..to + bytes].copy_from_slice(&arena[from..from + bytes]);
            }
        }
        expected
    }

    /// The bytes that an arena holds after a gather of `part` to it.
    pub fn after_gather(&self, part: &Part, moves: &[MoveEntry], arena: &[u8]) -> Vec<u8> {
        let base = self.memory.bytes().as_ptr() as u64;
        let mut expected = arena.to_vec();
        for entry in moves {
            for (address, offset, bytes) in self.layout.pieces(part, entry.block) {
                let (from, to) = ((address - base) as usize, slot(entry) + offset as usize);
                let bytes = bytes as usize;
                expected[to..to + bytes].copy_from_slice(&self.memory.bytes()[from..from + bytes]);
            }
        }
        expected
    }
}

/// Offset of a slot in its arena.
pub fn slot(entry: &MoveEntry) -> usize {
    entry.slot as usize * 4096
}

/// Asserts that two memories are equal, and names the first byte that differs.
pub fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    if found != expected {
        let at = found.iter().zip(expected).position(|(a, b)| a != b).unwrap();
        panic!("{what}: byte {at} is {:#x}, not {:#x}", found[at], expected[at]);
    }
}
