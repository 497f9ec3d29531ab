//! `split` for float16, which has five exponent bits: seven neighbouring exponents get a code of
//! three bits. Plain byte arithmetic, which the compiler vectorises.

use super::{CODED, GROUP};
use crate::frame::{FrameReader, damaged};
use crate::kernel::{Kernel, vectorised};
use ritornello_format::Result;

/// Number of neighbouring exponents that have a code.
const WINDOW: u8 = 7;
/// The code of an escape, a number whose exponent has no code: its exponent is listed after the
/// codes.
const ESCAPE: u8 = 7;
/// Bytes of the codes of a group. Each number has three bits of code, and the upper three bits of
/// its mantissa.
const CODES: usize = GROUP / 4 * 3;
/// Length of a block's head: kind, first exponent of the window, number of escapes.
const HEAD_BYTES: usize = 1 + 1 + 4;
/// Maximum number of groups from whose exponents the window is chosen.
const SAMPLE: usize = 32;

type Numbers = [u8; 2 * GROUP];

/// Encodes a block: head, plane of one byte per number (lower seven bits of the mantissa, sign),
/// codes, escapes, and the raw numbers after the last full group. `None` if that would be longer
/// than the block or `out`, or if no window covers more than 3/4 of the sampled exponents.
pub fn encode(kernel: Kernel, block: &[u8], out: &mut [u8]) -> Option<usize> {
    let (groups, tail) = block.as_chunks::<{ 2 * GROUP }>();
    let first = choose(groups)?;
    let most = block.len().min(out.len());
    let (head, rest) = out[..most].split_at_mut_checked(HEAD_BYTES)?;
    let (plane, rest) = rest.split_at_mut_checked(groups.len() * GROUP)?;
    let (codes, rest) = rest.split_at_mut_checked(groups.len() * CODES)?;
    let (planes, codes) = (plane.as_chunks_mut().0, codes.as_chunks_mut().0);
    let escaped = vectorised!(
        kernel,
        encode_groups,
        (
            first: u8,
            groups: &[Numbers],
            planes: &mut [[u8; GROUP]],
            codes: &mut [[u8; CODES]],
            rest: &mut [u8],
        ) -> Option<usize>
    )?;
    rest.get_mut(escaped..escaped + tail.len())?.copy_from_slice(tail);
    head[0] = CODED;
    head[1] = first;
    head[2..].copy_from_slice(&(escaped as u32).to_le_bytes());
    Some(HEAD_BYTES + groups.len() * (GROUP + CODES) + escaped + tail.len())
}

/// Decodes what [`encode`] wrote, except the kind, which the caller has read.
pub fn decode(kernel: Kernel, reader: &mut FrameReader<'_>, block: &mut [u8]) -> Result<()> {
    let (groups, tail) = block.as_chunks_mut::<{ 2 * GROUP }>();
    let (first, escaped) = (reader.u8()?, reader.u32()?);
    let planes = reader.take(groups.len() * GROUP)?.as_chunks().0;
    let codes = reader.take(groups.len() * CODES)?.as_chunks().0;
    let escapes = reader.take(escaped)?;
    tail.copy_from_slice(reader.take(tail.len())?);
    vectorised!(
        kernel,
        decode_groups,
        (
            first: u8,
            planes: &[[u8; GROUP]],
            codes: &[[u8; CODES]],
            escapes: &[u8],
            groups: &mut [Numbers],
        ) -> Option<()>
    )
    .ok_or_else(|| damaged("the number of escapes does not match the codes"))
}

/// Returns the first exponent of the window that covers the largest number of a sample's exponents;
/// `None` if no window covers more than three quarters of the sample.
fn choose(groups: &[Numbers]) -> Option<u8> {
    let mut counts = [0u32; 32];
    for group in groups.iter().step_by(groups.len().div_ceil(SAMPLE).max(1)) {
        group.chunks_exact(2).for_each(|number| counts[usize::from(number[1] >> 2 & 31)] += 1);
    }
    let window = |first: u8| counts[usize::from(first)..].iter().take(7).sum::<u32>();
    let first = (0..=32 - WINDOW).max_by_key(|&first| window(first))?;
    (window(first) * 4 > counts.iter().sum::<u32>() * 3).then_some(first)
}

#[inline(always)]
fn encode_groups(
    first: u8,
    groups: &[Numbers],
    planes: &mut [[u8; GROUP]],
    codes: &mut [[u8; CODES]],
    escapes: &mut [u8],
) -> Option<usize> {
    let mut escaped = 0;
    for ((numbers, plane), packed) in groups.iter().zip(planes).zip(codes) {
        let mut sextets = [0u8; GROUP];
        let mut largest = 0;
        for at in 0..GROUP {
            let number = u16::from_le_bytes([numbers[2 * at], numbers[2 * at + 1]]);
            let rotated = number.rotate_left(1);
            plane[at] = rotated as u8;
            let top = (rotated >> 8) as u8;
            let code = (top >> 3).wrapping_sub(first).min(ESCAPE);
            largest = largest.max(code);
            sextets[at] = code << 3 | top & 7;
        }
        let [a, b, c, d] = quarters(&sextets);
        for at in 0..GROUP / 4 {
            packed[at] = a[at] | d[at] << 6;
            packed[16 + at] = b[at] | d[at] >> 2 << 6;
            packed[32 + at] = c[at] | d[at] >> 4 << 6;
        }
        if largest == ESCAPE {
            for (number, _) in
                numbers.chunks_exact(2).zip(sextets).filter(|(_, sextet)| sextet >> 3 == ESCAPE)
            {
                *escapes.get_mut(escaped)? = number[1] >> 2 & 31;
                escaped += 1;
            }
        }
    }
    Some(escaped)
}

#[inline(always)]
fn decode_groups(
    first: u8,
    planes: &[[u8; GROUP]],
    codes: &[[u8; CODES]],
    escapes: &[u8],
    groups: &mut [Numbers],
) -> Option<()> {
    let mut escapes = escapes.iter();
    for ((plane, packed), numbers) in planes.iter().zip(codes).zip(groups) {
        let mut sextets = [0u8; GROUP];
        for at in 0..GROUP / 4 {
            let [a, b, c] = [packed[at], packed[16 + at], packed[32 + at]];
            sextets[at] = a & 63;
            sextets[16 + at] = b & 63;
            sextets[32 + at] = c & 63;
            sextets[48 + at] = a >> 6 | b >> 6 << 2 | c >> 6 << 4;
        }
        let mut exponents = [0u8; GROUP];
        let mut largest = 0;
        for at in 0..GROUP {
            largest = largest.max(sextets[at] >> 3);
            exponents[at] = (sextets[at] >> 3).wrapping_add(first);
        }
        if largest == ESCAPE {
            for at in 0..GROUP {
                if sextets[at] >> 3 == ESCAPE {
                    exponents[at] = *escapes.next()?;
                }
            }
        }
        for at in 0..GROUP {
            let top = exponents[at] << 3 | sextets[at] & 7;
            let rotated = u16::from(top) << 8 | u16::from(plane[at]);
            [numbers[2 * at], numbers[2 * at + 1]] = rotated.rotate_right(1).to_le_bytes();
        }
    }
    escapes.next().is_none().then_some(())
}

#[inline(always)]
fn quarters(bytes: &[u8; GROUP]) -> [[u8; GROUP / 4]; 4] {
    std::array::from_fn(|quarter| std::array::from_fn(|at| bytes[quarter * (GROUP / 4) + at]))
}
