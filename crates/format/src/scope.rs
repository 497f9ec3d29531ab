//! Scopes: everything besides tokens that decides whether bytes may be reused.

use crate::wire::{Reader, Writer};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The digest of a scope's identity: the first 16 bytes of the BLAKE3 of its canonical encoding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct ScopeId(pub [u8; 16]);

impl ScopeId {
    /// The seed of the scope's page hashes.
    #[must_use]
    #[inline]
    pub fn seed(&self) -> u64 {
        u128::from_le_bytes(self.0) as u64
    }
}

impl fmt::Display for ScopeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ScopeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The number a store gave to a scope when it was registered. Never reused: a scope that is
/// dropped and comes back gets another slot, which is what makes dropping durable at once.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct ScopeSlot(pub u32);

/// The full description of a scope.
///
/// The fields up to `extra` are its **identity** and make its [`ScopeId`]. `layout`, `page_bytes`
/// and `chained` are **attributes**: stored beside it, and opening the scope with others is an
/// error rather than another scope.
#[derive(Clone, Debug, Eq, Serialize, Deserialize)]
pub struct Scope {
    /// Model: its normalised configuration after overrides, or a name that stands for it.
    pub model: String,
    /// Fingerprint of the weights (file headers, sizes, load format).
    pub weights: Vec<u8>,
    /// Adapter (LoRA) where the block hashes do not carry it.
    pub adapter: String,
    /// Number format of the keys and values.
    pub dtype: String,
    /// How the numbers are scaled.
    pub kv_scale: String,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Layers held, first and one past the last.
    pub layers: (u32, u32),
    /// KV heads held, first and one past the last.
    pub kv_heads: (u32, u32),
    /// Numbers a head.
    pub head_dim: u32,
    /// The engine's block-hash algorithm.
    pub hash_algorithm: String,
    /// The tenant's salt, where the block hashes do not carry it.
    pub salt: Vec<u8>,
    /// Distinguishes weights that changed in place.
    pub epoch: Vec<u8>,
    /// Which pool of a hybrid model.
    pub part: u32,
    /// Anything else that decides (for vLLM on CPUs: the instruction set).
    pub extra: BTreeMap<String, String>,
    /// Which byte ranges of a page are which. Three are known. `page_first` and `layer_first` (they
    /// differ in where an engine keeps a page, not in its bytes): layer after layer, of each the keys,
    /// then the values, token after token. `page_head`: head after head, and of each the same, so that
    /// heads can be told apart. Any other name is the caller's own.
    pub layout: String,
    /// Bytes a page; `None` where the layout is known and they follow from it.
    pub page_bytes: Option<u64>,
    /// Whether a key commits to all keys before it in its sequence.
    pub chained: bool,
}

/// Field by field, as a derived comparison would, but for one thing: empty fields are not handed to
/// `memcmp`. Given an empty string's dangling address, its vector loads fault and are suppressed in
/// microcode, which took 130 ns a field where measured: most of a probe.
impl PartialEq for Scope {
    fn eq(&self, other: &Self) -> bool {
        fn same(a: impl AsRef<[u8]>, b: impl AsRef<[u8]>) -> bool {
            let (a, b) = (a.as_ref(), b.as_ref());
            a.len() == b.len() && (a.is_empty() || a == b)
        }
        // Names every field, so that a new one is not forgotten here.
        let Self {
            model,
            weights,
            adapter,
            dtype,
            kv_scale,
            page_tokens,
            layers,
            kv_heads,
            head_dim,
            hash_algorithm,
            salt,
            epoch,
            part,
            extra,
            layout,
            page_bytes,
            chained,
        } = self;
        let numbers = (*page_tokens, *layers, *kv_heads, *head_dim, *part, *page_bytes, *chained);
        let theirs = (
            other.page_tokens,
            other.layers,
            other.kv_heads,
            other.head_dim,
            other.part,
            other.page_bytes,
            other.chained,
        );
        numbers == theirs
            && same(epoch, &other.epoch)
            && same(model, &other.model)
            && same(weights, &other.weights)
            && same(adapter, &other.adapter)
            && same(dtype, &other.dtype)
            && same(kv_scale, &other.kv_scale)
            && same(hash_algorithm, &other.hash_algorithm)
            && same(salt, &other.salt)
            && same(layout, &other.layout)
            && extra == &other.extra
    }
}

/// Layouts whose page size follows from the shape.
const KNOWN_LAYOUTS: [&str; 3] = ["page_first", "layer_first", "page_head"];
/// The layout of [`Scope::opaque`].
const OPAQUE: &str = "opaque";
/// The largest page, in bytes: a quarter of the largest segment.
pub const PAGE_BYTES_MAX: u64 = 64 << 20;

