//! `int8` and `int4`: numbers quantised in groups. A group of keys is in one channel, a group of
//! values in one token, so that a channel of keys with outliers shares no group with other
//! channels.

mod matrix;
mod number;

pub use matrix::Bits;

use crate::frame::{FrameReader, FrameWriter, damaged};
use crate::kernel::{Kernel, vectorised};
use crate::{Dtype, SliceKind, SliceShape};
use matrix::{Row, SCALE_BYTES};
use number::{Bf16, Fp16};
use ritornello_format::{Error, Result};

/// The matrices of a slice, and how their numbers are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QuantLayout {
    bits: Bits,
    dtype: Dtype,
    keys: bool,
    values: bool,
    /// Tokens per group of a channel of keys.
    key_group: usize,
    /// Channels per group of a token of values.
    value_group: usize,
    tokens: usize,
    channels: usize,
    layers: usize,
}

/// Encodes into fewer bytes than `input` has, and fewer than `out` has; `None` if that is
/// impossible, or if a number, or the difference of the largest and the smallest number of a group,
/// is not finite.
///
/// # Errors
/// `Invalid` if the shape does not distinguish keys from values, or if the length that it describes
/// is zero or differs from the length of `input`.
pub fn encode(
    kernel: Kernel,
    bits: Bits,
    shape: &SliceShape,
    input: &[u8],
    out: &mut [u8],
) -> Result<Option<usize>> {
    let layout = QuantLayout::new(bits, shape)?;
    if layout.slice_bytes() != Some(input.len() as u64) {
        return Err(Error::invalid("a slice is not as long as its shape says: correct the shape")
            .with("slice", input.len())
            .with("shape", format!("{:?}", shape.kind)));
    }
    Ok(layout.encode(kernel, input, out))
}

/// Decodes what [`encode`] wrote.
pub fn decode(kernel: Kernel, bits: Bits, frame: &[u8], out: &mut [u8]) -> Result<()> {
    let (mut reader, dtype) = FrameReader::open(frame, out.len())?;
    let layout = QuantLayout::read(bits, dtype, &mut reader)?;
    if layout.slice_bytes() != Some(out.len() as u64) {
        return Err(damaged("the slice is not as long as its shape says"));
    }
    layout.decode(kernel, &mut reader, out)?;
    reader.close()
}

impl QuantLayout {
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

    /// Reads the layout. The fields are the matrices (1 for keys, 2 for values, 3 for both), a zero
    /// byte, tokens per group, channels per group, tokens, channels, and layers.
    fn read(bits: Bits, dtype: Dtype, reader: &mut FrameReader<'_>) -> Result<Self> {
        let (which, zero) = (reader.u8()?, reader.u8()?);
        let layout = Self {
            bits,
            dtype,
            keys: which & 1 != 0,
            values: which & 2 != 0,
            key_group: reader.u16()?,
            value_group: reader.u16()?,
            tokens: reader.u32()?,
            channels: reader.u32()?,
            layers: reader.u32()?,
        };
        if !(1..=3).contains(&which)
            || zero != 0
            || layout.key_group == 0
            || layout.value_group == 0
        {
            return Err(damaged("the layout of a quantised slice is out of range"));
        }
        Ok(layout)
    }

    fn write(&self, writer: &mut FrameWriter<'_>) -> Option<()> {
        let which = u8::from(self.keys) | u8::from(self.values) << 1;
        writer.take(2)?.copy_from_slice(&[which, 0]);
        writer.take(2)?.copy_from_slice(&(self.key_group as u16).to_le_bytes());
        writer.take(2)?.copy_from_slice(&(self.value_group as u16).to_le_bytes());
        for number in [self.tokens, self.channels, self.layers] {
            writer.take(4)?.copy_from_slice(&(number as u32).to_le_bytes());
        }
        Some(())
    }

    /// Length of the slice in bytes; `None` if it is zero or overflows.
    fn slice_bytes(&self) -> Option<u64> {
        let matrices = u64::from(self.keys) + u64::from(self.values);
        [self.tokens, self.channels, self.layers]
            .iter()
            .try_fold(2 * matrices, |bytes, &factor| bytes.checked_mul(factor as u64))
            .filter(|&bytes| bytes > 0)
    }

    /// Encoded bytes of `tokens` rows of keys that share their groups.
    fn key_bytes(&self, tokens: usize) -> usize {
        self.channels * SCALE_BYTES + tokens * self.bits.row_bytes(self.channels)
    }

