//! `split` for bfloat16 blocks with codebook codes, one number at a time: the reference for the
//! other kernels, which use it for the last, partial group of a block.

use super::GROUP;
use super::codebook::{Codebook, ESCAPE, exponent};

/// Encodes each number: its mantissa and sign into one byte of `plane`, the code of its exponent
/// into half a byte of `nibbles`, and an exponent without a code into one byte of `escapes`.
/// Returns the number of exponents written to `escapes`; `None` if `escapes` is too short.
pub fn encode(
    book: &Codebook,
    input: &[u8],
    plane: &mut [u8],
    nibbles: &mut [u8],
    escapes: &mut [u8],
) -> Option<usize> {
    if input.is_empty() {
        return Some(0);
    }
    let codes: [u8; 256] = std::array::from_fn(|exponent| book.code(exponent as u8));
    let groups = input.chunks(2 * GROUP).zip(plane.chunks_mut(GROUP));
    let mut escaped = 0;
    for ((input, plane), nibbles) in groups.zip(nibbles.chunks_mut(GROUP / 2)) {
        nibbles.fill(0);
        let half = nibbles.len();
        let halves = input.chunks(2 * half).zip(plane.chunks_mut(half)).zip([0, 4]);
        for ((input, plane), shift) in halves {
            let numbers = input.as_chunks::<2>().0.iter().zip(plane);
            for ((&number, plane), nibble) in numbers.zip(nibbles.iter_mut()) {
                *plane = number[0] << 1 | number[1] >> 7;
                let exponent = exponent(number);
                let code = codes[usize::from(exponent)];
                *nibble |= code << shift;
                if code == ESCAPE {
                    *escapes.get_mut(escaped)? = exponent;
                    escaped += 1;
                }
            }
        }
    }
    Some(escaped)
}

/// Decodes what [`encode`] wrote; `None` if `escapes` does not have one byte for each escape among
/// the codes in `nibbles`.
pub fn decode(
    exponents: &[u8; 16],
    plane: &[u8],
    nibbles: &[u8],
    escapes: &[u8],
    out: &mut [u8],
) -> Option<()> {
    let groups = plane.chunks(GROUP).zip(nibbles.chunks(GROUP / 2));
    let mut escapes = escapes.iter();
    for ((plane, nibbles), out) in groups.zip(out.chunks_mut(2 * GROUP)) {
        let half = nibbles.len();
        for ((plane, out), shift) in plane.chunks(half).zip(out.chunks_mut(2 * half)).zip([0, 4]) {
            let numbers = out.as_chunks_mut::<2>().0.iter_mut().zip(plane);
            for ((number, &plane), &nibble) in numbers.zip(nibbles) {
                let exponent = match nibble >> shift & 15 {
                    ESCAPE => *escapes.next()?,
                    code => exponents[usize::from(code)],
                };
                *number = [exponent << 7 | plane >> 1, plane << 7 | exponent >> 1];
            }
        }
    }
    escapes.next().is_none().then_some(())
}
