//! The journal of the index `run`: the changes of the index, in order, as checksummed frames.
//!
//! **File.** A [`JournalHeader`] (40 bytes), then frames up to the end of the file. Sequence
//! numbers increase by one from frame to frame, across files too. The first frame that is short,
//! damaged or out of sequence ends the journal: frames after it are ignored.
//!
//! **Frame**, the unit of checksumming. Checkpoints consist of frames as well:
//!
//! | bytes | field |
//! |---|---|
//! | 4 | length `n` of all bytes between this field and the checksum, 9 to [`FRAME_BYTES_MAX`] |
//! | 8 | sequence number |
//! | 1 | kind |
//! | n - 9 | body |
//! | 8 | CRC-64/NVME of all preceding bytes of the frame, the length included |
//!
//! Replay is idempotent: replaying a record a second time changes nothing. A record about a removed
//! run has no effect, even if a later run has the same number, because the runs of one number
//! differ in their reuse counts ([`RunImage::run`]). A checkpoint can therefore be copied while the
//! index changes.

use crate::version::check_version;
use crate::wire::{Reader, Writer};
use crate::{
    Error, Extent, FORMAT_VERSION, PageHash, Place, Result, ScopeSlot, SegmentId, checksum,
};
use std::borrow::Cow;

/// The longest frame, without its length field and checksum. A reader treats a greater length as
/// damage, so that a damaged length cannot cause a large allocation.
pub const FRAME_BYTES_MAX: usize = 4 << 20;
/// Bytes of a frame without its body.
pub const FRAME_OVERHEAD: usize = 4 + 8 + 1 + 8;

/// Appends a frame. `body` writes exactly `body_bytes` bytes.
pub fn write_frame(
    writer: &mut Writer,
    sequence: u64,
    kind: u8,
    body_bytes: usize,
    body: impl FnOnce(&mut Writer),
) {
    let start = writer.as_slice().len();
    debug_assert!(body_bytes + 9 <= FRAME_BYTES_MAX);
    writer.u32((body_bytes + 9) as u32).u64(sequence).u8(kind);
    body(writer);
    debug_assert_eq!(writer.as_slice().len(), start + 13 + body_bytes);
    let sum = checksum(&writer.as_slice()[start..]);
    writer.u64(sum);
}

/// A verified frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The frame's sequence number.
    pub sequence: u64,
    /// The kind of the body: see [`JournalRecord`],
    /// [`CheckpointFrame`](crate::checkpoint::CheckpointFrame) and
    /// [`ResidencyRecord`](crate::residency::ResidencyRecord).
    pub kind: u8,
    /// The body, which the type for this kind decodes.
    pub body: &'a [u8],
    /// Length of the whole frame in bytes.
    pub bytes: usize,
}

/// The result of parsing the next bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// An intact frame.
    Frame(Frame<'a>),
    /// The bytes end inside the frame, whose length is at least this number of bytes.
    Short(usize),
    /// Bytes that are not a frame.
    Damaged,
}

/// Parses the frame at the start of `bytes`.
#[must_use]
pub fn read_frame(bytes: &[u8]) -> Parsed<'_> {
    let mut reader = Reader::new(bytes);
    let Ok(length) = reader.u32() else { return Parsed::Short(FRAME_OVERHEAD) };
    let length = length as usize;
    if !(9..=FRAME_BYTES_MAX).contains(&length) {
        return Parsed::Damaged;
    }
    let (Ok(inner), Ok(sum)) = (reader.raw(length), reader.u64()) else {
        return Parsed::Short(length + 12);
    };
    if checksum(&bytes[..4 + length]) != sum {
        return Parsed::Damaged;
    }
    let mut inner = Reader::new(inner);
    match (inner.u64(), inner.u8()) {
        (Ok(sequence), Ok(kind)) => {
            Parsed::Frame(Frame { sequence, kind, body: inner.rest(), bytes: length + 12 })
        }
        _ => Parsed::Damaged,
    }
}

/// Encodes the header of a file of frames. The layout of the header is the same in every version:
/// magic (8), version `u32`, features `u32`, `N` numbers `u64`, CRC-64 of all preceding bytes.
pub(crate) fn write_header<const N: usize>(magic: &[u8; 8], numbers: [u64; N]) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.raw(magic).u32(FORMAT_VERSION).u32(0);
    for number in numbers {
        writer.u64(number);
    }
    let sum = checksum(writer.as_slice());
    writer.u64(sum);
    writer.into_vec()
}

