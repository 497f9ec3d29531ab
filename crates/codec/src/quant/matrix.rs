//! Quantises one matrix. For each group of numbers a frame stores the smallest number, which is
//! exact, and a step. The code of a number is its distance from the smallest number in steps. A
//! group of keys has the numbers of one channel in consecutive tokens, because channels with large
//! numbers are large in every token; a group of values has consecutive channels of one token.

use super::number::{Number, ordered};

/// Bits per code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// One code per byte.
    Eight,
    /// Two codes per byte: the low bits hold the first half of a row, the high bits the second
    /// half.
    Four,
}

impl Bits {
    fn largest(self) -> f32 {
        match self {
            Self::Eight => 255.0,
            Self::Four => 15.0,
        }
    }

    /// Bytes of the codes of `channels` numbers.
    pub fn row_bytes(self, channels: usize) -> usize {
        match self {
            Self::Eight => channels,
            Self::Four => channels.div_ceil(2),
        }
    }
}

/// Bytes of the smallest number and the step of a group.
pub const SCALE_BYTES: usize = 4;

/// Smallest usable step; smaller steps are stored as zero. The inverse of a step below about 3e-39
/// would be infinite.
const STEP_MIN: f32 = 1e-37;
/// The number 2^23. The sum of 2^23 and a smaller number is rounded to an integer, so the low bits
/// of the sum hold the smaller number, rounded.
const TO_INTEGER: f32 = 8_388_608.0;
/// Numbers compared in parallel to find the smallest and the largest number of a group of values.
const LANES: usize = 32;

/// Buffers for one row of a matrix, reused for all rows of a slice.
pub struct Row {
    /// The smallest number of each channel of keys, as the integer to which [`ordered`] maps it.
    least: Vec<i16>,
    /// The largest number of each channel of keys, as the integer to which [`ordered`] maps it.
    most: Vec<i16>,
    /// Smallest number of each group; unused while values are encoded. A row of keys has one group
    /// per channel, a row of values one per `group` channels.
    base: Vec<f32>,
    /// The step of each group while decoding; the inverse of the step while keys are encoded;
    /// unused while values are encoded.
    step: Vec<f32>,
    /// The code of each number of the row, one per byte.
    codes: Vec<u8>,
}

impl Row {
    /// Buffers for rows of `channels` numbers.
    pub fn new(channels: usize) -> Self {
        Self {
            least: vec![0; channels],
            most: vec![0; channels],
            base: vec![0.0; channels],
            step: vec![0.0; channels],
            codes: vec![0; channels],
        }
    }
}

#[inline(always)]
fn u16_of(bytes: &[u8; 2]) -> u16 {
    u16::from_le_bytes(*bytes)
}

/// Encodes rows of keys, one row per token, that share their groups. `out` receives the smallest
/// numbers of all channels, their steps, then the codes row by row. `None` if a number, or the
/// range of a group, is not finite, or if `out` is too short for the smallest numbers and steps.
#[inline(always)]
pub fn encode_keys<N: Number>(
    bits: Bits,
    channels: usize,
    rows: &[[u8; 2]],
    row: &mut Row,
    out: &mut [u8],
) -> Option<()> {
    row.least.fill(i16::MAX);
    row.most.fill(i16::MIN);
    for numbers in rows.chunks_exact(channels) {
        let ranges = row.least.iter_mut().zip(&mut row.most);
        for ((least, most), number) in ranges.zip(numbers) {
            let number = ordered(u16_of(number));
            *least = (*least).min(number);
            *most = (*most).max(number);
        }
    }
    let (bases, rest) = out.split_at_mut_checked(2 * channels)?;
    let (steps, codes) = rest.split_at_mut_checked(2 * channels)?;
    let mut finite = true;
    let scales = bases.as_chunks_mut().0.iter_mut().zip(steps.as_chunks_mut().0);
    let ranges = row.least.iter().zip(&row.most).zip(row.base.iter_mut().zip(&mut row.step));
    for ((base_out, step_out), ((&least, &most), (base, step))) in scales.zip(ranges) {
        finite &= scale::<N>(bits, least, most, (base, step), (base_out, step_out));
    }
    let codes = codes.chunks_exact_mut(bits.row_bytes(channels));
    for (numbers, out) in rows.chunks_exact(channels).zip(codes) {
        let scales = row.base.iter().zip(&row.step);
        for ((code, number), (&base, &inverse)) in row.codes.iter_mut().zip(numbers).zip(scales) {
            *code = quantise::<N>(number, base, inverse);
        }
        pack(bits, &row.codes, out);
    }
    finite.then_some(())
}

