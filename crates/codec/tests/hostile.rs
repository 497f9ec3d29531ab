//! Malformed frames cause no panic and no write outside of the output. If a frame is accepted, all
//! kernels decode it to the same bytes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Random, numbers};
use proptest::prelude::*;
use ritornello_codec::{Codec, Dtype, Kernel, SliceKind, SliceShape, decode, decode_with};
use ritornello_format::ErrorKind;

const ENCODED: [Codec; 4] = [Codec::Split, Codec::Zstd, Codec::Int8, Codec::Int4];
const GUARD: usize = 64;

/// Decodes a frame with every kernel, and returns whether it was accepted. The input buffer ends
/// with the frame; the output is the middle of a buffer whose ends must not change.
fn attempt(codec: u8, frame: &[u8], bytes: usize) -> bool {
    let frame: Box<[u8]> = frame.into();
    let mut answers = Kernel::available().iter().map(|&kernel| {
        let mut out = vec![0xc3; bytes + 2 * GUARD];
        let result = decode_with(kernel, codec, &frame, &mut out[GUARD..GUARD + bytes]);
        let guards = out[..GUARD].iter().chain(&out[GUARD + bytes..]);
        assert!(
            guards.copied().all(|byte| byte == 0xc3),
            "kernel {} writes outside of the output",
            kernel.word()
        );
        match result {
            Ok(()) => Some(out),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Miss, "{error}");
                None
            }
        }
    });
    let first = answers.next().unwrap();
    assert!(answers.all(|answer| answer == first), "kernels decode a frame differently");
    first.is_some()
}

/// A slice that all codecs in [`ENCODED`] make shorter, with a few numbers that need an escape.
fn slice(dtype: Dtype, tokens: u32, seed: u64) -> (SliceShape, Vec<u8>) {
    let kind = SliceKind::KeysValues { tokens, channels: 64, layers: 1 };
    let mut input = numbers(dtype, tokens as usize * 128, &mut Random(seed));
    for at in (0..input.len()).step_by(230) {
        input[at..at + 2].copy_from_slice(&[0x12, 0x03]);
    }
    (SliceShape { dtype, kind }, input)
}

fn frame(codec: Codec, shape: &SliceShape, input: &[u8]) -> Vec<u8> {
    let mut out = vec![0; input.len()];
    let (used, length) = codec.encode(shape, input, &mut out).unwrap();
    assert_eq!(used, codec);
    out.truncate(length);
    out
}

#[test]
fn cut_or_extended_frame_is_a_miss() {
    for dtype in [Dtype::Bf16, Dtype::Fp16] {
        let (shape, input) = slice(dtype, 33, 1);
        for codec in ENCODED {
            let whole = frame(codec, &shape, &input);
            assert!(attempt(codec.number(), &whole, input.len()));
            for cut in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
                assert!(!attempt(codec.number(), &whole[..cut], input.len()), "{codec:?} {cut}");
            }
            let longer = [&whole[..], &[0]].concat();
            assert!(!attempt(codec.number(), &longer, input.len()));
            for bytes in [0, 1, 2, input.len() - 2, input.len() - 1, input.len() + 2] {
                assert!(!attempt(codec.number(), &whole, bytes), "{codec:?} into {bytes}");
            }
        }
    }
}

#[test]
fn unknown_codec_is_a_miss() {
    for number in 5..=u8::MAX {
        let error = decode(number, &[0; 64], &mut [0; 64]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Miss);
        assert!(error.to_string().contains(&number.to_string()));
    }
    assert_eq!(decode(0, &[0; 63], &mut [0; 64]).unwrap_err().kind(), ErrorKind::Miss);
}

#[test]
fn newer_frame_version_is_a_miss() {
    let (shape, input) = slice(Dtype::Bf16, 32, 2);
    for codec in ENCODED {
        let mut frame = frame(codec, &shape, &input);
        frame[0] += 1;
        assert!(!attempt(codec.number(), &frame, input.len()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn mutated_frames_cause_no_panic_or_stray_write(
        codec in 0usize..4,
        half in any::<bool>(),
        tokens in 20u32..40,
        seed in any::<u64>(),
        changes in 1usize..8,
        front in any::<bool>(),
    ) {
        let dtype = if half { Dtype::Fp16 } else { Dtype::Bf16 };
        let (shape, input) = slice(dtype, tokens, seed);
        let mut frame = frame(ENCODED[codec], &shape, &input);
        let mut random = Random(seed);
        for _ in 0..changes {
            // Most fields of a frame are in its first 48 bytes.
            let end = if front { 48 } else { frame.len() };
            let at = random.next() as usize % end;
            frame[at] = if random.next().is_multiple_of(2) { 0xff } else { random.next() as u8 };
        }
        attempt(ENCODED[codec].number(), &frame, input.len());
    }

    #[test]
    fn noise_causes_no_panic_or_stray_write(
        codec in 0u8..6,
        noise in proptest::collection::vec(any::<u8>(), 0..400),
        bytes in 0u32..600,
        plausible in any::<bool>(),
    ) {
        let mut frame = vec![];
        // A plausible frame has a valid head: version, number format, two zero bytes, and length.
        if plausible {
            frame.extend([1, noise.first().map_or(0, |byte| byte & 1), 0, 0]);
            frame.extend(bytes.to_le_bytes());
        }
        frame.extend(noise);
        attempt(codec, &frame, bytes as usize);
    }
}
