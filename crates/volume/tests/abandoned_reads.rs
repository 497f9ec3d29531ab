//! Reads by `io_uring` whose disk does not answer. The medium of these tests replaces the
//! descriptors of a volume's files by an empty pipe: the kernel then completes no read of these
//! files until the test closes the pipe.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::*;
use ritornello_format::SegmentId;
use ritornello_medium::{Access, Host, Medium, MediumFile, Room};
use ritornello_volume::*;
use std::ffi::OsString;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGE: usize = 192 << 10;
/// Bytes in flight on each volume: fewer than a volume's runs have, so that a read of the runs of
/// both volumes has several lanes.
const IN_FLIGHT: usize = 256 << 10;
const SHORT: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(20);

/// The pipe, and whether reads hang.
#[derive(Debug)]
struct Hang {
    reader: PipeReader,
    writer: Mutex<Option<PipeWriter>>,
    is_hung: AtomicBool,
}

impl Hang {
    fn begin(&self) {
        self.is_hung.store(true, Ordering::Release);
    }
    /// Completes the reads in flight without bytes.
    fn end(&self) {
        self.is_hung.store(false, Ordering::Release);
        self.writer.lock().unwrap().take();
    }
}

/// The host, with files below `hangs` whose reads hang.
#[derive(Debug)]
struct HangingHost {
    hangs: PathBuf,
    hang: Arc<Hang>,
}

impl Medium for HangingHost {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        Host.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        let inner = Host.open(path, access)?;
        let hang = path.starts_with(&self.hangs).then(|| Arc::clone(&self.hang));
        Ok(Arc::new(HangingFile { inner, hang }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Host.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        Host.remove(path)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        Host.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        Host.sync_dir(dir)
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        Host.room(dir)
    }
}

#[derive(Debug)]
struct HangingFile {
    inner: Arc<dyn MediumFile>,
    hang: Option<Arc<Hang>>,
}

impl MediumFile for HangingFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.inner.read_at(buffer, offset)
    }
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.inner.write_at(buffer, offset)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.inner.sync_data()
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.inner.allocate(length)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.inner.set_len(length)
    }
    fn drain(&self) -> io::Result<()> {
        self.inner.drain()
    }
    fn length(&self) -> io::Result<u64> {
        self.inner.length()
    }
    fn allocated(&self) -> io::Result<u64> {
        self.inner.allocated()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.hang {
            Some(hang) if hang.is_hung.load(Ordering::Acquire) => Some(hang.reader.as_fd()),
            _ => self.inner.descriptor(),
        }
    }
}

/// Two volumes, of which the second hangs on request, and two runs on each.
struct Volumes {
    _dirs: [tempfile::TempDir; 2],
    hang: Arc<Hang>,
    segments: Segments,
    runs: Vec<Run>,
}

/// `None` if the segments do not use `io_uring` on this machine.
fn volumes() -> Option<Volumes> {
    let new = || tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dirs = [new(), new()];
    let (reader, writer) = io::pipe().unwrap();
    let (writer, is_hung) = (Mutex::new(Some(writer)), AtomicBool::new(false));
    let hang = Arc::new(Hang { reader, writer, is_hung });
    let medium = HangingHost { hangs: dirs[1].path().into(), hang: Arc::clone(&hang) };
    let config = SegmentsConfig {
        dirs: dirs.iter().map(|dir| dir.path().into()).collect(),
        segment_bytes: SEGMENT_BYTES,
        io: IoChoice::Auto,
        in_flight_bytes: IN_FLIGHT,
    };
    let segments = Segments::open(Arc::new(medium), config).unwrap();
    if segments.report().mode != IoMode::Uring {
        return None;
    }
    let runs = (0..4u8).map(|at| {
        let mut run = Run::at(u64::from(at) + 1, 4, PAGE, &[], 3 + u32::from(at / 2) * 400);
        run.header.slices_per_page = 4;
        run.place.extents[0].segment = SegmentId::new(at % 2, 0);
        run
    });
    let mut runs: Vec<Run> = runs.collect();
    (0..2).for_each(|volume| segments.create(SegmentId::new(volume, 0)).unwrap());
    runs.iter_mut().for_each(|run| run.write(&segments));
    Some(Volumes { _dirs: dirs, hang, segments, runs })
}

fn memory(runs: &[Run]) -> Vec<Memory> {
    runs.iter().flat_map(|run| run.pages.iter().map(|_| Memory::new(PAGE, 0))).collect()
}

