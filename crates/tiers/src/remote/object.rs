//! Objects: an object is a run header, padded to a multiple of 4 KiB ([`UNIT`]), followed by the
//! pages. In a sealed object the [`seal`] encloses the header, and the padding follows the seal.
//!
//! The header has the format of a run header on disk, with the same checksums; fields that are
//! meaningful on one machine only (store, slot, generation, extents) are zero or empty. Pages are
//! stored one after another. A page is stored compressed only if this makes it shorter. A
//! compressed object therefore holds each page at or before its uncompressed offset, and a request
//! for the uncompressed length of the first pages returns all their bytes.

use super::keyring::KeyRing;
use super::options::RemoteOptions;
use super::packing::{self, Form};
use super::rejected::{RejectReason, Verified};
use super::seal::{self, Seal, Sealer};
use blake3::Hash;
use ritornello_format::{
    Error, PAGE_BYTES_MAX, Result, RunHeader, ScopeId, Slice, SliceChecksum, UNIT, units_of,
};
use std::ops::Range;

/// The codec of a page that is one Zstandard frame. Codec numbers of at least 128 are used in
/// objects only.
const ZSTD: u8 = 128;
/// Maximum length of an object: one page of the maximum length, or several shorter pages, with
/// header and seal.
pub(super) const BYTES_MAX: u64 = PAGE_BYTES_MAX + 8 * UNIT;

/// Returns the offset of the first page in an object whose keys have these lengths.
pub(super) fn first_page_offset(
    form: Form,
    key_lengths: impl ExactSizeIterator<Item = usize>,
) -> u64 {
    let pages = key_lengths.len();
    let header = u64::from(RunHeader::units(key_lengths, 1)) * UNIT;
    match form {
        Form::Plain => header,
        Form::Sealed => units_of(header + seal::seal_bytes(pages) as u64) * UNIT,
    }
}

/// Packs a run header and pages of equal length into an object. `parent` is the key of the page
/// before them.
///
/// # Errors
/// `Invalid` if there is not one page per key, pages differ in length, or a key is too short or too
/// long; `Retry` if the options have a key file that was not read yet, because the object would
/// have no seal.
pub(super) fn pack(
    scope: &ScopeId,
    parent: Option<&[u8]>,
    keys: &[&[u8]],
    pages: &[&[u8]],
    options: &RemoteOptions,
) -> Result<Vec<u8>> {
    let page_bytes = pages.first().map_or(0, |page| page.len());
    if keys.len() != pages.len() || pages.iter().any(|page| page.len() != page_bytes) {
        return Err(Error::invalid("an object needs pages of equal length, one page per key"));
    }
    let begin = first_page_offset(options.form(), keys.iter().map(|key| key.len())) as usize;
    let mut object = Vec::with_capacity(begin + pages.len() * page_bytes);
    object.resize(begin, 0);
    let mut slices = Vec::with_capacity(pages.len());
    for (key, page) in keys.iter().zip(pages) {
        let shorter = options.zstd.and_then(|level| zstd::bulk::compress(page, level).ok());
        let shorter = shorter.filter(|short| short.len() < page_bytes);
        let codec = if shorter.is_some() { ZSTD } else { Slice::RAW };
        let stored = shorter.as_deref().unwrap_or(page);
        slices.push(Slice {
            bytes: stored.len() as u32,
            codec,
            checksum: page_checksum(key, stored),
        });
        object.extend_from_slice(stored);
    }
    let header = RunHeader {
        scope: *scope,
        page_bytes: page_bytes as u64,
        header_units: RunHeader::units(keys.iter().map(|key| key.len()), 1),
        page_units: units_of(page_bytes as u64) as u32,
        parent: parent.map(<[u8]>::to_vec),
        keys: keys.iter().collect(),
        slices_per_page: 1,
        slices,
        ..RunHeader::default()
    };
    let (mut front, _) = header.encode()?;
    if let Some(ring) = options.keys.as_deref() {
        let unread = || Error::retry("the remote's key file was not read: no object can be sealed");
        let sealer = Sealer::new(ring.newest().ok_or_else(unread)?, scope);
        let mut left = &object[begin..];
        let mut tags = Vec::with_capacity(pages.len());
        for (page, slice) in header.slices.iter().enumerate() {
            let (stored, rest) = left.split_at(slice.bytes as usize);
            tags.push(sealer.page(&seal::position(&header, page, slice), stored));
            left = rest;
        }
        front = sealer.seal(&front, &tags);
    }
    object[..front.len()].copy_from_slice(&front);
    Ok(object)
}

