//! `split` for bfloat16 with AVX2. AVX2 packs and unpacks bytes within each half of a register, so
//! each result is reordered once, before it is stored.

use super::codebook::{Codebook, ESCAPE, Lookup};
use super::strip::{self, Numbers, list_escapes, patch_escapes};
use super::{GROUP, scalar};
use std::arch::x86_64::*;

/// Permutation that restores the order of a register's quarters: packing two registers into one
/// leaves them in the order 0 2 1 3.
const IN_ORDER: i32 = 0b11_01_10_00;

/// Shuffle that gathers the low bytes of eight numbers, then their high bytes.
const SORTED: [u8; 16] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];

/// Distance in bytes at which the code prefetches. The processor prefetches too, but stops at the
/// end of a 4 KiB page of memory.
const AHEAD: usize = 2048;

/// Prefetches the cache lines [`AHEAD`] bytes after `bytes`. The lines may be outside the slice,
/// because a prefetch does not fault.
#[target_feature(enable = "sse")]
pub fn prefetch<const N: usize>(bytes: &[u8; N]) {
    let ahead = bytes.as_ptr().wrapping_add(AHEAD).cast::<i8>();
    for line in (0..N).step_by(64) {
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line));
    }
}

#[target_feature(enable = "avx2")]
fn load<const N: usize>(bytes: &[u8; N], at: usize) -> __m256i {
    assert!(at + 32 <= N, "the 32 bytes must be inside the array");
    // SAFETY: the array has at least 32 bytes starting at `at`.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().add(at).cast()) }
}

#[target_feature(enable = "avx2")]
fn store<const N: usize>(bytes: &mut [u8; N], at: usize, value: __m256i) {
    assert!(at + 32 <= N, "the 32 bytes must be inside the array");
    // SAFETY: the array has at least 32 bytes starting at `at`.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().add(at).cast(), value) };
}

