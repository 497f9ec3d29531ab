//! The stored records of the index `lsm`: of one run, without its pages, and of the whole index.

use super::keys::Family;
use crate::RunId;
use ritornello_format::wire::{Reader, Writer};
use ritornello_format::{Error, Extent, Place, Result, ScopeSlot, SegmentId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A run without the hashes of its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) scope: ScopeSlot,
    pub(super) chained: bool,
    pub(super) parent: Option<(RunId, u16)>,
    /// Number of pages that precede the run in its chain, as far as the index knew them when the
    /// run was attached. Removals do not change the number, because parents are not removed before
    /// their children. The number is too low if an ancestor of the run was linked to its own parent
    /// later.
    pub(super) depth: u64,
    /// Number of pages, holes included.
    pub(super) pages: u16,
    /// Number of pages that are not holes.
    pub(super) live: u16,
    pub(super) place: Place,
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        let (parent, parent_page) = self.parent.map_or((0, 0), |(run, page)| (run.0, page));
        out.u8(u8::from(self.chained)).u32(self.scope.0).u64(parent).u16(parent_page);
        out.u64(self.depth).u16(self.pages).u16(self.live);
        out.u64(self.place.generation).u64(self.place.header_checksum);
        out.u32(self.place.header_units).u32(self.place.page_units);
        for extent in &self.place.extents {
            out.u32(extent.segment.0).u32(extent.start).u32(extent.units);
        }
        out.into_vec()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut input = Reader::new(bytes);
        let chained = input.u8()? != 0;
        let scope = ScopeSlot(input.u32()?);
        let parent = RunId(input.u64()?);
        let parent_page = input.u16()?;
        let parent = (parent.0 != 0).then_some((parent, parent_page));
        let (depth, pages, live) = (input.u64()?, input.u16()?, input.u16()?);
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
        if pages == 0 || live == 0 || live > pages {
            return Err(Error::miss("a record of a run has an impossible number of pages"));
        }
        Ok(Self { scope, chained, parent, depth, pages, live, place })
    }
}

/// A run's recency and the end of its retention, separate from the [`Record`], which is longer and
/// changes less often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) recency: u64,
    pub(super) retain_until: u64,
}

impl Use {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut out = Writer::new();
        out.u64(self.recency).u64(self.retain_until);
        out.into_vec()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut input = Reader::new(bytes);
        Ok(Self { recency: input.u64()?, retain_until: input.u64()? })
    }
}

/// A checksum over entries that does not depend on their order. A missing or outdated entry changes
/// the checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum(u64);

impl Sum {
    fn of(family: Family, key: &[u8], value: &[u8]) -> u64 {
        xxh3_64_with_seed(value, xxh3_64_with_seed(key, family as u64))
    }

    pub(super) fn add(&mut self, family: Family, key: &[u8], value: &[u8]) {
        self.0 = self.0.wrapping_add(Self::of(family, key, value));
    }

    pub(super) fn subtract(&mut self, family: Family, key: &[u8], value: &[u8]) {
        self.0 = self.0.wrapping_sub(Self::of(family, key, value));
    }
}

/// Counts of the whole index, stored with every change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// The run name that was assigned last.
    pub(super) last: u64,
    pub(super) runs: u64,
    pub(super) pages: u64,
    /// See [`crate::PrefixIndex::clock`].
    pub(super) clock: u64,
    /// Checksum over all entries of the column families in `Family::ALL`.
    pub(super) sum: Sum,
}

impl Counts {
    /// Version of the keys and values. A database of another version is refused.
    const VERSION: u8 = 2;

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.u8(Self::VERSION).u64(self.last).u64(self.runs).u64(self.pages).u64(self.clock);
        out.u64(self.sum.0);
        out.into_vec()
    }

    /// # Errors
    /// `Invalid` if the version is unknown, `Miss` if there are too few bytes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut input = Reader::new(bytes);
        let version = input.u8()?;
        if version != Self::VERSION {
            return Err(Error::invalid(
                "the index has an unknown format: open it with the version \
                 that wrote it, or make a new store",
            )
            .with("format", version));
        }
        Ok(Self {
            last: input.u64()?,
            runs: input.u64()?,
            pages: input.u64()?,
            clock: input.u64()?,
            sum: Sum(input.u64()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip() {
        let record = Record {
            scope: ScopeSlot(7),
            chained: true,
            parent: Some((RunId(9), 65_535)),
            depth: 1 << 40,
            pages: 300,
            live: 299,
            place: crate::conformance::place(5, 300),
        };
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes).unwrap(), record);
        assert!((0..bytes.len()).all(|cut| {
            Record::decode(&bytes[..cut]).is_err() || (bytes.len() - cut).is_multiple_of(12)
        }));
        let used = Use { recency: 3, retain_until: 4 };
        assert_eq!(Use::decode(&used.encode()).unwrap(), used);
        let counts = Counts { last: 1, runs: 2, pages: 3, clock: 4, sum: Sum(5) };
        let mut bytes = counts.encode();
        assert_eq!(Counts::decode(&bytes).unwrap(), counts);
        bytes[0] = 9;
        let error = Counts::decode(&bytes).unwrap_err();
        assert_eq!(error.kind(), ritornello_format::ErrorKind::Invalid);
    }
}
