//! Pseudo-random numbers, to be encoded.

#![allow(dead_code, reason = "each test binary uses a part of this module")]

use ritornello_codec::Dtype;

/// SplitMix64: the same numbers on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number from zero to below one.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// A number with an approximately standard normal distribution: the sum of twelve uniform
    /// numbers, minus six.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

/// The upper half of an `f32`.
pub fn bf16(number: f32) -> u16 {
    (number.to_bits() >> 16) as u16
}

pub fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// A float16 near `number`, which must be in the range of normal float16s.
pub fn fp16(number: f32) -> u16 {
    let bits = number.to_bits();
    let exponent = ((bits >> 23) & 255).saturating_sub(112).min(30);
    ((bits >> 16) & 0x8000 | exponent << 10 | (bits >> 13) & 0x3ff) as u16
}

/// `count` normally distributed numbers as bytes.
pub fn numbers(dtype: Dtype, count: usize, random: &mut Random) -> Vec<u8> {
    (0..count)
        .flat_map(|_| {
            let number = random.normal();
            match dtype {
                Dtype::Bf16 => bf16(number),
                Dtype::Fp16 => fp16(number),
            }
            .to_le_bytes()
        })
        .collect()
}

pub fn from_fp16(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    let (exponent, mantissa) = (bits >> 10 & 31, (bits & 1023) as f32);
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-24),
        31 => f32::INFINITY,
        _ => (1024.0 + mantissa) * 2f32.powi(exponent as i32 - 25),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}
