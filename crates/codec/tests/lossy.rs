//! `int8` and `int4` change every number by at most half a step of its group, plus rounding errors.
//! They leave a slice raw if one of its numbers is not finite, and refuse wrong shapes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Random, bf16, fp16, from_bf16, from_fp16, numbers};
use proptest::prelude::*;
use ritornello_codec::{Codec, Dtype, Kernel, SliceKind, SliceShape, decode_with};
use ritornello_format::ErrorKind;

const LOSSY: [Codec; 2] = [Codec::Int8, Codec::Int4];

fn shape(dtype: Dtype, kind: SliceKind) -> SliceShape {
    SliceShape { dtype, kind }
}

/// Encodes and decodes with every kernel, which must agree. Returns the codec used, the length of
/// the frame, and the decoded bytes.
fn round_trip(codec: Codec, shape: &SliceShape, input: &[u8]) -> (Codec, usize, Vec<u8>) {
    let mut seen: Vec<(Codec, Vec<u8>, Vec<u8>)> = Vec::new();
    for &kernel in Kernel::available() {
        let mut frame = vec![0xa5; codec.bound(shape, input.len())];
        let (used, length) = codec.encode_with(kernel, shape, input, &mut frame).unwrap();
        frame.truncate(length);
        let mut back = vec![0x5a; input.len()];
        decode_with(kernel, used.number(), &frame, &mut back).unwrap();
        seen.push((used, frame, back));
        assert!(seen[0] == seen[seen.len() - 1], "kernel {} encodes differently", kernel.word());
    }
    let (used, frame, back) = seen.remove(0);
    (used, frame.len(), back)
}

fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let numbers = bytes.chunks_exact(2).map(|number| [number[0], number[1]]);
    match dtype {
        Dtype::Bf16 => numbers.map(from_bf16).collect(),
        Dtype::Fp16 => numbers.map(from_fp16).collect(),
    }
}

/// Checks that every decoded number (`b`) is within half a step of the original (`a`). A step is
/// the span of the number's group (maximum less minimum) divided by the largest code. The bound
/// adds the rounding of the step to a bfloat16, and of the decoded number to its format.
fn check_bounds(codec: Codec, dtype: Dtype, keys: bool, channels: usize, a: &[f32], b: &[f32]) {
    let (codes, key_group, value_group) =
        if codec == Codec::Int8 { (255.0, 64, 128) } else { (15.0, 32, 32) };
    let group_of = |at: usize| {
        let (token, channel) = (at / channels, at % channels);
        if keys { (token / key_group, channel) } else { (token, channel / value_group) }
    };
    let mut spans = std::collections::HashMap::new();
    for (at, &number) in a.iter().enumerate() {
        let (low, high) = spans.entry(group_of(at)).or_insert((number, number));
        (*low, *high) = (low.min(number), high.max(number));
    }
    let precision = if dtype == Dtype::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    for (at, (&a, &b)) in a.iter().zip(b).enumerate() {
        let (low, high) = spans[&group_of(at)];
        let step = (high - low) / codes * (1.0 + 1.0 / 128.0);
        let bound = step * 0.51 + (a.abs() + step) * precision + 1e-7;
        assert!((a - b).abs() <= bound, "{a} became {b}: more than {bound}");
    }
}

#[test]
fn numbers_stay_within_half_a_step() {
    let mut random = Random(1);
    for (tokens, channels) in [(64, 128), (16, 1024), (100, 130), (33, 64), (7, 63), (200, 1)] {
        for dtype in [Dtype::Bf16, Dtype::Fp16] {
            let matrix = numbers(dtype, (tokens * channels) as usize, &mut random);
            for codec in LOSSY {
                for keys in [true, false] {
                    let kind = if keys {
                        SliceKind::Keys { tokens, channels }
                    } else {
                        SliceKind::Values { tokens, channels }
                    };
                    let (_, _, back) = round_trip(codec, &shape(dtype, kind), &matrix);
                    let (a, b) = (widen(dtype, &matrix), widen(dtype, &back));
                    check_bounds(codec, dtype, keys, channels as usize, &a, &b);
                }
            }
        }
    }
}

#[test]
fn frame_sizes_stay_below_bounds() {
    let mut random = Random(2);
    let kind = SliceKind::KeysValues { tokens: 64, channels: 1024, layers: 3 };
    let input = numbers(Dtype::Bf16, 64 * 1024 * 2 * 3, &mut random);
    for (codec, ratio) in [(Codec::Int8, 0.53), (Codec::Int4, 0.32)] {
        let (used, length, _) = round_trip(codec, &shape(Dtype::Bf16, kind), &input);
        assert_eq!(used, codec);
        assert!((length as f64) < input.len() as f64 * ratio, "{codec:?}: {length}");
    }
}