/// Decodes what [`write_header`] wrote. Checks the checksum first: a flipped bit in the version is
/// damage, not an unsupported version.
pub(crate) fn read_header<const N: usize>(
    magic: &[u8; 8],
    what: &str,
    bytes: &[u8],
) -> Result<[u64; N]> {
    let mut reader = Reader::new(bytes);
    let whole = reader.raw(16 + 8 * N)?;
    if reader.u64()? != checksum(whole) {
        return Err(Error::miss(format!("the header of a {what} is damaged")));
    }
    let mut reader = Reader::new(whole);
    let (found, version, features) = (reader.array::<8>()?, reader.u32()?, reader.u32()?);
    if &found != magic {
        return Err(Error::miss(format!(
            "a file where a {what} is expected has a different magic number"
        )));
    }
    check_version(what, version, features)?;
    let mut numbers = [0; N];
    for number in &mut numbers {
        *number = reader.u64()?;
    }
    Ok(numbers)
}

/// The header of a journal file: magic `RTRNJRNL` (8), version `u32`, features `u32`, number
/// `u64`, first sequence number `u64`, CRC-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalHeader {
    /// The file's number. A later file has a higher number; only a file without records may be
    /// created again under its number.
    pub number: u64,
    /// Sequence number of the file's first frame.
    pub first: u64,
}

impl JournalHeader {
    const MAGIC: &'static [u8; 8] = b"RTRNJRNL";
    /// Encoded length in bytes.
    pub const BYTES: usize = 40;

    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        write_header(Self::MAGIC, [self.number, self.first])
    }

    /// Decodes what [`JournalHeader::encode`] wrote.
    ///
    /// # Errors
    /// `Miss` if the header is damaged or has another magic number; `Invalid` if it is intact, and
    /// of another version or with unknown features.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let [number, first] = read_header(Self::MAGIC, "journal", bytes)?;
        Ok(Self { number, first })
    }
}

/// The image of a run: the body of an insert record, and the content of checkpoints.
///
/// | bytes | field |
/// |---|---|
/// | 8 | run: number of its record in the index `run` (low 32 bits), reuse count (high 32 bits) |
/// | 4 | scope slot |
/// | 1 | flags: bit 0 the scope is chained, bit 1 the parent is known; the other bits are zero |
/// | 8 | parent run (zero if unknown) |
/// | 2 | page of the parent run that this run follows (zero if unknown) |
/// | 8 | recency |
/// | 8 | generation |
/// | 8 | checksum of the run header |
/// | 4 | header units |
/// | 4 | page units |
/// | 4 | number of extents `e` |
/// | 2 | number of pages `p`, at least 1 |
/// | 12 e | extents: segment `u32`, start `u32`, units `u32` |
/// | 16 p | page hashes; all zero where a page was removed alone |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunImage<'a> {
    /// The run's name: the number of its record in the memory of the index `run` (low 32 bits), and
    /// the record's reuse count (high 32 bits), which increases each time the record is used for a
    /// new run.
    pub run: u64,
    /// The scope of the run's pages.
    pub scope: ScopeSlot,
    /// Whether the scope's keys are chained.
    pub chained: bool,
    /// The parent run, and the number of its page that precedes this run, if known.
    pub parent: Option<(u64, u16)>,
    /// Number of the run's last use; the store numbers the uses of pages in order.
    pub recency: u64,
    /// The run's place.
    pub place: Cow<'a, Place>,
    /// Hashes of the run's pages: at least one, at most 65,535.
    pub pages: Cow<'a, [PageHash]>,
}