impl Scope {
    /// A scope for callers that only have bytes: a name, a page size, and whether keys chain.
    #[must_use]
    pub fn opaque(name: &str, page_bytes: u64, chained: bool) -> Self {
        Self {
            model: name.to_owned(),
            weights: Vec::new(),
            adapter: String::new(),
            dtype: String::new(),
            kv_scale: String::new(),
            page_tokens: 0,
            layers: (0, 0),
            kv_heads: (0, 0),
            head_dim: 0,
            hash_algorithm: String::new(),
            salt: Vec::new(),
            epoch: Vec::new(),
            part: 0,
            extra: BTreeMap::new(),
            layout: OPAQUE.to_owned(),
            page_bytes: Some(page_bytes),
            chained,
        }
    }

    /// The digest of the identity.
    #[must_use]
    pub fn id(&self) -> ScopeId {
        let mut writer = Writer::new();
        self.encode_identity(&mut writer);
        let digest = blake3::derive_key("ritornello 2026 scope identity v0", writer.as_slice());
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        ScopeId(id)
    }

    /// Bytes a page: as given, or derived from the shape where the layout is known.
    ///
    /// # Errors
    /// `Invalid` if neither says it, both say it differently, or it is zero or over
    /// [`PAGE_BYTES_MAX`].
    pub fn resolved_page_bytes(&self) -> Result<u64> {
        let derived = self.derived_page_bytes()?;
        let bytes = match (self.page_bytes, derived) {
            (Some(given), Some(derived)) if given != derived => {
                return Err(Error::invalid(
                    "page_bytes disagrees with the shape: leave it out, or correct one of them",
                )
                .with("page_bytes", given)
                .with("derived", derived));
            }
            (Some(bytes), _) | (None, Some(bytes)) => bytes,
            (None, None) => {
                return Err(Error::invalid(
                    "the page size does not follow from this layout and dtype: pass page_bytes",
                )
                .with("layout", &self.layout)
                .with("dtype", &self.dtype));
            }
        };
        if bytes == 0 || bytes > PAGE_BYTES_MAX {
            return Err(Error::invalid(format!("a page is 1 byte to {PAGE_BYTES_MAX} bytes"))
                .with("page_bytes", bytes));
        }
        Ok(bytes)
    }

    fn derived_page_bytes(&self) -> Result<Option<u64>> {
        if self.layout == OPAQUE {
            return Ok(None);
        }
        let ((l0, l1), (h0, h1)) = (self.layers, self.kv_heads);
        if self.page_tokens == 0 || self.head_dim == 0 || l0 >= l1 || h0 >= h1 {
            return Err(Error::invalid(
                "a scope needs page_tokens and head_dim above zero, and non-empty layer and head \
                 ranges; use Scope.opaque(name, page_bytes) where there is no shape",
            )
            .with("layers", format!("{l0}..{l1}"))
            .with("kv_heads", format!("{h0}..{h1}")));
        }
        let item = match self.dtype.as_str() {
            "float32" => 4,
            "bfloat16" | "float16" => 2,
            "int8" | "uint8" | "fp8" | "fp8_e4m3" | "fp8_e5m2" | "float8_e4m3fn"
            | "float8_e5m2" => 1,
            _ => return Ok(None),
        };
        if !KNOWN_LAYOUTS.contains(&self.layout.as_str()) {
            return Ok(None);
        }
        let numbers = [l1 - l0, h1 - h0, self.page_tokens, self.head_dim]
            .iter()
            .try_fold(2 * item, |bytes: u64, &factor| bytes.checked_mul(u64::from(factor)));
        numbers.map(Some).ok_or_else(|| Error::invalid("the page size overflows"))
    }

