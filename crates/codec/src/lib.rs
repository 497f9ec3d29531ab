//! # ritornello-codec
//!
//! Encodes the numbers of a slice in fewer bytes. [`Codec::encode`] turns a slice into a frame,
//! [`decode`] turns a frame back into a slice. A frame contains all that decoding needs except the
//! number of the codec and the length of the frame, which the run header holds. The format of
//! frames is specified in `docs/codecs.md`.
//!
//! **Promises.** `split` and `zstd` restore every bit of any slice. A frame is never longer than
//! the slice: if a codec would not make it shorter, the slice is stored raw, and the run header
//! must record [`Codec::Raw`]. For any frame, [`decode`] never panics, and accesses no memory of
//! the caller except the frame and the output. Buffers of `decode` take at most ten times the
//! length of the slice, in addition to one Zstandard context per thread. Damage that `decode`
//! detects is a `Miss`; the slice's checksum detects other damage. All kernels write the same
//! frames.
//!
//! **Must not know** pages, the location of frames, or the reason why a codec was chosen.

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

/// How a slice is encoded. Run headers record the codec's number, which is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// Raw bytes.
    Raw = 0,
    /// Lossless: frequent exponents get codes of 3 or 4 bits (bfloat16), or of 3 bits (float16).
    Split = 1,
    /// Lossless: Zstandard, level 1, over two planes of bytes. Smaller and slower than `split`.
    Zstd = 2,
    /// Lossy: 8 bits per number, scaled in groups: 64 tokens of a channel of keys, 128 channels of
    /// a token of values.
    Int8 = 3,
    /// Lossy: 4 bits per number, scaled in groups of 32 tokens (keys) or 32 channels (values), as
    /// in KIVI (<https://arxiv.org/abs/2402.02750>).
    Int4 = 4,
}

impl Codec {
    /// All codecs, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Raw, Self::Split, Self::Zstd, Self::Int8, Self::Int4];

    /// The codec whose [`Codec::word`] is `word`; `None` if no codec has this name.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.word() == word)
    }

    /// The name that users type.
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

    /// The number by which run headers name the codec.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The codec with the number `number` in run headers; `None` if this build knows no such codec.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.number() == number)
    }

    /// Whether decoding restores every bit.
    #[must_use]
    pub const fn is_lossless(self) -> bool {
        matches!(self, Self::Raw | Self::Split | Self::Zstd)
    }

    /// Maximum length of the encoding of `bytes` bytes.
    #[must_use]
    pub fn bound(self, _shape: &SliceShape, bytes: usize) -> usize {
        bytes
    }

    /// Encodes `input` into the beginning of `out`, which must have at least [`Codec::bound`]
    /// bytes. Returns the codec used and the number of bytes written. The codec used is `Raw`:
    /// * if `self` would not make the slice shorter;
    /// * if `self` is `Split` or `Zstd`, and the length of the slice is odd;
    /// * if `self` is `Zstd`, and there is no memory for a Zstandard context;
    /// * if `self` is lossy, and a number, or the difference of the largest and the smallest number
    ///   of a group, is not finite.
    ///
    /// # Errors
    /// `Invalid` if `out` is too short, or if `input` is 4 GiB or longer. With a lossy codec,
    /// `Invalid` also if `shape` does not tell which numbers are keys and which are values, or if
    /// the length that `shape` describes is zero or differs from the length of `input`.
    pub fn encode(self, shape: &SliceShape, input: &[u8], out: &mut [u8]) -> Result<(Self, usize)> {
        self.encode_with(Kernel::best(), shape, input, out)
    }

    /// [`Codec::encode`] with a given kernel. All kernels return the same result.
    ///
    /// # Errors
    /// `Invalid` under the same conditions as in [`Codec::encode`].
    pub fn encode_with(
        self,
        kernel: Kernel,
        shape: &SliceShape,
        input: &[u8],
        out: &mut [u8],
    ) -> Result<(Self, usize)> {
        let room = out.len();
        let out = out.get_mut(..input.len()).ok_or_else(|| {
            Error::invalid("the output is shorter than the slice: pass a longer output")
                .with("room", room)
                .with("slice", input.len())
        })?;
        if u32::try_from(input.len()).is_err() {
            return Err(Error::invalid(
                "a slice must be shorter than 4 GiB: use more slices per page",
            )
            .with("slice", input.len()));
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

/// Whether this build knows the codec and the version of a frame. A supported frame for which
/// [`decode`] returns `Miss` is damaged; a frame that is not supported may have been written by a
/// newer build.
#[must_use]
pub fn is_supported(codec: u8, encoded: &[u8]) -> bool {
    match Codec::from_number(codec) {
        Some(Codec::Raw) => true,
        Some(_) => encoded.first().is_none_or(|version| *version == frame::VERSION),
        None => false,
    }
}

/// Decodes a frame of the codec with this number into `out`, which must be as long as the slice.
/// All of `out` is written.
///
/// # Errors
/// `Miss` if this build does not know the codec or the frame's version, if the frame is damaged, or
/// if its slice is not as long as `out`; `Retry` if there is no memory for a Zstandard context. The
/// contents of `out` are then unspecified.
pub fn decode(codec: u8, encoded: &[u8], out: &mut [u8]) -> Result<()> {
    decode_with(Kernel::best(), codec, encoded, out)
}

/// [`decode`] with a given kernel. All kernels return the same result.
///
/// # Errors
/// `Miss` and `Retry` under the same conditions as in [`decode`].
pub fn decode_with(kernel: Kernel, codec: u8, encoded: &[u8], out: &mut [u8]) -> Result<()> {
    match Codec::from_number(codec) {
        Some(Codec::Raw) if encoded.len() == out.len() => {
            out.copy_from_slice(encoded);
            Ok(())
        }
        Some(Codec::Raw) => Err(frame::damaged("the raw slice is not as long as the output")),
        Some(Codec::Split) => split::decode(kernel, encoded, out),
        Some(Codec::Zstd) => planes::decode(encoded, out),
        Some(Codec::Int8) => quant::decode(kernel, Bits::Eight, encoded, out),
        Some(Codec::Int4) => quant::decode(kernel, Bits::Four, encoded, out),
        None => Err(Error::miss(
            "an encoded slice has an unknown codec: upgrade Ritornello, or compute the page again",
        )
        .with("codec", codec)),
    }
}
