//! Transfers get more lanes while threads checksum more slowly than a volume moves bytes, and fewer
//! once the volume is slower again. They deliver the right bytes and outcomes with any number of
//! lanes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::page_memory::{
    BorrowedPages, BorrowedPagesMut, Fragment, FragmentMut, PageSource, PageTarget,
};
use crate::segments::{IoChoice, Moved, Segments, SegmentsConfig, Speeds};
use crate::transfer::{Control, Encoded, MissReason, PageOutcome, RunRead, RunWrite};
use parking_lot::{Condvar, Mutex};
use ritornello_format::{
    Extent, KeyList, Place, RunHeader, ScopeId, ScopeSlot, SegmentId, UNIT, units_of,
};
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

const LANES_MAX: usize = 4;
const PAGE: usize = 64 << 10;
const PAGES_PER_RUN: usize = 2;
/// A multiple of 2, 3 and 4, so that the lanes of a volume have equally many runs: a lane with
/// fewer runs ends earlier, and then seems not to be busy all the time.
const RUNS_PER_VOLUME: usize = 12;
/// Bytes in flight on each volume: fewer than each transfer moves, because a shorter transfer has
/// one lane.
const IN_FLIGHT: usize = 256 << 10;
const SCOPE: ScopeId = ScopeId([7; 16]);
/// Time for which a thread works on each page of volume 0, if checksums are to be slow.
const SLOW_CHECKSUM: Duration = Duration::from_millis(5);
/// Time for which an operation takes longer, if the disk is to be slow.
const SLOW_DISK: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(30);

/// Memory of pages that several threads access. Each of the first `threads` threads waits for the
/// others before it accesses its first page, so no thread can move the pages of two lanes. Each
/// access to a page of volume 0 takes `delay`.
struct SharedMemory<M> {
    memory: M,
    volumes: usize,
    delay: Duration,
    threads: usize,
    /// The time from which threads no longer wait for other threads.
    until: Instant,
    seen: Mutex<HashSet<ThreadId>>,
    changed: Condvar,
}

impl<M> SharedMemory<M> {
    fn new(memory: M, volumes: usize, delay: Duration, threads: usize) -> Self {
        let until = Instant::now() + PATIENCE / 6;
        let (seen, changed) = (Mutex::default(), Condvar::new());
        Self { memory, volumes, delay, threads, until, seen, changed }
    }

    fn access(&self, page: usize) {
        let mut seen = self.seen.lock();
        seen.insert(thread::current().id());
        self.changed.notify_all();
        while seen.len() < self.threads
            && !self.changed.wait_until(&mut seen, self.until).timed_out()
        {}
        drop(seen);
        if (page / PAGES_PER_RUN).is_multiple_of(self.volumes) {
            thread::sleep(self.delay);
        }
    }

    fn assert_threads(&self) {
        assert_eq!(self.seen.lock().len(), self.threads, "each lane must have its own thread");
    }
}

// SAFETY: hands out the fragments of `memory`.
unsafe impl PageSource for SharedMemory<BorrowedPages<'_>> {
    fn len(&self) -> usize {
        self.memory.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        self.access(page);
        self.memory.fragments(page, out);
    }
}

// SAFETY: hands out the fragments of `memory`.
unsafe impl PageTarget for SharedMemory<BorrowedPagesMut<'_>> {
    fn len(&self) -> usize {
        self.memory.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        self.access(page);
        self.memory.fragments(page, out);
    }
}

struct Run {
    place: Place,
    header: RunHeader,
    pages: Vec<Vec<u8>>,
}

impl Run {
    /// Run `at` of the volumes, which have equally many runs.
    fn new(at: usize, volumes: usize) -> Self {
        let keys: KeyList = (0..PAGES_PER_RUN).map(|page| format!("{at:08} {page:08}")).collect();
        let header_units = RunHeader::units(keys.iter().map(<[u8]>::len), 1);
        let page_units = units_of(PAGE as u64) as u32;
        let units = header_units + page_units * PAGES_PER_RUN as u32;
        let segment = SegmentId::new((at % volumes) as u8, 0);
        let extents = vec![Extent { segment, start: (at / volumes) as u32 * units, units }];
        let place = Place {
            generation: at as u64 + 1,
            header_units,
            page_units,
            extents,
            ..Place::default()
        };
        let header = RunHeader {
            store: [1; 16],
            scope: SCOPE,
            slot: ScopeSlot(3),
            page_bytes: PAGE as u64,
            keys,
            ..RunHeader::default()
        };
        // All bytes of a page differ from the bytes of other pages, so a page that arrives in the
        // memory of another page is noticed.
        let byte = |page: usize| (at * PAGES_PER_RUN + page) as u8;
        Self {
            place,
            header,
            pages: (0..PAGES_PER_RUN).map(|page| vec![byte(page); PAGE]).collect(),
        }
    }
}

