//! Transfers over several volumes: lanes for single volumes, and runs on several volumes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Run, SEGMENT_BYTES};
use ritornello_format::SegmentId;
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Rule, Schedule};
use ritornello_volume::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

const VOLUMES: u8 = 3;
const PAGE: usize = 192 << 10;
/// Bytes in flight on each volume: fewer than each transfer of these tests moves, so that each
/// transfer without sections has several lanes.
const IN_FLIGHT: usize = 256 << 10;

struct Volumes {
    dirs: Vec<tempfile::TempDir>,
    segments: Segments,
}

fn volumes(io: IoChoice) -> Volumes {
    volumes_on(Arc::new(Host), io)
}

fn volumes_on(medium: Arc<dyn Medium>, io: IoChoice) -> Volumes {
    let new = |_| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dirs: Vec<tempfile::TempDir> = (0..VOLUMES).map(new).collect();
    let config = SegmentsConfig {
        dirs: dirs.iter().map(|dir| dir.path().into()).collect(),
        segment_bytes: SEGMENT_BYTES,
        io,
        in_flight_bytes: IN_FLIGHT,
    };
    let segments = Segments::open(medium, config).unwrap();
    for volume in 0..VOLUMES {
        segments.create(SegmentId::new(volume, 0)).unwrap();
        segments.create(SegmentId::new(volume, 1)).unwrap();
    }
    Volumes { dirs, segments }
}

/// Returns two runs of four pages on each volume, and one run whose four extents are on all three
/// volumes.
fn runs() -> Vec<Run> {
    let mut runs: Vec<Run> = (0..6)
        .map(|at: u32| {
            let mut run = Run::at(u64::from(at) + 1, 4, PAGE, &[], 3 + at / 3 * 400);
            move_to(&mut run, |_| (at % 3) as u8);
            run
        })
        .collect();
    let mut wide = Run::at(20, 1, 3 << 20, &[200, 200, 200], 1000);
    move_to(&mut wide, |extent| (extent % 3) as u8);
    runs.push(wide);
    runs
}

fn move_to(run: &mut Run, volume: impl Fn(usize) -> u8) {
    for (at, extent) in run.place.extents.iter_mut().enumerate() {
        extent.segment = SegmentId::new(volume(at), extent.segment.number());
    }
}

/// Writes all runs in one call.
fn write(segments: &Segments, runs: &mut [Run], control: &Control) -> Vec<bool> {
    let pages: Vec<Vec<u8>> = runs.iter().flat_map(|run| run.pages.clone()).collect();
    let source = OwnedPages::new(pages);
    let mut first = 0;
    let writes: Vec<RunWrite<'_>> = runs
        .iter()
        .map(|run| {
            let write = RunWrite { place: &run.place, header: &run.header, source: &source, first };
            first += run.pages.len();
            write
        })
        .collect();
    let results = segments.write_runs(&writes, control);
    let ok = results.iter().map(Result::is_ok).collect();
    for (run, result) in runs.iter_mut().zip(results) {
        run.place.header_checksum = result.unwrap_or(0);
    }
    ok
}

/// Reads all runs in one call, and returns for each whether all its pages are verified. Checks the
/// bytes of verified pages.
fn read(segments: &Segments, runs: &[Run], control: &Control) -> Vec<bool> {
    let mut out: Vec<Vec<u8>> =
        runs.iter().flat_map(|run| run.pages.iter().map(|page| vec![0; page.len()])).collect();
    let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
    let target = BorrowedPagesMut::new(&mut slices);
    let keys: Vec<Vec<&[u8]>> = runs.iter().map(Run::keys).collect();
    let mut first = 0;
    let reads: Vec<RunRead<'_>> = runs
        .iter()
        .zip(&keys)
        .map(|(run, keys)| {
            let read = RunRead {
                place: &run.place,
                scope: common::SCOPE,
                page_bytes: run.header.page_bytes,
                keys,
                first: 0,
                target: &target,
                target_first: first,
                encoded: Encoded::Refuse,
            };
            first += keys.len();
            read
        })
        .collect();
    let outcomes = segments.read_runs(&reads, control);
    drop(reads);
    drop(target);
    let mut pages = out.iter();
    let arrived = |(run, outcomes): (&Run, &Vec<PageOutcome>)| {
        let mut all = true;
        for (page, outcome) in run.pages.iter().zip(outcomes) {
            let got = pages.next().unwrap();
            assert!(!outcome.is_verified() || got == page, "wrong bytes");
            all &= outcome.is_verified();
        }
        all
    };
    runs.iter().zip(&outcomes).map(arrived).collect()
}

