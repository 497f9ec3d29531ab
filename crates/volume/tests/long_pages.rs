//! Pages longer than the staging memory are verified and copied in windows.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{ErrorKind, Extent, Place, SegmentId, UNIT};
use ritornello_medium::Host;
use ritornello_volume::segments::{IoChoice, Segments, SegmentsConfig};
use ritornello_volume::transfer::{Control, MissReason, PageOutcome};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

#[test]
fn page_longer_than_staging_is_verified_and_copied() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = SegmentsConfig {
        dirs: vec![dir.path().into()],
        segment_bytes: 160 << 20,
        io: IoChoice::Auto,
        in_flight_bytes: UNIT as usize,
    };
    let segments = Segments::open(Arc::new(Host), config).unwrap();
    (0..2).for_each(|number| segments.create(SegmentId::new(0, number)).unwrap());
    let page_bytes = segments.staging().capacity + (1 << 20) + 5;
    let mut run = Run::new(1, 1, page_bytes, &[7000, 4000]);
    run.write(&segments);
    let verified = |place: &Place| {
        let run = segments.verify_run(place, &Control::default()).unwrap();
        let page = segments.verify_page(place, 0, &Control::default()).unwrap();
        assert_eq!(run.pages, [page]);
        page
    };
    assert_eq!(verified(&run.place), PageOutcome::Verified);
    let beyond = segments.verify_page(&run.place, 1, &Control::default()).unwrap();
    assert_eq!(beyond, PageOutcome::Missed(MissReason::Header));

    let units = run.place.units() as u32;
    let target = Extent { segment: SegmentId::new(0, 1), start: 20_000, units };
    let mut to = Place { extents: vec![target], ..run.place.clone() };
    to.header_checksum = segments.copy_run(&run.place, &to, &[true], &Control::default()).unwrap();
    assert_eq!(verified(&to), PageOutcome::Verified);
    let copied = Run { place: to.clone(), ..run.clone() };
    assert_eq!(copied.check(&segments), [PageOutcome::Verified]);

    let last = run.place.page(0).pop().unwrap();
    let file = dir.path().join(Segments::file_name(last.segment));
    let file = OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(&[!run.pages[0][page_bytes - 1]], last.offset() + last.bytes() - UNIT + 4)
        .unwrap();
    assert_eq!(verified(&run.place), PageOutcome::Missed(MissReason::Checksum));
    let moved = segments.copy_run(&run.place, &to, &[true], &Control::default());
    assert_eq!(moved.unwrap_err().kind(), ErrorKind::Miss);

    // A removed page is not read, and its new place is zero.
    segments.copy_run(&run.place, &to, &[false], &Control::default()).unwrap();
    assert_eq!(verified(&to), PageOutcome::Missed(MissReason::Checksum));
    let moved = target.part(to.header_units, to.page_units);
    let file = std::fs::File::open(dir.path().join(Segments::file_name(moved.segment))).unwrap();
    let mut bytes = vec![1; moved.bytes() as usize];
    file.read_exact_at(&mut bytes, moved.offset()).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert_eq!(segments.staging().in_use, 0);
}
