//! `split` for bfloat16 with AVX-512: VBMI permutes bytes across the whole register, VBMI2
//! compresses and expands escapes without a loop.

use super::avx2::{pack, prefetch, unpack};
use super::codebook::{Codebook, ESCAPE, Lookup};
use super::strip::{self, Numbers};
use super::{GROUP, scalar};
use std::arch::x86_64::*;

/// Indices for permuting the bytes of two registers. `EVEN` and `ODD` gather the even and the odd
/// bytes; `FRONT` and `BACK` interleave two registers, and select the first and the second half of
/// the result.
const EVEN: [u8; 64] = sequence(0, 2);
const ODD: [u8; 64] = sequence(1, 2);
const FRONT: [u8; 64] = interleaved(0);
const BACK: [u8; 64] = interleaved(32);

const fn sequence(first: u8, step: u8) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut at = 0;
    while at < 64 {
        bytes[at] = first + at as u8 * step;
        at += 1;
    }
    bytes
}

/// Indices that alternate between the bytes of two registers (the second begins at 64), starting at
/// `first`.
const fn interleaved(first: u8) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut at = 0;
    while at < 64 {
        bytes[at] = first + at as u8 / 2 + 64 * (at as u8 % 2);
        at += 1;
    }
    bytes
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
fn load(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the array is as long as the register.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
fn table(bytes: &[u8; 16]) -> __m512i {
    // SAFETY: the array is as long as the register.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// The mask of the low `count` bytes; `count` is at most 64.
fn low(count: usize) -> u64 {
    if count == 64 { !0 } else { (1 << count) - 1 }
}

/// See [`scalar::encode`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub fn encode(
    book: &Codebook,
    input: &[u8],
    plane: &mut [u8],
    nibbles: &mut [u8],
    escapes: &mut [u8],
) -> Option<usize> {
    let (even, odd, half) = (load(&EVEN), load(&ODD), _mm512_set1_epi8(15));
    let escape = _mm512_set1_epi8(ESCAPE as i8);
    let tables = |lookup: &Lookup| (table(&lookup.exponents), table(&lookup.codes));
    let ((exponents, codes), (exponents2, codes2)) = (tables(&book.first), tables(&book.second));
    let mut escaped = 0;

    let (numbers, tail) = input.as_chunks::<{ 2 * GROUP }>();
    let (planes, plane_tail) = plane.as_chunks_mut::<GROUP>();
    let (pairs, nibble_tail) = nibbles.split_at_mut(planes.len() * GROUP / 2);
    let pairs = pairs.as_chunks_mut::<{ GROUP / 2 }>().0;
    for ((numbers, plane), pairs) in numbers.iter().zip(planes).zip(pairs) {
        prefetch(numbers);
        // SAFETY: a group is 128 bytes, two registers.
        let (a, b) = unsafe {
            (
                _mm512_loadu_si512(numbers.as_ptr().cast()),
                _mm512_loadu_si512(numbers.as_ptr().add(64).cast()),
            )
        };
        // Rotate each number left by one bit: its exponent is then the high byte, its mantissa and
        // sign are the low byte.
        let (a, b) = (_mm512_shldi_epi16::<1>(a, a), _mm512_shldi_epi16::<1>(b, b));
        let exponent = _mm512_permutex2var_epi8(a, odd, b);
        let low_half = _mm512_and_si512(exponent, half);
        let is_first = _mm512_cmpeq_epi8_mask(_mm512_shuffle_epi8(exponents, low_half), exponent);
        let is_second = _mm512_cmpeq_epi8_mask(_mm512_shuffle_epi8(exponents2, low_half), exponent);
        let code = _mm512_mask_shuffle_epi8(escape, is_second, codes2, low_half);
        let code = _mm512_mask_shuffle_epi8(code, is_first, codes, low_half);
        let (front, back) = (_mm512_castsi512_si256(code), _mm512_extracti64x4_epi64::<1>(code));
        let pair = _mm256_or_si256(front, _mm256_slli_epi16::<4>(back));
        // SAFETY: the arrays are as long as the registers.
        unsafe {
            _mm512_storeu_si512(plane.as_mut_ptr().cast(), _mm512_permutex2var_epi8(a, even, b));
            _mm256_storeu_si256(pairs.as_mut_ptr().cast(), pair);
        }
        let missing = !(is_first | is_second);
        if missing != 0 {
            let count = missing.count_ones() as usize;
            let room = escapes.get_mut(escaped..escaped + count)?;
            let listed = _mm512_maskz_compress_epi8(missing, exponent);
            // SAFETY: the mask admits as many bytes as `room` is long.
            unsafe { _mm512_mask_storeu_epi8(room.as_mut_ptr().cast(), low(count), listed) };
            escaped += count;
        }
    }
    let rest = scalar::encode(book, tail, plane_tail, nibble_tail, &mut escapes[escaped..])?;
    Some(escaped + rest)
}

/// See [`scalar::decode`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub fn decode(
    exponents: &[u8; 16],
    plane: &[u8],
    nibbles: &[u8],
    escapes: &[u8],
    out: &mut [u8],
) -> Option<()> {
    let (front, back, half) = (load(&FRONT), load(&BACK), _mm256_set1_epi8(15));
    let (table, escape) = (table(exponents), _mm512_set1_epi8(ESCAPE as i8));
    let mut escapes = escapes;

    let (planes, plane_tail) = plane.as_chunks::<GROUP>();
    let (pairs, nibble_tail) = nibbles.split_at(planes.len() * GROUP / 2);
    let pairs = pairs.as_chunks::<{ GROUP / 2 }>().0;
    let (numbers, tail) = out.as_chunks_mut::<{ 2 * GROUP }>();
    for ((plane, pairs), numbers) in planes.iter().zip(pairs).zip(numbers) {
        prefetch(plane);
        prefetch(pairs);
        // SAFETY: the array is as long as the register.
        let pair = unsafe { _mm256_loadu_si256(pairs.as_ptr().cast()) };
        let low_codes = _mm256_and_si256(pair, half);
        let high_codes = _mm256_and_si256(_mm256_srli_epi16::<4>(pair), half);
        let code = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low_codes), high_codes);
        let mut exponent = _mm512_shuffle_epi8(table, code);
        let missing = _mm512_cmpeq_epi8_mask(code, escape);
        if missing != 0 {
            let count = missing.count_ones() as usize;
            let (listed, rest) = escapes.split_at_checked(count)?;
            // SAFETY: the mask admits as many bytes as `listed` is long.
            let listed = unsafe { _mm512_maskz_loadu_epi8(low(count), listed.as_ptr().cast()) };
            exponent = _mm512_mask_expand_epi8(exponent, missing, listed);
            escapes = rest;
        }
        let rest = load(plane);
        let (a, b) = (
            _mm512_permutex2var_epi8(rest, front, exponent),
            _mm512_permutex2var_epi8(rest, back, exponent),
        );
        // SAFETY: a group is 128 bytes, two registers.
        unsafe {
            _mm512_storeu_si512(numbers.as_mut_ptr().cast(), _mm512_shrdi_epi16::<1>(a, a));
            _mm512_storeu_si512(numbers.as_mut_ptr().add(64).cast(), _mm512_shrdi_epi16::<1>(b, b));
        }
    }
    scalar::decode(exponents, plane_tail, nibble_tail, escapes, tail)
}

