//! `split` and `zstd` restore every bit with every kernel, and all kernels write the same frames.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Random, bf16, numbers};
use proptest::prelude::*;
use ritornello_codec::{Codec, Dtype, Kernel, SliceKind, SliceShape, decode_with};

const LOSSLESS: [Codec; 3] = [Codec::Raw, Codec::Split, Codec::Zstd];

fn shape(dtype: Dtype) -> SliceShape {
    SliceShape { dtype, kind: SliceKind::Opaque }
}

/// Encodes and decodes with every kernel. Returns the codec used and the length of the frame.
fn round_trip(codec: Codec, dtype: Dtype, input: &[u8]) -> (Codec, usize) {
    let mut frames: Vec<(Codec, Vec<u8>)> = Vec::new();
    for &kernel in Kernel::available() {
        let mut out = vec![0xa5; codec.bound(&shape(dtype), input.len())];
        let (used, length) = codec.encode_with(kernel, &shape(dtype), input, &mut out).unwrap();
        assert!(length <= input.len(), "{codec:?} makes the slice longer");
        assert!(used == codec || used == Codec::Raw);
        out.truncate(length);
        frames.push((used, out));
        assert!(
            frames[0] == frames[frames.len() - 1],
            "kernel {} of {codec:?} writes another frame",
            kernel.word()
        );
    }
    let (used, frame) = frames.remove(0);
    for &kernel in Kernel::available() {
        let mut back = vec![0x5a; input.len()];
        decode_with(kernel, used.number(), &frame, &mut back).unwrap();
        assert!(back == input, "kernel {} loses bits of {} bytes", kernel.word(), input.len());
    }
    (used, frame.len())
}

#[test]
fn every_number_roundtrips() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let reversed: Vec<u8> = (0..=u16::MAX).rev().flat_map(u16::to_le_bytes).collect();
    for dtype in [Dtype::Bf16, Dtype::Fp16] {
        for codec in LOSSLESS {
            round_trip(codec, dtype, &all);
            round_trip(codec, dtype, &reversed);
        }
    }
}

/// NaNs with payloads, infinities, denormals and signed zeros among numbers that get codes.
#[test]
fn special_numbers_roundtrip() {
    let mut random = Random(7);
    for dtype in [Dtype::Bf16, Dtype::Fp16] {
        let mut input = numbers(dtype, 70_000, &mut random);
        let odd: &[u16] = match dtype {
            Dtype::Bf16 => &[0x7fc1, 0xff81, 0x7f80, 0xff80, 0x0001, 0x807f, 0x8000, 0x0000],
            Dtype::Fp16 => &[0x7e01, 0xfd55, 0x7c00, 0xfc00, 0x0001, 0x83ff, 0x8000, 0x0000],
        };
        for (at, number) in odd.iter().cycle().take(800).enumerate() {
            let at = 2 * ((at * 87) % 70_000);
            input[at..at + 2].copy_from_slice(&number.to_le_bytes());
        }
        let (used, length) = round_trip(Codec::Split, dtype, &input);
        assert_eq!(used, Codec::Split);
        assert!(length < input.len() * 95 / 100);
        assert_eq!(round_trip(Codec::Zstd, dtype, &input).0, Codec::Zstd);
    }
}

#[test]
fn normally_distributed_numbers_are_encoded_shorter() {
    let mut random = Random(8);
    let input = numbers(Dtype::Bf16, 300_000, &mut random);
    let (used, split) = round_trip(Codec::Split, Dtype::Bf16, &input);
    assert_eq!(used, Codec::Split);
    assert!(split * 1000 <= input.len() * 715, "{split} of {}", input.len());
    let (used, zstd) = round_trip(Codec::Zstd, Dtype::Bf16, &input);
    assert_eq!(used, Codec::Zstd);
    assert!(zstd * 100 <= input.len() * 70, "{zstd} of {}", input.len());
    let half = numbers(Dtype::Fp16, 300_000, &mut random);
    let (used, split) = round_trip(Codec::Split, Dtype::Fp16, &half);
    assert_eq!(used, Codec::Split);
    assert!(split * 100 <= half.len() * 95, "{split} of {}", half.len());
}

/// Encodes numbers whose magnitude changes every 1,536 numbers. A window of exponents is selected
/// for every 1,024 numbers, so some windows have to cover two magnitudes.
#[test]
fn windows_follow_changing_magnitudes() {
    let mut random = Random(12);
    let input: Vec<u8> = (0..100_000)
        .flat_map(|at| bf16(random.normal() * [1e4, 1e-3][at / 1536 % 2]).to_le_bytes())
        .collect();
    let (used, length) = round_trip(Codec::Split, Dtype::Bf16, &input);
    assert_eq!(used, Codec::Split);
    assert!(length * 100 <= input.len() * 76, "{length} of {}", input.len());
}

