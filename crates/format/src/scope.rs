//! Scopes: everything besides tokens that decides whether cached bytes may be reused.

use crate::wire::{Reader, Writer};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

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

impl FromStr for ScopeId {
    type Err = Error;

    /// Parses 32 hexadecimal digits; `Invalid` for other text.
    fn from_str(text: &str) -> Result<Self> {
        let invalid = || Error::invalid("a scope's id is 32 hexadecimal digits");
        // Check each digit here, because `from_str_radix` accepts a sign.
        if text.len() != 32 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(invalid());
        }
        let number = u128::from_str_radix(text, 16).map_err(|_| invalid())?;
        Ok(Self(number.to_be_bytes()))
    }
}

impl fmt::Debug for ScopeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The number that a store assigned to a scope at registration. A slot is never reused: a scope
/// that is dropped and registered again gets a new slot. A drop is therefore complete as soon as
/// the registry records it: recovery discards runs that name the old slot.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct ScopeSlot(pub u32);

/// The description of a scope. Every field takes part in its [`ScopeId`], `layout` by its canonical
/// name and `page_bytes` as resolved. Descriptions that differ only in how they name one known
/// layout, or in whether they give the page length, are therefore one scope.
#[derive(Clone, Debug, Eq, Serialize, Deserialize)]
pub struct Scope {
    /// The model's normalised configuration after overrides, or a name for the model.
    pub model: String,
    /// Fingerprint of the weight files. The connectors hash names, sizes, headers and samples of
    /// the contents, and leave the field empty for weights that were not loaded from files.
    pub weights: Vec<u8>,
    /// The adapter (LoRA), if the block hashes do not cover it.
    pub adapter: String,
    /// Number format of the keys and values.
    pub dtype: String,
    /// Source of the scales of quantised keys and values; `none` without scales.
    pub kv_scale: String,
    /// Tokens per page.
    pub page_tokens: u32,
    /// The layers that a page holds: first, and one past the last.
    pub layers: (u32, u32),
    /// The KV heads that a page holds: first, and one past the last.
    pub kv_heads: (u32, u32),
    /// Elements in one key or value vector of a head.
    pub head_dim: u32,
    /// The engine's block-hash algorithm.
    pub hash_algorithm: String,
    /// The tenant's salt, if the block hashes do not cover it.
    pub salt: Vec<u8>,
    /// Distinguishes versions of weights that are changed in place.
    pub epoch: Vec<u8>,
    /// Number of the KV cache group that the pages belong to, if the model has several groups.
    pub part: u32,
    /// Other properties that decide about reuse, for example the instruction set for vLLM on CPUs.
    pub extra: BTreeMap<String, String>,
    /// The arrangement of a page's bytes. Three layouts are known. `page_first` and `layer_first`
    /// are two names for the same bytes, and so for the same scope: layer by layer, in each layer
    /// the keys, then the values, token by token. A `page_head` page is stored head by head, and
    /// the bytes of one head have the order of `page_first`. Any other name is defined by the
    /// caller and makes a distinct scope. `opaque` and names that begin with `opaque/` need no
    /// shape.
    pub layout: String,
    /// Bytes per page. `None` if the length of a page follows from a known layout; giving the
    /// derived number makes the same scope.
    pub page_bytes: Option<u64>,
    /// Whether a key is a hash that depends on all keys before it in its sequence, so that the
    /// sequences before two equal keys are equal too.
    pub chained: bool,
}

/// Compares all fields, as a derived comparison would, but does not call `memcmp` on empty fields.
/// The address of an empty string is dangling: `memcmp`'s vector loads from it fault, and the
/// processor suppresses the faults in microcode, which was measured at 130 ns per field, most of a
/// probe's time.
///
/// Two descriptions of one scope may differ: to compare identity, compare [`Scope::id`].
impl PartialEq for Scope {
    fn eq(&self, other: &Self) -> bool {
        (self.page_bytes, self.chained) == (other.page_bytes, other.chained)
            && self.has_same_content(other)
            && same(&self.layout, &other.layout)
    }
}

fn same(a: impl AsRef<[u8]>, b: impl AsRef<[u8]>) -> bool {
    let (a, b) = (a.as_ref(), b.as_ref());
    a.len() == b.len() && (a.is_empty() || a == b)
}

/// Layouts whose page length follows from the shape.
const KNOWN_LAYOUTS: [&str; 3] = ["page_first", "layer_first", "page_head"];
/// The layout of [`Scope::opaque`].
const OPAQUE: &str = "opaque";
/// BLAKE3's context string for the identity digest. Changes with the fields of the identity, as
/// [`Scope::IDENTITY`] does, so that builds whose identities have different fields share no digest.
const CONTEXT: &str = "ritornello 2026 scope identity v1";
/// The largest page, in bytes. A page of 256 tokens of Llama-3.1-405B in bfloat16 has 126 MiB; a
/// page of 1,024 tokens would still fit. Pages may be longer than a segment: their pieces are then
/// in several segments.
pub const PAGE_BYTES_MAX: u64 = 512 << 20;

