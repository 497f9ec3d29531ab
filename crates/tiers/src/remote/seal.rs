//! The seal of an object, which proves that a holder of the key wrote it.
//!
//! The seal encloses the run header. Before the header the seal holds fixed fields, the last of
//! which is the id of its key, and one authenticator. This authenticator covers the scope's id, the
//! fixed fields, the header and the pages' authenticators. After the header the seal holds an
//! authenticator of each page, which covers the page's scope, position and stored bytes, so that a
//! page is verified without reading other pages. The authenticators are keyed BLAKE3 hashes, with
//! keys derived from the sealing key for the scope and the purpose. A scope's id commits to the
//! scope's salt, so tenants with different salts have different keys.
//!
//! A reader with a key verifies the header's authenticator before it parses the header, and a
//! page's authenticator before it decompresses or copies the page.

use super::keyring::{ID_BYTES, Key, KeyRing, id_text};
use super::rejected::{RejectReason, Verified};
use blake3::{Hash, Hasher};
use ritornello_format::wire::{Reader, Writer};
use ritornello_format::{RUN_HEADER_UNITS_MAX, RUN_MAGIC, RunHeader, ScopeId, Slice, UNIT};

const MAGIC: [u8; 8] = *b"RTRNSEAL";
const VERSION: u32 = 1;
const TAG_BYTES: usize = 32;
/// Bytes of the fixed fields: magic, version, length of the header, number of pages, key id.
const FIXED_BYTES: usize = 8 + 4 + 4 + 4 + ID_BYTES;
/// Bytes of a seal before the run header.
const FRONT_BYTES: usize = FIXED_BYTES + TAG_BYTES;
const HEADER_BYTES_MAX: usize = RUN_HEADER_UNITS_MAX as usize * UNIT as usize;
/// BLAKE3 contexts from which the keys of the headers' and of the pages' authenticators are
/// derived.
const HEADERS: &str = "ritornello 2026 remote object header v1";
const PAGES: &str = "ritornello 2026 remote object page v1";

/// Bytes of a seal, without the run header.
pub(super) const fn seal_bytes(pages: usize) -> usize {
    FRONT_BYTES + pages * TAG_BYTES
}

/// The position of a page in its object. The page's authenticator covers the position and the
/// page's bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position<'a> {
    pub(super) key: &'a [u8],
    /// The index of the page in its object, and the number of pages of the object.
    pub(super) page: usize,
    pub(super) pages: usize,
    pub(super) page_bytes: u64,
    pub(super) codec: u8,
}

/// Computes the authenticators for one scope's objects.
pub(super) struct Sealer {
    id: [u8; ID_BYTES],
    scope: ScopeId,
    headers: [u8; 32],
    pages: [u8; 32],
}

impl Sealer {
    pub(super) fn new(key: &Key, scope: &ScopeId) -> Self {
        let derived = |purpose: &str| {
            let mut hasher = Hasher::new_derive_key(purpose);
            hasher.update(&key.secret).update(&scope.0);
            *hasher.finalize().as_bytes()
        };
        Self { id: key.id, scope: *scope, headers: derived(HEADERS), pages: derived(PAGES) }
    }

    /// The authenticator of a page's stored bytes. Every field hashed before these bytes has a
    /// fixed length or a length prefix, so that two different pages never have the same input.
    pub(super) fn page(&self, at: &Position<'_>, stored: &[u8]) -> Hash {
        let mut front = Writer::new();
        front
            .blob(&self.scope.0)
            .blob(at.key)
            .u32(at.page as u32)
            .u32(at.pages as u32)
            // An object stores a page as one slice: slice 0 of 1.
            .u16(0)
            .u16(1)
            .u64(at.page_bytes)
            .u8(at.codec)
            .u64(stored.len() as u64);
        Hasher::new_keyed(&self.pages).update(front.as_slice()).update(stored).finalize()
    }

    /// Whether `tag` authenticates `stored`. Comparing [`Hash`] values takes constant time.
    pub(super) fn is_page(&self, at: &Position<'_>, stored: &[u8], tag: &Hash) -> bool {
        self.page(at, stored) == *tag
    }

    /// The authenticator of the fixed fields, the scope's id, and the body, which is the header
    /// followed by the pages' authenticators.
    fn header(&self, fixed: &[u8], body: &[u8]) -> Hash {
        let mut scope = Writer::new();
        scope.blob(&self.scope.0);
        Hasher::new_keyed(&self.headers)
            .update(fixed)
            .update(scope.as_slice())
            .update(body)
            .finalize()
    }

    /// The seal, with the encoded run header inside.
    pub(super) fn seal(&self, header: &[u8], tags: &[Hash]) -> Vec<u8> {
        let mut fixed = Writer::new();
        fixed
            .raw(&MAGIC)
            .u32(VERSION)
            .u32(header.len() as u32)
            .u32(tags.len() as u32)
            .raw(&self.id);
        let fixed = fixed.into_vec();
        let mut body = header.to_vec();
        tags.iter().for_each(|tag| body.extend_from_slice(tag.as_bytes()));
        let tag = self.header(&fixed, &body);
        [&fixed[..], tag.as_bytes(), &body].concat()
    }
}

/// A seal as parsed without a key; its fields are not verified yet.
pub(super) struct Seal<'a> {
    fixed: &'a [u8],
    id: [u8; ID_BYTES],
    tag: [u8; TAG_BYTES],
    body: &'a [u8],
    header_bytes: usize,
}

