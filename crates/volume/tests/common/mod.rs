//! Segments in a temporary directory, and runs whose places tests choose.
#![allow(dead_code)] // Each test file uses a part of this module.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ritornello_format::{
    Extent, KeyList, Place, RunHeader, ScopeId, ScopeSlot, SegmentId, UNIT, units_of,
};
use ritornello_medium::{Host, Medium, Throttled};
use ritornello_volume::*;
use std::path::PathBuf;
use std::sync::Arc;

pub const SCOPE: ScopeId = ScopeId([7; 16]);
pub const SEGMENT_BYTES: u64 = 8 << 20;

pub struct Rig {
    pub dir: tempfile::TempDir,
    pub segments: Segments,
}

/// Segments with I/O mode `io`, on the disk of the target directory, because `/tmp` may be tmpfs.
pub fn rig(io: IoChoice) -> Rig {
    rig_in(io, env!("CARGO_TARGET_TMPDIR"))
}

/// Mapped segments; `None` if this machine has no `/dev/shm`, or its files cannot be mapped.
pub fn mapped_rig() -> Option<Rig> {
    let rig =
        std::path::Path::new("/dev/shm").is_dir().then(|| rig_in(IoChoice::Auto, "/dev/shm"))?;
    (rig.segments.report().mode == IoMode::Mapped).then_some(rig)
}

/// Segments on the disk of the target directory, whose files have no file descriptors: bytes move
/// by `read_at` and `write_at` of the medium, not by `preadv`, `pwritev` or `io_uring`.
pub fn calls_rig() -> Rig {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let medium = Throttled::new(Arc::new(Host), &[dir.path().into()], u64::MAX);
    let rig = rig_on(Arc::new(medium), dir, IoChoice::Auto);
    assert!(matches!(rig.segments.report().mode, IoMode::Pool | IoMode::Buffered));
    rig
}

fn rig_in(io: IoChoice, within: &str) -> Rig {
    rig_on(Arc::new(Host), tempfile::tempdir_in(within).unwrap(), io)
}

fn rig_on(medium: Arc<dyn Medium>, dir: tempfile::TempDir, io: IoChoice) -> Rig {
    let segments = open(medium, dir.path().into(), io);
    create_two(&segments, 0);
    Rig { dir, segments }
}

/// Creates segments 0 and 1 of a volume.
fn create_two(segments: &Segments, volume: u8) {
    segments.create(SegmentId::new(volume, 0)).unwrap();
    segments.create(SegmentId::new(volume, 1)).unwrap();
}

pub fn open(medium: Arc<dyn Medium>, dir: PathBuf, io: IoChoice) -> Segments {
    let config =
        SegmentsConfig { dirs: vec![dir], segment_bytes: SEGMENT_BYTES, io, in_flight_bytes: 0 };
    Segments::open(medium, config).unwrap()
}

/// Makes segments for every I/O mode that works on this machine, except `Simulated`, and segments
/// whose files have no file descriptors ([`calls_rig`]).
pub fn rigs() -> Vec<Rig> {
    let mut all = vec![rig(IoChoice::Pool), rig(IoChoice::Buffered), calls_rig()];
    let auto = rig(IoChoice::Auto);
    if auto.segments.report().mode == IoMode::Uring {
        all.push(auto);
    }
    all.extend(mapped_rig());
    all
}

/// Makes segments like [`rigs`], each on `volumes` volumes.
pub fn rigs_on(volumes: u8) -> Vec<Rig> {
    let all = rigs();
    for Rig { dir, segments } in &all {
        for volume in 1..volumes {
            let path = volume_path(dir, volume);
            std::fs::create_dir(&path).unwrap();
            segments.add_volume(segments.examine(&path).unwrap());
            create_two(segments, volume);
        }
    }
    all
}

/// The directory of a volume: volume 0 is the rig's own directory.
fn volume_path(dir: &tempfile::TempDir, volume: u8) -> PathBuf {
    if volume == 0 { dir.path().into() } else { dir.path().join(format!("volume-{volume}")) }
}

/// Returns pseudo-random bytes that depend on the seed and the page.
pub fn bytes(seed: u64, page: usize, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (page as u64) << 32 | 1;
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend(state.to_le_bytes());
    }
    out.truncate(length);
    out
}

/// A run: its place, its header, and the bytes of its pages.
#[derive(Clone)]
pub struct Run {
    pub place: Place,
    pub header: RunHeader,
    pub pages: Vec<Vec<u8>>,
}

impl Run {
    /// Makes a run of `count` pages of `page_bytes`. `extents`: lengths of the run's extents in
    /// units. The extents alternate between segments 0 and 1 of volume 0, with gaps; a last extent
    /// holds the units that remain.
    pub fn new(generation: u64, count: usize, page_bytes: usize, extents: &[u32]) -> Self {
        Self::at(generation, count, page_bytes, extents, 3)
    }

