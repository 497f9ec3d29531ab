//! Frames, and their checked reading and writing. A frame is an encoded slice: a head, followed by
//! the codec's data.

use crate::Dtype;
use ritornello_format::{Error, Result};

/// The version of frames that encoding writes, and the only version that decoding accepts.
pub const VERSION: u8 = 1;
/// Length of a frame's head: version, number format, two zero bytes, length of the slice (4 bytes).
pub const HEAD_BYTES: usize = 8;

/// Returns the error for a damaged frame, a `Miss`. `what` says what is wrong with the frame.
pub fn damaged(what: &'static str) -> Error {
    Error::miss("an encoded slice is damaged").with("what", what)
}

/// Writes a frame front to back. [`FrameWriter::open`] and [`FrameWriter::take`] return `None` if
/// the output has too little room left.
pub struct FrameWriter<'a> {
    rest: &'a mut [u8],
    written: usize,
}

impl<'a> FrameWriter<'a> {
    /// Writes the head of a frame for a slice of `slice` bytes. `None` if `slice` does not fit 32
    /// bits, or `out` is too short.
    pub fn open(out: &'a mut [u8], dtype: Dtype, slice: usize) -> Option<Self> {
        let mut writer = Self { rest: out, written: 0 };
        let slice = u32::try_from(slice).ok()?.to_le_bytes();
        let dtype = match dtype {
            Dtype::Bf16 => 0,
            Dtype::Fp16 => 1,
        };
        writer
            .take(HEAD_BYTES)?
            .copy_from_slice(&[VERSION, dtype, 0, 0, slice[0], slice[1], slice[2], slice[3]]);
        Some(writer)
    }

    /// The next `count` bytes, which the caller fills.
    pub fn take(&mut self, count: usize) -> Option<&'a mut [u8]> {
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut_checked(count)?;
        self.rest = rest;
        self.written += count;
        Some(taken)
    }

    /// The part of the output that is not written yet.
    pub fn rest(&mut self) -> &mut [u8] {
        self.rest
    }

    /// Bytes written so far.
    pub fn written(&self) -> usize {
        self.written
    }
}

/// Reads a frame front to back. A read fails with `Miss` if the frame ends too early.
pub struct FrameReader<'a>(&'a [u8]);

impl<'a> FrameReader<'a> {
    /// Reads the head of a frame for a slice of `slice` bytes. `Miss` if the head is damaged, or
    /// names another version or another length of the slice.
    pub fn open(frame: &'a [u8], slice: usize) -> Result<(Self, Dtype)> {
        let mut reader = Self(frame);
        let head = reader.take(HEAD_BYTES)?;
        let dtype = match head[1] {
            0 => Dtype::Bf16,
            1 => Dtype::Fp16,
            _ => return Err(damaged("the head has an unknown number format")),
        };
        if head[0] != VERSION {
            return Err(Error::miss(
                "an encoded slice has an unknown version: upgrade Ritornello, or compute the page \
                 again",
            )
            .with("version", head[0]));
        }
        if head[2..4] != [0, 0] || u32_of(&head[4..8]) != slice {
            return Err(damaged(
                "the length in the head is not the slice's length, or reserved bytes are not zero",
            ));
        }
        Ok((reader, dtype))
    }

    /// The next `count` bytes.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, rest) =
            self.0.split_at_checked(count).ok_or_else(|| damaged("the frame ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// The next byte.
    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    /// The next two bytes as a little-endian number.
    pub fn u16(&mut self) -> Result<usize> {
        Ok(u32_of(self.take(2)?))
    }

    /// The next four bytes as a little-endian number.
    pub fn u32(&mut self) -> Result<usize> {
        Ok(u32_of(self.take(4)?))
    }

    /// Checks that the whole frame was read; `Miss` if bytes are left.
    pub fn close(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(damaged("the frame is longer than its fields")) }
    }
}

fn u32_of(bytes: &[u8]) -> usize {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
}
