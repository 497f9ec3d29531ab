//! The values of the tree. Every value except the position of a page has a checksum seeded with its
//! key, because Holt's frames have no checksums.

use super::key;
use crate::RunId;
use crate::synthetic::mix;
use ritornello_format::wire::{Reader, Writer};
use ritornello_format::{
    Error, Extent, PageHash, Place, Result, ScopeSlot, SegmentId, checksum as crc,
};

/// The longest value that Holt accepts.
const VALUE_BYTES_MAX: usize = u16::MAX as usize;
const CHECKSUM_BYTES: usize = 8;

/// A run without its pages.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) scope: ScopeSlot,
    pub(super) chained: bool,
    pub(super) pages: u16,
    /// Number of pages that exist. Less than `pages` if the run has holes.
    pub(super) live: u16,
    /// Hash of the run's last page. In a chained scope, a prompt that has this hash at the
    /// position of the run's last page contains the whole run, so a probe compares no other page of
    /// the run.
    pub(super) last: PageHash,
    pub(super) recency: u64,
    pub(super) parent: Option<(RunId, u32)>,
    pub(super) place: Place,
}

impl Record {
    pub(super) fn encode(&self, run: RunId) -> Result<Vec<u8>> {
        let mut out = Writer::new();
        let (parent, page) = self.parent.map_or((0, 0), |(run, page)| (run.0, page as u16));
        out.u32(self.scope.0).u8(u8::from(self.chained)).u16(self.pages).u16(self.live);
        out.raw(&self.last.0).u64(self.recency).u64(parent).u16(page);
        out.u64(self.place.generation).u64(self.place.header_checksum);
        out.u32(self.place.header_units).u32(self.place.page_units);
        for extent in &self.place.extents {
            out.u32(extent.segment.0).u32(extent.start).u32(extent.units);
        }
        let value = seal(&key::run(run), out.into_vec());
        if value.len() >= VALUE_BYTES_MAX {
            return Err(Error::invalid(
                "the run has more extents than fit into the 64 KiB that Holt takes: \
                 insert shorter runs",
            )
            .with("extents", self.place.extents.len()));
        }
        Ok(value)
    }

    /// Decodes a record; `None` if it fails its checksum or is malformed.
    pub(super) fn decode(run: RunId, value: &[u8]) -> Option<Self> {
        let body = unseal(&key::run(run), value)?;
        Self::read(&mut Reader::new(body)).ok()
    }

    fn read(input: &mut Reader<'_>) -> Result<Self> {
        let (scope, chained) = (ScopeSlot(input.u32()?), input.u8()? != 0);
        let (pages, live) = (input.u16()?, input.u16()?);
        let (last, recency) = (PageHash(input.array()?), input.u64()?);
        let (parent, page) = (input.u64()?, input.u16()?);
        let mut place = Place {
            generation: input.u64()?,
            header_checksum: input.u64()?,
            header_units: input.u32()?,
            page_units: input.u32()?,
            extents: Vec::with_capacity(input.remaining() / 12),
        };
        while input.remaining() > 0 {
            let segment = SegmentId(input.u32()?);
            place.extents.push(Extent { segment, start: input.u32()?, units: input.u32()? });
        }
        let parent = (parent != 0).then_some((RunId(parent), u32::from(page)));
        Ok(Self { scope, chained, pages, live, last, recency, parent, place })
    }
}

pub(super) fn encode_chunk(key: &[u8], pages: &[PageHash]) -> Vec<u8> {
    seal(key, pages.iter().flat_map(|page| page.0).collect())
}

/// Decodes the page hashes of a chunk; `None` if its value fails its checksum or is malformed.
pub(super) fn decode_chunk(key: &[u8], value: &[u8]) -> Option<Vec<PageHash>> {
    let (pages, rest) = unseal(key, value)?.as_chunks();
    rest.is_empty().then(|| pages.iter().map(|page| PageHash(*page)).collect())
}

/// Encodes the position of a page. A position has no checksum: it is a hint, which the run's hashes
/// verify.
pub(super) fn encode_entry(run: RunId, page: u16) -> [u8; 10] {
    let mut value = [0; 10];
    value[..8].copy_from_slice(&run.0.to_be_bytes());
    value[8..].copy_from_slice(&page.to_be_bytes());
    value
}

pub(super) fn decode_entry(value: &[u8]) -> Option<(RunId, u16)> {
    let run = u64::from_be_bytes(value.get(..8)?.try_into().ok()?);
    Some((RunId(run), u16::from_be_bytes(value.get(8..)?.try_into().ok()?)))
}

/// Encodes numbers with a checksum that is seeded with the key.
pub(super) fn encode_numbers(key: &[u8], numbers: &[u64]) -> Vec<u8> {
    seal(key, numbers.iter().flat_map(|number| number.to_be_bytes()).collect())
}

pub(super) fn decode_numbers<const N: usize>(key: &[u8], value: &[u8]) -> Option<[u64; N]> {
    let (numbers, rest) = unseal(key, value)?.as_chunks();
    let numbers: &[[u8; 8]; N] = numbers.try_into().ok()?;
    rest.is_empty().then(|| numbers.map(u64::from_be_bytes))
}

fn seal(key: &[u8], mut body: Vec<u8>) -> Vec<u8> {
    let sum = checksum(key, &body);
    body.extend_from_slice(&sum.to_le_bytes());
    body
}

fn unseal<'a>(key: &[u8], value: &'a [u8]) -> Option<&'a [u8]> {
    let (body, sum) = value.split_at_checked(value.len().checked_sub(CHECKSUM_BYTES)?)?;
    (checksum(key, body).to_le_bytes() == sum).then_some(body)
}

fn checksum(key: &[u8], body: &[u8]) -> u64 {
    crc(body) ^ mix(crc(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_decodes_under_its_own_key_only() {
        let record = Record {
            scope: ScopeSlot(3),
            chained: true,
            pages: 9,
            live: 8,
            last: PageHash([7; 16]),
            recency: 5,
            parent: Some((RunId(4), 2)),
            place: crate::conformance::place(6, 9),
        };
        let value = record.encode(RunId(1)).unwrap();
        let back = Record::decode(RunId(1), &value).unwrap();
        assert_eq!((back.place, back.parent, back.live), (record.place, record.parent, 8));
        assert!(
            Record::decode(RunId(2), &value).is_none(),
            "the record of another run must be refused"
        );
        for at in 0..value.len() {
            let mut flipped = value.clone();
            flipped[at] ^= 1;
            assert!(Record::decode(RunId(1), &flipped).is_none(), "byte {at}");
            assert!(Record::decode(RunId(1), &value[..at]).is_none(), "cut at {at}");
        }
    }
}