/// Reads all runs in one call into `memory`, four pages for each run.
fn read(
    segments: &Segments,
    runs: &[Run],
    memory: &mut [Memory],
    control: &Control,
) -> Vec<Vec<PageOutcome>> {
    let mut slices: Vec<&mut [u8]> = memory.iter_mut().map(Memory::slice_mut).collect();
    let target = BorrowedPagesMut::new(&mut slices);
    let keys: Vec<Vec<&[u8]>> = runs.iter().map(Run::keys).collect();
    let of_run = runs.iter().zip(&keys).enumerate();
    let reads: Vec<RunRead<'_>> = of_run
        .map(|(at, (run, keys))| RunRead {
            place: &run.place,
            scope: SCOPE,
            page_bytes: run.header.page_bytes,
            keys,
            first: 0,
            target: &target,
            target_first: 4 * at,
            encoded: Encoded::Refuse,
        })
        .collect();
    segments.read_runs(&reads, control)
}

/// Reads all runs while the second volume hangs. Returns `None` if the read has not ended after
/// [`LONG`]: the volume then answers. Otherwise it still hangs when this function returns.
fn read_in_time(
    volumes: &Volumes,
    memory: &mut [Memory],
    control: &Control,
) -> Option<Vec<Vec<PageOutcome>>> {
    let Volumes { hang, segments, runs, .. } = volumes;
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(segments, runs, memory, control));
        let began = Instant::now();
        while !reading.is_finished() {
            if began.elapsed() > LONG {
                hang.end();
                let _ = reading.join();
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(reading.join().unwrap())
    })
}

fn until(limit: Duration) -> Control {
    Control { deadline: Some(Instant::now() + limit), ..Control::default() }
}

fn await_free_staging(segments: &Segments) {
    let began = Instant::now();
    while segments.staging().in_use > 0 {
        assert!(began.elapsed() < LONG, "reads that were left behind keep their memory");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn await_no_reads(segments: &Segments) {
    let began = Instant::now();
    while segments.longest_silence() > Duration::ZERO {
        assert!(began.elapsed() < LONG, "a read was lost");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const VERIFIED: [PageOutcome; 4] = [PageOutcome::Verified; 4];
const LATE: [PageOutcome; 4] = [PageOutcome::Missed(MissReason::Deadline); 4];

#[test]
fn staged_lanes_end_at_their_deadline() {
    let Some(volumes) = volumes() else { return };
    let Volumes { hang, segments, runs, .. } = &volumes;
    let mut memory = memory(runs);
    hang.begin();
    let began = Instant::now();
    let staged = Control { through_staging: true, ..until(SHORT) };
    let outcomes = read_in_time(&volumes, &mut memory, &staged);
    assert!(began.elapsed() >= SHORT);
    assert_eq!(outcomes.expect("the read waits for the disk"), [VERIFIED, LATE, VERIFIED, LATE]);
    let held = segments.staging().in_use;
    assert!(held >= PAGE, "{held} bytes of staging memory are in use");
    std::thread::sleep(LATER);
    assert_eq!(segments.staging().in_use, held);
    assert!(segments.longest_silence() >= LATER, "reads are in flight");
    hang.end();
    await_free_staging(segments);
    await_no_reads(segments);
    for (at, page) in memory.iter().enumerate() {
        let expected =
            if (at / 4) % 2 == 0 { &runs[at / 4].pages[at % 4][..] } else { &[0x5a; PAGE] };
        assert!(page.slice() == expected, "page {at}");
    }
    assert_eq!(read(segments, runs, &mut memory, &until(LONG)), [VERIFIED; 4]);
}

#[test]
fn read_to_the_memory_of_the_caller_waits_for_the_kernel() {
    let Some(Volumes { _dirs, hang, segments, runs }) = volumes() else { return };
    let mut memory = memory(&runs);
    hang.begin();
    std::thread::scope(|scope| {
        let direct = scope.spawn(|| read(&segments, &runs, &mut memory, &until(SHORT)));
        std::thread::sleep(SHORT + LATER);
        let has_ended = direct.is_finished();
        hang.end();
        let outcomes = direct.join().unwrap();
        assert!(!has_ended, "the kernel still writes to the memory of the read: {outcomes:?}");
        assert_eq!([&outcomes[0], &outcomes[2]], [&VERIFIED; 2]);
        assert!(outcomes[1].iter().all(|outcome| !outcome.is_verified()));
    });
    assert_eq!(segments.staging().in_use, 0);
}

/// With sections, headers are read before pages.
#[test]
fn read_of_headers_ends_at_its_deadline() {
    let Some(volumes) = volumes() else { return };
    let Volumes { hang, segments, runs, .. } = &volumes;
    let mut memory = memory(runs);
    hang.begin();
    let sections = Some(Arc::new(Sections::new(vec![PAGE as u64 / 2, PAGE as u64]).unwrap()));
    let control = Control { sections, ..until(SHORT) };
    let outcomes = read_in_time(&volumes, &mut memory, &control);
    assert_eq!(outcomes.expect("the read waits for the disk"), [LATE; 4]);
    assert!(segments.longest_silence() >= SHORT / 2, "reads are in flight");
    hang.end();
    await_no_reads(segments);
    let control = Control { sections: control.sections, ..until(LONG) };
    assert_eq!(read(segments, runs, &mut memory, &control), [VERIFIED; 4]);
}