    /// Whether `other`, of the same identity, may be used for the same pages.
    ///
    /// # Errors
    /// `Invalid`, naming the attribute that differs.
    pub fn check_same(&self, other: &Self) -> Result<()> {
        let (mine, theirs) = (self.resolved_page_bytes()?, other.resolved_page_bytes()?);
        let differs = |what: &'static str, stored: &dyn fmt::Display, given: &dyn fmt::Display| {
            Error::invalid(format!(
                "this scope is stored with another {what}: open it as it was stored, or drop it"
            ))
            .with("stored", stored)
            .with("given", given)
            .with("scope", self.id())
        };
        if mine != theirs {
            return Err(differs("page_bytes", &mine, &theirs));
        }
        if self.layout != other.layout {
            return Err(differs("layout", &self.layout, &other.layout));
        }
        if self.chained != other.chained {
            return Err(differs("chained", &self.chained, &other.chained));
        }
        let normal = |scope: &Self| Self { page_bytes: None, ..scope.clone() };
        if normal(self) != normal(other) {
            return Err(
                Error::fatal("two scopes share a digest: report this").with("scope", self.id())
            );
        }
        Ok(())
    }

    fn encode_identity(&self, writer: &mut Writer) {
        writer
            .blob(self.model.as_bytes())
            .blob(&self.weights)
            .blob(self.adapter.as_bytes())
            .blob(self.dtype.as_bytes())
            .blob(self.kv_scale.as_bytes())
            .u32(self.page_tokens)
            .u32(self.layers.0)
            .u32(self.layers.1)
            .u32(self.kv_heads.0)
            .u32(self.kv_heads.1)
            .u32(self.head_dim)
            .blob(self.hash_algorithm.as_bytes())
            .blob(&self.salt)
            .blob(&self.epoch)
            .u32(self.part)
            .u32(self.extra.len() as u32);
        for (name, value) in &self.extra {
            writer.blob(name.as_bytes()).blob(value.as_bytes());
        }
    }

    /// The canonical encoding: identity, then attributes.
    pub fn encode(&self, writer: &mut Writer) {
        self.encode_identity(writer);
        writer
            .blob(self.layout.as_bytes())
            .u8(u8::from(self.page_bytes.is_some()))
            .u64(self.page_bytes.unwrap_or(0))
            .u8(u8::from(self.chained));
    }

    /// Reads what [`Scope::encode`] wrote.
    ///
    /// # Errors
    /// `Miss` if the bytes are not a scope.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let mut scope = Self {
            model: reader.text()?,
            weights: reader.blob()?.to_vec(),
            adapter: reader.text()?,
            dtype: reader.text()?,
            kv_scale: reader.text()?,
            page_tokens: reader.u32()?,
            layers: (reader.u32()?, reader.u32()?),
            kv_heads: (reader.u32()?, reader.u32()?),
            head_dim: reader.u32()?,
            hash_algorithm: reader.text()?,
            salt: reader.blob()?.to_vec(),
            epoch: reader.blob()?.to_vec(),
            part: reader.u32()?,
            extra: BTreeMap::new(),
            layout: String::new(),
            page_bytes: None,
            chained: false,
        };
        for _ in 0..reader.u32()? {
            scope.extra.insert(reader.text()?, reader.text()?);
        }
        scope.layout = reader.text()?;
        let given = reader.u8()? == 1;
        let bytes = reader.u64()?;
        scope.page_bytes = given.then_some(bytes);
        scope.chained = reader.u8()? == 1;
        Ok(scope)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> Scope {
        Scope {
            model: "llama".into(),
            dtype: "bfloat16".into(),
            page_tokens: 64,
            layers: (0, 32),
            kv_heads: (0, 8),
            head_dim: 128,
            layout: "page_first".into(),
            page_bytes: None,
            chained: true,
            ..Scope::opaque("", 1, true)
        }
    }

    #[test]
    fn page_bytes_follow_from_the_shape() {
        assert_eq!(llama().resolved_page_bytes().unwrap(), 8 << 20);
        let odd = Scope { page_bytes: Some(1), ..llama() };
        assert!(odd.resolved_page_bytes().is_err());
    }

    #[test]
    fn identity_changes_the_id_and_attributes_do_not() {
        let base = llama();
        assert_ne!(base.id(), Scope { salt: b"a".to_vec(), ..llama() }.id());
        assert_ne!(base.id(), Scope { epoch: b"a".to_vec(), ..llama() }.id());
        let other = Scope { layout: "layer_first".into(), ..llama() };
        assert_eq!(base.id(), other.id());
        assert!(base.check_same(&other).unwrap_err().to_string().contains("layout"));
        assert!(base.check_same(&Scope { page_bytes: Some(8 << 20), ..llama() }).is_ok());
    }

    #[test]
    fn a_change_of_any_field_makes_another_scope() {
        let changes: [fn(&mut Scope); 17] = [
            |s| s.model.push('x'),
            |s| s.weights.push(1),
            |s| s.adapter.push('x'),
            |s| s.dtype.push('x'),
            |s| s.kv_scale.push('x'),
            |s| s.page_tokens += 1,
            |s| s.layers.1 += 1,
            |s| s.kv_heads.0 += 1,
            |s| s.head_dim += 1,
            |s| s.hash_algorithm.push('x'),
            |s| s.salt.push(1),
            |s| s.epoch.push(1),
            |s| s.part += 1,
            |s| drop(s.extra.insert("a".into(), "b".into())),
            |s| s.layout.push('x'),
            |s| s.page_bytes = Some(1),
            |s| s.chained = false,
        ];
        for (at, change) in changes.into_iter().enumerate() {
            let mut other = llama();
            change(&mut other);
            assert!(other != llama(), "field {at}");
            // The attributes come last and are no part of the digest.
            assert_eq!(other.id() == llama().id(), at >= 14, "field {at}");
        }
        assert!(llama() == llama());
    }

    #[test]
    fn fields_cannot_run_into_each_other() {
        let a = Scope { model: "ab".into(), adapter: "c".into(), ..llama() };
        let b = Scope { model: "a".into(), adapter: "bc".into(), ..llama() };
        assert_ne!(a.id(), b.id());
    }

    #[test]
    fn the_encoding_comes_back() {
        let mut scope = llama();
        scope.extra.insert("isa".into(), "amx".into());
        let mut writer = Writer::new();
        scope.encode(&mut writer);
        let bytes = writer.into_vec();
        assert_eq!(Scope::decode(&mut Reader::new(&bytes)).unwrap(), scope);
        for cut in 0..bytes.len() {
            assert!(Scope::decode(&mut Reader::new(&bytes[..cut])).is_err());
        }
    }
}
