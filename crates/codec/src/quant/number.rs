//! Converts two-byte numbers to `f32` and back, in arithmetic that vectorises.

/// A number format of two bytes.
pub trait Number {
    /// The largest finite number of the format.
    const LARGEST: f32;
    /// The bits of positive infinity in the format.
    const INFINITY: u16;

    /// Converts exactly. The result for a number that is not finite is unspecified.
    fn widen(bits: u16) -> f32;

    /// Rounds to the nearest number, ties to even; a result that is denormal may be rounded twice.
    /// Numbers beyond [`Number::LARGEST`] become the largest finite number, with their sign.
    fn narrow(number: f32) -> u16;
}

/// bfloat16: the upper half of an `f32`.
pub struct Bf16;

impl Number for Bf16 {
    const LARGEST: f32 = f32::from_bits(0x7f7f_0000);
    const INFINITY: u16 = 0x7f80;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> u16 {
        let bits = number.clamp(-Self::LARGEST, Self::LARGEST).to_bits();
        (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
    }
}

/// IEEE 754 binary16.
pub struct Fp16;

/// The number 2^112: the smallest normal float16 divided by the smallest normal `f32`. The
/// exponents of the two formats have the biases 15 and 127.
const SHIFT: f32 = f32::from_bits((127 + 112) << 23);

impl Number for Fp16 {
    const LARGEST: f32 = 65504.0;
    const INFINITY: u16 = 0x7c00;

    /// Moves exponent and mantissa to their positions in `f32`. Multiplying by `SHIFT` then
    /// corrects the exponent's bias, for denormals too.
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * SHIFT;
        f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
    }

    /// A denormal result is rounded twice, first to a denormal `f32`. If the first rounding yields
    /// the middle between two denormal float16s, the second yields the even one, even if `number`
    /// is slightly closer to the odd one.
    #[inline(always)]
    fn narrow(number: f32) -> u16 {
        let number = number.clamp(-Self::LARGEST, Self::LARGEST);
        let bits = (number.abs() * (1.0 / SHIFT)).to_bits();
        let magnitude = bits.wrapping_add(0xfff + (bits >> 13 & 1)) >> 13;
        magnitude as u16 | (number.to_bits() >> 16 & 0x8000) as u16
    }
}

/// Maps bits to integers with the same order as the numbers: if the number is negative, inverts all
/// its bits except the sign. The function is its own inverse.
#[inline(always)]
pub fn ordered(bits: u16) -> i16 {
    let bits = bits.cast_signed();
    bits ^ ((bits >> 15).cast_unsigned() >> 1).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<N: Number>() {
        let finite = |bits: &u16| bits & 0x7fff < N::INFINITY;
        let mut all: Vec<u16> = (0..=u16::MAX).filter(finite).collect();
        for &bits in &all {
            assert_eq!(N::narrow(N::widen(bits)), bits, "{bits:04x}");
            assert_eq!(ordered(ordered(bits).cast_unsigned()).cast_unsigned(), bits);
        }
        all.sort_by_key(|&bits| ordered(bits));
        assert!(all.windows(2).all(|pair| N::widen(pair[0]) <= N::widen(pair[1])));
        assert_eq!(N::widen(N::narrow(f32::MAX)), N::LARGEST);
        // A number between two neighbours is rounded to the nearer neighbour.
        for pair in all.windows(2).filter(|pair| pair[0] & 0x7fff != 0 && pair[1] & 0x7fff != 0) {
            let (low, high) = (N::widen(pair[0]), N::widen(pair[1]));
            assert_eq!(N::narrow(low + (high - low) * 0.25), pair[0]);
            assert_eq!(N::narrow(low + (high - low) * 0.75), pair[1]);
        }
    }

    #[test]
    fn finite_numbers_roundtrip_and_numbers_between_are_rounded() {
        check::<Bf16>();
        check::<Fp16>();
        assert_eq!(Bf16::widen(0x3f80), 1.0);
        assert_eq!((Fp16::widen(0x3c00), Fp16::widen(0x0001)), (1.0, 2f32.powi(-24)));
    }
}
