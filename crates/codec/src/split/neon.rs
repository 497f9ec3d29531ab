//! `split` for bfloat16 blocks with codebook codes, with NEON. The kernel uses only intrinsics that
//! Miri supports, so that Miri can test the kernel on other processors.

use super::codebook::{Codebook, ESCAPE, Lookup, exponent};
use super::{GROUP, scalar};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
fn load(bytes: &[u8; 16]) -> uint8x16_t {
    // SAFETY: the array is as long as the register.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[target_feature(enable = "neon")]
fn store(bytes: &mut [u8; 16], value: uint8x16_t) {
    // SAFETY: the array is as long as the register.
    unsafe { vst1q_u8(bytes.as_mut_ptr(), value) };
}

#[target_feature(enable = "neon")]
fn bytes(value: uint8x16_t) -> [u8; 16] {
    let mut bytes = [0; 16];
    store(&mut bytes, value);
    bytes
}

#[target_feature(enable = "neon")]
fn halves(bytes: &[u8; 32]) -> [uint8x16_t; 2] {
    // SAFETY: the array is as long as two registers.
    unsafe { [vld1q_u8(bytes.as_ptr()), vld1q_u8(bytes.as_ptr().add(16))] }
}

/// Each byte of `bytes` shifted left by one, with the top bit of `below` as its lowest bit.
#[target_feature(enable = "neon")]
fn merge_shifted(bytes: uint8x16_t, below: uint8x16_t) -> uint8x16_t {
    vorrq_u8(vshlq_n_u8::<1>(bytes), vshrq_n_u8::<7>(below))
}

/// See [`scalar::encode`].
#[target_feature(enable = "neon")]
pub fn encode(
    book: &Codebook,
    input: &[u8],
    plane: &mut [u8],
    nibbles: &mut [u8],
    escapes: &mut [u8],
) -> Option<usize> {
    let half = vdupq_n_u8(15);
    let tables = |lookup: &Lookup| (load(&lookup.exponents), load(&lookup.codes));
    let ((exponents, codes), (exponents2, codes2)) = (tables(&book.first), tables(&book.second));
    let mut escaped = 0;

    let (numbers, tail) = input.as_chunks::<{ 2 * GROUP }>();
    let (planes, plane_tail) = plane.as_chunks_mut::<GROUP>();
    let (pairs, nibble_tail) = nibbles.split_at_mut(planes.len() * GROUP / 2);
    let pairs = pairs.as_chunks_mut::<{ GROUP / 2 }>().0;
    for ((numbers, plane), pairs) in numbers.iter().zip(planes).zip(pairs) {
        let mut code = [half; 4];
        let quarters = numbers.as_chunks::<32>().0.iter().zip(plane.as_chunks_mut::<16>().0);
        for ((quarter, plane), code) in quarters.zip(&mut code) {
            let [a, b] = halves(quarter);
            let (low, high) = (vuzp1q_u8(a, b), vuzp2q_u8(a, b));
            let exponent = merge_shifted(high, low);
            store(plane, merge_shifted(low, high));
            let low_half = vandq_u8(exponent, half);
            let is_first = vceqq_u8(vqtbl1q_u8(exponents, low_half), exponent);
            let is_second = vceqq_u8(vqtbl1q_u8(exponents2, low_half), exponent);
            *code = vbslq_u8(is_second, vqtbl1q_u8(codes2, low_half), half);
            *code = vbslq_u8(is_first, vqtbl1q_u8(codes, low_half), *code);
        }
        let [front, back] = [0, 1].map(|at| vorrq_u8(code[at], vshlq_n_u8::<4>(code[at + 2])));
        let halves = pairs.as_chunks_mut::<16>().0.iter_mut().zip([front, back]);
        halves.for_each(|(pairs, codes)| store(pairs, codes));
        let largest = vmaxq_u8(vmaxq_u8(code[0], code[1]), vmaxq_u8(code[2], code[3]));
        if vmaxvq_u8(largest) == ESCAPE {
            for (at, number) in numbers.chunks_exact(2).enumerate() {
                let pair = pairs[at % (GROUP / 2)];
                if (if at < GROUP / 2 { pair & 15 } else { pair >> 4 }) == ESCAPE {
                    *escapes.get_mut(escaped)? = exponent([number[0], number[1]]);
                    escaped += 1;
                }
            }
        }
    }
    let rest = scalar::encode(book, tail, plane_tail, nibble_tail, &mut escapes[escaped..])?;
    Some(escaped + rest)
}

/// See [`scalar::decode`].
#[target_feature(enable = "neon")]
pub fn decode(
    exponents: &[u8; 16],
    plane: &[u8],
    nibbles: &[u8],
    escapes: &[u8],
    out: &mut [u8],
) -> Option<()> {
    let (table, half) = (load(exponents), vdupq_n_u8(15));
    let mut escapes = escapes;

    let (planes, plane_tail) = plane.as_chunks::<GROUP>();
    let (pairs, nibble_tail) = nibbles.split_at(planes.len() * GROUP / 2);
    let pairs = pairs.as_chunks::<{ GROUP / 2 }>().0;
    let (numbers, tail) = out.as_chunks_mut::<{ 2 * GROUP }>();
    for ((plane, pairs), numbers) in planes.iter().zip(pairs).zip(numbers) {
        let [front, back] = halves(pairs);
        let codes = [
            vandq_u8(front, half),
            vandq_u8(back, half),
            vshrq_n_u8::<4>(front),
            vshrq_n_u8::<4>(back),
        ];
        let quarters = numbers.as_chunks_mut::<32>().0.iter_mut().zip(plane.as_chunks::<16>().0);
        for ((numbers, plane), code) in quarters.zip(codes) {
            let mut exponent = vqtbl1q_u8(table, code);
            if vmaxvq_u8(code) == ESCAPE {
                let mut exponents = bytes(exponent);
                for (exponent, code) in exponents.iter_mut().zip(bytes(code)) {
                    if code == ESCAPE {
                        let (&next, rest) = escapes.split_first()?;
                        *exponent = next;
                        escapes = rest;
                    }
                }
                exponent = load(&exponents);
            }
            let rest = load(plane);
            let low = vorrq_u8(vshrq_n_u8::<1>(rest), vshlq_n_u8::<7>(exponent));
            let high = vorrq_u8(vshrq_n_u8::<1>(exponent), vshlq_n_u8::<7>(rest));
            let (front, back) = numbers.split_at_mut(16);
            front.copy_from_slice(&bytes(vzip1q_u8(low, high)));
            back.copy_from_slice(&bytes(vzip2q_u8(low, high)));
        }
    }
    scalar::decode(exponents, plane_tail, nibble_tail, escapes, tail)
}
