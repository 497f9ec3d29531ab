//! Every kernel on little data: what Miri can run, for this processor and for others. See
//! `docs/codecs.md`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Source, numbers};
use ritornello_codec::{Codec, Dtype, Kernel, SliceKind, SliceShape, decode_with};

/// Numbers of more exponents than a codebook holds, in lengths with and without tails.
#[test]
fn kernels_write_and_read_the_same_frames() {
    let shape = SliceShape { dtype: Dtype::Bf16, kind: SliceKind::Opaque };
    for length in [128, 191, 321] {
        let mut input = numbers(Dtype::Bf16, length, &mut Source(3));
        for (at, high) in (0..input.len()).step_by(8).zip(0..) {
            input[at..at + 2].copy_from_slice(&[0x12, high]);
        }
        let mut frames = Vec::new();
        for &kernel in Kernel::available() {
            let mut frame = vec![0; input.len()];
            let (used, bytes) =
                Codec::Split.encode_with(kernel, &shape, &input, &mut frame).unwrap();
            assert_eq!(used, Codec::Split);
            // No byte to spare: Miri sees every read behind the end.
            frame.truncate(bytes);
            frame.shrink_to_fit();
            frames.push(frame);
        }
        assert!(frames.windows(2).all(|pair| pair[0] == pair[1]));
        for &kernel in Kernel::available() {
            let mut back = vec![0; input.len()];
            decode_with(kernel, Codec::Split.number(), &frames[0], &mut back).unwrap();
            assert!(back == input, "{}", kernel.word());
            // Fewer escapes than codes that ask for one.
            let mut lying = frames[0].clone();
            lying.pop();
            lying[24] -= 1;
            decode_with(kernel, Codec::Split.number(), &lying, &mut back).unwrap_err();
        }
    }
}