/// Each matrix of each layer decodes as if the slice held no other matrix.
#[test]
fn matrices_of_a_slice_are_encoded_independently() {
    let (tokens, channels) = (40, 96);
    let bytes = 2 * (tokens * channels) as usize;
    let mut random = Random(3);
    let input = numbers(Dtype::Bf16, bytes * 2, &mut random);
    for codec in LOSSY {
        let both = SliceKind::KeysValues { tokens, channels, layers: 2 };
        let (_, _, together) = round_trip(codec, &shape(Dtype::Bf16, both), &input);
        let kinds = [SliceKind::Keys { tokens, channels }, SliceKind::Values { tokens, channels }];
        for (at, kind) in kinds.iter().cycle().take(4).enumerate() {
            let range = at * bytes..(at + 1) * bytes;
            let alone = round_trip(codec, &shape(Dtype::Bf16, *kind), &input[range.clone()]).2;
            assert!(together[range] == alone, "matrix {at}");
        }
    }
}

#[test]
fn slice_with_an_infinity_or_a_nan_stays_raw() {
    let mut random = Random(4);
    let kind = SliceKind::KeysValues { tokens: 32, channels: 64, layers: 1 };
    for (dtype, odd) in [
        (Dtype::Bf16, [0x7f80, 0xff80, 0x7fc0, 0xffff]),
        (Dtype::Fp16, [0x7c00, 0xfc00, 0x7e00, 0xffff]),
    ] {
        for number in odd {
            for at in [0, 5000, 8190] {
                let mut input = numbers(dtype, 4096, &mut random);
                input[at..at + 2].copy_from_slice(&u16::to_le_bytes(number));
                for codec in LOSSY {
                    let (used, _, back) = round_trip(codec, &shape(dtype, kind), &input);
                    assert_eq!((used, back == input), (Codec::Raw, true));
                }
            }
        }
    }
}

#[test]
fn zeros_constants_and_extremes_survive() {
    let kind = SliceKind::KeysValues { tokens: 32, channels: 64, layers: 1 };
    let (small, large) = (f32::MIN_POSITIVE / 1024.0, 1.0e38);
    for number in [0.0, -0.0, 1.5, -3.0e-39, small, large] {
        let input: Vec<u8> = (0..4096).flat_map(|_| bf16(number).to_le_bytes()).collect();
        for codec in LOSSY {
            let (used, _, back) = round_trip(codec, &shape(Dtype::Bf16, kind), &input);
            let same = widen(Dtype::Bf16, &back) == widen(Dtype::Bf16, &input);
            assert_eq!((used, same), (codec, true), "{number:e}");
        }
    }
    for (dtype, pair) in
        [(Dtype::Bf16, [bf16(-large), bf16(large)]), (Dtype::Fp16, [fp16(65504.0), fp16(-65504.0)])]
    {
        let input: Vec<u8> =
            pair.iter().cycle().take(4096).flat_map(|number| number.to_le_bytes()).collect();
        for codec in LOSSY {
            let (_, _, back) = round_trip(codec, &shape(dtype, kind), &input);
            let (a, b) = (widen(dtype, &input), widen(dtype, &back));
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= a.abs() * 0.02 && b.is_finite()));
        }
    }
}

#[test]
fn opaque_or_wrong_shapes_are_refused() {
    let mut out = [0; 4096];
    for kind in [
        SliceKind::Opaque,
        SliceKind::Keys { tokens: 16, channels: 63 },
        SliceKind::Values { tokens: 0, channels: 64 },
        SliceKind::KeysValues { tokens: 16, channels: 64, layers: 1 },
        SliceKind::KeysValues { tokens: u32::MAX, channels: u32::MAX, layers: u32::MAX },
    ] {
        for codec in LOSSY {
            let shape = shape(Dtype::Bf16, kind);
            let error = codec.encode(&shape, &[0; 2048], &mut out).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{kind:?}");
        }
    }
}

proptest! {
    /// For arbitrary bytes (`wild`), all kernels agree and none panics. Normally distributed
    /// numbers stay within the bound of `check_bounds`.
    #[test]
    fn kernels_agree_on_any_matrix_and_normal_numbers_stay_within_bounds(
        tokens in 1u32..70,
        channels in 1u32..140,
        seed in any::<u64>(),
        wild in any::<bool>(),
        half in any::<bool>(),
    ) {
        let dtype = if half { Dtype::Fp16 } else { Dtype::Bf16 };
        let mut random = Random(seed);
        let count = (tokens * channels) as usize;
        let mut input = numbers(dtype, count, &mut random);
        if wild {
            input.fill_with(|| random.next() as u8);
        }
        for codec in LOSSY {
            for keys in [true, false] {
                let kind = if keys {
                    SliceKind::Keys { tokens, channels }
                } else {
                    SliceKind::Values { tokens, channels }
                };
                let (used, _, back) = round_trip(codec, &shape(dtype, kind), &input);
                if used == Codec::Raw {
                    prop_assert!(back == input);
                } else if !wild {
                    let (a, b) = (widen(dtype, &input), widen(dtype, &back));
                    check_bounds(codec, dtype, keys, channels as usize, &a, &b);
                }
            }
        }
    }
}
