//! An object: a run header, padded to whole units, and the pages behind it.
//!
//! The header is the one of a run on disk, with the same checksums; what has a meaning on one machine
//! only (store, slot, generation, extents) is zero or empty in it. Pages lie one after another as they
//! are stored; compressed ones are shorter than pages are, so that a page lies no further behind than it would
//! uncompressed, and a reader that knows the length of pages reads enough without asking first.

use ritornello_format::{Error, Result, RunHeader, ScopeId, Slice, SliceChecksum, UNIT, units_of};
use std::ops::Range;

/// The codec of a page that is one Zstandard frame. Numbers from 128 on are those of objects alone.
const ZSTD: u8 = 128;

/// Bytes before the first page of an object with such keys.
pub(super) fn pages_begin(keys: &[&[u8]]) -> u64 {
    u64::from(RunHeader::units(keys.iter().map(|key| key.len()), 1)) * UNIT
}

/// Packs pages of one length each, behind the header of their run. `parent`: the key of the page
/// before them. `zstd`: compresses every page by itself, at that level, where that makes it shorter.
///
/// # Errors
/// `Invalid` if pages and keys do not match.
pub(super) fn pack(
    scope: &ScopeId,
    parent: Option<&[u8]>,
    keys: &[&[u8]],
    pages: &[&[u8]],
    zstd: Option<i32>,
) -> Result<Vec<u8>> {
    let page_bytes = pages.first().map_or(0, |page| page.len());
    if keys.len() != pages.len() || pages.iter().any(|page| page.len() != page_bytes) {
        return Err(Error::invalid("an object's pages are of one length, one page a key"));
    }
    let begin = pages_begin(keys) as usize;
    let mut object = Vec::with_capacity(begin + pages.len() * page_bytes);
    object.resize(begin, 0);
    let mut slices = Vec::with_capacity(pages.len());
    for (key, page) in keys.iter().zip(pages) {
        let shorter = zstd.and_then(|level| zstd::bulk::compress(page, level).ok());
        let shorter = shorter.filter(|short| short.len() < page_bytes);
        let codec = if shorter.is_some() { ZSTD } else { Slice::RAW };
        let stored = shorter.as_deref().unwrap_or(page);
        slices.push(Slice { bytes: stored.len() as u32, codec, checksum: sum(key, stored) });
        object.extend_from_slice(stored);
    }
    let header = RunHeader {
        scope: *scope,
        page_bytes: page_bytes as u64,
        header_units: RunHeader::units(keys.iter().map(|key| key.len()), 1),
        page_units: units_of(page_bytes as u64) as u32,
        parent: parent.map(<[u8]>::to_vec),
        keys: keys.iter().map(|key| key.to_vec()).collect(),
        slices_per_page: 1,
        slices,
        ..RunHeader::default()
    };
    let (encoded, _) = header.encode()?;
    object[..encoded.len()].copy_from_slice(&encoded);
    Ok(object)
}

/// The bytes of an object from one of its bytes on.
pub(super) struct Part<'a> {
    /// Which byte of the object is the first.
    pub(super) at: u64,
    pub(super) bytes: &'a [u8],
}

impl<'a> Part<'a> {
    fn slice(&self, range: Range<u64>) -> Option<&'a [u8]> {
        let from = range.start.checked_sub(self.at)?;
        self.bytes.get(from as usize..(range.end - self.at) as usize)
    }
}

/// What an object holds, by its header.
pub(super) struct Contents {
    pub(super) header: RunHeader,
}

impl Contents {
    /// From the first bytes of an object, the header at least.
    ///
    /// # Errors
    /// `Miss` if they are damaged, or of a version that is not known.
    pub(super) fn read(head: &[u8]) -> Result<Self> {
        let (header, _) = RunHeader::decode(head)?;
        if header.slices_per_page != 1 || header.slices.len() != header.keys.len() {
            return Err(Error::miss("an object's pages have one slice each"));
        }
        Ok(Self { header })
    }

    /// Where the stored bytes of `pages` lie.
    pub(super) fn place(&self, pages: Range<usize>) -> Range<u64> {
        let lengths =
            |pages: &[Slice]| pages.iter().map(|slice| u64::from(slice.bytes)).sum::<u64>();
        let units = u64::from(RunHeader::units(self.header.keys.iter().map(Vec::len), 1));
        let from = units * UNIT + lengths(&self.header.slices[..pages.start]);
        from..from + lengths(&self.header.slices[pages])
    }

    /// Whether it holds these pages, and no others.
    ///
    /// # Errors
    /// `Miss` if not.
    pub(super) fn check(&self, scope: &ScopeId, keys: &[&[u8]], page_bytes: u64) -> Result<()> {
        let same = self.header.scope == *scope
            && self.header.page_bytes == page_bytes
            && self.header.keys.iter().map(Vec::as_slice).eq(keys.iter().copied());
        if same {
            Ok(())
        } else {
            Err(Error::miss("an object holds other pages than its name says"))
        }
    }

