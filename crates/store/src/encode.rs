//! How the pages of a scope are encoded: the division of a page into slices, and the contents of a
//! slice.

use ritornello_codec::{Codec, Dtype, SliceKind, SliceShape, decode, is_supported};
use ritornello_format::{Error, Result, Scope, UNIT};
use ritornello_volume::transfer::{MissReason, Pack, Unpack};

/// Minimum length of a slice, unless its page is shorter. Shorter slices compress equally well, but
/// each slice takes space in the run header. Longer slices would not stay in the processor's cache
/// between two passes of a codec.
const SLICE_BYTES_MIN: u64 = 128 << 10;

/// Encodes the pages of one scope.
pub(crate) struct Encoder {
    codec: Codec,
    shape: SliceShape,
    slices: u16,
}

/// The pairs of a key matrix and a value matrix in a page.
struct Pairs {
    count: u32,
    tokens: u32,
    channels: u32,
}

/// Maximum slices of a page in a scope with a codec: a run header has space for the slices of at
/// least two pages.
const SLICES_MAX: u64 = 512;
/// Maximum slices of an unencoded page. With more slices a run header would hold fewer than 64
/// pages with keys of 32 bytes, and a long put would become several runs.
const RAW_SLICES_MAX: u64 = 16;

/// Returns the number of slices of an unencoded page. A slice has at least [`SLICE_BYTES_MIN`]
/// bytes, unless the page is shorter. If any number of slices from half of the permitted maximum up
/// to this maximum gives slices of whole units, returns the highest such number, so that direct I/O
/// can read each slice into the caller's memory; otherwise returns the maximum.
pub(crate) fn raw_slices(page_bytes: u64) -> u16 {
    let most = (page_bytes / SLICE_BYTES_MIN).clamp(1, RAW_SLICES_MAX);
    let whole = (most.div_ceil(2)..=most).rev().find(|n| page_bytes.is_multiple_of(n * UNIT));
    u16::try_from(whole.unwrap_or(most)).unwrap_or(1)
}

impl Encoder {
    /// Returns the encoder of a scope, or `None` if its pages are stored unencoded: because raw was
    /// chosen, the dtype is unknown, or the owner is a newer version with a codec that this version
    /// lacks.
    ///
    /// # Errors
    /// `Invalid` if a lossy codec was chosen for numbers of unknown dtype or layout.
    pub(crate) fn of(scope: &Scope, codec: u8, page_bytes: u64) -> Result<Option<Self>> {
        let Some(codec) = Codec::from_number(codec).filter(|codec| *codec != Codec::Raw) else {
            return Ok(None);
        };
        let dtype = Dtype::parse(&scope.dtype);
        let pairs = Pairs::of(scope, page_bytes).filter(|_| dtype.is_some());
        if !codec.is_lossless() && pairs.is_none() {
            return Err(unsuited(codec, scope));
        }
        let Some(dtype) = dtype else { return Ok(None) };
        let most = (page_bytes / SLICE_BYTES_MIN).min(SLICES_MAX);
        let (slices, kind) = match pairs {
            Some(Pairs { count, tokens, channels }) => {
                let divides = |n: &u32| count.is_multiple_of(*n);
                let most = u32::try_from(most).unwrap_or(u32::MAX).clamp(1, count);
                let slices = (1..=most).rev().find(divides).unwrap_or(1);
                let layers = count / slices;
                (slices, SliceKind::KeysValues { tokens, channels, layers })
            }
            None => {
                let fits = |n: u64| n <= most && page_bytes.is_multiple_of(2 * n);
                let doublings = (0..16).take_while(|power| fits(2 << power)).count();
                (1 << doublings, SliceKind::Opaque)
            }
        };
        let slices = u16::try_from(slices).unwrap_or(1);
        Ok(Some(Self { codec, shape: SliceShape { dtype, kind }, slices }))
    }

    pub(crate) fn slices(&self) -> u16 {
        self.slices
    }
}

/// The error for a codec that cannot encode the numbers of a scope.
pub(crate) fn unsuited(codec: Codec, scope: &Scope) -> Error {
    Error::invalid(
        "a lossy codec must know which numbers are keys and which values: the scope needs the dtype \
         bfloat16 or float16 and a known layout; use split, zstd or raw for other scopes",
    )
    .with("codec", codec.word())
    .with("dtype", format!("{:?}", scope.dtype))
    .with("layout", format!("{:?}", scope.layout))
}

/// Whether a codec can encode the numbers of a scope.
pub(crate) fn suits(codec: Codec, scope: &Scope) -> bool {
    let page_bytes = scope.resolved_page_bytes().unwrap_or(0);
    codec.is_lossless()
        || Dtype::parse(&scope.dtype).is_some() && Pairs::of(scope, page_bytes).is_some()
}

