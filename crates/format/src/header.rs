//! The run header, which precedes the pages of a run and describes them.

use crate::version::check_version;
use crate::wire::{Reader, Writer};
use crate::{
    Error, Extent, FORMAT_VERSION, KEY_BYTES_MAX, KEY_BYTES_MIN, KeyList, PAGE_BYTES_MAX, Result,
    ScopeId, ScopeSlot, SegmentId, UNIT, checksum, units_of,
};
use std::ops::Range;

/// The first eight bytes of every run header.
pub const RUN_MAGIC: [u8; 8] = *b"RITORUN\0";
/// The longest run header, in units. A batch of pages whose header would be longer becomes several
/// runs.
pub const RUN_HEADER_UNITS_MAX: u32 = 4;

/// Number of extents for which [`RunHeader::units`] leaves room. A header lists further extents if
/// they fit its last unit. Only salvage reads the list.
const EXTENT_ROOM: usize = 32;
/// Bytes of the fields of fixed length: magic, version, length, features, store, scope, slot,
/// slices per page, header units, page units, generation, page bytes, number of extents, number of
/// listed extents, number of pages, length of the parent key.
const FIXED_BYTES: usize = 8 + 4 + 4 + 4 + 16 + 16 + 4 + 2 + 2 + 4 + 8 + 8 + 4 + 4 + 4 + 1;
const EXTENT_BYTES: usize = 12;
const SLICE_BYTES: usize = 4 + 1 + 8;
const CHECKSUM_BYTES: usize = 8;
const BYTES_MAX: usize = RUN_HEADER_UNITS_MAX as usize * UNIT as usize;

/// One slice of a page, as stored on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Slice {
    /// Encoded length in bytes.
    pub bytes: u32,
    /// Number of the slice's codec; [`Slice::RAW`] if the slice is not encoded.
    pub codec: u8,
    /// [`crate::SliceChecksum`] of the encoded bytes.
    pub checksum: u64,
}

impl Slice {
    /// The codec number of bytes that are not encoded.
    pub const RAW: u8 = 0;

    /// The byte range of a page that slice `number` of `slices` holds. The lengths of a page's
    /// slices differ by at most one byte.
    #[must_use]
    pub const fn part(number: u16, slices: u16, page_bytes: u64) -> Range<u64> {
        let slices = if slices == 0 { 1 } else { slices as u64 };
        let number = number as u64;
        number * page_bytes / slices..(number + 1) * page_bytes / slices
    }
}

/// A run header. It holds a checksum of each slice of each page; the index keeps the checksum of
/// every run header ([`RunHeader::encode`]).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RunHeader {
    /// The store that holds the run.
    pub store: [u8; 16],
    /// The scope of all keys of the run.
    pub scope: ScopeId,
    /// The scope's slot when the run was written. Salvage uses it to skip runs of dropped scopes.
    pub slot: ScopeSlot,
    /// See [`crate::Place::generation`].
    pub generation: u64,
    /// Length of a page before it is encoded and padded, in bytes.
    pub page_bytes: u64,
    /// See [`crate::Place::header_units`].
    pub header_units: u32,
    /// See [`crate::Place::page_units`].
    pub page_units: u32,
    /// Key of the page before the run's first page, if known; `None` in a scope that is not
    /// chained.
    pub parent: Option<Vec<u8>>,
    /// The run's extents when the run was written. Truncating the run frees extents and does not
    /// change this list. If not all [`RunHeader::extents_total`] extents fit, the list holds the
    /// leading extents.
    pub extents: Vec<Extent>,
    /// Number of the run's extents when it was written.
    pub extents_total: u32,
    /// Key of every page.
    pub keys: KeyList,
    /// Slices per page, the same for all pages.
    pub slices_per_page: u16,
    /// The slices of all pages, in order.
    pub slices: Vec<Slice>,
}

impl RunHeader {
    /// The store that a run header at the start of `unit` names. `None` if `unit` does not begin
    /// with a run header of this version. Does not verify the header.
    #[must_use]
    pub fn store_of(unit: &[u8]) -> Option<[u8; 16]> {
        let version = unit.get(8..12)?;
        let is_header = unit.starts_with(&RUN_MAGIC) && version == FORMAT_VERSION.to_le_bytes();
        is_header.then(|| unit.get(20..36)?.try_into().ok()).flatten()
    }

