//! The kernels of `kernels/kv.cu`, compiled for the CPU: they move all bytes of their pages and
//! write no others.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{MARGIN, Memory, Shape, Tensors, assert_same, shapes};
use proptest::prelude::*;
use ritornello_device::driver::Launch;
use ritornello_device::driver::emulated::run_kernel;
use ritornello_device::layout::{Direction, Kernel, MoveEntry, Part, Word};

/// Moves of some blocks of a pool, in random order, each with a separate slot.
fn moves(shape: &Shape, slot_units: u32, seed: u64) -> Vec<MoveEntry> {
    let mut blocks: Vec<u32> = (0..shape.blocks).collect();
    let mut state = seed | 1;
    for at in (1..blocks.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        blocks.swap(at, (state >> 33) as usize % (at + 1));
    }
    let kept = 1 + (seed as usize >> 7) % blocks.len();
    let entry = |(at, block)| MoveEntry { block, slot: 2 + at as u32 * slot_units };
    blocks.into_iter().rev().take(kept).enumerate().map(entry).collect()
}

/// Moves up to `count + 1` spans, starting at span `first` modulo their number, with the kernel of
/// `word` in both directions, and compares all memory with the expected bytes.
fn check(shape: &Shape, word: Word, grid: u32, seed: u64, first: usize, count: usize) {
    let mut tensors = Tensors::new(shape);
    let slot_units = tensors.layout.page_bytes().div_ceil(4096) as u32;
    let moves = moves(shape, slot_units, seed);
    let spans = tensors.layout.spans().to_vec();
    let first = first % spans.len();
    let end = (first + 1 + count).min(spans.len());
    let last = spans.get(end).map_or(tensors.layout.page_bytes(), |span| span.offset);
    let part: Part = tensors.layout.part(&(spans[first].offset..last)).unwrap();
    assert_eq!(part.spans, first..end);
    let mut arena = Memory::new(MARGIN * 2 + (slot_units * shape.blocks) as usize * 4096, 0xc3);
    for direction in [Direction::Scatter, Direction::Gather] {
        let (in_pool, in_arena) = match direction {
            Direction::Scatter => {
                let expected = tensors.after_scatter(&part, &moves, arena.bytes());
                (expected, arena.bytes().to_vec())
            }
            Direction::Gather => {
                // Make the bytes of the pool differ from the bytes in the arena.
                tensors.memory.bytes_mut().iter_mut().for_each(|byte| *byte ^= 0x99);
                let pool = tensors.memory.bytes().to_vec();
                (pool, tensors.after_gather(&part, &moves, arena.bytes()))
            }
        };
        let launch = Launch {
            kernel: Kernel { direction, word },
            grid,
            spans: spans[part.spans.clone()].as_ptr() as u64,
            count: part.count(),
            units: part.units,
            moves: moves.as_ptr() as u64,
            pages: moves.len() as u32,
            arena: arena.base(),
        };
        // SAFETY: tables, tensors and arena live until the end of the test.
        unsafe { run_kernel(&launch) };
        assert_same(tensors.memory.bytes(), &in_pool, &format!("{direction:?}, pool"));
        assert_same(arena.bytes(), &in_arena, &format!("{direction:?}, arena"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn each_kernel_moves_exactly_its_bytes(
        (word, shape) in prop::sample::select(vec![Word::B16, Word::B8, Word::B4, Word::B1])
            .prop_flat_map(|word| (Just(word), shapes(word.bytes()))),
        grid in 1_u32..=12,
        seed: u64,
        first in 0_usize..6,
        count in 0_usize..6,
    ) {
        check(&shape, word, grid, seed, first, count);
    }
}

#[test]
fn pieces_of_model_sizes_are_moved_exactly() {
    // Bytes of one layer in one block: of a model with 8B parameters and 16 tokens in a block, of a
    // model with 70B parameters over 8 GPUs, of two models with MLA; then lengths around a work
    // unit (2,048 bytes), short lengths, two units, and 16 bytes more than two units.
    for piece in [65_536, 8192, 41_472, 73_728, 2047, 2048, 2049, 1, 15, 4096, 4112] {
        let word = match piece {
            p if p % 16 == 0 => Word::B16,
            _ => Word::B1,
        };
        for arrangement in [common::Arrangement::Pairs, common::Arrangement::Together] {
            let shape = Shape { pieces: vec![piece; 4], arrangement, blocks: 5, gap: 0, shift: 0 };
            check(&shape, word, 4, u64::from(piece), 0, 6);
        }
    }
}

#[test]
fn names_of_kernels_are_those_of_the_ptx() {
    let ptx = include_str!("../kernels/kv.ptx");
    let entries: Vec<&str> = ptx
        .lines()
        .filter_map(|line| line.strip_prefix(".visible .entry "))
        .map(|line| line.trim_end_matches('('))
        .collect();
    assert_eq!(entries, Kernel::NAMES);
    // Drivers accept PTX 8.4 since release 550. The oldest supported architecture is sm_80.
    assert!(ptx.contains("\n.version 8.4\n") && ptx.contains("\n.target sm_80\n"));
    for (at, name) in Kernel::NAMES.iter().enumerate() {
        let word = [Word::B16, Word::B8, Word::B4, Word::B1][at % 4];
        let direction = [Direction::Scatter, Direction::Gather][at / 4];
        let kernel = Kernel { direction, word };
        assert_eq!(kernel.index(), at);
        assert!(name.ends_with(&format!("_{}", word.bytes())));
    }
}
