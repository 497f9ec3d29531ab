//! What the numbers of a slice are and how they lie.

/// The format of a number. All are two bytes long, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16: sign, 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE 754 binary16: sign, 5 bits of exponent, 10 of mantissa.
    Fp16,
}

impl Dtype {
    /// From the word a scope uses; `None` for every format that no codec knows.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        match word.strip_prefix("torch.").unwrap_or(word) {
            "bfloat16" | "bf16" => Some(Self::Bf16),
            "float16" | "fp16" | "half" => Some(Self::Fp16),
            _ => None,
        }
    }
}

/// A slice as a codec sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SliceShape {
    /// The format of its numbers.
    pub dtype: Dtype,
    /// Which number is which.
    pub kind: SliceKind,
}

/// Which number of a slice is which. A matrix of `tokens` x `channels` lies token after token;
/// `channels` are KV heads times numbers a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SliceKind {
    /// Unknown: lossless codecs only.
    Opaque,
    /// One matrix of keys.
    Keys {
        /// Rows.
        tokens: u32,
        /// Columns.
        channels: u32,
    },
    /// One matrix of values.
    Values {
        /// Rows.
        tokens: u32,
        /// Columns.
        channels: u32,
    },
    /// Layer after layer: a matrix of keys, then one of values.
    KeysValues {
        /// Rows of each matrix.
        tokens: u32,
        /// Columns of each matrix.
        channels: u32,
        /// Pairs of matrices.
        layers: u32,
    },
}