impl RunImage<'_> {
    /// Encoded length in bytes of an image with these numbers of pages and extents.
    #[must_use]
    pub const fn bytes(pages: usize, extents: usize) -> usize {
        61 + 12 * extents + 16 * pages
    }

    /// Encoded length in bytes.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        Self::bytes(self.pages.len(), self.place.extents.len())
    }

    /// Appends the image.
    pub fn encode(&self, writer: &mut Writer) {
        let (parent, page) = self.parent.unwrap_or_default();
        let flags = u8::from(self.chained) | u8::from(self.parent.is_some()) << 1;
        let place = &self.place;
        writer
            .u64(self.run)
            .u32(self.scope.0)
            .u8(flags)
            .u64(parent)
            .u16(page)
            .u64(self.recency)
            .u64(place.generation)
            .u64(place.header_checksum)
            .u32(place.header_units)
            .u32(place.page_units)
            .u32(place.extents.len() as u32)
            .u16(self.pages.len() as u16);
        for extent in &place.extents {
            writer.u32(extent.segment.0).u32(extent.start).u32(extent.units);
        }
        for page in self.pages.iter() {
            writer.raw(&page.0);
        }
    }

    /// Decodes what [`RunImage::encode`] wrote.
    ///
    /// # Errors
    /// `Miss` if the bytes are not an image.
    pub fn decode(reader: &mut Reader<'_>) -> Result<RunImage<'static>> {
        let run = reader.u64()?;
        let scope = ScopeSlot(reader.u32()?);
        let flags = reader.u8()?;
        let parent = (reader.u64()?, reader.u16()?);
        let recency = reader.u64()?;
        let mut place = Place {
            generation: reader.u64()?,
            header_checksum: reader.u64()?,
            header_units: reader.u32()?,
            page_units: reader.u32()?,
            extents: Vec::new(),
        };
        let extents = reader.u32()? as usize;
        let pages = usize::from(reader.u16()?);
        if flags > 3 || pages == 0 {
            return Err(Error::miss("a run image is malformed").with("run", run));
        }
        place.extents = read_extents(reader, extents)?;
        let hashes = reader.raw(16 * pages)?.as_chunks::<16>().0;
        Ok(RunImage {
            run,
            scope,
            chained: flags & 1 != 0,
            parent: (flags & 2 != 0).then_some(parent),
            recency,
            place: Cow::Owned(place),
            pages: Cow::Owned(hashes.iter().map(|hash| PageHash(*hash)).collect()),
        })
    }
}

/// Decodes `count` extents. Checks that their bytes exist before it allocates.
fn read_extents(reader: &mut Reader<'_>, count: usize) -> Result<Vec<Extent>> {
    let bytes = count
        .checked_mul(12)
        .ok_or_else(|| Error::miss("a record has an impossible number of extents"))?;
    let mut reader = Reader::new(reader.raw(bytes)?);
    (0..count)
        .map(|_| {
            Ok(Extent {
                segment: SegmentId(reader.u32()?),
                start: reader.u32()?,
                units: reader.u32()?,
            })
        })
        .collect()
}

/// One change of the index: a journal frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalRecord<'a> {
    /// Kind 1: a run was inserted. Body: a [`RunImage`].
    Insert(RunImage<'a>),
    /// Kind 2: runs were truncated, each to a number of pages; zero removes the run. Body: count
    /// `u32`, then run `u64` and pages kept `u16` of each.
    Cut(Vec<(u64, u16)>),
    /// Kind 3: single pages were removed from runs, which keep other pages. Body as in kind 2, with
    /// the page's number instead of the pages kept.
    Punch(Vec<(u64, u16)>),
    /// Kind 4: the parent of a run became known. Body: run `u64`, parent run `u64`, page of the
    /// parent `u16`.
    Link {
        /// The run whose parent became known.
        child: u64,
        /// The parent run, which the child follows.
        parent: u64,
        /// The page of the parent run that precedes the child.
        page: u16,
    },
    /// Kind 5: a run moved. Body: run `u64`, generation `u64`, header checksum `u64`, header units
    /// `u32`, page units `u32`, number of extents `u32`, extents as in [`RunImage`].
    Relocate {
        /// The run that moved.
        run: u64,
        /// The run's new place.
        place: Cow<'a, Place>,
    },
    /// Kind 6: runs were used. Body: count `u32`, then run `u64` and recency `u64` of each.
    Touch(Vec<(u64, u64)>),
    /// Kind 7: runs are retained. Body: [`Retentions`].
    Retain(Retentions),
}

/// The times until which runs are not evicted, and the time when the record was written.
///
/// Body: clock `u64`, count `u32`, then run `u64` and end `u64` of each. Times are in seconds of
/// the store's clock: seconds since 1970, except that the clock never decreases. An end of zero
/// ends a retention.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retentions {
    /// The store's clock when the record was written. After a restart the clock continues from the
    /// latest stored value.
    pub clock: u64,
    /// Runs, and the ends of their retentions.
    pub runs: Vec<(u64, u64)>,
}

impl Retentions {
    /// Encoded length in bytes of the retentions of `runs` runs.
    #[must_use]
    pub const fn bytes(runs: usize) -> usize {
        12 + 16 * runs
    }

