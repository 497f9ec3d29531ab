//! The codec `split` stores the exponents of numbers in short codes: neighbouring numbers have few
//! different exponents, while their mantissas are noise. A block of bfloat16 is coded (4-bit codes
//! for 15 frequent exponents) or windowed (each part of the block has 3-bit codes for seven
//! neighbouring exponents). A block of float16 has one window. The sign and the mantissa of each
//! number are stored unchanged. Exponents without a code follow the codes in a list. A block is
//! stored raw if codes would make it longer, or would cover too few of its numbers.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod codebook;
mod fp16;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
mod strip;
mod window;

use crate::Dtype;
use crate::frame::{FrameReader, FrameWriter, damaged};
use crate::kernel::{Instructions, Kernel};
use codebook::{CODES, Codebook};
use ritornello_format::Result;

/// Numbers per block; the last block may be shorter. A block has 128 KiB, so that it stays in the
/// second-level cache from the choice of its codebook to its encoding.
const BLOCK: usize = 1 << 16;
/// Numbers per group. The codes of a group are packed together. With codebook codes the last group
/// of a block may be shorter; with window codes the numbers after the last whole group stay raw.
const GROUP: usize = 64;
/// Kind of a block that is stored raw.
const STORED: u8 = 0;
/// Kind of a bfloat16 block with codebook codes, and of a float16 block with window codes.
const CODED: u8 = 1;
/// Kind of a bfloat16 block with window codes.
const WINDOWED: u8 = 2;

/// Encodes into fewer bytes than `input` has, and fewer than `out` has; `None` if that is
/// impossible, or if the length of `input` is odd.
pub fn encode(kernel: Kernel, dtype: Dtype, input: &[u8], out: &mut [u8]) -> Option<usize> {
    let shorter = input.len().min(out.len()).checked_sub(1)?;
    let mut writer = FrameWriter::open(&mut out[..shorter], dtype, input.len())?;
    if !input.len().is_multiple_of(2) {
        return None;
    }
    for block in input.chunks(2 * BLOCK) {
        let coded = match dtype {
            Dtype::Bf16 => window::encode(kernel, block, writer.rest())
                .or_else(|| encode_block(kernel, block, writer.rest())),
            Dtype::Fp16 => fp16::encode(kernel, block, writer.rest()),
        };
        match coded {
            Some(length) => {
                writer.take(length)?;
            }
            None => {
                writer.take(1)?[0] = STORED;
                writer.take(block.len())?.copy_from_slice(block);
            }
        }
    }
    Some(writer.written())
}

/// Decodes what [`encode`] wrote.
pub fn decode(kernel: Kernel, frame: &[u8], out: &mut [u8]) -> Result<()> {
    let (mut reader, dtype) = FrameReader::open(frame, out.len())?;
    if !out.len().is_multiple_of(2) {
        return Err(damaged("the slice has an odd length, which `split` does not encode"));
    }
    for block in out.chunks_mut(2 * BLOCK) {
        match (reader.u8()?, dtype) {
            (STORED, _) => block.copy_from_slice(reader.take(block.len())?),
            (CODED, Dtype::Bf16) => decode_block(kernel, &mut reader, block)?,
            (WINDOWED, Dtype::Bf16) => window::decode(kernel, &mut reader, block)?,
            (CODED, Dtype::Fp16) => fp16::decode(kernel, &mut reader, block)?,
            _ => return Err(damaged("a block has an unknown kind")),
        }
    }
    reader.close()
}

/// Encodes a block of bfloat16: kind, codebook, number of escapes, plane of mantissas and signs,
/// codes, escapes. `None` if that would be longer than the block or `out`, or if the codebook has
/// codes for at most half of the sampled numbers.
fn encode_block(kernel: Kernel, block: &[u8], out: &mut [u8]) -> Option<usize> {
    const HEAD_BYTES: usize = 1 + CODES + 4;
    let numbers = block.len() / 2;
    let book = Codebook::choose(block)?;
    let most = block.len().min(out.len());
    let (head, rest) = out[..most].split_at_mut_checked(HEAD_BYTES)?;
    let (plane, rest) = rest.split_at_mut_checked(numbers)?;
    let (nibbles, escapes) = rest.split_at_mut_checked(numbers.div_ceil(2))?;
    let escaped = match kernel.0 {
        // SAFETY: a `Kernel` exists only where the processor has its instructions.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { avx2::encode(&book, block, plane, nibbles, escapes) },
        // SAFETY: a `Kernel` exists only where the processor has its instructions.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { avx512::encode(&book, block, plane, nibbles, escapes) },
        // SAFETY: a `Kernel` exists only where the processor has its instructions.
        #[cfg(target_arch = "aarch64")]
        Instructions::Neon => unsafe { neon::encode(&book, block, plane, nibbles, escapes) },
        _ => scalar::encode(&book, block, plane, nibbles, escapes),
    }?;
    head[0] = CODED;
    head[1..=CODES].copy_from_slice(&book.exponents[..CODES]);
    head[1 + CODES..].copy_from_slice(&(escaped as u32).to_le_bytes());
    Some(HEAD_BYTES + numbers + numbers.div_ceil(2) + escaped)
}

fn decode_block(kernel: Kernel, reader: &mut FrameReader<'_>, block: &mut [u8]) -> Result<()> {
    let numbers = block.len() / 2;
    let mut exponents = [0; 16];
    exponents[..CODES].copy_from_slice(reader.take(CODES)?);
    let escaped = reader.u32()?;
    let (plane, nibbles) = (reader.take(numbers)?, reader.take(numbers.div_ceil(2))?);
    let escapes = reader.take(escaped)?;
    match kernel.0 {
        // SAFETY: a `Kernel` exists only where the processor has its instructions.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { avx2::decode(&exponents, plane, nibbles, escapes, block) },
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => {
            // SAFETY: a `Kernel` exists only where the processor has its instructions.
            unsafe { avx512::decode(&exponents, plane, nibbles, escapes, block) }
        }
        // SAFETY: a `Kernel` exists only where the processor has its instructions.
        #[cfg(target_arch = "aarch64")]
        Instructions::Neon => unsafe { neon::decode(&exponents, plane, nibbles, escapes, block) },
        _ => scalar::decode(&exponents, plane, nibbles, escapes, block),
    }
    .ok_or_else(|| damaged("the number of escapes does not match the codes"))
}