    /// Makes a run like [`Run::new`]. `start` is the first unit of the run in each segment.
    pub fn at(
        generation: u64,
        count: usize,
        page_bytes: usize,
        extents: &[u32],
        start: u32,
    ) -> Self {
        let keys: KeyList = (0..count).map(|n| bytes(generation + 1000, n, 32)).collect();
        let header_units = RunHeader::units(keys.iter().map(<[u8]>::len), 1);
        let page_units = units_of(page_bytes as u64) as u32;
        let mut left = header_units + page_units * count as u32;
        let mut next = [start, start];
        let mut place = Place { generation, header_units, page_units, ..Place::default() };
        for at in 0.. {
            let units = extents.get(at).copied().unwrap_or(left).min(left);
            let segment = at % 2;
            let id = SegmentId::new(0, segment as u32);
            place.extents.push(Extent { segment: id, start: next[segment], units });
            next[segment] += units + 5;
            left -= units;
            if left == 0 {
                break;
            }
        }
        let header = RunHeader {
            store: [1; 16],
            scope: SCOPE,
            slot: ScopeSlot(3),
            page_bytes: page_bytes as u64,
            keys,
            ..RunHeader::default()
        };
        let pages = (0..count).map(|n| bytes(generation, n, page_bytes)).collect();
        Self { place, header, pages }
    }

    /// Makes a run on `volumes` volumes: one extent on one volume, otherwise one extent for each
    /// page, round robin over the volumes.
    pub fn over(volumes: u8, generation: u64, count: usize, page_bytes: usize) -> Self {
        let mut run = Self::new(generation, count, page_bytes, &[]);
        if volumes > 1 {
            let Place { header_units, page_units, .. } = run.place;
            let mut extents = vec![page_units; count];
            extents[0] += header_units;
            run = Self::new(generation, count, page_bytes, &extents);
            for (at, extent) in (0..).zip(&mut run.place.extents) {
                extent.segment = SegmentId::new(at % volumes, extent.segment.number());
            }
        }
        run
    }

    pub fn write_from(&mut self, segments: &Segments, source: &dyn PageSource) {
        let write = RunWrite { place: &self.place, header: &self.header, source, first: 0 };
        let mut results = segments.write_runs(&[write], &Control::default());
        self.place.header_checksum = results.pop().unwrap().unwrap();
    }

    pub fn write(&mut self, segments: &Segments) {
        let source = OwnedPages::new(self.pages.clone());
        self.write_from(segments, &source);
    }

    pub fn keys(&self) -> Vec<&[u8]> {
        self.header.keys.iter().collect()
    }

    pub fn read_into(
        &self,
        segments: &Segments,
        first: usize,
        target: &dyn PageTarget,
    ) -> Vec<PageOutcome> {
        self.read_controlled(segments, first, target, &Control::default())
    }

    /// Reads as many pages as `target` has, starting at page `first`.
    pub fn read_controlled(
        &self,
        segments: &Segments,
        first: usize,
        target: &dyn PageTarget,
        control: &Control,
    ) -> Vec<PageOutcome> {
        let keys = self.keys();
        let read = RunRead {
            place: &self.place,
            scope: SCOPE,
            page_bytes: self.header.page_bytes,
            keys: &keys[first..first + target.len()],
            first: first as u32,
            target,
            target_first: 0,
            encoded: Encoded::Refuse,
        };
        segments.read_runs(&[read], control).pop().unwrap()
    }

    /// Reads `count` pages, starting at page `first`, into vectors.
    pub fn read(
        &self,
        segments: &Segments,
        first: usize,
        count: usize,
    ) -> (Vec<PageOutcome>, Vec<Vec<u8>>) {
        let mut out = vec![vec![0xa5; self.header.page_bytes as usize]; count];
        let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
        let outcomes = self.read_into(segments, first, &BorrowedPagesMut::new(&mut slices));
        (outcomes, out)
    }

    /// Reads all pages and asserts that verified pages have the right bytes. Returns the outcomes.
    pub fn check(&self, segments: &Segments) -> Vec<PageOutcome> {
        let (outcomes, out) = self.read(segments, 0, self.pages.len());
        for (page, outcome) in outcomes.iter().enumerate() {
            if outcome.is_verified() {
                assert!(out[page] == self.pages[page], "wrong bytes in page {page}");
            }
        }
        outcomes
    }
}

/// Memory at any alignment: a vector, and the offset at which the bytes begin.
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Memory {
    /// Allocates `length` bytes that begin `skew` bytes after a 4 KiB boundary.
    pub fn new(length: usize, skew: usize) -> Self {
        let bytes = vec![0x5a; length + 2 * UNIT as usize];
        let start = bytes.as_ptr().align_offset(UNIT as usize) + skew;
        Self { bytes, start, length }
    }
    pub fn filled(content: &[u8], skew: usize) -> Self {
        let mut memory = Self::new(content.len(), skew);
        memory.slice_mut().copy_from_slice(content);
        memory
    }
    pub fn slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.length]
    }
    pub fn slice_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

/// The file of a segment of volume 0, for tests that damage it.
pub fn segment_path(rig: &Rig, number: u32) -> PathBuf {
    file_of(rig, SegmentId::new(0, number))
}

/// The file of a segment, for tests that damage it.
pub fn file_of(rig: &Rig, id: SegmentId) -> PathBuf {
    volume_path(&rig.dir, id.volume()).join(Segments::file_name(id))
}