    /// Appends the body of the record or checkpoint frame that holds these retentions.
    pub fn encode(&self, writer: &mut Writer) {
        writer.u64(self.clock).u32(self.runs.len() as u32);
        for (run, end) in &self.runs {
            writer.u64(*run).u64(*end);
        }
    }

    /// Decodes what [`Retentions::encode`] wrote.
    ///
    /// # Errors
    /// `Miss` if bytes are missing.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let clock = reader.u64()?;
        let mut entries = Reader::new(counted(reader, 16)?);
        let mut runs = Vec::with_capacity(entries.remaining() / 16);
        while entries.remaining() > 0 {
            runs.push((entries.u64()?, entries.u64()?));
        }
        Ok(Self { clock, runs })
    }
}

impl JournalRecord<'_> {
    /// Length in bytes of the frame that [`JournalRecord::encode`] appends.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        FRAME_OVERHEAD + self.body_bytes()
    }

    fn body_bytes(&self) -> usize {
        match self {
            Self::Insert(image) => image.encoded_bytes(),
            Self::Cut(entries) | Self::Punch(entries) => 4 + 10 * entries.len(),
            Self::Link { .. } => 18,
            Self::Relocate { place, .. } => 36 + 12 * place.extents.len(),
            Self::Touch(entries) => 4 + 16 * entries.len(),
            Self::Retain(retentions) => Retentions::bytes(retentions.runs.len()),
        }
    }

    /// Appends the record as a frame.
    pub fn encode(&self, sequence: u64, writer: &mut Writer) {
        let kind = match self {
            Self::Insert(_) => 1,
            Self::Cut(_) => 2,
            Self::Punch(_) => 3,
            Self::Link { .. } => 4,
            Self::Relocate { .. } => 5,
            Self::Touch(_) => 6,
            Self::Retain(_) => 7,
        };
        write_frame(writer, sequence, kind, self.body_bytes(), |body| match self {
            Self::Insert(image) => image.encode(body),
            Self::Cut(entries) | Self::Punch(entries) => {
                body.u32(entries.len() as u32);
                for (run, page) in entries {
                    body.u64(*run).u16(*page);
                }
            }
            Self::Link { child, parent, page } => {
                body.u64(*child).u64(*parent).u16(*page);
            }
            Self::Relocate { run, place } => {
                body.u64(*run)
                    .u64(place.generation)
                    .u64(place.header_checksum)
                    .u32(place.header_units)
                    .u32(place.page_units)
                    .u32(place.extents.len() as u32);
                for extent in &place.extents {
                    body.u32(extent.segment.0).u32(extent.start).u32(extent.units);
                }
            }
            Self::Touch(entries) => {
                body.u32(entries.len() as u32);
                for (run, recency) in entries {
                    body.u64(*run).u64(*recency);
                }
            }
            Self::Retain(retentions) => retentions.encode(body),
        });
    }

    /// Decodes the body of a frame.
    ///
    /// # Errors
    /// `Miss` if the kind is unknown, or the body is too short, too long or malformed.
    pub fn decode(kind: u8, body: &[u8]) -> Result<JournalRecord<'static>> {
        let mut reader = Reader::new(body);
        let record = match kind {
            1 => JournalRecord::Insert(RunImage::decode(&mut reader)?),
            2 | 3 => {
                let mut entries = Reader::new(counted(&mut reader, 10)?);
                let mut list = Vec::with_capacity(entries.remaining() / 10);
                while entries.remaining() > 0 {
                    list.push((entries.u64()?, entries.u16()?));
                }
                if kind == 2 { JournalRecord::Cut(list) } else { JournalRecord::Punch(list) }
            }
            4 => JournalRecord::Link {
                child: reader.u64()?,
                parent: reader.u64()?,
                page: reader.u16()?,
            },
            5 => {
                let run = reader.u64()?;
                let mut place = Place {
                    generation: reader.u64()?,
                    header_checksum: reader.u64()?,
                    header_units: reader.u32()?,
                    page_units: reader.u32()?,
                    extents: Vec::new(),
                };
                let extents = reader.u32()? as usize;
                place.extents = read_extents(&mut reader, extents)?;
                JournalRecord::Relocate { run, place: Cow::Owned(place) }
            }
            6 => {
                let mut entries = Reader::new(counted(&mut reader, 16)?);
                let mut list = Vec::with_capacity(entries.remaining() / 16);
                while entries.remaining() > 0 {
                    list.push((entries.u64()?, entries.u64()?));
                }
                JournalRecord::Touch(list)
            }
            7 => JournalRecord::Retain(Retentions::decode(&mut reader)?),
            _ => return Err(Error::miss("a journal record is of an unknown kind")),
        };
        if reader.remaining() > 0 {
            return Err(Error::miss("a journal record is longer than its fields"));
        }
        Ok(record)
    }
}