#[target_feature(enable = "avx2")]
fn table(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: the array is as long as the register.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// Splits 32 numbers into mantissas with signs, and exponents, both with their quarters out of
/// order.
#[target_feature(enable = "avx2")]
fn parts(a: __m256i, b: __m256i) -> (__m256i, __m256i) {
    let (zero, sort) = (_mm256_setzero_si256(), table(&SORTED));
    let (a, b) = (_mm256_shuffle_epi8(a, sort), _mm256_shuffle_epi8(b, sort));
    let (low, high) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    // Returns `bytes`, each shifted left by one bit, with the top bit of the byte of `below` as its
    // lowest bit.
    let merge_shifted = |bytes, below| {
        _mm256_sub_epi8(_mm256_add_epi8(bytes, bytes), _mm256_cmpgt_epi8(zero, below))
    };
    (merge_shifted(low, high), merge_shifted(high, low))
}

/// See [`scalar::encode`].
#[target_feature(enable = "avx2")]
pub fn encode(
    book: &Codebook,
    input: &[u8],
    plane: &mut [u8],
    nibbles: &mut [u8],
    escapes: &mut [u8],
) -> Option<usize> {
    let (zero, half) = (_mm256_setzero_si256(), _mm256_set1_epi8(15));
    // The tables hold codes with inverted bits, so that an escape is zero. The bits are inverted
    // back before the codes are stored.
    let tables =
        |lookup: &Lookup| (table(&lookup.exponents), _mm256_xor_si256(table(&lookup.codes), half));
    let ((exponents, codes), (exponents2, codes2)) = (tables(&book.first), tables(&book.second));
    let code = |exponent: __m256i| {
        let low = _mm256_and_si256(exponent, half);
        let of = |exponents, codes| {
            let same = _mm256_cmpeq_epi8(_mm256_shuffle_epi8(exponents, low), exponent);
            _mm256_and_si256(_mm256_shuffle_epi8(codes, low), same)
        };
        _mm256_or_si256(of(exponents, codes), of(exponents2, codes2))
    };
    let mut escaped = 0;

    let (numbers, tail) = input.as_chunks::<{ 2 * GROUP }>();
    let (planes, plane_tail) = plane.as_chunks_mut::<GROUP>();
    let (pairs, nibble_tail) = nibbles.split_at_mut(planes.len() * GROUP / 2);
    let pairs = pairs.as_chunks_mut::<{ GROUP / 2 }>().0;
    for ((numbers, plane), pairs) in numbers.iter().zip(planes).zip(pairs) {
        prefetch(numbers);
        let (front, front_exponents) = parts(load(numbers, 0), load(numbers, 32));
        let (back, back_exponents) = parts(load(numbers, 64), load(numbers, 96));
        store(plane, 0, _mm256_permute4x64_epi64::<IN_ORDER>(front));
        store(plane, 32, _mm256_permute4x64_epi64::<IN_ORDER>(back));
        let (front, back) = (code(front_exponents), code(back_exponents));
        let pair = _mm256_or_si256(front, _mm256_slli_epi16::<4>(back));
        let pair = _mm256_xor_si256(pair, _mm256_set1_epi8(-1));
        store(pairs, 0, _mm256_permute4x64_epi64::<IN_ORDER>(pair));
        let missing = _mm256_cmpeq_epi8(_mm256_min_epu8(front, back), zero);
        if _mm256_movemask_epi8(missing) != 0 {
            let mut missing = 0;
            let mut bytes = [0u8; GROUP];
            for (at, exponent, code) in [(0, front_exponents, front), (32, back_exponents, back)] {
                store(&mut bytes, at, _mm256_permute4x64_epi64::<IN_ORDER>(exponent));
                let none = _mm256_cmpeq_epi8(code, zero);
                let none = _mm256_movemask_epi8(_mm256_permute4x64_epi64::<IN_ORDER>(none));
                missing |= u64::from(none.cast_unsigned()) << at;
            }
            let room = escapes.get_mut(escaped..escaped + missing.count_ones() as usize)?;
            for escape in room {
                *escape = bytes[missing.trailing_zeros() as usize % GROUP];
                missing &= missing - 1;
                escaped += 1;
            }
        }
    }
    let rest = scalar::encode(book, tail, plane_tail, nibble_tail, &mut escapes[escaped..])?;
    Some(escaped + rest)
}

/// Combines 32 exponents and 32 bytes of mantissa and sign (`rest`) into 32 numbers, and writes
/// them to `numbers` (a group) from byte `at`.
#[target_feature(enable = "avx2")]
fn join(exponent: __m256i, rest: __m256i, numbers: &mut Numbers, at: usize) {
    let turn = |v| _mm256_or_si256(_mm256_srli_epi16::<1>(v), _mm256_slli_epi16::<15>(v));
    let low = turn(_mm256_unpacklo_epi8(rest, exponent));
    let high = turn(_mm256_unpackhi_epi8(rest, exponent));
    store(numbers, at, _mm256_permute2x128_si256::<0x20>(low, high));
    store(numbers, at + 32, _mm256_permute2x128_si256::<0x31>(low, high));
}

/// See [`scalar::decode`].
#[target_feature(enable = "avx2")]
pub fn decode(
    exponents: &[u8; 16],
    plane: &[u8],
    nibbles: &[u8],
    escapes: &[u8],
    out: &mut [u8],
) -> Option<()> {
    let (table, half) = (table(exponents), _mm256_set1_epi8(15));
    let escape = _mm256_set1_epi8(ESCAPE as i8);
    let mut escapes = escapes;

    let (planes, plane_tail) = plane.as_chunks::<GROUP>();
    let (pairs, nibble_tail) = nibbles.split_at(planes.len() * GROUP / 2);
    let pairs = pairs.as_chunks::<{ GROUP / 2 }>().0;
    let (numbers, tail) = out.as_chunks_mut::<{ 2 * GROUP }>();
    for ((plane, pairs), numbers) in planes.iter().zip(pairs).zip(numbers) {
        prefetch(plane);
        prefetch(pairs);
        let pair = load(pairs, 0);
        let codes =
            [_mm256_and_si256(pair, half), _mm256_and_si256(_mm256_srli_epi16::<4>(pair), half)];
        for (part, code) in codes.into_iter().enumerate() {
            let mut exponent = _mm256_shuffle_epi8(table, code);
            let mut missing = _mm256_movemask_epi8(_mm256_cmpeq_epi8(code, escape)).cast_unsigned();
            if missing != 0 {
                let mut bytes = [0u8; 32];
                store(&mut bytes, 0, exponent);
                while missing != 0 {
                    let (&next, rest) = escapes.split_first()?;
                    bytes[missing.trailing_zeros() as usize] = next;
                    escapes = rest;
                    missing &= missing - 1;
                }
                exponent = load(&bytes, 0);
            }
            join(exponent, load(plane, 32 * part), numbers, 64 * part);
        }
    }
    scalar::decode(exponents, plane_tail, nibble_tail, escapes, tail)
}

/// Returns shift counts for four 64-bit lanes that each hold the last eight code pairs, one pair of
/// six bits in each byte. Shifted left by these counts, the first three lanes have bits 0 and 1, 2
/// and 3, or 4 and 5 of each pair in the top two bits of its byte; the fourth lane is zero.
#[target_feature(enable = "avx2")]
fn spread_shifts() -> __m256i {
    _mm256_set_epi64x(64, 2, 4, 6)
}

#[target_feature(enable = "avx2")]
fn load_codes(bytes: &[u8; strip::CODES]) -> __m256i {
    // SAFETY: the array has 24 bytes: 16 bytes at its start, then 8.
    unsafe {
        let (front, back) = (bytes.as_ptr().cast(), bytes.as_ptr().add(16).cast());
        _mm256_set_m128i(_mm_loadl_epi64(back), _mm_loadu_si128(front))
    }
}

#[target_feature(enable = "avx2")]
fn store_codes(bytes: &mut [u8; strip::CODES], value: __m256i) {
    // SAFETY: the array has 24 bytes: 16 bytes at its start, then 8.
    unsafe {
        _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm256_castsi256_si128(value));
        let back = _mm256_extracti128_si256::<1>(value);
        _mm_storel_epi64(bytes.as_mut_ptr().add(16).cast(), back);
    }
}

