//! # ritornello-codec
//!
//! How the numbers of a slice are written down in fewer bytes. [`Codec::encode`] makes a frame out
//! of a slice, [`decode`] makes the slice out of a frame; a frame says all that decoding needs but
//! the codec's number and the slice's length, which the run header keeps. The frames, byte by byte,
//! are in `docs/codecs.md`.
//!
//! **Promises.** `split` and `zstd` give back every bit, whatever it means. A frame is never longer
//! than the slice: where a codec would not make it shorter, the slice is stored as it came, and
//! [`Codec::Raw`] is what the header must record. [`decode`] never panics, never touches memory
//! outside its two slices and allocates no more than ten times the slice, whatever the frame holds;
//! damage that it notices is a `Miss`, and damage that it cannot notice is what the slice's checksum
//! is for. All kernels write the same frames.
//!
//! **May not know** what a page is, where frames lie, or who chose the codec.

mod frame;
mod kernel;
mod planes;
mod quant;
mod shape;
mod split;

pub use kernel::Kernel;
pub use shape::{Dtype, SliceKind, SliceShape};

use quant::Bits;
use ritornello_format::{Error, Result};

/// How a slice is encoded. The number is what a run header records; it is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// As it came.
    Raw = 0,
    /// Lossless: exponents through a codebook of 4 bits (bfloat16) or 3 bits (float16).
    Split = 1,
    /// Lossless: Zstandard, level 1, over two planes of bytes. Smaller and slower than `split`.
    Zstd = 2,
    /// Lossy: 8 bits a number, keys scaled per channel, values per token.
    Int8 = 3,
    /// Lossy: 4 bits a number, scaled in groups of 32 (KIVI, <https://arxiv.org/abs/2402.02750>).
    Int4 = 4,
}

impl Codec {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Raw, Self::Split, Self::Zstd, Self::Int8, Self::Int4];

    /// The codec that a user calls `word`.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.word() == word)
    }

    /// What users call it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Split => "split",
            Self::Zstd => "zstd",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// What run headers call it.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The codec of that number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.number() == number)
    }

    /// Whether decoding gives back every bit.
    #[must_use]
    pub const fn is_lossless(self) -> bool {
        matches!(self, Self::Raw | Self::Split | Self::Zstd)
    }

    /// The most bytes that encoding a slice of `bytes` bytes may take.
    #[must_use]
    pub fn bound(self, _shape: &SliceShape, bytes: usize) -> usize {
        bytes
    }

    /// Encodes `input` into the beginning of `out`, which is at least [`Codec::bound`] long.
    /// Returns the codec that was used (`Raw` where this one would not have been shorter, or where a
    /// lossy one met a number that is not finite) and the number of bytes written.
    ///
    /// # Errors
    /// `Invalid` if `out` is too short, if `input` is longer than 4 GiB, or if a lossy codec is not
    /// told what the numbers mean.
    pub fn encode(self, shape: &SliceShape, input: &[u8], out: &mut [u8]) -> Result<(Self, usize)> {
        self.encode_with(Kernel::best(), shape, input, out)
    }

    /// [`Codec::encode`] through a kernel of the caller's choice. The result is the same.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    pub fn encode_with(
        self,
        kernel: Kernel,
        shape: &SliceShape,
        input: &[u8],
        out: &mut [u8],
    ) -> Result<(Self, usize)> {
        let room = out.len();
        let out = out.get_mut(..input.len()).ok_or_else(|| {
            Error::invalid("an encoded slice needs as much room as the slice: pass more")
                .with("room", room)
                .with("slice", input.len())
        })?;
        if u32::try_from(input.len()).is_err() {
            return Err(Error::invalid("a slice is shorter than 4 GiB").with("slice", input.len()));
        }
        let shorter = match self {
            Self::Raw => None,
            Self::Split => split::encode(kernel, shape.dtype, input, out),
            Self::Zstd => planes::encode(shape.dtype, input, out),
            Self::Int8 => quant::encode(kernel, Bits::Eight, shape, input, out)?,
            Self::Int4 => quant::encode(kernel, Bits::Four, shape, input, out)?,
        };
        if let Some(length) = shorter {
            return Ok((self, length));
        }
        out.copy_from_slice(input);
        Ok((Self::Raw, input.len()))
    }
}

/// Whether a frame is of a codec and a version that this build decodes. One that is and does not
/// decode is damaged; one that is not may be a newer build's.
#[must_use]
pub fn is_supported(codec: u8, encoded: &[u8]) -> bool {
    match Codec::from_number(codec) {
        Some(Codec::Raw) => true,
        Some(_) => encoded.first().is_none_or(|version| *version == frame::VERSION),
        None => false,
    }
}

/// Decodes a slice that [`Codec::encode`] made with the codec of that number, and writes all of
/// `out`, whose length is the slice's.
///
/// # Errors
/// `Miss` if there is no such codec, or if the frame is damaged or of a slice of another length;
/// `out` then holds anything.
pub fn decode(codec: u8, encoded: &[u8], out: &mut [u8]) -> Result<()> {
    decode_with(Kernel::best(), codec, encoded, out)
}

/// [`decode`] through a kernel of the caller's choice. The result is the same.
///
/// # Errors
/// As [`decode`].
pub fn decode_with(kernel: Kernel, codec: u8, encoded: &[u8], out: &mut [u8]) -> Result<()> {
    match Codec::from_number(codec) {
        Some(Codec::Raw) if encoded.len() == out.len() => {
            out.copy_from_slice(encoded);
            Ok(())
        }
        Some(Codec::Raw) => Err(frame::damaged("a raw slice has another length")),
        Some(Codec::Split) => split::decode(kernel, encoded, out),
        Some(Codec::Zstd) => planes::decode(encoded, out),
        Some(Codec::Int8) => quant::decode(kernel, Bits::Eight, encoded, out),
        Some(Codec::Int4) => quant::decode(kernel, Bits::Four, encoded, out),
        None => Err(Error::miss("a codec that this version does not know: upgrade, or recompute")
            .with("codec", codec)),
    }
}