impl Pairs {
    /// The pairs of a page of two-byte numbers, if the layout is known: see [`Scope::layout`].
    fn of(scope: &Scope, page_bytes: u64) -> Option<Self> {
        let layers = scope.layers.1.checked_sub(scope.layers.0)?;
        let heads = scope.kv_heads.1.checked_sub(scope.kv_heads.0)?;
        let (count, channels) = match scope.layout.as_str() {
            "page_first" | "layer_first" => (Some(layers), heads.checked_mul(scope.head_dim)?),
            "page_head" => (layers.checked_mul(heads), scope.head_dim),
            _ => return None,
        };
        let pairs = Self { count: count?, tokens: scope.page_tokens, channels };
        let bytes = [pairs.count, pairs.tokens, pairs.channels]
            .iter()
            .try_fold(4, |bytes: u64, factor| bytes.checked_mul(u64::from(*factor)))?;
        (bytes == page_bytes && bytes > 0).then_some(pairs)
    }
}

impl Pack for Encoder {
    fn pack(&self, slice: &[u8], out: &mut [u8]) -> Option<(u8, usize)> {
        let (codec, bytes) = self.codec.encode(&self.shape, slice, out).ok()?;
        Some((codec.number(), bytes))
    }
}

/// Decodes every codec that this version knows.
pub(crate) struct Decoder;

impl Unpack for Decoder {
    fn knows(&self, codec: u8) -> bool {
        Codec::from_number(codec).is_some()
    }
    fn unpack(
        &self,
        codec: u8,
        encoded: &[u8],
        out: &mut [u8],
    ) -> std::result::Result<(), MissReason> {
        decode(codec, encoded, out).map_err(|_| {
            if is_supported(codec, encoded) { MissReason::Frame } else { MissReason::Codec }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::{KEY_BYTES_MAX, RunHeader};

    fn scope(layout: &str, layers: u32, heads: u32, page_bytes: Option<u64>) -> Scope {
        Scope {
            dtype: "bfloat16".into(),
            page_tokens: 16,
            layers: (0, layers),
            kv_heads: (0, heads),
            head_dim: 128,
            layout: layout.into(),
            page_bytes,
            ..Scope::opaque("encoded", 1, true)
        }
    }

    fn slices(scope: &Scope) -> u16 {
        let bytes = scope.resolved_page_bytes().unwrap();
        Encoder::of(scope, Codec::Split.number(), bytes).unwrap().unwrap().slices()
    }

    #[test]
    fn number_of_slices_follows_length_and_layout() {
        // A layer is 64 KiB: 2 matrices of 16 tokens, 8 heads, and 128 numbers of 2 bytes.
        assert_eq!(slices(&scope("page_first", 32, 8, None)), 16);
        assert_eq!(slices(&scope("layer_first", 30, 8, None)), 15);
        assert_eq!(
            slices(&scope("page_first", 61, 8, None)),
            1,
            "61 is prime, and a slice of one layer would be shorter than 128 KiB"
        );
        assert_eq!(slices(&scope("page_first", 61, 64, None)), 61);
        assert_eq!(slices(&scope("page_head", 32, 8, None)), 16);
        assert_eq!(slices(&scope("page_first", 2, 1, None)), 1);
        assert_eq!(slices(&scope("engine's own", 1, 1, Some(8 << 20))), 64);
        assert_eq!(slices(&scope("engine's own", 1, 1, Some(1_000_002))), 1);
    }

    #[test]
    fn raw_slices_are_whole_units_where_possible() {
        let kib = |n: u64| raw_slices(n << 10);
        assert_eq!([4, 128, 255, 256, 2048].map(kib), [1, 1, 1, 2, 16]);
        assert_eq!(kib(61 * 72), 9, "each slice has 122 units");
        assert_eq!(raw_slices(300_001), 2);
        assert_eq!(raw_slices(ritornello_format::PAGE_BYTES_MAX), 16);
        let bytes = ritornello_format::PAGE_BYTES_MAX;
        let heads = Scope { page_tokens: 128, ..scope("page_head", 80, 64, None) };
        for layout in [scope("engine's own", 1, 1, Some(bytes)), heads] {
            let pages = RunHeader::pages_that_fit([KEY_BYTES_MAX], slices(&layout));
            assert_eq!(pages, 1, "the header has space for a page of any layout");
        }
        let of_32_bytes = std::iter::repeat_n(32, 100);
        assert!(ritornello_format::RunHeader::pages_that_fit(of_32_bytes, 16) >= 64);
    }

    #[test]
    fn codec_unsuited_to_a_scope_stores_raw_or_is_refused() {
        let of = |scope: &Scope, codec: Codec| Encoder::of(scope, codec.number(), 4096);
        let opaque = Scope::opaque("bytes", 4096, true);
        let layout = scope("engine's own", 1, 1, Some(4096));
        for codec in [Codec::Raw, Codec::Split, Codec::Zstd] {
            assert!(of(&opaque, codec).unwrap().is_none());
        }
        assert!(of(&layout, Codec::Zstd).unwrap().is_some());
        for scope in [&opaque, &layout] {
            for codec in [Codec::Int8, Codec::Int4] {
                let error = of(scope, codec).map(drop).unwrap_err();
                assert!(error.to_string().contains("split"), "{error}");
                assert!(!suits(codec, scope));
            }
        }
        assert!(
            Encoder::of(&layout, 200, 4096).unwrap().is_none(),
            "pages with an unknown codec are stored raw"
        );
    }
}
