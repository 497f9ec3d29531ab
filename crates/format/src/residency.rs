//! Residency records: a log of the workers and tiers on which pages are present.
//!
//! **File.** A [`ResidencyHeader`] (40 bytes), then frames as in the [journal](crate::journal);
//! sequence numbers increase by one across files. A file begins with a copy of the whole state, as
//! records of kind [`ResidencyRecord::Stored`], interleaved with concurrent changes.
//! [`ResidencyRecord::Complete`] marks the point at which the copy is complete, so that older files
//! are no longer needed. The first frame that is short, damaged or out of sequence ends the file.

use crate::journal::{FRAME_OVERHEAD, read_header, write_frame, write_header};
use crate::wire::{Reader, Writer};
use crate::{Error, PageHash, Result, ScopeSlot};
use std::borrow::Cow;

/// A worker of a serving engine, by the number that its router assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Worker(pub u32);

/// A storage tier of a worker. The order is from fast to slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The memory of the worker's accelerator.
    Device,
    /// The memory of the worker's machine.
    Host,
    /// A disk of the worker's machine.
    Disk,
    /// Storage that several machines share, such as a bucket.
    Remote,
}

impl Tier {
    /// All tiers, from fast to slow.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::Remote];
}

/// A set of tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Tiers(u8);

impl Tiers {
    /// No tier.
    pub const NONE: Self = Self(0);
    /// Every tier.
    pub const ALL: Self = Self(0b1111);

    /// The set with these [`Tiers::bits`]; `None` if a bit belongs to no tier.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !Self::ALL.0 == 0 { Some(Self(bits)) } else { None }
    }
    /// The set as bits: bit n stands for the n-th of [`Tier::ALL`].
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }
    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// Whether `tier` is in the set.
    #[must_use]
    pub const fn contains(self, tier: Tier) -> bool {
        self.0 & 1 << tier as u8 != 0
    }
    /// The union of both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    /// The tiers of this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
    /// The fastest tier of the set; `None` if it is empty.
    #[must_use]
    pub fn fastest(self) -> Option<Tier> {
        Tier::ALL.get(self.0.trailing_zeros() as usize).copied()
    }
}

impl From<Tier> for Tiers {
    fn from(tier: Tier) -> Self {
        Self(1 << tier as u8)
    }
}

/// A worker that holds a page, and the tiers on which the worker holds the page, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder {
    /// The worker.
    pub worker: Worker,
    /// The tiers on which the worker holds the page.
    pub tiers: Tiers,
}

/// The header of a file of the residency log: magic `RTRNRESI` (8), version `u32`, features `u32`,
/// number `u64`, first sequence number `u64`, CRC-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidencyHeader {
    /// The file's number. A later file has a higher number; only a file without records may be
    /// created again under its number.
    pub number: u64,
    /// Sequence number of the file's first frame.
    pub first: u64,
}

impl ResidencyHeader {
    const MAGIC: &'static [u8; 8] = b"RTRNRESI";
    /// Encoded length in bytes.
    pub const BYTES: usize = 40;

    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        write_header(Self::MAGIC, [self.number, self.first])
    }

    /// Decodes what [`ResidencyHeader::encode`] wrote.
    ///
    /// # Errors
    /// `Miss` if the header is damaged or has another magic number; `Invalid` if it is intact, and
    /// of another version or with unknown features.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let [number, first] = read_header(Self::MAGIC, "residency log", bytes)?;
        Ok(Self { number, first })
    }
}