    /// Number of units that the header of a run takes, given the lengths of the keys of its pages.
    /// If the number exceeds [`RUN_HEADER_UNITS_MAX`], split the batch: see
    /// [`RunHeader::pages_that_fit`].
    #[must_use]
    pub fn units(key_lengths: impl IntoIterator<Item = usize>, slices_per_page: u16) -> u32 {
        let bytes = key_lengths
            .into_iter()
            .fold(least_bytes(), |sum, key| sum.saturating_add(page_room(key, slices_per_page)));
        u32::try_from(units_of(bytes as u64)).unwrap_or(u32::MAX)
    }

    /// Number of leading pages that the header of one run can describe. Zero only if there are no
    /// pages, or if one page has more slices than a header can describe.
    #[must_use]
    pub fn pages_that_fit(
        key_lengths: impl IntoIterator<Item = usize>,
        slices_per_page: u16,
    ) -> usize {
        let mut bytes = least_bytes();
        key_lengths
            .into_iter()
            .take_while(|&key| {
                bytes = bytes.saturating_add(page_room(key, slices_per_page));
                bytes <= BYTES_MAX
            })
            .count()
    }

    /// The slices of page `page`; empty if the header has no page `page`.
    #[must_use]
    pub fn slices_of(&self, page: usize) -> &[Slice] {
        let count = usize::from(self.slices_per_page);
        let from = page.saturating_mul(count);
        self.slices.get(from..from.saturating_add(count)).unwrap_or(&[])
    }

    /// The encoded header, not padded, and its checksum: the CRC-64 of all bytes before the last
    /// eight, which hold the CRC. The checksum does not cover these eight bytes, because the CRC of
    /// bytes that end with their own CRC is a constant.
    ///
    /// Writes the length of `extents` as the number of extents, ignores `extents_total`, and lists
    /// only the leading extents that fit `header_units`.
    ///
    /// # Errors
    /// `Invalid` if the header does not fit `header_units`, if `header_units` is zero or above
    /// [`RUN_HEADER_UNITS_MAX`], if a key is too short or too long, or if keys and slices do not
    /// match.
    pub fn encode(&self) -> Result<(Vec<u8>, u64)> {
        let units = self.header_units;
        let parent = self.parent.as_deref().unwrap_or(&[]);
        let key_fits = |key: &[u8]| (KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&key.len());
        if !self.keys.iter().all(key_fits)
            || !(self.parent.is_none() || key_fits(parent))
            || self.slices.len() != self.keys.len() * usize::from(self.slices_per_page)
        {
            return Err(Error::invalid(
                "a run header has a key of a wrong length, or slices that do not match its keys",
            ));
        }
        let bare = FIXED_BYTES
            + parent.len()
            + self.keys.iter().map(|key| page_room(key.len(), self.slices_per_page)).sum::<usize>()
            + CHECKSUM_BYTES;
        let room = units as usize * UNIT as usize;
        if bare > room || units == 0 || units > RUN_HEADER_UNITS_MAX {
            return Err(Error::invalid("a run header does not fit: put fewer pages into one run")
                .with("bytes", bare)
                .with("room", room));
        }
        let listed = self.extents.len().min((room - bare) / EXTENT_BYTES);
        let length = bare + listed * EXTENT_BYTES;

        let mut writer = Writer::new();
        writer
            .raw(&RUN_MAGIC)
            .u32(FORMAT_VERSION)
            .u32(length as u32)
            .u32(0)
            .raw(&self.store)
            .raw(&self.scope.0)
            .u32(self.slot.0)
            .u16(self.slices_per_page)
            .u16(units as u16)
            .u32(self.page_units)
            .u64(self.generation)
            .u64(self.page_bytes)
            .u32(self.extents.len() as u32)
            .u32(listed as u32)
            .u32(self.keys.len() as u32)
            .u8(parent.len() as u8)
            .raw(parent);
        for extent in &self.extents[..listed] {
            writer.u32(extent.segment.0).u32(extent.start).u32(extent.units);
        }
        for (page, key) in self.keys.iter().enumerate() {
            writer.u8(key.len() as u8).raw(key);
            for slice in self.slices_of(page) {
                writer.u32(slice.bytes).u8(slice.codec).u64(slice.checksum);
            }
        }
        let sum = checksum(writer.as_slice());
        writer.u64(sum);
        Ok((writer.into_vec(), sum))
    }