/// Consecutive bytes of an object.
pub(super) struct ObjectBytes<'a> {
    /// Offset in the object of the first of these bytes.
    pub(super) at: u64,
    pub(super) bytes: &'a [u8],
}

impl<'a> ObjectBytes<'a> {
    fn slice(&self, range: Range<u64>) -> Option<&'a [u8]> {
        let from = range.start.checked_sub(self.at)?;
        self.bytes.get(from as usize..(range.end - self.at) as usize)
    }
}

/// The contents of an object, according to its header.
pub(super) struct Contents {
    pub(super) header: RunHeader,
    form: Form,
    /// For a sealed object that was read with keys: the sealer and the pages' authenticators, which
    /// verify the pages.
    seal: Option<(Sealer, Vec<Hash>)>,
}

impl Contents {
    /// Reads an object from its first bytes, which must include everything before its first page.
    /// With keys and the expected scope, the header of a sealed object is verified before it is
    /// parsed; without keys only checksums are verified. No length in an accepted header exceeds
    /// the limits of an object.
    pub(super) fn read(
        head: &[u8],
        form: Form,
        verify: Option<(&KeyRing, &ScopeId)>,
    ) -> Verified<Self> {
        let (encoded, tags, sealer) = match form {
            Form::Plain => (head, None, None),
            Form::Sealed => {
                let seal = Seal::read(head)?;
                let sealer = verify.map(|(keys, scope)| seal.open(keys, scope)).transpose()?;
                (seal.header(), Some(seal.tags()), sealer)
            }
        };
        let (header, _) = RunHeader::decode(encoded).map_err(RejectReason::damaged)?;
        let pages = header.keys.len();
        if header.slices_per_page != 1 || header.slices.len() != pages {
            return Err(RejectReason::damaged("a page does not have exactly one slice"));
        }
        if tags.as_ref().is_some_and(|tags| tags.len() != pages) {
            return Err(RejectReason::damaged("seal and header name different numbers of pages"));
        }
        if pages > packing::group_pages(header.page_bytes) {
            return Err(RejectReason::damaged("more pages than fit into an object"));
        }
        let fits = |slice: &Slice| match slice.codec {
            Slice::RAW => u64::from(slice.bytes) == header.page_bytes,
            _ => u64::from(slice.bytes) <= header.page_bytes,
        };
        if !header.slices.iter().all(fits) {
            return Err(RejectReason::damaged("a stored page has an impossible length"));
        }
        Ok(Self { header, form, seal: sealer.zip(tags) })
    }

    /// The byte range in which `pages` are stored.
    pub(super) fn stored_range(&self, pages: Range<usize>) -> Range<u64> {
        let lengths =
            |pages: &[Slice]| pages.iter().map(|slice| u64::from(slice.bytes)).sum::<u64>();
        let begin = first_page_offset(self.form, self.header.keys.iter().map(<[u8]>::len));
        let from = begin + lengths(&self.header.slices[..pages.start]);
        from..from + lengths(&self.header.slices[pages])
    }

    /// Rejects the object unless it holds exactly these pages.
    pub(super) fn check(&self, scope: &ScopeId, keys: &[&[u8]], page_bytes: u64) -> Verified<()> {
        let same = self.header.scope == *scope
            && self.header.page_bytes == page_bytes
            && self.header.keys.iter().eq(keys.iter().copied());
        if same {
            Ok(())
        } else {
            Err(RejectReason::damaged("the object's pages do not match its name"))
        }
    }

    /// Copies pages `requested` to `out`, up to the first rejected page. Returns the number of
    /// pages copied, and the reason of the rejection, if any. A page is verified before it is
    /// decompressed or copied.
    pub(super) fn unpack(
        &self,
        part: &ObjectBytes<'_>,
        requested: Range<usize>,
        out: &mut [u8],
    ) -> (usize, Option<RejectReason>) {
        let page_bytes = self.header.page_bytes as usize;
        for (copied, (page, out)) in
            requested.clone().zip(out.chunks_exact_mut(page_bytes.max(1))).enumerate()
        {
            if let Err(why) = self.unpack_page(part, page, out) {
                return (copied, Some(why));
            }
        }
        (requested.len(), None)
    }