/// One change of residency: the body of a frame. Replay is idempotent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResidencyRecord<'a> {
    /// Kind 1: holders were added to consecutive pages. Body: scope `u32`, parent (16 bytes, zero
    /// if unknown), number of holders `u32`, worker `u32` and tiers `u8` of each, then 16 bytes per
    /// page.
    Stored {
        /// The pages' scope.
        scope: ScopeSlot,
        /// The page before the first of `pages`, if known.
        parent: Option<PageHash>,
        /// The holders added to each page, ordered by worker.
        holders: Cow<'a, [Holder]>,
        /// The pages.
        pages: Cow<'a, [PageHash]>,
    },
    /// Kind 2: a worker no longer holds pages on some tiers. Body: scope `u32`, worker `u32`, these
    /// tiers `u8`, then 16 bytes per page.
    Removed {
        /// The pages' scope.
        scope: ScopeSlot,
        /// The worker, and the tiers on which it no longer holds the pages.
        holder: Holder,
        /// The pages.
        pages: Cow<'a, [PageHash]>,
    },
    /// Kind 3: a worker no longer holds any page. Body: worker `u32`.
    ClearedWorker(Worker),
    /// Kind 4: no worker holds any page of a scope any longer. Body: scope `u32`.
    ClearedScope(ScopeSlot),
    /// Kind 5: the copy of the state with which the file begins is complete. No body.
    Complete,
}

impl ResidencyRecord<'_> {
    fn kind(&self) -> u8 {
        match self {
            Self::Stored { .. } => 1,
            Self::Removed { .. } => 2,
            Self::ClearedWorker(_) => 3,
            Self::ClearedScope(_) => 4,
            Self::Complete => 5,
        }
    }

    fn body_bytes(&self) -> usize {
        match self {
            Self::Stored { holders, pages, .. } => 24 + 5 * holders.len() + 16 * pages.len(),
            Self::Removed { pages, .. } => 9 + 16 * pages.len(),
            Self::ClearedWorker(_) | Self::ClearedScope(_) => 4,
            Self::Complete => 0,
        }
    }

    /// Length in bytes of the frame that [`ResidencyRecord::encode`] appends.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        FRAME_OVERHEAD + self.body_bytes()
    }

    /// Appends the record as a frame.
    pub fn encode(&self, sequence: u64, writer: &mut Writer) {
        write_frame(writer, sequence, self.kind(), self.body_bytes(), |body| match self {
            Self::Stored { scope, parent, holders, pages } => {
                body.u32(scope.0).raw(&parent.unwrap_or(PageHash::NONE).0);
                body.u32(holders.len() as u32);
                for holder in holders.iter() {
                    body.u32(holder.worker.0).u8(holder.tiers.0);
                }
                write_pages(body, pages);
            }
            Self::Removed { scope, holder, pages } => {
                body.u32(scope.0).u32(holder.worker.0).u8(holder.tiers.0);
                write_pages(body, pages);
            }
            Self::ClearedWorker(Worker(number)) | Self::ClearedScope(ScopeSlot(number)) => {
                body.u32(*number);
            }
            Self::Complete => {}
        });
    }

    /// Decodes the body of a frame.
    ///
    /// # Errors
    /// `Miss` if the kind is unknown or the body is malformed.
    pub fn decode(kind: u8, body: &[u8]) -> Result<ResidencyRecord<'static>> {
        let mut reader = Reader::new(body);
        let record = match kind {
            1 => {
                let scope = ScopeSlot(reader.u32()?);
                let parent = PageHash(reader.array()?);
                let count = reader.u32()? as usize;
                let bytes = count.checked_mul(5).ok_or_else(malformed)?;
                let mut entries = Reader::new(reader.raw(bytes)?);
                let holders =
                    (0..count).map(|_| read_holder(&mut entries)).collect::<Result<Vec<_>>>()?;
                if holders.is_empty() || !holders.is_sorted_by(|a, b| a.worker < b.worker) {
                    return Err(malformed());
                }
                ResidencyRecord::Stored {
                    scope,
                    parent: (parent != PageHash::NONE).then_some(parent),
                    holders: Cow::Owned(holders),
                    pages: Cow::Owned(read_pages(&mut reader)?),
                }
            }
            2 => ResidencyRecord::Removed {
                scope: ScopeSlot(reader.u32()?),
                holder: read_holder(&mut reader)?,
                pages: Cow::Owned(read_pages(&mut reader)?),
            },
            3 => ResidencyRecord::ClearedWorker(Worker(reader.u32()?)),
            4 => ResidencyRecord::ClearedScope(ScopeSlot(reader.u32()?)),
            5 => ResidencyRecord::Complete,
            _ => return Err(malformed()),
        };
        if reader.remaining() > 0 { Err(malformed()) } else { Ok(record) }
    }
}