    /// Decodes what [`RunHeader::encode`] wrote; more bytes may follow. Returns the header and its
    /// checksum. Interprets only magic, version and length before it has verified the checksum.
    ///
    /// # Errors
    /// `Miss` if `bytes` do not begin with an intact run header of this version, or if the header
    /// has unknown features or fields out of range.
    pub fn decode(bytes: &[u8]) -> Result<(Self, u64)> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != RUN_MAGIC {
            return Err(Error::miss("the bytes do not begin with a run header"));
        }
        let version = reader.u32()?;
        if version != FORMAT_VERSION {
            return Err(Error::miss("a run header of another format version")
                .with("version", version)
                .with("read", FORMAT_VERSION));
        }
        let length = reader.u32()? as usize;
        let whole = bytes
            .get(..length)
            .filter(|_| (FIXED_BYTES + CHECKSUM_BYTES..=BYTES_MAX).contains(&length))
            .ok_or_else(|| Error::miss("a run header of impossible length"))?;
        let (body, tail) = whole.split_at(length - CHECKSUM_BYTES);
        let sum = Reader::new(tail).u64()?;
        if checksum(body) != sum {
            return Err(Error::miss("a run header fails its checksum"));
        }
        let mut reader = Reader::new(&body[16..]);
        check_version("run header", version, reader.u32()?)
            .map_err(|error| Error::miss("a run header with unknown features").because(error))?;
        let header = Self::decode_fields(&mut reader)?;
        if reader.remaining() != 0 {
            return Err(Error::miss("a run header is longer than its fields"));
        }
        Ok((header, sum))
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self> {
        let mut header = Self {
            store: reader.array()?,
            scope: ScopeId(reader.array()?),
            slot: ScopeSlot(reader.u32()?),
            slices_per_page: reader.u16()?,
            header_units: u32::from(reader.u16()?),
            page_units: reader.u32()?,
            generation: reader.u64()?,
            page_bytes: reader.u64()?,
            extents_total: reader.u32()?,
            ..Self::default()
        };
        let (listed, pages) = (reader.u32()? as usize, reader.u32()? as usize);
        let parent = reader.u8()? as usize;
        header.parent = match parent {
            0 => None,
            length => Some(reader.raw(length)?.to_vec()),
        };
        // Limit the numbers of extents and pages by the remaining bytes before allocating memory.
        if listed > reader.remaining() / EXTENT_BYTES || listed > header.extents_total as usize {
            return Err(Error::miss("a run header lists an impossible number of extents"));
        }
        for _ in 0..listed {
            let (segment, start, units) = (SegmentId(reader.u32()?), reader.u32()?, reader.u32()?);
            header.extents.push(Extent { segment, start, units });
        }
        let slices = header.slices_per_page;
        if pages > reader.remaining() / page_room(KEY_BYTES_MIN, slices) {
            return Err(Error::miss("a run header lists an impossible number of pages"));
        }
        let fields = pages * (page_room(0, slices));
        header.keys = KeyList::with_capacity(pages, reader.remaining().saturating_sub(fields));
        header.slices.reserve_exact(pages * usize::from(slices));
        for _ in 0..pages {
            let length = reader.u8()? as usize;
            header.keys.push(reader.raw(length)?);
            for _ in 0..slices {
                header.slices.push(Slice {
                    bytes: reader.u32()?,
                    codec: reader.u8()?,
                    checksum: reader.u64()?,
                });
            }
        }
        let sane = (1..=RUN_HEADER_UNITS_MAX).contains(&header.header_units)
            && (1..=PAGE_BYTES_MAX).contains(&header.page_bytes)
            && header
                .keys
                .iter()
                .chain(header.parent.as_deref())
                .all(|key| (KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&key.len()));
        if sane { Ok(header) } else { Err(Error::miss("a run header's fields are out of range")) }
    }
}

/// Bytes of a header without pages, with the longest parent key and room for [`EXTENT_ROOM`]
/// extents.
const fn least_bytes() -> usize {
    FIXED_BYTES + KEY_BYTES_MAX + EXTENT_ROOM * EXTENT_BYTES + CHECKSUM_BYTES
}