/// A mask with a set bit for each byte that the packed codes of a group take.
const CODES: u32 = (1 << strip::CODES) - 1;

/// See [`strip::encode_strip`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub fn encode_strip(
    first: u8,
    groups: &[Numbers],
    planes: &mut [[u8; GROUP]],
    codes: &mut [[u8; strip::CODES]],
    escapes: &mut [u8],
) -> Option<usize> {
    let (even, odd) = (load(&EVEN), load(&ODD));
    let (first, escape) = (_mm512_set1_epi8(first.cast_signed()), _mm512_set1_epi8(7));
    let mut escaped = 0;
    for ((numbers, plane), packed) in groups.iter().zip(planes).zip(codes) {
        prefetch(numbers);
        // SAFETY: a group is 128 bytes, two registers.
        let (a, b) = unsafe {
            (
                _mm512_loadu_si512(numbers.as_ptr().cast()),
                _mm512_loadu_si512(numbers.as_ptr().add(64).cast()),
            )
        };
        // Rotate each number left by one bit: its exponent is then the high byte, its mantissa and
        // sign are the low byte.
        let (a, b) = (_mm512_shldi_epi16::<1>(a, a), _mm512_shldi_epi16::<1>(b, b));
        let exponent = _mm512_permutex2var_epi8(a, odd, b);
        let code = _mm512_min_epu8(_mm512_sub_epi8(exponent, first), escape);
        let missing = _mm512_cmpeq_epi8_mask(code, escape);
        let (front, back) = (_mm512_castsi512_si256(code), _mm512_extracti64x4_epi64::<1>(code));
        let pairs = pack(_mm256_or_si256(front, _mm256_slli_epi16::<3>(back)));
        // SAFETY: a plane is as long as the register, and the mask admits only bytes inside
        // `packed`.
        unsafe {
            _mm512_storeu_si512(plane.as_mut_ptr().cast(), _mm512_permutex2var_epi8(a, even, b));
            _mm256_mask_storeu_epi8(packed.as_mut_ptr().cast(), CODES, pairs);
        }
        let count = missing.count_ones() as usize;
        let room = escapes.get_mut(escaped..escaped + count)?;
        let listed = _mm512_maskz_compress_epi8(missing, exponent);
        // SAFETY: the mask admits as many bytes as `room` is long.
        unsafe { _mm512_mask_storeu_epi8(room.as_mut_ptr().cast(), low(count), listed) };
        escaped += count;
    }
    Some(escaped)
}