fn malformed() -> Error {
    Error::miss("a residency record is malformed")
}

fn write_pages(body: &mut Writer, pages: &[PageHash]) {
    for page in pages {
        body.raw(&page.0);
    }
}

/// Reads the pages up to the end of the record. A record with [`PageHash::NONE`] is malformed.
fn read_pages(reader: &mut Reader<'_>) -> Result<Vec<PageHash>> {
    let (hashes, rest) = reader.raw(reader.remaining())?.as_chunks::<16>();
    let pages: Vec<PageHash> = hashes.iter().map(|hash| PageHash(*hash)).collect();
    if rest.is_empty() && !pages.contains(&PageHash::NONE) { Ok(pages) } else { Err(malformed()) }
}

fn read_holder(reader: &mut Reader<'_>) -> Result<Holder> {
    let worker = Worker(reader.u32()?);
    let tiers = Tiers::from_bits(reader.u8()?).filter(|tiers| !tiers.is_empty());
    Ok(Holder { worker, tiers: tiers.ok_or_else(malformed)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Parsed, read_frame};

    #[test]
    fn records_round_trip() {
        let holder = |worker, bits| Holder { worker: Worker(worker), tiers: Tiers(bits) };
        let (scope, pages) =
            (ScopeSlot(7), Cow::<[_]>::Owned(vec![PageHash([1; 16]), PageHash([2; 16])]));
        let holders = Cow::Owned(vec![holder(1, 3), holder(9, 8)]);
        let parent = Some(PageHash([3; 16]));
        let records = [
            ResidencyRecord::Stored { scope, parent, holders, pages: pages.clone() },
            ResidencyRecord::Removed { scope, holder: holder(4, 15), pages },
            ResidencyRecord::ClearedWorker(Worker(5)),
            ResidencyRecord::ClearedScope(scope),
            ResidencyRecord::Complete,
        ];
        for (sequence, record) in (1..).zip(&records) {
            let mut writer = Writer::new();
            record.encode(sequence, &mut writer);
            assert_eq!(writer.as_slice().len(), record.frame_bytes());
            let Parsed::Frame(frame) = read_frame(writer.as_slice()) else { panic!() };
            assert_eq!(frame.sequence, sequence);
            assert_eq!(&ResidencyRecord::decode(frame.kind, frame.body).unwrap(), record);
            let mut longer = frame.body.to_vec();
            longer.push(0);
            assert!(ResidencyRecord::decode(frame.kind, &longer).is_err());
        }
        let header = ResidencyHeader { number: 3, first: 99 };
        assert_eq!(ResidencyHeader::decode(&header.encode()).unwrap(), header);
        assert_eq!(header.encode().len(), ResidencyHeader::BYTES);
    }

    #[test]
    fn stored_record_needs_ordered_holders_with_tiers() {
        let stored = |holders: &[(u32, u8)]| {
            let mut body = Writer::new();
            body.u32(1).raw(&[0; 16]).u32(holders.len() as u32);
            for (worker, tiers) in holders {
                body.u32(*worker).u8(*tiers);
            }
            ResidencyRecord::decode(1, body.as_slice())
        };
        assert!(stored(&[(1, 1), (2, 15)]).is_ok());
        for wrong in [&[][..], &[(1, 0)], &[(1, 16)], &[(2, 1), (1, 1)], &[(1, 1), (1, 2)]] {
            assert!(stored(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn tiers_behave_as_a_set() {
        let both = Tiers::from(Tier::Disk).with(Tier::Host.into());
        assert_eq!(both.fastest(), Some(Tier::Host));
        assert!(both.contains(Tier::Disk) && !both.contains(Tier::Device));
        assert_eq!(both.without(Tier::Host.into()), Tier::Disk.into());
        assert_eq!(Tiers::NONE.fastest(), None);
        assert_eq!(
            Tier::ALL.map(Tiers::from).into_iter().fold(Tiers::NONE, Tiers::with),
            Tiers::ALL
        );
    }
}
