//! `zstd`: rotates each number left by one bit, which puts its exponent first and its sign last.
//! Gathers the upper bytes in one plane and the lower bytes in another, and compresses each plane
//! separately.

use crate::Dtype;
use crate::frame::{FrameReader, FrameWriter, damaged};
use ritornello_format::Result;
use std::cell::RefCell;
use zstd::bulk::{Compressor, Decompressor};

/// Numbers per block; the last block may be shorter. Encoding and decoding have buffers for one
/// block.
const BLOCK: usize = 1 << 18;
const LEVEL: i32 = 1;
/// Kind of a plane that is stored raw.
const STORED: u8 = 0;
/// Kind of a plane that is one Zstandard frame.
const COMPRESSED: u8 = 1;

thread_local! {
    /// Zstandard contexts, one per thread: creating a context takes longer than processing a small
    /// slice.
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Encodes into fewer bytes than `input` has, and fewer than `out` has. `None` if that is
/// impossible, if the length of `input` is odd, or if there is no memory for a Zstandard context.
pub fn encode(dtype: Dtype, input: &[u8], out: &mut [u8]) -> Option<usize> {
    let shorter = input.len().min(out.len()).checked_sub(1)?;
    let mut writer = FrameWriter::open(&mut out[..shorter], dtype, input.len())?;
    if !input.len().is_multiple_of(2) {
        return None;
    }
    COMPRESSOR.with_borrow_mut(|compressor| {
        let compressor = match compressor {
            Some(compressor) => compressor,
            none => none.insert(Compressor::new(LEVEL).ok()?),
        };
        let mut plane = Vec::with_capacity(BLOCK.min(input.len() / 2));
        for block in input.chunks(2 * BLOCK) {
            for shift in [8, 0] {
                plane.clear();
                plane.extend(block.chunks_exact(2).map(|number| {
                    (u16::from_le_bytes([number[0], number[1]]).rotate_left(1) >> shift) as u8
                }));
                compress(compressor, &plane, &mut writer)?;
            }
        }
        Some(writer.written())
    })
}

/// Writes a plane: kind, stored length, bytes.
fn compress(
    compressor: &mut Compressor<'_>,
    plane: &[u8],
    writer: &mut FrameWriter<'_>,
) -> Option<()> {
    const HEAD_BYTES: usize = 1 + 4;
    let room = writer.rest().get_mut(HEAD_BYTES..)?;
    let most = room.len().min(plane.len());
    let (kind, length) = match compressor.compress_to_buffer(plane, &mut room[..most]) {
        Ok(length) => (COMPRESSED, length),
        // The compressed plane does not fit `most` bytes, or Zstandard found no memory: store the
        // plane raw.
        Err(_) => {
            room.get_mut(..plane.len())?.copy_from_slice(plane);
            (STORED, plane.len())
        }
    };
    let head = writer.take(HEAD_BYTES)?;
    head[0] = kind;
    head[1..].copy_from_slice(&(length as u32).to_le_bytes());
    writer.take(length)?;
    Some(())
}

/// Decodes what [`encode`] wrote.
pub fn decode(frame: &[u8], out: &mut [u8]) -> Result<()> {
    let (mut reader, _) = FrameReader::open(frame, out.len())?;
    if !out.len().is_multiple_of(2) {
        return Err(damaged("the slice has an odd length, which cannot be divided into planes"));
    }
    DECOMPRESSOR.with_borrow_mut(|decompressor| {
        let decompressor = match decompressor {
            Some(decompressor) => decompressor,
            none => none.insert(Decompressor::new()?),
        };
        let numbers = BLOCK.min(out.len() / 2);
        let (mut high, mut low) = (vec![0; numbers], vec![0; numbers]);
        for block in out.chunks_mut(2 * BLOCK) {
            let numbers = block.len() / 2;
            decompress(decompressor, &mut reader, &mut high[..numbers])?;
            decompress(decompressor, &mut reader, &mut low[..numbers])?;
            for ((number, &high), &low) in block.chunks_exact_mut(2).zip(&high).zip(&low) {
                let rotated = u16::from(high) << 8 | u16::from(low);
                number.copy_from_slice(&rotated.rotate_right(1).to_le_bytes());
            }
        }
        reader.close()
    })
}

fn decompress(
    decompressor: &mut Decompressor<'_>,
    reader: &mut FrameReader<'_>,
    plane: &mut [u8],
) -> Result<()> {
    let (kind, length) = (reader.u8()?, reader.u32()?);
    let bytes = reader.take(length)?;
    let written = match kind {
        STORED if length == plane.len() => {
            plane.copy_from_slice(bytes);
            length
        }
        COMPRESSED => decompressor
            .decompress_to_buffer(bytes, plane)
            .map_err(|error| damaged("a plane does not decompress").because(error))?,
        _ => return Err(damaged("a plane has an unknown kind or a wrong length")),
    };
    if written == plane.len() { Ok(()) } else { Err(damaged("a plane is too short")) }
}