/// See [`strip::decode_strip`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub fn decode_strip<'e>(
    first: u8,
    planes: &[[u8; GROUP]],
    codes: &[[u8; strip::CODES]],
    mut escapes: &'e [u8],
    groups: &mut [Numbers],
) -> Option<&'e [u8]> {
    let (front, back, seven) = (load(&FRONT), load(&BACK), _mm512_set1_epi8(7));
    let first = _mm512_set1_epi8(first.cast_signed());
    for ((plane, packed), numbers) in planes.iter().zip(codes).zip(groups) {
        prefetch(plane);
        prefetch(packed);
        // SAFETY: the mask admits only bytes inside `packed`.
        let pairs = unpack(unsafe { _mm256_maskz_loadu_epi8(CODES, packed.as_ptr().cast()) });
        let code = _mm512_castsi256_si512(pairs);
        let code = _mm512_inserti64x4::<1>(code, _mm256_srli_epi16::<3>(pairs));
        let code = _mm512_and_si512(code, seven);
        let missing = _mm512_cmpeq_epi8_mask(code, seven);
        let count = missing.count_ones() as usize;
        let (listed, left) = escapes.split_at_checked(count)?;
        escapes = left;
        // SAFETY: the mask admits as many bytes as `listed` is long.
        let listed = unsafe { _mm512_maskz_loadu_epi8(low(count), listed.as_ptr().cast()) };
        let exponent = _mm512_add_epi8(code, first);
        let exponent = _mm512_mask_expand_epi8(exponent, missing, listed);
        let rest = load(plane);
        let (a, b) = (
            _mm512_permutex2var_epi8(rest, front, exponent),
            _mm512_permutex2var_epi8(rest, back, exponent),
        );
        // SAFETY: a group is 128 bytes, two registers.
        unsafe {
            _mm512_storeu_si512(numbers.as_mut_ptr().cast(), _mm512_shrdi_epi16::<1>(a, a));
            _mm512_storeu_si512(numbers.as_mut_ptr().add(64).cast(), _mm512_shrdi_epi16::<1>(b, b));
        }
    }
    Some(escapes)
}