impl Scope {
    /// The version of the identity that a [`ScopeId`] digests. A registry records it, because all
    /// ids and page hashes differ between versions.
    pub const IDENTITY: u8 = 1;

    /// A scope for callers that know only a name, a page length, and whether keys chain.
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

    /// The digest of the identity. A scope whose page length cannot be resolved has an id that no
    /// scope with a resolved length has, but no store registers such a scope.
    #[must_use]
    pub fn id(&self) -> ScopeId {
        let digest = blake3::derive_key(CONTEXT, &self.identity());
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        ScopeId(id)
    }

    /// Bytes per page: as given, or derived from the shape if the layout is known.
    ///
    /// # Errors
    /// `Invalid` if the layout is not opaque and the shape is empty, if the length is neither given
    /// nor derived, if the given and the derived length differ, or if the length is zero, overflows
    /// or exceeds [`PAGE_BYTES_MAX`].
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
        if self.layout == OPAQUE || self.layout.starts_with("opaque/") {
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
        numbers
            .map(Some)
            .ok_or_else(|| Error::invalid("the page size overflows 64 bits: correct the shape"))
    }

    /// Checks that `other`, which has the same [`Scope::id`], is the same scope.
    ///
    /// # Errors
    /// `Fatal` if two identities have the same digest.
    pub fn check_same(&self, other: &Self) -> Result<()> {
        if self == other || self.identity() == other.identity() {
            return Ok(());
        }
        Err(Error::fatal("two scopes share a digest: report this").with("scope", self.id()))
    }

    /// Tells how the arrangement of pages differs, if the scopes differ in nothing else: names
    /// `layout`, `page_bytes` and `chained`, where they differ, with both values. `None` for the
    /// same scope, and for scopes that differ in other fields.
    #[must_use]
    pub fn rearranged(&self, other: &Self) -> Option<String> {
        if !self.has_same_content(other) {
            return None;
        }
        let bytes = |scope: &Self| scope.resolved_page_bytes().ok().or(scope.page_bytes);
        let (mine, theirs) = (bytes(self).unwrap_or(0), bytes(other).unwrap_or(0));
        let mut differences = Vec::new();
        if self.canonical_layout() != other.canonical_layout() {
            differences.push(format!("layout {:?} and {:?}", self.layout, other.layout));
        }
        if mine != theirs {
            differences.push(format!("page_bytes {mine} and {theirs}"));
        }
        if self.chained != other.chained {
            differences.push(format!("chained {} and {}", self.chained, other.chained));
        }
        (!differences.is_empty()).then(|| differences.join(", "))
    }

    /// A digest of all fields except `layout`, `page_bytes` and `chained`: equal for scopes that
    /// differ only in the arrangement of pages (see [`Scope::rearranged`]).
    #[must_use]
    pub fn content_digest(&self) -> [u8; 16] {
        let mut writer = Writer::new();
        self.encode_content(&mut writer);
        let mut digest = [0; 16];
        digest.copy_from_slice(&blake3::hash(writer.as_slice()).as_bytes()[..16]);
        digest
    }