/// Bytes that a page with a key of `key` bytes and `slices` slices adds to the header.
const fn page_room(key: usize, slices: u16) -> usize {
    1 + key + slices as usize * SLICE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(pages: usize, extents: usize) -> RunHeader {
        let keys: KeyList = (0..pages).map(|n| vec![n as u8; 8 + n % 57]).collect();
        RunHeader {
            store: [3; 16],
            scope: ScopeId([4; 16]),
            slot: ScopeSlot(5),
            generation: 6,
            page_bytes: 70_000,
            header_units: RunHeader::units(keys.iter().map(<[u8]>::len), 1),
            page_units: 18,
            parent: Some(vec![9; 32]),
            extents: (0..extents as u32)
                .map(|n| Extent { segment: SegmentId::new(1, n), start: n, units: 1 + n })
                .collect(),
            extents_total: extents as u32,
            slices_per_page: 1,
            slices: (0..pages as u64)
                .map(|n| Slice { bytes: 70_000, codec: Slice::RAW, checksum: n * 77 })
                .collect(),
            keys,
        }
    }

    #[test]
    fn header_round_trips_when_other_bytes_follow() {
        for (pages, extents) in [(0, 0), (1, 1), (57, 3), (200, 32)] {
            let header = header(pages, extents);
            let (mut bytes, sum) = header.encode().unwrap();
            assert!(bytes.len() <= header.header_units as usize * UNIT as usize);
            bytes.resize(BYTES_MAX, 0xab);
            assert_eq!(RunHeader::decode(&bytes).unwrap(), (header, sum));
        }
    }

    #[test]
    fn slices_cover_a_page_without_gaps() {
        for (bytes, slices) in [(1, 1), (10, 3), (8 << 20, 64), (70_001, 7)] {
            let parts: Vec<_> = (0..slices).map(|n| Slice::part(n, slices, bytes)).collect();
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, bytes));
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
            assert!(parts.iter().all(|part| !part.is_empty()));
        }
        assert_eq!(Slice::part(0, 0, 9), 0..9);
    }

    #[test]
    fn different_headers_have_different_checksums() {
        let (a, mut b) = (header(3, 1), header(3, 1));
        b.generation += 1;
        assert_ne!(a.encode().unwrap().1, b.encode().unwrap().1);
    }

    #[test]
    fn header_counts_extents_that_it_has_no_room_to_list() {
        let big = header(10, 2000);
        let (bytes, _) = big.encode().unwrap();
        let (read, _) = RunHeader::decode(&bytes).unwrap();
        assert_eq!(read.extents_total, 2000);
        assert!((EXTENT_ROOM..2000).contains(&read.extents.len()));
        assert_eq!(read.extents[..], big.extents[..read.extents.len()]);
    }

    #[test]
    fn batch_splits_where_the_header_is_full() {
        let lengths = || std::iter::repeat_n(32, 10_000);
        let fit = RunHeader::pages_that_fit(lengths(), 1);
        assert!(fit > 300, "{fit}");
        assert_eq!(RunHeader::units(lengths().take(fit), 1), RUN_HEADER_UNITS_MAX);
        assert_eq!(RunHeader::units(lengths().take(fit + 1), 1), RUN_HEADER_UNITS_MAX + 1);
        assert_eq!(RunHeader::units(lengths().take(32), 1), 1);
    }

    #[test]
    fn flipped_bit_or_cut_header_is_refused() {
        let (bytes, _) = header(5, 2).encode().unwrap();
        for at in 0..bytes.len() {
            assert!(RunHeader::decode(&bytes[..at]).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                assert!(RunHeader::decode(&bad).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn header_with_unknown_features_is_a_miss() {
        let (mut bytes, _) = header(2, 1).encode().unwrap();
        bytes[16] = 1;
        let body = bytes.len() - CHECKSUM_BYTES;
        let sum = checksum(&bytes[..body]).to_le_bytes();
        bytes[body..].copy_from_slice(&sum);
        assert_eq!(RunHeader::decode(&bytes).unwrap_err().kind(), crate::ErrorKind::Miss);
    }

    proptest! {
        /// A header may have wrong fields and a matching checksum. Decoding such a header causes no
        /// panic, even if a wrong count is huge.
        #[test]
        fn wrong_fields_under_valid_checksum_cause_no_panic(
            at in 16usize..400, value in any::<[u8; 4]>(), pages in 0usize..8
        ) {
            let (mut bytes, _) = header(pages, 2).encode().unwrap();
            let body = bytes.len() - CHECKSUM_BYTES;
            let at = at.min(body - 4);
            bytes[at..at + 4].copy_from_slice(&value);
            let sum = checksum(&bytes[..body]).to_le_bytes();
            bytes[body..].copy_from_slice(&sum);
            let _ = RunHeader::decode(&bytes);
        }

        #[test]
        fn noise_after_magic_is_refused(noise in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut bytes = RUN_MAGIC.to_vec();
            bytes.extend(FORMAT_VERSION.to_le_bytes());
            bytes.extend(noise);
            prop_assert!(RunHeader::decode(&bytes).is_err());
        }
    }
}