/// Reads a `u32` count, and returns the bytes of `count` entries of `size` bytes.
fn counted<'a>(reader: &mut Reader<'a>, size: usize) -> Result<&'a [u8]> {
    let count = reader.u32()? as usize;
    reader.raw(
        count
            .checked_mul(size)
            .ok_or_else(|| Error::miss("a record has an impossible number of entries"))?,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<JournalRecord<'static>> {
        let place = Place {
            generation: 7,
            header_checksum: 8,
            header_units: 1,
            page_units: 2,
            extents: vec![Extent { segment: SegmentId(3), start: 4, units: 5 }],
        };
        vec![
            JournalRecord::Insert(RunImage {
                run: 1 << 32 | 9,
                scope: ScopeSlot(4),
                chained: true,
                parent: Some((6, 2)),
                recency: 11,
                place: Cow::Owned(place.clone()),
                pages: Cow::Owned(vec![PageHash([1; 16]), PageHash([2; 16])]),
            }),
            JournalRecord::Cut(vec![(9, 1), (10, 0)]),
            JournalRecord::Punch(vec![(9, 0)]),
            JournalRecord::Link { child: 1, parent: 2, page: 3 },
            JournalRecord::Relocate { run: 9, place: Cow::Owned(place) },
            JournalRecord::Touch(vec![(9, 77)]),
            JournalRecord::Retain(Retentions { clock: 5, runs: vec![(9, 78), (10, 0)] }),
        ]
    }

    #[test]
    fn records_round_trip() {
        for (sequence, record) in records().into_iter().enumerate() {
            let mut writer = Writer::new();
            record.encode(sequence as u64, &mut writer);
            let bytes = writer.into_vec();
            assert_eq!(bytes.len(), record.frame_bytes());
            let Parsed::Frame(frame) = read_frame(&bytes) else { panic!("{record:?}") };
            assert_eq!((frame.sequence, frame.bytes), (sequence as u64, bytes.len()));
            assert_eq!(JournalRecord::decode(frame.kind, frame.body).unwrap(), record);
        }
    }

    #[test]
    fn cut_frame_is_short_and_flipped_bit_is_detected() {
        for record in records() {
            let mut writer = Writer::new();
            record.encode(5, &mut writer);
            let good = writer.into_vec();
            for at in 0..good.len() {
                assert!(matches!(read_frame(&good[..at]), Parsed::Short(n) if n > at));
                let mut bad = good.clone();
                bad[at] ^= 0x40;
                assert!(!matches!(read_frame(&bad), Parsed::Frame(_)), "{record:?} byte {at}");
            }
        }
        assert_eq!(read_frame(&[0; 64]), Parsed::Damaged);
        assert_eq!(read_frame(&[0xff; 64]), Parsed::Damaged);
    }

    #[test]
    fn huge_counts_cause_no_panic_or_allocation() {
        for kind in 0..=8 {
            for fill in [0u8, 0x7f, 0xff] {
                for bytes in 0..96 {
                    // Decoding must not panic or allocate gigabytes. A few of these bodies are
                    // valid records.
                    let _ = JournalRecord::decode(kind, &vec![fill; bytes]);
                }
            }
        }
    }

    #[test]
    fn header_of_other_version_is_invalid_and_damage_is_a_miss() {
        let header = JournalHeader { number: 3, first: 99 };
        let good = header.encode();
        assert_eq!(good.len(), JournalHeader::BYTES);
        assert_eq!(JournalHeader::decode(&good).unwrap(), header);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            let kind = JournalHeader::decode(&bad).unwrap_err().kind();
            assert_eq!(kind, crate::ErrorKind::Miss, "byte {at}");
        }
        let mut other = good[..32].to_vec();
        other[8] = 9;
        let sum = checksum(&other);
        other.extend(sum.to_le_bytes());
        let error = JournalHeader::decode(&other).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid);
    }
}