    /// Whether all fields except `layout`, `page_bytes` and `chained` are equal.
    fn has_same_content(&self, other: &Self) -> bool {
        // Names all fields, so that a new field is a compile error until it is compared here.
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
            layout: _,
            page_bytes: _,
            chained: _,
        } = self;
        let numbers = (*page_tokens, *layers, *kv_heads, *head_dim, *part);
        let theirs = (other.page_tokens, other.layers, other.kv_heads, other.head_dim, other.part);
        numbers == theirs
            && same(epoch, &other.epoch)
            && same(model, &other.model)
            && same(weights, &other.weights)
            && same(adapter, &other.adapter)
            && same(dtype, &other.dtype)
            && same(kv_scale, &other.kv_scale)
            && same(hash_algorithm, &other.hash_algorithm)
            && same(salt, &other.salt)
            && extra == &other.extra
    }

    /// The layout's canonical name, one for all names of the same bytes.
    pub(crate) fn canonical_layout(&self) -> &str {
        if self.layout == "layer_first" { "page_first" } else { &self.layout }
    }

    /// The bytes of the identity: all fields up to `extra`, the canonical layout, whether the page
    /// length is resolved (1 or 0), the resolved or else the given length, and whether keys are
    /// chained.
    fn identity(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        self.encode_content(&mut writer);
        let resolved = self.resolved_page_bytes().ok();
        writer
            .blob(self.canonical_layout().as_bytes())
            .u8(u8::from(resolved.is_some()))
            .u64(resolved.or(self.page_bytes).unwrap_or(0))
            .u8(u8::from(self.chained));
        writer.into_vec()
    }

    fn encode_content(&self, writer: &mut Writer) {
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

    /// Encodes the description as given: `layout` by its own name, `page_bytes` unresolved.
    pub fn encode(&self, writer: &mut Writer) {
        self.encode_content(writer);
        writer
            .blob(self.layout.as_bytes())
            .u8(u8::from(self.page_bytes.is_some()))
            .u64(self.page_bytes.unwrap_or(0))
            .u8(u8::from(self.chained));
    }

    /// Decodes what [`Scope::encode`] wrote.
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
    fn printed_id_is_parsed() {
        let id = llama().id();
        assert_eq!(id.to_string().parse::<ScopeId>().unwrap(), id);
        assert_eq!(id.to_string().to_uppercase().parse::<ScopeId>().unwrap(), id);
        for wrong in ["", "00", &format!("+{}", "0".repeat(31)), &"g".repeat(32), &"é".repeat(16)]
        {
            assert!(wrong.parse::<ScopeId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn page_bytes_follow_from_the_shape() {
        assert_eq!(llama().resolved_page_bytes().unwrap(), 8 << 20);
        let odd = Scope { page_bytes: Some(1), ..llama() };
        assert!(odd.resolved_page_bytes().is_err());
    }

    #[test]
    fn salt_epoch_layout_page_bytes_and_chaining_change_the_id() {
        let base = llama();
        assert_ne!(base.id(), Scope { salt: b"a".to_vec(), ..llama() }.id());
        assert_ne!(base.id(), Scope { epoch: b"a".to_vec(), ..llama() }.id());
        assert_ne!(base.id(), Scope { layout: "page_head".into(), ..llama() }.id());
        assert_ne!(base.id(), Scope { layout: "page-first".into(), ..llama() }.id());
        assert_ne!(base.id(), Scope { chained: false, ..llama() }.id());
        let opaque = |bytes, chained| Scope::opaque("opaque", bytes, chained).id();
        assert_ne!(opaque(4096, true), opaque(8192, true));
        assert_ne!(opaque(4096, true), opaque(4096, false));
    }

    #[test]
    fn equivalent_descriptions_are_one_scope() {
        let base = llama();
        let layer_first = Scope { layout: "layer_first".into(), ..llama() };
        let given = Scope { page_bytes: Some(8 << 20), ..llama() };
        for other in [layer_first, given] {
            assert_eq!(base.id(), other.id());
            assert!(base.check_same(&other).is_ok());
        }
        let other = Scope { salt: b"a".to_vec(), ..llama() };
        assert!(base.check_same(&other).is_err());
    }

    #[test]
    fn difference_of_arrangements_has_both_values() {
        let base = llama();
        let head = Scope { layout: "page_head".into(), chained: false, ..llama() };
        assert_eq!(
            base.rearranged(&head).unwrap(),
            "layout \"page_first\" and \"page_head\", chained true and false"
        );
        let bytes = Scope::opaque("a", 1, true).rearranged(&Scope::opaque("a", 2, true));
        assert_eq!(bytes.unwrap(), "page_bytes 1 and 2");
        let same = Scope { layout: "layer_first".into(), page_bytes: Some(8 << 20), ..llama() };
        assert_eq!(base.rearranged(&same), None);
        assert_eq!(base.rearranged(&Scope { part: 1, ..head }), None);
    }

    #[test]
    fn opaque_layouts_need_no_shape() {
        let scope = Scope { layout: "opaque/bfloat16[2]".into(), ..Scope::opaque("a", 4, false) };
        assert_eq!(scope.resolved_page_bytes().unwrap(), 4);
        assert_ne!(scope.id(), Scope::opaque("a", 4, false).id());
    }

    #[test]
    fn scopes_with_unresolved_page_bytes_have_distinct_ids() {
        let unresolved = [
            Scope { page_bytes: Some(1), ..llama() },
            Scope { page_bytes: Some(2), ..llama() },
            Scope { page_bytes: None, layout: "mine".into(), ..llama() },
            Scope { page_bytes: None, ..Scope::opaque("opaque", 1, true) },
            Scope { page_tokens: u32::MAX, head_dim: u32::MAX, ..llama() },
            Scope { kv_heads: (8, 0), ..llama() },
        ];
        let mut ids: Vec<ScopeId> = unresolved.iter().map(Scope::id).collect();
        assert!(unresolved.iter().all(|scope| scope.resolved_page_bytes().is_err()));
        // This scope's resolved length is 1, the given length of the first unresolved scope.
        ids.push(Scope { page_bytes: Some(1), layout: "mine".into(), ..llama() }.id());
        ids.push(llama().id());
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), all);
    }

    #[test]
    fn change_of_any_field_changes_the_scope() {
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
            assert_ne!(other.id(), llama().id(), "field {at}");
        }
        assert!(llama() == llama());
    }

    #[test]
    fn bytes_moved_between_fields_change_the_id() {
        let a = Scope { model: "ab".into(), adapter: "c".into(), ..llama() };
        let b = Scope { model: "a".into(), adapter: "bc".into(), ..llama() };
        assert_ne!(a.id(), b.id());
    }

    #[test]
    fn encoding_round_trips() {
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
