//! `int8` and `int4`: numbers as counts of steps, grouped as their outliers lie.

mod matrix;
mod number;

pub use matrix::Bits;

use crate::frame::{Sink, Source, damaged};
use crate::kernel::{Kernel, vectorised};
use crate::{Dtype, SliceKind, SliceShape};
use matrix::{Row, SCALE_BYTES};
use number::{Bf16, Fp16};
use ritornello_format::{Error, Result};

/// Which matrices there are and how their numbers are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    bits: Bits,
    dtype: Dtype,
    keys: bool,
    values: bool,
    /// Tokens that share a scale, of each channel of keys.
    key_group: usize,
    /// Channels that share a scale, of each token of values.
    value_group: usize,
    tokens: usize,
    channels: usize,
    layers: usize,
}

/// Encodes into at most `out.len() - 1` bytes; `None` if that is not possible, or if a number is
/// not finite.
///
/// # Errors
/// `Invalid` if the shape does not say what the numbers mean, or is that of another slice.
pub fn encode(
    kernel: Kernel,
    bits: Bits,
    shape: &SliceShape,
    input: &[u8],
    out: &mut [u8],
) -> Result<Option<usize>> {
    let plan = Plan::new(bits, shape)?;
    if plan.slice_bytes() != Some(input.len() as u64) {
        return Err(Error::invalid("a slice is not of the length that its shape says")
            .with("slice", input.len())
            .with("shape", format!("{:?}", shape.kind)));
    }
    Ok(plan.encode(kernel, input, out))
}

/// Decodes what [`encode`] made.
pub fn decode(kernel: Kernel, bits: Bits, frame: &[u8], out: &mut [u8]) -> Result<()> {
    let (mut source, dtype) = Source::open(frame, out.len())?;
    let plan = Plan::read(bits, dtype, &mut source)?;
    if plan.slice_bytes() != Some(out.len() as u64) {
        return Err(damaged("shape of the slice"));
    }
    plan.decode(kernel, &mut source, out)?;
    source.close()
}

impl Plan {
    fn new(bits: Bits, shape: &SliceShape) -> Result<Self> {
        let (keys, values, tokens, channels, layers) = match shape.kind {
            SliceKind::Opaque => {
                return Err(Error::invalid(
                    "a lossy codec needs to know which numbers are keys and which are values: \
                     use split or zstd for this layout",
                ));
            }
            SliceKind::Keys { tokens, channels } => (true, false, tokens, channels, 1),
            SliceKind::Values { tokens, channels } => (false, true, tokens, channels, 1),
            SliceKind::KeysValues { tokens, channels, layers } => {
                (true, true, tokens, channels, layers)
            }
        };
        let (key_group, value_group) = match bits {
            Bits::Eight => (64, 128),
            Bits::Four => (32, 32),
        };
        Ok(Self {
            bits,
            dtype: shape.dtype,
            keys,
            values,
            key_group,
            value_group,
            tokens: tokens as usize,
            channels: channels as usize,
            layers: layers as usize,
        })
    }

    /// Which matrices (1 keys, 2 values, 3 both), zero, tokens a group, channels a group, tokens,
    /// channels, layers.
    fn read(bits: Bits, dtype: Dtype, source: &mut Source<'_>) -> Result<Self> {
        let (which, zero) = (source.u8()?, source.u8()?);
        let plan = Self {
            bits,
            dtype,
            keys: which & 1 != 0,
            values: which & 2 != 0,
            key_group: source.u16()?,
            value_group: source.u16()?,
            tokens: source.u32()?,
            channels: source.u32()?,
            layers: source.u32()?,
        };
        if !(1..=3).contains(&which) || zero != 0 || plan.key_group == 0 || plan.value_group == 0 {
            return Err(damaged("fields of a quantised slice"));
        }
        Ok(plan)
    }

    fn write(&self, sink: &mut Sink<'_>) -> Option<()> {
        let which = u8::from(self.keys) | u8::from(self.values) << 1;
        sink.take(2)?.copy_from_slice(&[which, 0]);
        sink.take(2)?.copy_from_slice(&(self.key_group as u16).to_le_bytes());
        sink.take(2)?.copy_from_slice(&(self.value_group as u16).to_le_bytes());
        for number in [self.tokens, self.channels, self.layers] {
            sink.take(4)?.copy_from_slice(&(number as u32).to_le_bytes());
        }
        Some(())
    }

    /// Length of the slice; `None` if it is zero or absurd.
    fn slice_bytes(&self) -> Option<u64> {
        let matrices = u64::from(self.keys) + u64::from(self.values);
        [self.tokens, self.channels, self.layers]
            .iter()
            .try_fold(2 * matrices, |bytes, &factor| bytes.checked_mul(factor as u64))
            .filter(|&bytes| bytes > 0)
    }