/// Decodes what [`encode_keys`] wrote. `None` if `encoded` is too short for the smallest numbers
/// and steps.
#[inline(always)]
pub fn decode_keys<N: Number>(
    bits: Bits,
    channels: usize,
    encoded: &[u8],
    row: &mut Row,
    rows: &mut [[u8; 2]],
) -> Option<()> {
    let (bases, rest) = encoded.split_at_checked(2 * channels)?;
    let (steps, codes) = rest.split_at_checked(2 * channels)?;
    read_scales::<N>(bases, steps, row);
    let codes = codes.chunks_exact(bits.row_bytes(channels));
    for (numbers, codes) in rows.chunks_exact_mut(channels).zip(codes) {
        unpack(bits, codes, &mut row.codes);
        let scales = row.base.iter().zip(&row.step);
        for ((number, &code), (&base, &step)) in numbers.iter_mut().zip(&row.codes).zip(scales) {
            *number = N::narrow(base + f32::from(code) * step).to_le_bytes();
        }
    }
    Some(())
}

/// Encodes one row of values in groups of `group` channels. `out` receives the smallest numbers of
/// all groups, their steps, then the codes. `None` if a number, or the range of a group, is not
/// finite, or if `out` is too short for the smallest numbers and steps.
#[inline(always)]
pub fn encode_values<N: Number>(
    bits: Bits,
    group: usize,
    numbers: &[[u8; 2]],
    row: &mut Row,
    out: &mut [u8],
) -> Option<()> {
    let groups = numbers.len().div_ceil(group);
    let (bases, rest) = out.split_at_mut_checked(2 * groups)?;
    let (steps, out) = rest.split_at_mut_checked(2 * groups)?;
    let mut finite = true;
    let scales = bases.as_chunks_mut().0.iter_mut().zip(steps.as_chunks_mut().0);
    let parts = numbers.chunks(group).zip(row.codes.chunks_mut(group));
    for ((base_out, step_out), (numbers, codes)) in scales.zip(parts) {
        let (least, most) = range(numbers);
        let (mut base, mut inverse) = (0.0, 0.0);
        finite &= scale::<N>(bits, least, most, (&mut base, &mut inverse), (base_out, step_out));
        for (code, number) in codes.iter_mut().zip(numbers) {
            *code = quantise::<N>(number, base, inverse);
        }
    }
    pack(bits, &row.codes, out);
    finite.then_some(())
}

/// Decodes what [`encode_values`] wrote. `None` if `encoded` is too short for the smallest numbers
/// and steps.
#[inline(always)]
pub fn decode_values<N: Number>(
    bits: Bits,
    group: usize,
    encoded: &[u8],
    row: &mut Row,
    numbers: &mut [[u8; 2]],
) -> Option<()> {
    let groups = numbers.len().div_ceil(group);
    let (bases, rest) = encoded.split_at_checked(2 * groups)?;
    let (steps, codes) = rest.split_at_checked(2 * groups)?;
    read_scales::<N>(bases, steps, row);
    unpack(bits, codes, &mut row.codes);
    let scales = row.base.iter().zip(&row.step);
    let parts = numbers.chunks_mut(group).zip(row.codes.chunks(group));
    for ((numbers, codes), (&base, &step)) in parts.zip(scales) {
        for (number, &code) in numbers.iter_mut().zip(codes) {
            *number = N::narrow(base + f32::from(code) * step).to_le_bytes();
        }
    }
    Some(())
}