/// Encodes three slices of one block each: a slice whose second half is zero, a slice with two very
/// different magnitudes, and a slice with a single exponent.
#[test]
fn blocks_with_uneven_exponents_are_encoded_shorter() {
    let mut random = Random(9);
    let mut halves = numbers(Dtype::Bf16, 4096, &mut random);
    halves.extend([0; 8192]);
    assert!(round_trip(Codec::Split, Dtype::Bf16, &halves).1 <= halves.len() * 76 / 100);
    let two: Vec<u8> = (0..8192)
        .flat_map(|at| bf16(random.normal() * if at % 2 == 0 { 1e4 } else { 1e-2 }).to_le_bytes())
        .collect();
    assert!(round_trip(Codec::Split, Dtype::Bf16, &two).1 <= two.len() * 80 / 100);
    let same = [0x80, 0x3f].repeat(5000);
    assert!(round_trip(Codec::Split, Dtype::Bf16, &same).1 <= same.len() * 76 / 100);
}

#[test]
fn noise_is_stored_raw() {
    let mut random = Random(10);
    let noise: Vec<u8> = (0..200_001).map(|_| random.next() as u8).collect();
    for codec in LOSSLESS {
        for length in [0, 1, 2, 3, 63, 200_000, 200_001] {
            let (used, _) = round_trip(codec, Dtype::Bf16, &noise[..length]);
            assert_eq!(used, Codec::Raw, "{codec:?} must store {length} bytes of noise raw");
        }
    }
}

#[test]
fn block_of_noise_leaves_other_blocks_encoded() {
    let mut random = Random(11);
    let mut input = numbers(Dtype::Bf16, 3 << 16, &mut random);
    input[1 << 17..1 << 18].fill_with(|| random.next() as u8);
    let (used, length) = round_trip(Codec::Split, Dtype::Bf16, &input);
    assert_eq!(used, Codec::Split);
    assert!(length < input.len() * 85 / 100, "{length}");
}

#[test]
fn output_shorter_than_the_input_is_refused() {
    for codec in Codec::ALL {
        let error = codec.encode(&shape(Dtype::Bf16), &[0; 100], &mut [0; 99]).unwrap_err();
        assert_eq!(error.kind(), ritornello_format::ErrorKind::Invalid);
    }
}

#[test]
fn names_and_numbers_of_codecs_parse_back() {
    for codec in Codec::ALL {
        assert_eq!(Codec::parse(codec.word()), Some(codec));
        assert_eq!(Codec::from_number(codec.number()), Some(codec));
    }
    assert_eq!(Codec::ALL.map(Codec::number), [0, 1, 2, 3, 4]);
    assert_eq!(Codec::parse("lz4"), None);
    assert_eq!(Dtype::parse("bfloat16"), Some(Dtype::Bf16));
    assert_eq!(Dtype::parse("half"), Some(Dtype::Fp16));
    for unknown in ["float32", "fp8_e4m3", "int8", ""] {
        assert_eq!(Dtype::parse(unknown), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_bytes_round_trip(
        bytes in proptest::collection::vec(any::<u8>(), 0..3000),
        half in any::<bool>(),
    ) {
        for codec in LOSSLESS {
            round_trip(codec, if half { Dtype::Fp16 } else { Dtype::Bf16 }, &bytes);
        }
    }

    /// Encodes mixtures of frequent and rare exponents, of any length, so that the last group of a
    /// block has any length.
    #[test]
    fn any_numbers_round_trip(
        length in 0usize..5000,
        seed in any::<u64>(),
        rare in 0u64..200,
        scale in -30i32..30,
        half in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let dtype = if half { Dtype::Fp16 } else { Dtype::Bf16 };
        let mut input = numbers(dtype, length, &mut random);
        for number in input.chunks_exact_mut(2) {
            if random.next() % 1000 < rare {
                number.copy_from_slice(&(random.next() as u16).to_le_bytes());
            } else if !half {
                let scaled = bf16(common::from_bf16([number[0], number[1]]) * 2f32.powi(scale));
                number.copy_from_slice(&scaled.to_le_bytes());
            }
        }
        for codec in LOSSLESS {
            round_trip(codec, dtype, &input);
        }
    }
}
