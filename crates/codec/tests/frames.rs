//! Frames that earlier builds wrote, as stores may still hold them, decode to the same bytes as
//! when they were recorded.
//!
//! A later encoder may write other frames for the same numbers, so only decoding is compared.
//! Frames of a new codec, version or kind of block are recorded in a new file; a recorded file is
//! never overwritten:
//!
//! ```text
//! RITORNELLO_WRITE_GOLDEN=1 cargo test -p ritornello-codec --test frames
//! ```
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Random, numbers};
use ritornello_codec::{Codec, Dtype, Kernel, SliceKind, SliceShape, decode_with};
use ritornello_format::checksum;
use std::collections::BTreeSet;
use std::path::Path;

/// Returns the recorded cases: the codec, the shape of the slice, and its numbers.
fn cases() -> Vec<(Codec, SliceShape, Vec<u8>)> {
    let mut random = Random(2026);
    let (bf16, fp16) = (Dtype::Bf16, Dtype::Fp16);
    let (tokens, channels) = (40, 72);
    let opaque = SliceKind::Opaque;
    let mut cases = Vec::new();
    let mut add = |codec, dtype, kind, input: Vec<u8>| {
        cases.push((codec, SliceShape { dtype, kind }, input));
    };
    // 1,500 is not a multiple of 64, the numbers in a group.
    add(Codec::Split, bf16, opaque, numbers(bf16, 1500, &mut random));
    add(Codec::Split, fp16, opaque, numbers(fp16, 1500, &mut random));
    // A block whose exponents are far from each other gets codebook codes, not window codes.
    let spread = |random: &mut Random, count: usize| -> Vec<u8> {
        let exponent = |random: &mut Random| 60 + 13 * (random.next() % 12) as u16;
        let number = |random: &mut Random| exponent(random) << 7 | random.next() as u16 & 0x807f;
        (0..count).flat_map(|_| number(random).to_le_bytes()).collect()
    };
    add(Codec::Split, bf16, opaque, spread(&mut random, 1500));
    // A full block of 65,536 numbers, then a block of noise, which is stored raw.
    let repeated = numbers(bf16, 64, &mut random).repeat(1024);
    let noise = (0..300).flat_map(|_| (random.next() as u16).to_le_bytes()).collect();
    add(Codec::Split, bf16, opaque, [repeated, noise].concat());
    add(Codec::Zstd, bf16, opaque, numbers(bf16, 1500, &mut random));
    add(Codec::Zstd, fp16, opaque, numbers(fp16, 1500, &mut random));
    for codec in [Codec::Int8, Codec::Int4] {
        for dtype in [bf16, fp16] {
            let count = (tokens * channels) as usize;
            let keys = SliceKind::Keys { tokens, channels };
            add(codec, dtype, keys, numbers(dtype, count, &mut random));
            let values = SliceKind::Values { tokens, channels };
            add(codec, dtype, values, numbers(dtype, count, &mut random));
        }
        let both = SliceKind::KeysValues { tokens: 16, channels: 40, layers: 2 };
        add(codec, bf16, both, numbers(bf16, 16 * 40 * 4, &mut random));
    }
    cases
}

#[test]
fn recorded_frames_decode_to_the_same_bytes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/frames-1.bin");
    if !path.exists() && std::env::var_os("RITORNELLO_WRITE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, record()).unwrap();
    }
    let recorded = std::fs::read(&path).unwrap();
    let mut rest = recorded.as_slice();
    let mut kinds = BTreeSet::new();
    for (codec, shape, input) in cases() {
        let (length, tail) = rest.split_first_chunk().unwrap();
        let (frame, tail) = tail.split_at(u32::from_le_bytes(*length) as usize);
        let (sum, tail) = tail.split_first_chunk().unwrap();
        rest = tail;
        // Byte 0 of a frame is its version, and byte 8 of a `split` frame is the kind of the first
        // block.
        assert_eq!(frame[0], 1, "the version of {codec:?}");
        kinds.extend((codec == Codec::Split).then(|| (shape.dtype as u8, frame[8])));
        for &kernel in Kernel::available() {
            let mut out = vec![0x5a; input.len()];
            decode_with(kernel, codec.number(), frame, &mut out).unwrap();
            assert!(!codec.is_lossless() || out == input, "{codec:?} {shape:?}");
            assert_eq!(checksum(&out), u64::from_le_bytes(*sum), "{codec:?} {shape:?}");
        }
    }
    assert!(rest.is_empty() && kinds.len() == 3, "{kinds:?}");
}

/// Returns, for each case, the length of the frame, the frame, and the checksum of the decoded
/// bytes.
fn record() -> Vec<u8> {
    let mut recorded = Vec::new();
    for (codec, shape, input) in cases() {
        let mut frame = vec![0; input.len()];
        let (used, length) = codec.encode(&shape, &input, &mut frame).unwrap();
        assert_eq!(used, codec, "{shape:?}");
        let mut out = vec![0; input.len()];
        decode_with(Kernel::best(), used.number(), &frame[..length], &mut out).unwrap();
        recorded.extend((length as u32).to_le_bytes());
        recorded.extend(&frame[..length]);
        recorded.extend(checksum(&out).to_le_bytes());
    }
    recorded
}
