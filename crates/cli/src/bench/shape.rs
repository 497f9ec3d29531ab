//! The pages of a model, and the number of pages per call.

use crate::args::{ShapeName, StoreArgs};
use crate::exit::Failure;
use ritornello_codec::{Codec, Dtype};
use ritornello_format::{Scope, UNIT, units_of};

/// Tokens of a sequence, within the limits below.
const SEQUENCE_TOKENS: u64 = 4096;
/// Maximum pages per sequence.
const SEQUENCE_PAGES_MAX: u64 = 256;
/// Maximum bytes per sequence.
const SEQUENCE_BYTES_MAX: u64 = 512 << 20;

/// Pages and sequences of one measurement.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Scope of the pages.
    pub scope: Scope,
    /// Codec of the store.
    pub codec: Codec,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Pages per sequence: of one put, and of one get.
    pub sequence_pages: u32,
    /// Number of sequences in the total.
    pub sequences: u32,
}

impl Shape {
    /// Returns the shape that the arguments ask for.
    ///
    /// # Errors
    /// `Unusable` for a shape without a valid page.
    pub fn from_args(args: &StoreArgs) -> Result<Self, Failure> {
        let scope = scope(args)?;
        let page_bytes = scope.resolved_page_bytes()?;
        let by_tokens = (SEQUENCE_TOKENS / u64::from(args.page_tokens)).max(8);
        let by_bytes = (SEQUENCE_BYTES_MAX / page_bytes).max(1);
        // A small total still makes two sequences, so that there is more than one call.
        let by_total = (args.total / page_bytes / 2).max(1);
        let pages = by_tokens.min(by_bytes).min(SEQUENCE_PAGES_MAX).min(by_total);
        let sequences = args.total.div_ceil(pages * page_bytes).max(2);
        let fits = u32::try_from(sequences).ok().filter(|_| args.total >= page_bytes);
        let sequences = fits.ok_or_else(|| {
            Failure::unusable(
                "the total is less than a page, or exceeds the largest number",
                "--total 2GiB",
            )
        })?;
        // At most 256.
        let codec = args.codec;
        Ok(Self { scope, codec, page_bytes, sequence_pages: pages as u32, sequences })
    }

    /// Returns whether pages hold bfloat16 numbers, which codecs can shorten.
    #[must_use]
    pub fn is_bfloat16(&self) -> bool {
        Dtype::parse(&self.scope.dtype) == Some(Dtype::Bf16)
    }

    /// Returns the bytes of all sequences.
    #[must_use]
    pub fn total(&self) -> u64 {
        u64::from(self.sequences) * u64::from(self.sequence_pages) * self.page_bytes
    }

    /// Returns the bytes from one page to the next in memory: whole units, so that all are aligned.
    #[must_use]
    pub fn stride(&self) -> usize {
        (units_of(self.page_bytes) * UNIT) as usize
    }

    /// Returns the bytes of memory of a sequence.
    #[must_use]
    pub fn sequence_bytes(&self) -> usize {
        self.stride() * self.sequence_pages as usize
    }
}

fn scope(args: &StoreArgs) -> Result<Scope, Failure> {
    let custom = args.shape == ShapeName::Custom;
    let given = args.layers.is_some()
        || args.kv_heads.is_some()
        || args.head_dim.is_some()
        || args.dtype.is_some()
        || args.page_bytes.is_some();
    if given && !custom {
        return Err(Failure::unusable(
            "the layers, heads, dtype and page bytes belong to a custom shape",
            "--shape custom, or leave them out",
        ));
    }
    let dtype = args.dtype.clone().unwrap_or_else(|| "bfloat16".to_owned());
    let (name, layers, heads, dim) = match args.shape {
        ShapeName::Llama3 => ("llama3-8b", 32, 8, 128),
        ShapeName::Qwen25 => ("qwen2.5-0.5b", 24, 2, 64),
        ShapeName::Custom => {
            if let Some(bytes) = args.page_bytes {
                return Ok(Scope::opaque("ritornello bench", bytes, true));
            }
            let (Some(layers), Some(heads), Some(dim)) =
                (args.layers, args.kv_heads, args.head_dim)
            else {
                return Err(Failure::unusable(
                    "a custom shape needs its dimensions",
                    "--layers 32 --kv-heads 8 --head-dim 128, or --page-bytes 8MiB",
                ));
            };
            ("custom", layers, heads, dim)
        }
    };
    Ok(Scope {
        dtype,
        kv_scale: "none".to_owned(),
        page_tokens: args.page_tokens,
        layers: (0, layers),
        kv_heads: (0, heads),
        head_dim: dim,
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque(&format!("ritornello bench {name}"), 1, true)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{BenchCommand, Cli, Command};
    use clap::Parser;

    fn shape(text: &str) -> Result<Shape, Failure> {
        let words = "ritornello bench store ".to_owned() + text;
        match Cli::try_parse_from(words.split_whitespace()).unwrap().command {
            Command::Bench(bench) => match bench.what {
                BenchCommand::Store(args) => Shape::from_args(&args),
                _ => unreachable!(),
            },
            _ => unreachable!(),
        }
    }

    #[test]
    fn known_shapes_have_documented_sizes() {
        let llama = shape("").unwrap();
        assert_eq!((llama.page_bytes, llama.sequence_pages, llama.sequences), (8 << 20, 64, 4));
        assert_eq!(llama.total(), 2 << 30);
        let qwen = shape("--shape qwen2.5-0.5b --page-tokens 16").unwrap();
        assert_eq!((qwen.page_bytes, qwen.sequence_pages), (192 << 10, 256));
        assert!(qwen.total() >= 2 << 30 && qwen.total() < (2 << 30) + (48 << 20));
        let long = shape("--page-tokens 256 --total 64MiB").unwrap();
        assert_eq!((long.page_bytes, long.sequence_pages, long.sequences), (32 << 20, 1, 2));
    }

    #[test]
    fn invalid_shapes_are_refused() {
        for bad in
            ["--shape custom", "--layers 3", "--total 1MiB", "--shape custom --page-bytes 1GiB"]
        {
            assert_eq!(shape(bad).unwrap_err().status, crate::exit::Status::Unusable, "{bad}");
        }
        let odd = shape("--shape custom --page-bytes 5000 --total 1MiB").unwrap();
        assert_eq!((odd.page_bytes, odd.stride()), (5000, 8192));
    }
}