    /// Encoded bytes of `tokens` rows of keys that share a scale.
    fn key_bytes(&self, tokens: usize) -> usize {
        self.channels * SCALE_BYTES + tokens * self.bits.row_bytes(self.channels)
    }

    /// Encoded bytes of a row of values.
    fn value_bytes(&self) -> usize {
        self.channels.div_ceil(self.value_group) * SCALE_BYTES + self.bits.row_bytes(self.channels)
    }

    fn encode(&self, kernel: Kernel, input: &[u8], out: &mut [u8]) -> Option<usize> {
        let shorter = input.len().min(out.len()).checked_sub(1)?;
        let mut sink = Sink::open(&mut out[..shorter], self.dtype, input.len())?;
        self.write(&mut sink)?;
        let (plan, sink_ref) = (self, &mut sink);
        let numbers = input.as_chunks().0;
        match self.dtype {
            Dtype::Bf16 => vectorised!(
                kernel,
                encode_all::<Bf16>,
                (plan: &Plan, numbers: &[[u8; 2]], sink_ref: &mut Sink<'_>) -> Option<()>
            ),
            Dtype::Fp16 => vectorised!(
                kernel,
                encode_all::<Fp16>,
                (plan: &Plan, numbers: &[[u8; 2]], sink_ref: &mut Sink<'_>) -> Option<()>
            ),
        }?;
        Some(sink.written())
    }

    fn decode(&self, kernel: Kernel, source: &mut Source<'_>, out: &mut [u8]) -> Result<()> {
        let (plan, numbers) = (self, out.as_chunks_mut().0);
        match self.dtype {
            Dtype::Bf16 => vectorised!(
                kernel,
                decode_all::<Bf16>,
                (plan: &Plan, source: &mut Source<'_>, numbers: &mut [[u8; 2]]) -> Result<()>
            ),
            Dtype::Fp16 => vectorised!(
                kernel,
                decode_all::<Fp16>,
                (plan: &Plan, source: &mut Source<'_>, numbers: &mut [[u8; 2]]) -> Result<()>
            ),
        }
    }
}

#[inline(always)]
fn encode_all<N: number::Number>(
    plan: &Plan,
    numbers: &[[u8; 2]],
    sink: &mut Sink<'_>,
) -> Option<()> {
    let mut row = Row::new(plan.channels);
    let mut rest = numbers;
    for _ in 0..plan.layers {
        if plan.keys {
            let (matrix, behind) = rest.split_at_checked(plan.tokens * plan.channels)?;
            for rows in matrix.chunks(plan.key_group * plan.channels) {
                let out = sink.take(plan.key_bytes(rows.len() / plan.channels))?;
                matrix::encode_keys::<N>(plan.bits, plan.channels, rows, &mut row, out)?;
            }
            rest = behind;
        }
        if plan.values {
            let (matrix, behind) = rest.split_at_checked(plan.tokens * plan.channels)?;
            for numbers in matrix.chunks_exact(plan.channels) {
                let out = sink.take(plan.value_bytes())?;
                matrix::encode_values::<N>(plan.bits, plan.value_group, numbers, &mut row, out)?;
            }
            rest = behind;
        }
    }
    Some(())
}

#[inline(always)]
fn decode_all<N: number::Number>(
    plan: &Plan,
    source: &mut Source<'_>,
    numbers: &mut [[u8; 2]],
) -> Result<()> {
    let short = || damaged("a matrix is too short");
    let mut row = Row::new(plan.channels);
    for matrices in numbers.chunks_mut(numbers_a_layer(plan)) {
        let mut rest = matrices;
        if plan.keys {
            let (matrix, behind) =
                rest.split_at_mut_checked(plan.tokens * plan.channels).ok_or_else(short)?;
            for rows in matrix.chunks_mut(plan.key_group * plan.channels) {
                let encoded = source.take(plan.key_bytes(rows.len() / plan.channels))?;
                matrix::decode_keys::<N>(plan.bits, plan.channels, encoded, &mut row, rows)
                    .ok_or_else(short)?;
            }
            rest = behind;
        }
        if plan.values {
            for numbers in rest.chunks_exact_mut(plan.channels) {
                let encoded = source.take(plan.value_bytes())?;
                matrix::decode_values::<N>(plan.bits, plan.value_group, encoded, &mut row, numbers)
                    .ok_or_else(short)?;
            }
        }
    }
    Ok(())
}

fn numbers_a_layer(plan: &Plan) -> usize {
    (usize::from(plan.keys) + usize::from(plan.values)) * plan.tokens * plan.channels
}