    /// Encoded bytes of a row of values.
    fn value_bytes(&self) -> usize {
        self.channels.div_ceil(self.value_group) * SCALE_BYTES + self.bits.row_bytes(self.channels)
    }

    fn encode(&self, kernel: Kernel, input: &[u8], out: &mut [u8]) -> Option<usize> {
        let shorter = input.len().min(out.len()).checked_sub(1)?;
        let mut writer = FrameWriter::open(&mut out[..shorter], self.dtype, input.len())?;
        self.write(&mut writer)?;
        let (layout, sink_ref) = (self, &mut writer);
        let numbers = input.as_chunks().0;
        match self.dtype {
            Dtype::Bf16 => vectorised!(
                kernel,
                encode_all::<Bf16>,
                (layout: &QuantLayout, numbers: &[[u8; 2]], sink_ref: &mut FrameWriter<'_>) -> Option<()>
            ),
            Dtype::Fp16 => vectorised!(
                kernel,
                encode_all::<Fp16>,
                (layout: &QuantLayout, numbers: &[[u8; 2]], sink_ref: &mut FrameWriter<'_>) -> Option<()>
            ),
        }?;
        Some(writer.written())
    }

    fn decode(&self, kernel: Kernel, reader: &mut FrameReader<'_>, out: &mut [u8]) -> Result<()> {
        let (layout, numbers) = (self, out.as_chunks_mut().0);
        match self.dtype {
            Dtype::Bf16 => vectorised!(
                kernel,
                decode_all::<Bf16>,
                (layout: &QuantLayout, reader: &mut FrameReader<'_>, numbers: &mut [[u8; 2]]) -> Result<()>
            ),
            Dtype::Fp16 => vectorised!(
                kernel,
                decode_all::<Fp16>,
                (layout: &QuantLayout, reader: &mut FrameReader<'_>, numbers: &mut [[u8; 2]]) -> Result<()>
            ),
        }
    }
}

#[inline(always)]
fn encode_all<N: number::Number>(
    layout: &QuantLayout,
    numbers: &[[u8; 2]],
    writer: &mut FrameWriter<'_>,
) -> Option<()> {
    let mut row = Row::new(layout.channels);
    let mut rest = numbers;
    for _ in 0..layout.layers {
        if layout.keys {
            let (matrix, behind) = rest.split_at_checked(layout.tokens * layout.channels)?;
            for rows in matrix.chunks(layout.key_group * layout.channels) {
                let out = writer.take(layout.key_bytes(rows.len() / layout.channels))?;
                matrix::encode_keys::<N>(layout.bits, layout.channels, rows, &mut row, out)?;
            }
            rest = behind;
        }
        if layout.values {
            let (matrix, behind) = rest.split_at_checked(layout.tokens * layout.channels)?;
            for numbers in matrix.chunks_exact(layout.channels) {
                let out = writer.take(layout.value_bytes())?;
                matrix::encode_values::<N>(
                    layout.bits,
                    layout.value_group,
                    numbers,
                    &mut row,
                    out,
                )?;
            }
            rest = behind;
        }
    }
    Some(())
}

#[inline(always)]
fn decode_all<N: number::Number>(
    layout: &QuantLayout,
    reader: &mut FrameReader<'_>,
    numbers: &mut [[u8; 2]],
) -> Result<()> {
    let short = || damaged("a matrix is too short");
    let mut row = Row::new(layout.channels);
    for matrices in numbers.chunks_mut(numbers_a_layer(layout)) {
        let mut rest = matrices;
        if layout.keys {
            let (matrix, behind) =
                rest.split_at_mut_checked(layout.tokens * layout.channels).ok_or_else(short)?;
            for rows in matrix.chunks_mut(layout.key_group * layout.channels) {
                let encoded = reader.take(layout.key_bytes(rows.len() / layout.channels))?;
                matrix::decode_keys::<N>(layout.bits, layout.channels, encoded, &mut row, rows)
                    .ok_or_else(short)?;
            }
            rest = behind;
        }
        if layout.values {
            for numbers in rest.chunks_exact_mut(layout.channels) {
                let encoded = reader.take(layout.value_bytes())?;
                matrix::decode_values::<N>(
                    layout.bits,
                    layout.value_group,
                    encoded,
                    &mut row,
                    numbers,
                )
                .ok_or_else(short)?;
            }
        }
    }
    Ok(())
}

fn numbers_a_layer(layout: &QuantLayout) -> usize {
    (usize::from(layout.keys) + usize::from(layout.values)) * layout.tokens * layout.channels
}
