//! The meaning and the layout of the numbers in a slice.

/// The format of a number. All formats have two bytes, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16: sign, 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE 754 binary16: sign, 5 bits of exponent, 10 of mantissa.
    Fp16,
}

impl Dtype {
    /// Parses the name of a number format, as the field `dtype` of a scope has it; `None` for
    /// formats that no codec supports.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        match word.strip_prefix("torch.").unwrap_or(word) {
            "bfloat16" | "bf16" => Some(Self::Bf16),
            "float16" | "fp16" | "half" => Some(Self::Fp16),
            _ => None,
        }
    }
}

/// The properties of a slice that codecs need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SliceShape {
    /// Format of the numbers.
    pub dtype: Dtype,
    /// Meaning of the numbers.
    pub kind: SliceKind,
}

/// The meaning of the numbers in a slice. A matrix of `tokens` x `channels` is stored token by
/// token; `channels` are KV heads times numbers per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SliceKind {
    /// The meaning is unknown: only lossless codecs can encode the slice.
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
    /// For each layer a matrix of keys, then one of values.
    KeysValues {
        /// Rows of each matrix.
        tokens: u32,
        /// Columns of each matrix.
        channels: u32,
        /// Pairs of matrices.
        layers: u32,
    },
}