#[test]
fn lanes_write_and_read_every_run() {
    for io in [IoChoice::Auto, IoChoice::Pool, IoChoice::Buffered] {
        for through_staging in [false, true] {
            let volumes = volumes(io);
            let control = Control { through_staging, ..Control::default() };
            let mut runs = runs();
            assert_eq!(write(&volumes.segments, &mut runs, &control), [true; 7], "{io:?}");
            assert_eq!(read(&volumes.segments, &runs, &control), [true; 7], "{io:?}");
        }
    }
}

#[test]
fn lost_volume_misses_only_its_runs() {
    let volumes = volumes(IoChoice::Auto);
    let mut runs = runs();
    write(&volumes.segments, &mut runs, &Control::default());
    let Volumes { dirs, segments } = volumes;
    for number in 0..2 {
        std::fs::write(dirs[1].path().join(format!("seg-{number:06}")), b"").unwrap();
    }
    let found = read(&segments, &runs, &Control::default());
    assert_eq!(found, [true, false, true, true, false, true, false], "runs 1, 4, 6 need volume 1");
}

/// The runs of all volumes are in one call. Each lane has its own volume, except the lane of the
/// run that is on all volumes.
#[test]
fn stalled_volume_fails_only_its_runs() {
    let schedule = Schedule::new();
    let medium = Faulty::new(Arc::new(Host), schedule.clone());
    let volumes = volumes_on(Arc::new(medium), IoChoice::Pool);
    let (segments, mut runs) = (&volumes.segments, runs());
    assert_eq!(write(segments, &mut runs, &Control::default()), [true; 7]);
    let stalled = volumes.dirs[1].path().join("seg-").display().to_string();
    schedule.add(Rule::always(MediumFault::Stall).at(stalled));
    let wait_until = |is_true: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(30);
        while !is_true() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    std::thread::scope(|scope| {
        let caught = scope.spawn(|| read(segments, &runs, &Control::default()));
        wait_until(&|| segments.stalled_volumes() == [1]);
        let found = scope.spawn(|| read(segments, &runs, &Control::default()));
        let written = scope.spawn(|| write(segments, &mut runs.clone(), &Control::default()));
        wait_until(&|| found.is_finished() && written.is_finished());
        let have_ended = (caught.is_finished(), found.is_finished(), written.is_finished());
        schedule.heal();
        assert_eq!(have_ended, (false, true, true));
        let expected = [true, false, true, true, false, true, false];
        assert_eq!(
            (found.join().unwrap(), written.join().unwrap()),
            (expected.to_vec(), expected.to_vec())
        );
        caught.join().unwrap();
    });
    assert_eq!(read(segments, &runs, &Control::default()), [true; 7]);
}

#[test]
fn transfers_past_their_deadline_fail() {
    let volumes = volumes(IoChoice::Auto);
    let mut runs = runs();
    let now = Some(Instant::now());
    let late = Control { deadline: now, ..Control::default() };
    assert_eq!(write(&volumes.segments, &mut runs, &late), [false; 7]);
    write(&volumes.segments, &mut runs, &Control::default());
    assert_eq!(read(&volumes.segments, &runs, &late), [false; 7]);
}

#[test]
fn all_sections_arrive_over_several_volumes() {
    let volumes = volumes(IoChoice::Auto);
    let mut runs = runs();
    runs.pop();
    write(&volumes.segments, &mut runs, &Control::default());
    let ends = vec![PAGE as u64 / 4, PAGE as u64 / 2, PAGE as u64];
    let sections = Arc::new(Sections::new(ends).unwrap());
    let control = Control { sections: Some(Arc::clone(&sections)), ..Control::default() };
    assert_eq!(read(&volumes.segments, &runs, &control), [true; 6]);
    assert_eq!(sections.arrived(), 3);
}
