//! Windowed blocks of `split` for bfloat16: seven neighbouring exponents, the window, get codes of
//! three bits. The exponents of most keys and values are in one window.

use super::strip::{CODES, Numbers, decode_strip, encode_strip, rotated};
use super::{GROUP, WINDOWED};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::frame::{FrameReader, damaged};
use crate::kernel::{Instructions, Kernel};
use ritornello_format::Result;

/// Number of groups in a strip, the part of a block that shares one window of exponents; the last
/// strip may have fewer. A block may hold matrices of keys and of values in turn, which differ in
/// magnitude. These matrices are small in a page of few tokens: a longer strip would then often
/// hold keys and values, and one window would cover only one of them.
const STRIP: usize = 16;
/// Number of neighbouring exponents that have a code.
const WINDOW: u8 = 7;
/// Length of a block's head: kind, number of escapes.
const HEAD_BYTES: usize = 1 + 4;
/// Minimum ratio of numbers to escapes in a windowed block. With more escapes, a block with the
/// 4-bit codes of a codebook is shorter, unless many of its numbers need escapes too.
const ESCAPES: usize = 8;
/// Maximum number of groups from whose exponents the window of a strip is chosen.
const SAMPLE: usize = 8;

/// Encodes a block: head, first exponent of each strip's window, plane of mantissas and signs,
/// codes, escapes, and the raw numbers after the last full group. `None` if that would be longer
/// than the block or than `out`, or if more than one number in [`ESCAPES`] needs an escape.
pub fn encode(kernel: Kernel, block: &[u8], out: &mut [u8]) -> Option<usize> {
    let (groups, tail) = block.as_chunks::<{ 2 * GROUP }>();
    let strips = groups.len().div_ceil(STRIP);
    let most = block.len().min(out.len());
    let (head, rest) = out[..most].split_at_mut_checked(HEAD_BYTES)?;
    let (firsts, rest) = rest.split_at_mut_checked(strips)?;
    let (plane, rest) = rest.split_at_mut_checked(groups.len() * GROUP)?;
    let (codes, rest) = rest.split_at_mut_checked(groups.len() * CODES)?;
    let room = rest.len().min(groups.len() * GROUP / ESCAPES);
    let (planes, codes, escapes) =
        (plane.as_chunks_mut().0, codes.as_chunks_mut().0, &mut rest[..room]);
    let (mut windows, mut escaped) = ([None; 2], 0);
    let parts = groups.chunks(STRIP).zip(planes.chunks_mut(STRIP)).zip(codes.chunks_mut(STRIP));
    for (((groups, planes), codes), out) in parts.zip(firsts) {
        // Remember two windows, because keys and values may alternate.
        if !windows[0].is_some_and(|first| fits(first, groups)) {
            windows.swap(0, 1);
            if !windows[0].is_some_and(|first| fits(first, groups)) {
                windows[0] = Some(choose(groups));
            }
        }
        let first = windows[0]?;
        *out = first;
        let escapes = escapes.get_mut(escaped..)?;
        escaped += match kernel.0 {
            // SAFETY: a `Kernel` exists only where the processor has its instructions.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe {
                avx2::encode_strip(first, groups, planes, codes, escapes)
            },
            // SAFETY: a `Kernel` exists only where the processor has its instructions.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe {
                avx512::encode_strip(first, groups, planes, codes, escapes)
            },
            _ => encode_strip(first, groups, planes, codes, escapes),
        }?;
    }
    rest.get_mut(escaped..escaped + tail.len())?.copy_from_slice(tail);
    head[0] = WINDOWED;
    head[1..].copy_from_slice(&(escaped as u32).to_le_bytes());
    Some(HEAD_BYTES + strips + groups.len() * (GROUP + CODES) + escaped + tail.len())
}

/// Decodes what [`encode`] wrote, except the kind, which the caller has read.
pub fn decode(kernel: Kernel, reader: &mut FrameReader<'_>, block: &mut [u8]) -> Result<()> {
    let (groups, tail) = block.as_chunks_mut::<{ 2 * GROUP }>();
    let escaped = reader.u32()?;
    let firsts = reader.take(groups.len().div_ceil(STRIP))?;
    let planes = reader.take(groups.len() * GROUP)?.as_chunks().0;
    let codes = reader.take(groups.len() * CODES)?.as_chunks().0;
    let escapes = reader.take(escaped)?;
    tail.copy_from_slice(reader.take(tail.len())?);
    let mut escapes = escapes;
    let strips = planes.chunks(STRIP).zip(codes.chunks(STRIP)).zip(groups.chunks_mut(STRIP));
    for (((planes, codes), groups), &first) in strips.zip(firsts) {
        escapes = match kernel.0 {
            // SAFETY: a `Kernel` exists only where the processor has its instructions.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe {
                avx2::decode_strip(first, planes, codes, escapes, groups)
            },
            // SAFETY: a `Kernel` exists only where the processor has its instructions.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe {
                avx512::decode_strip(first, planes, codes, escapes, groups)
            },
            _ => decode_strip(first, planes, codes, escapes, groups),
        }
        .ok_or_else(|| damaged("there are fewer escapes than codes of escapes"))?;
    }
    if escapes.is_empty() {
        Ok(())
    } else {
        Err(damaged("there are more escapes than codes of escapes"))
    }
}

/// Whether the window that begins at exponent `first` suits a strip of `groups`: at most one in
/// [`ESCAPES`] exponents of the strip's middle group is outside the window.
#[inline(always)]
fn fits(first: u8, groups: &[Numbers]) -> bool {
    let middle = &groups[groups.len() / 2];
    let mut outside = 0;
    for at in 0..GROUP {
        let exponent = (rotated(middle, at) >> 8) as u8;
        outside += u8::from(exponent.wrapping_sub(first) >= WINDOW);
    }
    usize::from(outside) * ESCAPES <= GROUP
}

/// Returns the first exponent of the window that covers the largest number of exponents in a sample
/// of the strip. Later strips use the same window if it [`fits`] them, so a poor choice affects
/// several strips.
#[inline(never)]
fn choose(groups: &[Numbers]) -> u8 {
    let mut counts = [0u16; 256];
    let (mut least, mut most) = (u8::MAX, 0);
    for group in groups.iter().step_by(groups.len().div_ceil(SAMPLE)) {
        for at in 0..GROUP {
            let exponent = (rotated(group, at) >> 8) as u8;
            counts[usize::from(exponent)] += 1;
            least = least.min(exponent);
            most = most.max(exponent);
        }
    }
    let window = |first: u8| counts[usize::from(first)..].iter().take(WINDOW.into()).sum::<u16>();
    let highest = most.saturating_sub(WINDOW - 1).max(least.min(u8::MAX - WINDOW + 1));
    (least.min(highest)..=highest).max_by_key(|&first| window(first)).unwrap_or(least)
}