struct Rig {
    _dir: tempfile::TempDir,
    schedule: Schedule,
    segments: Segments,
    volumes: usize,
    runs: Vec<Run>,
}

impl Rig {
    /// Runs on `volumes` volumes, written with one lane for each volume. A volume may get
    /// [`LANES_MAX`] lanes, whatever the number of processors of this machine.
    fn new(volumes: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let dirs: Vec<_> = (0..volumes).map(|at| dir.path().join(format!("disk{at}"))).collect();
        dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        let schedule = Schedule::new();
        let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
        let (io, segment_bytes) = (IoChoice::Pool, 4 << 20);
        let config = SegmentsConfig { dirs, segment_bytes, io, in_flight_bytes: IN_FLIGHT };
        let mut segments = Segments::open(medium, config).unwrap();
        segments.speeds = Speeds::new(LANES_MAX);
        (0..volumes as u8).for_each(|at| segments.create(SegmentId::new(at, 0)).unwrap());
        let runs = (0..RUNS_PER_VOLUME * volumes).map(|at| Run::new(at, volumes)).collect();
        let mut rig = Self { _dir: dir, schedule, segments, volumes, runs };
        rig.write(Duration::ZERO);
        rig
    }

    /// Number of threads of the next transfer.
    fn threads(&self, moved: Moved) -> usize {
        self.segments.speeds.lanes(moved) * self.volumes
    }

    /// Writes all runs in one call. A thread works for `delay` on each page of volume 0.
    fn write(&mut self, delay: Duration) {
        let pages: Vec<&[u8]> =
            self.runs.iter().flat_map(|run| &run.pages).map(Vec::as_slice).collect();
        let pages = BorrowedPages::new(&pages);
        let source = SharedMemory::new(pages, self.volumes, delay, self.threads(Moved::Written));
        let write = |(at, run): (usize, &Run)| {
            let (place, header) = (run.place.clone(), run.header.clone());
            (place, header, at * PAGES_PER_RUN)
        };
        let writes: Vec<_> = self.runs.iter().enumerate().map(write).collect();
        let writes: Vec<RunWrite<'_>> = writes
            .iter()
            .map(|(place, header, first)| RunWrite {
                place,
                header,
                source: &source,
                first: *first,
            })
            .collect();
        let sums = self.segments.write_runs(&writes, &Control::default());
        source.assert_threads();
        for (run, sum) in self.runs.iter_mut().zip(sums) {
            run.place.header_checksum = sum.unwrap();
        }
    }

    /// Reads all runs in one call, and returns the outcomes of their pages. Asserts that verified
    /// pages have the right bytes. A thread works for `delay` on each page of volume 0.
    fn read(&self, delay: Duration, control: &Control) -> Vec<PageOutcome> {
        let mut out = vec![vec![0xEE; PAGE]; self.runs.len() * PAGES_PER_RUN];
        let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
        let memory = BorrowedPagesMut::new(&mut slices);
        let target = SharedMemory::new(memory, self.volumes, delay, self.threads(Moved::Read));
        let keys: Vec<Vec<&[u8]>> =
            self.runs.iter().map(|run| run.header.keys.iter().collect()).collect();
        let read = |(at, (run, keys))| {
            let (run, keys): (&Run, &Vec<&[u8]>) = (run, keys);
            RunRead {
                place: &run.place,
                scope: SCOPE,
                page_bytes: PAGE as u64,
                keys,
                first: 0,
                target: &target,
                target_first: at * PAGES_PER_RUN,
                encoded: Encoded::Refuse,
            }
        };
        let reads: Vec<RunRead<'_>> = self.runs.iter().zip(&keys).enumerate().map(read).collect();
        let outcomes = self.segments.read_runs(&reads, control);
        target.assert_threads();
        drop(reads);
        drop(target);
        let outcomes: Vec<PageOutcome> = outcomes.into_iter().flatten().collect();
        assert_eq!(outcomes.len(), out.len());
        let pages = self.runs.iter().flat_map(|run| &run.pages);
        for (at, (page, outcome)) in pages.zip(&outcomes).enumerate() {
            assert!(!outcome.is_verified() || out[at] == *page, "wrong bytes in page {at}");
        }
        outcomes
    }

