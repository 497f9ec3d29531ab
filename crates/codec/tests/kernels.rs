//! The codec `split` for bfloat16 with every kernel that this processor has, on small inputs. Miri
//! can run these tests, also for other processors, except the AVX-512 kernel (see
//! `docs/codecs.md`).

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Random, numbers};
use ritornello_codec::{Codec, Dtype, Kernel, SliceKind, SliceShape, decode_with};

/// Encodes with every kernel, compares the frames, and decodes them with every kernel. `kind`
/// is the kind of block that the frames must begin with. Checks that each kernel refuses a frame
/// that lists one escape fewer than its codes need. An escape is an exponent outside the codebook
/// or window; byte `escapes` of a frame is the low byte of the number of escapes.
fn check(input: &[u8], kind: u8, escapes: usize) {
    let shape = SliceShape { dtype: Dtype::Bf16, kind: SliceKind::Opaque };
    let mut frames = Vec::new();
    for &kernel in Kernel::available() {
        let mut frame = vec![0; input.len()];
        let (used, bytes) = Codec::Split.encode_with(kernel, &shape, input, &mut frame).unwrap();
        assert_eq!((used, frame[8]), (Codec::Split, kind));
        // Without spare bytes, Miri detects every read past the end.
        frame.truncate(bytes);
        frame.shrink_to_fit();
        frames.push(frame);
    }
    assert!(frames.windows(2).all(|pair| pair[0] == pair[1]));
    for &kernel in Kernel::available() {
        let mut back = vec![0; input.len()];
        decode_with(kernel, Codec::Split.number(), &frames[0], &mut back).unwrap();
        assert!(back == input, "{}", kernel.word());
        let mut lying = frames[0].clone();
        lying.pop();
        lying[escapes] -= 1;
        decode_with(kernel, Codec::Split.number(), &lying, &mut back).unwrap_err();
    }
}

/// Encodes more exponents than a codebook holds. One length is a multiple of 64, the numbers in a
/// group; the two other lengths end with a shorter group.
#[test]
fn kernels_agree_on_codebook_frames() {
    for length in [128, 191, 321] {
        let mut input = numbers(Dtype::Bf16, length, &mut Random(3));
        for (at, high) in (0..input.len()).step_by(8).zip(0..) {
            input[at..at + 2].copy_from_slice(&[0x12, high]);
        }
        check(&input, 1, 24);
    }
}

/// Encodes numbers with seven neighbouring exponents: in three inputs the smallest seven exponents,
/// seven of medium size, and the largest seven. A group has no escape, one, two, or 64 (each
/// number of the group).
#[test]
fn kernels_agree_on_window_frames() {
    for (length, exponent) in [(192, 0), (1029, 120), (2300, 249)] {
        let mut random = Random(5);
        let mut input: Vec<u8> = (0..length)
            .flat_map(|_| {
                let exponent = exponent + (random.next() % 7) as u16;
                (exponent << 7 | random.next() as u16 & 0x807f).to_le_bytes()
            })
            .collect();
        for at in [0, 63, 64, 191] {
            input[2 * at..2 * at + 2].copy_from_slice(&(0x4321u16 ^ at as u16).to_le_bytes());
        }
        if length > 2000 {
            input[2 * 1024..2 * 1088].fill(0x11);
        }
        check(&input, 2, 9);
    }
}