/// Returns the smallest and the largest number, as the integers to which [`ordered`] maps them;
/// zeros if `numbers` is empty.
#[inline(always)]
fn range(numbers: &[[u8; 2]]) -> (i16, i16) {
    let first = numbers.first().map_or(0, |number| ordered(u16_of(number)));
    let (mut least, mut most) = ([first; LANES], [first; LANES]);
    let (lanes, tail) = numbers.as_chunks::<LANES>();
    for numbers in lanes {
        for at in 0..LANES {
            let number = ordered(u16_of(&numbers[at]));
            least[at] = least[at].min(number);
            most[at] = most[at].max(number);
        }
    }
    for number in tail.iter().map(|number| ordered(u16_of(number))) {
        least[0] = least[0].min(number);
        most[0] = most[0].max(number);
    }
    (least.into_iter().fold(first, i16::min), most.into_iter().fold(first, i16::max))
}

/// Computes a group's smallest number and step. Writes the smallest number to `base`, and in its
/// stored form to `base_out`; the inverse of the step to `inverse`, and the step in its stored form
/// to `step_out`. Returns false if a number of the group, or the difference between its largest and
/// smallest number, is not finite.
#[inline(always)]
fn scale<N: Number>(
    bits: Bits,
    least: i16,
    most: i16,
    (base, inverse): (&mut f32, &mut f32),
    (base_out, step_out): (&mut [u8; 2], &mut [u8; 2]),
) -> bool {
    let [least_bits, most_bits] =
        [least, most].map(|number| ordered(number.cast_unsigned()).cast_unsigned());
    *base = N::widen(least_bits);
    let span = N::widen(most_bits) - *base;
    // The step is rounded up to a bfloat16, so that the largest number still has a code.
    let step = (span / bits.largest()).to_bits().wrapping_add(0xffff) & 0xffff_0000;
    let usable = f32::from_bits(step) >= STEP_MIN;
    let step = if usable { step } else { 0 };
    *inverse = if usable { 1.0 / f32::from_bits(step) } else { 0.0 };
    *base_out = least_bits.to_le_bytes();
    *step_out = ((step >> 16) as u16).to_le_bytes();
    least_bits & 0x7fff < N::INFINITY && most_bits & 0x7fff < N::INFINITY && span < f32::INFINITY
}

#[inline(always)]
fn quantise<N: Number>(number: &[u8; 2], base: f32, inverse: f32) -> u8 {
    ((N::widen(u16_of(number)) - base) * inverse + TO_INTEGER).to_bits() as u8
}

#[inline(always)]
fn read_scales<N: Number>(bases: &[u8], steps: &[u8], row: &mut Row) {
    for (base, stored) in row.base.iter_mut().zip(bases.as_chunks().0) {
        *base = N::widen(u16_of(stored));
    }
    for (step, stored) in row.step.iter_mut().zip(steps.as_chunks().0) {
        *step = f32::from_bits(u32::from(u16_of(stored)) << 16);
    }
}

#[inline(always)]
fn pack(bits: Bits, codes: &[u8], out: &mut [u8]) {
    match bits {
        Bits::Eight => out.copy_from_slice(codes),
        Bits::Four => {
            let (low, high) = codes.split_at(out.len());
            let (both, single) = out.split_at_mut(high.len());
            for ((out, &low), &high) in both.iter_mut().zip(low).zip(high) {
                *out = low | high << 4;
            }
            single.copy_from_slice(&low[high.len()..]);
        }
    }
}

#[inline(always)]
fn unpack(bits: Bits, packed: &[u8], codes: &mut [u8]) {
    match bits {
        Bits::Eight => codes.copy_from_slice(packed),
        Bits::Four => {
            let (low, high) = codes.split_at_mut(packed.len());
            low.iter_mut().zip(packed).for_each(|(code, &pair)| *code = pair & 15);
            high.iter_mut().zip(packed).for_each(|(code, &pair)| *code = pair >> 4);
        }
    }
}