    fn assert_verified(&self, delay: Duration, control: &Control) {
        let outcomes = self.read(delay, control);
        assert!(outcomes.iter().all(|page| page.is_verified()), "{outcomes:?}");
    }

    /// Repeats `transfer` until a volume has `lanes` lanes. A busy machine may disturb the measures
    /// of single transfers.
    fn repeat_until(&mut self, moved: Moved, lanes: usize, transfer: impl Fn(&mut Self)) {
        let until = Instant::now() + PATIENCE;
        while self.segments.speeds.lanes(moved) != lanes {
            let now = self.segments.speeds.lanes(moved);
            assert!(Instant::now() < until, "{now} lanes instead of {lanes}");
            transfer(self);
        }
    }

    /// Repeats `transfer` three times, and asserts that the lanes stay within their maximum.
    fn assert_no_more_lanes(&mut self, moved: Moved, transfer: impl Fn(&mut Self)) {
        for _ in 0..3 {
            transfer(self);
            let lanes = self.segments.speeds.lanes(moved);
            assert!(lanes <= LANES_MAX, "{lanes} lanes");
        }
    }

    /// Slows all operations `op` down until the schedule is healed.
    fn slow_down(&self, op: Op) {
        self.schedule.add(Rule::always(MediumFault::Slow(SLOW_DISK)).on(op).at("seg-"));
    }

    /// Overwrites 8 bytes of run `at`, `offset` bytes after its start. Returns the old bytes.
    fn overwrite(&self, at: usize, offset: u64, bytes: [u8; 8]) -> [u8; 8] {
        let extent = self.runs[at].place.extents[0];
        let dir = self.segments.dir(extent.segment.volume()).unwrap();
        let file = dir.join(Segments::file_name(extent.segment));
        let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
        let mut old = [0; 8];
        file.read_exact_at(&mut old, extent.offset() + offset).unwrap();
        file.write_all_at(&bytes, extent.offset() + offset).unwrap();
        old
    }
}

#[test]
fn slow_checksums_add_lanes_to_reads() {
    for volumes in [1, 2] {
        let mut rig = Rig::new(volumes);
        let (quick, control) = (Duration::ZERO, Control::default());
        let read_slowly = |rig: &mut Rig| rig.assert_verified(SLOW_CHECKSUM, &control);
        rig.repeat_until(Moved::Read, LANES_MAX, read_slowly);
        rig.assert_no_more_lanes(Moved::Read, read_slowly);
        rig.repeat_until(Moved::Read, LANES_MAX, read_slowly);
        rig.assert_verified(SLOW_CHECKSUM, &Control { through_staging: true, ..control.clone() });

        let (page, header) = (volumes * 5, volumes * 7);
        let end = rig.runs[page].place.units() * UNIT - 8;
        let old = (rig.overwrite(page, end, *b"damaged!"), rig.overwrite(header, 0, [0xFF; 8]));
        let mut expected = vec![PageOutcome::Verified; rig.runs.len() * PAGES_PER_RUN];
        expected[page * PAGES_PER_RUN + 1] = PageOutcome::Missed(MissReason::Checksum);
        expected[header * PAGES_PER_RUN..][..PAGES_PER_RUN]
            .fill(PageOutcome::Missed(MissReason::Header));
        assert_eq!(rig.read(SLOW_CHECKSUM, &control), expected);
        rig.overwrite(page, end, old.0);
        rig.overwrite(header, 0, old.1);

        rig.slow_down(Op::Read);
        rig.repeat_until(Moved::Read, 1, |rig| rig.assert_verified(quick, &control));
        rig.assert_verified(quick, &control);
    }
}

#[test]
fn slow_checksums_add_lanes_to_writes() {
    for volumes in [1, 2] {
        let mut rig = Rig::new(volumes);
        let (quick, control) = (Duration::ZERO, Control::default());
        rig.repeat_until(Moved::Written, LANES_MAX, |rig| rig.write(SLOW_CHECKSUM));
        rig.assert_no_more_lanes(Moved::Written, |rig| rig.write(SLOW_CHECKSUM));
        assert_eq!(rig.segments.speeds.lanes(Moved::Read), 1, "reads have lanes of their own");
        rig.assert_verified(quick, &control);

        rig.slow_down(Op::Write);
        rig.repeat_until(Moved::Written, 1, |rig| rig.write(quick));
        rig.write(quick);
        rig.schedule.heal();
        rig.assert_verified(quick, &control);
    }
}