impl<'a> Seal<'a> {
    /// Parses the seal at the beginning of `head`; other bytes may follow.
    pub(super) fn read(head: &'a [u8]) -> Verified<Self> {
        if head.starts_with(&RUN_MAGIC) {
            return Err(RejectReason::Unsealed);
        }
        Self::parse(head).ok_or_else(|| RejectReason::damaged("malformed seal"))
    }

    fn parse(head: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(head);
        let (magic, version) = (reader.array::<8>().ok()?, reader.u32().ok()?);
        let (header_bytes, pages) = (reader.u32().ok()? as usize, reader.u32().ok()? as usize);
        let (id, tag) = (reader.array().ok()?, reader.array().ok()?);
        if magic != MAGIC || version != VERSION || header_bytes > HEADER_BYTES_MAX {
            return None;
        }
        let end = header_bytes.checked_add(pages.checked_mul(TAG_BYTES)?)?;
        let body = head.get(FRONT_BYTES..)?.get(..end)?;
        Some(Self { fixed: head.get(..FIXED_BYTES)?, id, tag, body, header_bytes })
    }

    /// Verifies the header's authenticator. Returns the [`Sealer`] that verifies the pages.
    pub(super) fn open(&self, keys: &KeyRing, scope: &ScopeId) -> Verified<Sealer> {
        let key = keys.find(&self.id).ok_or_else(|| RejectReason::UnknownKey(id_text(&self.id)))?;
        let sealer = Sealer::new(key, scope);
        if sealer.header(self.fixed, self.body) == Hash::from_bytes(self.tag) {
            Ok(sealer)
        } else {
            Err(RejectReason::WrongTag)
        }
    }

    pub(super) fn header(&self) -> &'a [u8] {
        &self.body[..self.header_bytes]
    }

    /// The authenticators of the pages.
    pub(super) fn tags(&self) -> Vec<Hash> {
        let tag = |bytes: &[u8]| Hash::from_slice(bytes).ok();
        self.body[self.header_bytes..].chunks_exact(TAG_BYTES).filter_map(tag).collect()
    }
}

/// The position of page `page` in an object with this header.
pub(super) fn position<'a>(header: &'a RunHeader, page: usize, slice: &Slice) -> Position<'a> {
    Position {
        key: &header.keys[page],
        page,
        pages: header.keys.len(),
        page_bytes: header.page_bytes,
        codec: slice.codec,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCOPE: ScopeId = ScopeId([5; 16]);

    fn ring(keys: &[(&str, u8)]) -> KeyRing {
        let line = |(id, byte): &(&str, u8)| format!("{id} {}\n", format!("{byte:02x}").repeat(32));
        KeyRing::parse(&keys.iter().map(line).collect::<String>()).unwrap()
    }

    fn sealer(keys: &KeyRing, scope: &ScopeId) -> Sealer {
        Sealer::new(keys.newest().unwrap(), scope)
    }

    #[test]
    fn seal_opens_with_its_key_and_scope_only() {
        let keys = ring(&[("a", 1)]);
        let tag = blake3::hash(b"page");
        let sealed = sealer(&keys, &SCOPE).seal(b"header", &[tag, tag]);
        let seal = Seal::read(&sealed).unwrap();
        assert_eq!((seal.header(), seal.tags()), (&b"header"[..], vec![tag, tag]));
        assert!(seal.open(&ring(&[("b", 2), ("a", 1)]), &SCOPE).is_ok());
        let rejected = |keys: &KeyRing, scope| seal.open(keys, scope).err().unwrap().to_string();
        assert!(rejected(&ring(&[("b", 1)]), &SCOPE).contains("`a`"));
        assert!(rejected(&ring(&[("a", 2)]), &SCOPE).contains("forged"));
        assert!(rejected(&keys, &ScopeId([6; 16])).contains("forged"));
    }

    #[test]
    fn flipped_or_truncated_seal_is_rejected() {
        let keys = ring(&[("a", 1)]);
        let sealed = sealer(&keys, &SCOPE).seal(b"header", &[blake3::hash(b"page")]);
        let opens =
            |bytes: &[u8]| Seal::read(bytes).and_then(|seal| seal.open(&keys, &SCOPE)).is_ok();
        assert!(opens(&sealed));
        for at in 0..sealed.len() {
            assert!(!opens(&sealed[..at]), "cut at {at}");
            for bit in 0..8 {
                let mut damaged = sealed.clone();
                damaged[at] ^= 1 << bit;
                assert!(!opens(&damaged), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn page_tag_binds_key_scope_position_and_codec() {
        let keys = ring(&[("a", 1), ("b", 2)]);
        let right = Position { key: &[1; 32], page: 2, pages: 8, page_bytes: 700, codec: 0 };
        let tag = sealer(&keys, &SCOPE).page(&right, b"bytes");
        let is = |at: &Position<'_>, bytes: &[u8]| sealer(&keys, &SCOPE).is_page(at, bytes, &tag);
        assert!(is(&right, b"bytes"));
        assert!(!is(&right, b"bytez") && !is(&right, b"byte"));
        for different in [
            Position { key: &[2; 32], ..right },
            Position { key: &[1; 31], ..right },
            Position { page: 3, ..right },
            Position { pages: 4, ..right },
            Position { page_bytes: 701, ..right },
            Position { codec: 128, ..right },
        ] {
            assert!(!is(&different, b"bytes"), "{different:?}");
        }
        assert!(!sealer(&keys, &ScopeId([6; 16])).is_page(&right, b"bytes", &tag));
        let other = Sealer::new(
            keys.find(&{
                let mut id = [0; ID_BYTES];
                id[0] = b'b';
                id
            })
            .unwrap(),
            &SCOPE,
        );
        assert!(!other.is_page(&right, b"bytes", &tag));
    }
}
