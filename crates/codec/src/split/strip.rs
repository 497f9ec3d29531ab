//! Encodes and decodes a strip: consecutive groups that share one window of exponents. Plain byte
//! arithmetic, which the compiler vectorises.

use super::GROUP;
use std::hint::select_unpredictable;

/// Marks an escape among the codes: a number with an exponent outside the window of the strip. The
/// exponents of escapes are listed after the codes.
pub const ESCAPE: u8 = 7;
/// Bytes of the codes of a group.
pub const CODES: usize = GROUP / 8 * 3;
/// Number of escapes per group that are handled without a branch; few groups have more.
const BRANCHLESS_ESCAPES: usize = 4;

/// The numbers of a group, as bytes.
pub type Numbers = [u8; 2 * GROUP];

/// Encodes the groups of a strip: mantissas and signs into `planes`, codes of exponents into
/// `codes`, exponents without a code into `escapes`. `first` is the first exponent of the strip's
/// window. Returns the number of exponents written to `escapes`; `None` if `escapes` is too short.
#[inline(always)]
pub fn encode_strip(
    first: u8,
    groups: &[Numbers],
    planes: &mut [[u8; GROUP]],
    codes: &mut [[u8; CODES]],
    escapes: &mut [u8],
) -> Option<usize> {
    let mut escaped = 0;
    for ((numbers, plane), packed) in groups.iter().zip(planes).zip(codes) {
        let (mut exponents, mut code) = ([0; GROUP], [0; GROUP]);
        for at in 0..GROUP {
            let rotated = rotated(numbers, at);
            plane[at] = rotated as u8;
            exponents[at] = (rotated >> 8) as u8;
            code[at] = exponents[at].wrapping_sub(first).min(ESCAPE);
        }
        pack(&code, packed);
        escaped += list_escapes(escapes_of(&code), &exponents, escapes.get_mut(escaped..)?)?;
    }
    Some(escaped)
}

/// Writes to `room` the exponents of the numbers whose bits are set in `missing`. Returns the
/// number of these exponents; `None` if `room` is too short. May also change bytes of `room` after
/// these exponents.
#[inline(always)]
pub fn list_escapes(mut missing: u64, exponents: &[u8; GROUP], room: &mut [u8]) -> Option<usize> {
    let count = missing.count_ones() as usize;
    let mut at = 0;
    if let Some(few) = room.first_chunk_mut::<BRANCHLESS_ESCAPES>() {
        // The entries after the last escape are not counted: either the bytes that are written next
        // overwrite these entries, or these entries are after the end of the encoded block.
        for escape in few {
            *escape = exponents[missing.trailing_zeros() as usize % GROUP];
            missing &= missing.wrapping_sub(1);
        }
        at = BRANCHLESS_ESCAPES;
    }
    while missing != 0 {
        *room.get_mut(at)? = exponents[missing.trailing_zeros() as usize % GROUP];
        missing &= missing - 1;
        at += 1;
    }
    Some(count)
}

/// Decodes what [`encode_strip`] wrote. Returns the escapes of later strips; `None` if `escapes` is
/// too short for this strip.
#[inline(always)]
pub fn decode_strip<'e>(
    first: u8,
    planes: &[[u8; GROUP]],
    codes: &[[u8; CODES]],
    mut escapes: &'e [u8],
    groups: &mut [Numbers],
) -> Option<&'e [u8]> {
    for ((plane, packed), numbers) in planes.iter().zip(codes).zip(groups) {
        let code = unpack(packed);
        for at in 0..GROUP {
            let number = number(code[at].wrapping_add(first), plane[at]);
            [numbers[2 * at], numbers[2 * at + 1]] = number.to_le_bytes();
        }
        escapes = patch_escapes(escapes_of(&code), escapes, plane, numbers)?;
    }
    Some(escapes)
}