    fn unpack_page(&self, part: &ObjectBytes<'_>, page: usize, out: &mut [u8]) -> Verified<()> {
        let damaged = || {
            RejectReason::damaged(format_args!(
                "page {page} of {} is damaged",
                self.header.keys.len()
            ))
        };
        let slice = &self.header.slices[page];
        let stored = part.slice(self.stored_range(page..page + 1)).ok_or_else(damaged)?;
        match &self.seal {
            Some((sealer, tags)) => {
                let position = seal::position(&self.header, page, slice);
                if !tags.get(page).is_some_and(|tag| sealer.is_page(&position, stored, tag)) {
                    return Err(RejectReason::WrongTag);
                }
            }
            None if slice.checksum != page_checksum(&self.header.keys[page], stored) => {
                return Err(damaged());
            }
            None => {}
        }
        match slice.codec {
            Slice::RAW => out.copy_from_slice(stored),
            // A frame that decompresses to more than `out` holds is an error.
            ZSTD => match zstd::bulk::decompress_to_buffer(stored, out) {
                Ok(length) if length == out.len() => {}
                _ => return Err(damaged()),
            },
            _ => return Err(damaged()),
        }
        Ok(())
    }
}

fn page_checksum(key: &[u8], page: &[u8]) -> u64 {
    let mut sum = SliceChecksum::new(key, 0, 0);
    sum.update(page);
    sum.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const SCOPE: ScopeId = ScopeId([5; 16]);

    fn sample() -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        ((0..4_u8).map(|n| vec![n; 32]).collect(), (0..4_u8).map(|n| vec![n ^ 0x55; 700]).collect())
    }

    fn refs(of: &[Vec<u8>]) -> Vec<&[u8]> {
        of.iter().map(Vec::as_slice).collect()
    }

    fn options(zstd: Option<i32>, keys: Option<&str>) -> RemoteOptions {
        let ring = |ids: &str| {
            let line = |id: char| format!("{id} {}\n", format!("{:02x}", id as u8).repeat(32));
            Arc::new(KeyRing::parse(&ids.chars().map(line).collect::<String>()).unwrap())
        };
        RemoteOptions { zstd, keys: keys.map(ring) }
    }

    fn read(
        object: &[u8],
        keys: &[&[u8]],
        requested: Range<usize>,
        out: &mut [u8],
        options: &RemoteOptions,
    ) -> Verified<usize> {
        let verify = options.keys.as_deref().map(|keys| (keys, &SCOPE));
        let contents = Contents::read(object, options.form(), verify)?;
        contents.check(&SCOPE, keys, (out.len() / requested.len()) as u64)?;
        let place = contents.stored_range(requested.clone());
        let bytes = object.get(place.start as usize..).unwrap_or_default();
        Ok(contents.unpack(&ObjectBytes { at: place.start, bytes }, requested, out).0)
    }

    #[test]
    fn pages_roundtrip_and_damage_is_detected() {
        let (keys, pages) = sample();
        let (keys, pages) = (refs(&keys), refs(&pages));
        for (zstd, ring) in [(None, None), (Some(3), None), (None, Some("a")), (Some(3), Some("a"))]
        {
            let options = options(zstd, ring);
            let begin =
                first_page_offset(options.form(), keys.iter().map(|key| key.len())) as usize;
            let object = pack(&SCOPE, Some(&[9; 64]), &keys, &pages, &options).unwrap();
            assert_eq!(object.len() == begin + 4 * 700, zstd.is_none());
            let read = |object: &[u8]| {
                let mut out = vec![0; 2 * 700];
                read(object, &keys, 1..3, &mut out, &options).map(|copied| (copied, out))
            };
            assert_eq!(read(&object).unwrap(), (2, pages[1..3].concat()));
            for at in (0..object.len()).step_by(13).chain(begin..object.len().min(begin + 200)) {
                let mut damaged = object.clone();
                damaged[at] ^= 4;
                if let Ok((copied, out)) = read(&damaged) {
                    assert_eq!(
                        out[..copied * 700],
                        pages[1..3].concat()[..copied * 700],
                        "byte {at}"
                    );
                }
            }
            for length in [0, 10, begin, begin + 1, object.len() / 2] {
                if let Ok((copied, _)) = read(&object[..length]) {
                    assert!(copied < 2);
                }
            }
        }
    }

    #[test]
    fn incompressible_page_is_stored_raw() {
        let keys = [vec![1; 32], vec![2; 32]];
        let mut state = 1_u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        let pages = [(0..700).map(|_| noise()).collect(), vec![7; 700]];
        let zstd = options(Some(1), None);
        let object = pack(&SCOPE, None, &refs(&keys), &refs(&pages), &zstd).unwrap();
        let contents = Contents::read(&object, Form::Plain, None).unwrap();
        let codecs: Vec<u8> = contents.header.slices.iter().map(|s| s.codec).collect();
        assert_eq!(codecs, [Slice::RAW, ZSTD]);
        let mut out = vec![0; 1400];
        assert_eq!(read(&object, &refs(&keys), 0..2, &mut out, &zstd).unwrap(), 2);
        assert_eq!(out, pages.concat());
    }

    #[test]
    fn pages_of_different_keys_are_rejected() {
        let (keys, pages) = sample();
        let object = pack(&SCOPE, None, &refs(&keys), &refs(&pages), &options(None, None));
        let contents = Contents::read(&object.unwrap(), Form::Plain, None).unwrap();
        let mut others = keys.clone();
        others[0][3] ^= 1;
        assert!(contents.check(&SCOPE, &refs(&keys), 700).is_ok());
        assert!(contents.check(&SCOPE, &refs(&others), 700).is_err());
        assert!(contents.check(&ScopeId([6; 16]), &refs(&keys), 700).is_err());
        assert!(contents.check(&SCOPE, &refs(&keys)[..2], 700).is_err());
        assert!(contents.check(&SCOPE, &refs(&keys), 699).is_err());
    }

    /// Forges a page as a writer without the key would: with valid checksums.
    fn forge(object: &[u8], keys: &[&[u8]], page: usize, bytes: &[u8]) -> Vec<u8> {
        let mut forged = object.to_vec();
        let contents = Contents::read(object, Form::Sealed, None).unwrap();
        let (mut header, place) = (contents.header.clone(), contents.stored_range(page..page + 1));
        forged[place.start as usize..place.end as usize].copy_from_slice(bytes);
        header.slices[page].checksum = page_checksum(keys[page], bytes);
        let (encoded, _) = header.encode().unwrap();
        let at = object.windows(8).position(|eight| eight == ritornello_format::RUN_MAGIC).unwrap();
        forged[at..at + encoded.len()].copy_from_slice(&encoded);
        forged
    }

    #[test]
    fn forged_page_is_rejected_only_with_key() {
        let (keys, pages) = sample();
        let (keys, pages) = (refs(&keys), refs(&pages));
        let sealed = options(None, Some("a"));
        let object = pack(&SCOPE, None, &keys, &pages, &sealed).unwrap();
        let forged = forge(&object, &keys, 1, &[66; 700]);
        let mut out = vec![0; 700];
        let contents = Contents::read(&forged, Form::Sealed, None).unwrap();
        let whole = ObjectBytes { at: 0, bytes: &forged };
        let unpacked = contents.unpack(&whole, 1..2, &mut out);
        assert_eq!(unpacked, (1, None), "the checksums of the forged page must match");
        assert_eq!(out, vec![66; 700]);
        let rejected = |object: &[u8], options: &RemoteOptions| {
            read(object, &keys, 1..2, &mut vec![0; 700], options).unwrap_err()
        };
        assert_eq!(rejected(&forged, &sealed), RejectReason::WrongTag);
        assert_eq!(
            rejected(&object, &options(None, Some("b"))),
            RejectReason::UnknownKey("a".into())
        );
        let plain = pack(&SCOPE, None, &keys, &pages, &options(None, None)).unwrap();
        assert_eq!(rejected(&plain, &sealed), RejectReason::Unsealed);
        assert!(matches!(rejected(&object, &options(None, None)), RejectReason::Damaged(_)));
    }

    #[test]
    fn first_key_seals_and_older_keys_verify() {
        let (keys, pages) = sample();
        let (keys, pages) = (refs(&keys), refs(&pages));
        let old = pack(&SCOPE, None, &keys, &pages, &options(None, Some("a"))).unwrap();
        let both = options(None, Some("ba"));
        let new = pack(&SCOPE, None, &keys, &pages, &both).unwrap();
        let read = |object, options: &RemoteOptions| {
            read(object, &keys, 0..4, &mut vec![0; 4 * 700], options)
        };
        assert_eq!((read(&old, &both), read(&new, &both)), (Ok(4), Ok(4)));
        assert_eq!(read(&new, &options(None, Some("b"))), Ok(4));
        assert_eq!(
            read(&old, &options(None, Some("b"))),
            Err(RejectReason::UnknownKey("a".into()))
        );
    }
}
