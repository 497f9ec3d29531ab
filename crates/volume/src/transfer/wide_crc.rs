//! Adds the bytes of slices to their checksums, with 256-bit carry-less multiplication on
//! processors without 512-bit multiplication.
//!
//! `crc_fast`, which computes [`SliceChecksum`], multiplies 512 bits at a time with AVX-512, and
//! 128 bits without. Processors with `VPCLMULQDQ` and without AVX-512 (AMD Zen 3, Intel's desktop
//! processors since Alder Lake) multiply 256 bits in the time that 128 bits take. The checksum is
//! the same CRC-64/NVME.
//! Once `crc_fast` multiplies 256 bits, this file can be removed.

use ritornello_format::SliceChecksum;

/// Adds the next bytes of the slice to its checksum.
pub(super) fn update(sum: &mut SliceChecksum, bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= x86::BYTES_MIN && x86::is_supported() {
        // SAFETY: the processor has the features of the function.
        unsafe { x86::update(sum, bytes) };
        return;
    }
    sum.update(bytes);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::SliceChecksum;
    use std::arch::x86_64::{
        __m128i, __m256i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_prefetch, _mm_set_epi64x,
        _mm_storeu_si128, _mm_xor_si128, _mm256_castsi256_si128, _mm256_clmulepi64_epi128,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_set_epi64x, _mm256_setr_m128i,
        _mm256_setzero_si256, _mm256_xor_si256,
    };

    /// The polynomial of CRC-64/NVME, bit-reflected.
    const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
    const LANE: usize = 32;
    /// Bytes per step: eight lanes keep the multiplier busy while each lane waits for its previous
    /// product.
    const STEP: usize = 8 * LANE;
    /// Bytes between a step and the bytes that it prefetches. The bytes of a transfer come from
    /// memory, not from the cache, and the processor's own prefetch falls behind.
    const PREFETCH: usize = 2048;
    const CACHE_LINE: usize = 64;
    /// Minimum bytes for which 256-bit multiplication is faster.
    pub(super) const BYTES_MIN: usize = 4 * STEP;

    pub(super) fn is_supported() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("vpclmulqdq")
            && !is_x86_feature_detected!("avx512vl")
    }

    /// `x` to the power of `n`, modulo the polynomial, bit-reflected: bit 63 is the constant term.
    const fn power(n: usize) -> i64 {
        let (mut value, mut at) = (1 << 63, 0);
        while at < n {
            value = (value >> 1) ^ if value & 1 == 1 { POLYNOMIAL } else { 0 };
            at += 1;
        }
        value.cast_signed()
    }

    /// The factors that move the high and the low half of 128 bits forward by `bytes`. The exponent
    /// of each factor is one too small, because the carry-less product of bit-reflected values has
    /// an additional factor `x`.
    const fn factors(bytes: usize) -> (i64, i64) {
        (power(8 * bytes - 1), power(8 * bytes + 63))
    }

    /// Adds `bytes`: whole steps with 256-bit multiplication, the remainder without.
    #[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
    pub(super) fn update(sum: &mut SliceChecksum, bytes: &[u8]) {
        let (steps, rest) = bytes.as_chunks::<STEP>();
        let [first, steps @ ..] = steps else { return sum.update(rest) };
        let mut lanes = [_mm256_setzero_si256(); STEP / LANE];
        for (at, lane) in lanes.iter_mut().enumerate() {
            *lane = load(first, at);
        }
        let register = _mm256_set_epi64x(0, 0, 0, sum.register().cast_signed());
        lanes[0] = _mm256_xor_si256(lanes[0], register);
        let by_step = wide(const { factors(STEP) });
        for step in steps {
            for line in (0..STEP).step_by(CACHE_LINE) {
                let ahead = step.as_ptr().wrapping_add(PREFETCH + line);
                #[allow(unused_unsafe)] // Older versions of Rust declare the function unsafe.
                // SAFETY: a prefetch of an address that is not mapped does nothing.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                }
            }
            for (at, lane) in lanes.iter_mut().enumerate() {
                *lane = _mm256_xor_si256(moved(*lane, by_step), load(step, at));
            }
        }
        let by_lane = wide(const { factors(LANE) });
        let mut all = lanes[0];
        for lane in &lanes[1..] {
            all = _mm256_xor_si256(moved(all, by_lane), *lane);
        }
        let (high, low) = const { factors(LANE / 2) };
        let (head, tail) = (_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        let factors = _mm_set_epi64x(high, low);
        let products = _mm_xor_si128(
            _mm_clmulepi64_si128(head, factors, 0x00),
            _mm_clmulepi64_si128(head, factors, 0x11),
        );
        let mut folded = [0u8; 16];
        // SAFETY: `folded` has 16 bytes, and the store permits any alignment.
        unsafe {
            _mm_storeu_si128(folded.as_mut_ptr().cast::<__m128i>(), _mm_xor_si128(products, tail));
        }
        // The checksum of these 16 bytes, from an initial value of zero, equals the checksum of all
        // folded bytes.
        *sum = SliceChecksum::resume(0);
        sum.update(&folded);
        sum.update(rest);
    }

    /// Lane `at` of a step.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(step: &[u8; STEP], at: usize) -> __m256i {
        let lane = &step[at * LANE..][..LANE];
        // SAFETY: `lane` has the length of a register, and the load permits any alignment.
        unsafe { _mm256_loadu_si256(lane.as_ptr().cast()) }
    }

    /// The pair of factors, once for each 128-bit half of a register.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn wide((high, low): (i64, i64)) -> __m256i {
        let half = _mm_set_epi64x(high, low);
        _mm256_setr_m128i(half, half)
    }

    /// A lane, moved forward by the number of bytes that `factors` stand for.
    #[inline]
    #[target_feature(enable = "avx2,vpclmulqdq")]
    fn moved(lane: __m256i, factors: __m256i) -> __m256i {
        _mm256_xor_si256(
            _mm256_clmulepi64_epi128(lane, factors, 0x00),
            _mm256_clmulepi64_epi128(lane, factors, 0x11),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sums(parts: &[&[u8]], add: impl Fn(&mut SliceChecksum, &[u8])) -> u64 {
        let mut sum = SliceChecksum::new(b"key-0001", 7, 3);
        parts.iter().for_each(|part| add(&mut sum, part));
        sum.finish()
    }

    proptest! {
        #[test]
        fn checksums_are_those_of_the_format(
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            at in any::<prop::sample::Index>(),
        ) {
            let parts = bytes.split_at(at.index(bytes.len() + 1));
            let parts = [parts.0, parts.1];
            let expected = sums(&[&bytes], SliceChecksum::update);
            prop_assert_eq!(sums(&parts, update), expected);
        }
    }
}