/// Packs 32 code pairs, two codes of three bits in each byte, into 24 bytes.
#[target_feature(enable = "avx2")]
pub fn pack(pairs: __m256i) -> __m256i {
    let last = _mm256_sllv_epi64(_mm256_permute4x64_epi64::<0xff>(pairs), spread_shifts());
    _mm256_or_si256(pairs, _mm256_and_si256(last, _mm256_set1_epi8(-64)))
}

/// Unpacks the first 24 bytes of a result of [`pack`]. The last eight bytes of `packed` have no
/// effect.
#[target_feature(enable = "avx2")]
pub fn unpack(packed: __m256i) -> __m256i {
    let top = _mm256_and_si256(packed, _mm256_set1_epi8(-64));
    // Each of the first three 64-bit lanes holds two bits of each of the last eight pairs.
    let bits = _mm256_srlv_epi64(top, spread_shifts());
    let halves = _mm256_or_si256(bits, _mm256_permute4x64_epi64::<0b01_00_11_10>(bits));
    let last = _mm256_or_si256(halves, _mm256_shuffle_epi32::<0b01_00_11_10>(halves));
    let pairs = _mm256_and_si256(packed, _mm256_set1_epi8(63));
    _mm256_blend_epi32::<0b1100_0000>(pairs, last)
}

/// The mask of the escapes of a group, one bit per number, from the group's code pairs.
#[target_feature(enable = "avx2")]
fn escapes_of(pairs: __m256i) -> u64 {
    let [front, back] = [7, 56].map(|code| {
        let code = _mm256_set1_epi8(code);
        let same = _mm256_cmpeq_epi8(_mm256_and_si256(pairs, code), code);
        u64::from(_mm256_movemask_epi8(same).cast_unsigned())
    });
    back << 32 | front
}

/// See [`strip::encode_strip`].
#[target_feature(enable = "avx2,bmi1,popcnt")]
pub fn encode_strip(
    first: u8,
    groups: &[Numbers],
    planes: &mut [[u8; GROUP]],
    codes: &mut [[u8; strip::CODES]],
    escapes: &mut [u8],
) -> Option<usize> {
    let (first, escape) = (_mm256_set1_epi8(first.cast_signed()), _mm256_set1_epi8(7));
    let code = |exponent| _mm256_min_epu8(_mm256_sub_epi8(exponent, first), escape);
    let mut escaped = 0;
    for ((numbers, plane), packed) in groups.iter().zip(planes).zip(codes) {
        prefetch(numbers);
        let (front, front_exponents) = parts(load(numbers, 0), load(numbers, 32));
        let (back, back_exponents) = parts(load(numbers, 64), load(numbers, 96));
        store(plane, 0, _mm256_permute4x64_epi64::<IN_ORDER>(front));
        store(plane, 32, _mm256_permute4x64_epi64::<IN_ORDER>(back));
        let (front, back) = (code(front_exponents), code(back_exponents));
        let pairs = _mm256_or_si256(front, _mm256_slli_epi16::<3>(back));
        let pairs = _mm256_permute4x64_epi64::<IN_ORDER>(pairs);
        store_codes(packed, pack(pairs));
        let mut exponents = [0; GROUP];
        store(&mut exponents, 0, _mm256_permute4x64_epi64::<IN_ORDER>(front_exponents));
        store(&mut exponents, 32, _mm256_permute4x64_epi64::<IN_ORDER>(back_exponents));
        escaped += list_escapes(escapes_of(pairs), &exponents, escapes.get_mut(escaped..)?)?;
    }
    Some(escaped)
}

/// See [`strip::decode_strip`].
#[target_feature(enable = "avx2,bmi1,popcnt")]
pub fn decode_strip<'e>(
    first: u8,
    planes: &[[u8; GROUP]],
    codes: &[[u8; strip::CODES]],
    mut escapes: &'e [u8],
    groups: &mut [Numbers],
) -> Option<&'e [u8]> {
    let (first, seven) = (_mm256_set1_epi8(first.cast_signed()), _mm256_set1_epi8(7));
    for ((plane, packed), numbers) in planes.iter().zip(codes).zip(groups) {
        prefetch(plane);
        prefetch(packed);
        let pairs = unpack(load_codes(packed));
        let halves = [pairs, _mm256_srli_epi16::<3>(pairs)];
        for (part, code) in halves.into_iter().enumerate() {
            let exponent = _mm256_add_epi8(_mm256_and_si256(code, seven), first);
            join(exponent, load(plane, 32 * part), numbers, 64 * part);
        }
        escapes = patch_escapes(escapes_of(pairs), escapes, plane, numbers)?;
    }
    Some(escapes)
}