    /// Copies pages `wanted` to `out`, one after another, as far as they lie in `part` and are whole.
    /// Returns how many there are.
    pub(super) fn unpack(&self, part: &Part<'_>, wanted: Range<usize>, out: &mut [u8]) -> usize {
        let page_bytes = self.header.page_bytes as usize;
        let mut came = 0;
        for (page, out) in wanted.zip(out.chunks_exact_mut(page_bytes.max(1))) {
            let slice = self.header.slices[page];
            let stored = part.slice(self.place(page..page + 1));
            let Some(stored) = stored.filter(|s| slice.checksum == sum(&self.header.keys[page], s))
            else {
                break;
            };
            let whole = match slice.codec {
                Slice::RAW if stored.len() == out.len() => {
                    out.copy_from_slice(stored);
                    true
                }
                ZSTD => zstd::bulk::decompress_to_buffer(stored, out)
                    .is_ok_and(|length| length == page_bytes),
                _ => false,
            };
            if !whole {
                break;
            }
            came += 1;
        }
        came
    }
}

fn sum(key: &[u8], page: &[u8]) -> u64 {
    let mut sum = SliceChecksum::new(key, 0, 0);
    sum.update(page);
    sum.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCOPE: ScopeId = ScopeId([5; 16]);

    fn sample() -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        ((0..4_u8).map(|n| vec![n; 32]).collect(), (0..4_u8).map(|n| vec![n ^ 0x55; 700]).collect())
    }

    fn refs(of: &[Vec<u8>]) -> Vec<&[u8]> {
        of.iter().map(Vec::as_slice).collect()
    }

    fn read(object: &[u8], keys: &[&[u8]], wanted: Range<usize>, out: &mut [u8]) -> Result<usize> {
        let contents = Contents::read(object)?;
        contents.check(&SCOPE, keys, (out.len() / wanted.len()) as u64)?;
        let place = contents.place(wanted.clone());
        let bytes = object.get(place.start as usize..).unwrap_or_default();
        Ok(contents.unpack(&Part { at: place.start, bytes }, wanted, out))
    }

    #[test]
    fn pages_come_back_and_no_damaged_byte_does() {
        let (keys, pages) = sample();
        let (keys, pages) = (refs(&keys), refs(&pages));
        let begin = pages_begin(&keys) as usize;
        for zstd in [None, Some(3)] {
            let object = pack(&SCOPE, Some(&[9; 64]), &keys, &pages, zstd).unwrap();
            assert_eq!(object.len() == begin + 4 * 700, zstd.is_none());
            let read = |object: &[u8]| {
                let mut out = vec![0; 2 * 700];
                read(object, &keys, 1..3, &mut out).map(|came| (came, out))
            };
            assert_eq!(read(&object).unwrap(), (2, pages[1..3].concat()));
            for at in (0..object.len()).step_by(13).chain(begin..object.len().min(begin + 200)) {
                let mut damaged = object.clone();
                damaged[at] ^= 4;
                if let Ok((came, out)) = read(&damaged) {
                    assert_eq!(out[..came * 700], pages[1..3].concat()[..came * 700], "byte {at}");
                }
            }
            for length in [0, 10, begin, begin + 1, object.len() / 2] {
                if let Ok((came, _)) = read(&object[..length]) {
                    assert!(came < 2);
                }
            }
        }
    }

    #[test]
    fn a_page_that_does_not_shrink_stays_as_it_is() {
        let keys = [vec![1; 32], vec![2; 32]];
        let mut state = 1_u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        let pages = [(0..700).map(|_| noise()).collect(), vec![7; 700]];
        let object = pack(&SCOPE, None, &refs(&keys), &refs(&pages), Some(1)).unwrap();
        let codecs: Vec<u8> =
            Contents::read(&object).unwrap().header.slices.iter().map(|s| s.codec).collect();
        assert_eq!(codecs, [Slice::RAW, ZSTD]);
        let mut out = vec![0; 1400];
        assert_eq!(read(&object, &refs(&keys), 0..2, &mut out).unwrap(), 2);
        assert_eq!(out, pages.concat());
    }

    #[test]
    fn the_pages_of_others_are_a_miss() {
        let (keys, pages) = sample();
        let object = pack(&SCOPE, None, &refs(&keys), &refs(&pages), None).unwrap();
        let contents = Contents::read(&object).unwrap();
        let mut others = keys.clone();
        others[0][3] ^= 1;
        assert!(contents.check(&SCOPE, &refs(&keys), 700).is_ok());
        assert!(contents.check(&SCOPE, &refs(&others), 700).is_err());
        assert!(contents.check(&ScopeId([6; 16]), &refs(&keys), 700).is_err());
        assert!(contents.check(&SCOPE, &refs(&keys)[..2], 700).is_err());
        assert!(contents.check(&SCOPE, &refs(&keys), 699).is_err());
    }
}