/// Inserts the exponents in `escapes` into the numbers whose bits are set in `missing`. Returns the
/// escapes of later groups; `None` if `escapes` is too short for this group.
#[inline(always)]
pub fn patch_escapes<'e>(
    mut missing: u64,
    escapes: &'e [u8],
    plane: &[u8; GROUP],
    numbers: &mut Numbers,
) -> Option<&'e [u8]> {
    let (listed, rest) = escapes.split_at_checked(missing.count_ones() as usize)?;
    let mut listed = listed;
    if let Some(few) = escapes.first_chunk::<BRANCHLESS_ESCAPES>() {
        listed = listed.get(BRANCHLESS_ESCAPES..).unwrap_or_default();
        // The loop has no branch, so every iteration writes a number. If no escape is left, the
        // iteration writes the number of the last escape again, or the group's first number if the
        // group has no escape.
        let (mut at, mut right) = (0, u16::from_le_bytes([numbers[0], numbers[1]]));
        for &exponent in few {
            let next = missing.trailing_zeros() as usize % GROUP;
            at = select_unpredictable(missing != 0, next, at);
            right = select_unpredictable(missing != 0, number(exponent, plane[next]), right);
            numbers[2 * at..2 * at + 2].copy_from_slice(&right.to_le_bytes());
            missing &= missing.wrapping_sub(1);
        }
    }
    for &exponent in listed {
        let at = missing.trailing_zeros() as usize % GROUP;
        numbers[2 * at..2 * at + 2].copy_from_slice(&number(exponent, plane[at]).to_le_bytes());
        missing &= missing - 1;
    }
    Some(rest)
}

/// Returns number `at`, rotated left by one bit: its exponent is the high byte, its mantissa and
/// sign are the low byte.
#[inline(always)]
pub fn rotated(numbers: &Numbers, at: usize) -> u16 {
    u16::from_le_bytes([numbers[2 * at], numbers[2 * at + 1]]).rotate_left(1)
}

#[inline(always)]
fn number(exponent: u8, rest: u8) -> u16 {
    (u16::from(exponent) << 8 | u16::from(rest)).rotate_right(1)
}

/// Packs codes `i` and `i + 32` as a pair of six bits: the first 24 pairs into the low bits of the
/// 24 bytes, and the last eight pairs into the two top bits of each byte.
#[inline(always)]
fn pack(code: &[u8; GROUP], packed: &mut [u8; CODES]) {
    let sextets: [u8; GROUP / 2] = std::array::from_fn(|at| code[at] | code[GROUP / 2 + at] << 3);
    for at in 0..8 {
        let last = sextets[CODES + at];
        packed[at] = sextets[at] | last << 6;
        packed[8 + at] = sextets[8 + at] | last >> 2 << 6;
        packed[16 + at] = sextets[16 + at] | last >> 4 << 6;
    }
}

#[inline(always)]
fn unpack(packed: &[u8; CODES]) -> [u8; GROUP] {
    let mut sextets = [0; GROUP / 2];
    for at in 0..8 {
        let [a, b, c] = [packed[at], packed[8 + at], packed[16 + at]];
        sextets[at] = a & 63;
        sextets[8 + at] = b & 63;
        sextets[16 + at] = c & 63;
        sextets[24 + at] = a >> 6 | b >> 6 << 2 | c >> 6 << 4;
    }
    let mut code = [0; GROUP];
    let (front, back) = code.split_at_mut(GROUP / 2);
    for ((front, back), pair) in front.iter_mut().zip(back).zip(sextets) {
        (*front, *back) = (pair & 7, pair >> 3);
    }
    code
}

/// The mask of the escapes among the codes of a group, one bit per number.
#[inline(always)]
fn escapes_of(code: &[u8; GROUP]) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // A product with this number has the lowest bits of eight bytes in its highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    code.as_chunks::<8>().0.iter().zip(0..).fold(0, |mask, (eight, at)| {
        // Adding one carries into bit 3 for the code seven only.
        let bits = (u64::from_le_bytes(*eight) + ONES) >> 3 & ONES;
        mask | (bits.wrapping_mul(GATHER) >> 56) << (8 * at)
    })
}
