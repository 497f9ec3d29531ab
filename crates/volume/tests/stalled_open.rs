//! A disk that hangs while a segment is opened.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::SegmentId;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_volume::segments::{IoChoice, Segments, SegmentsConfig};
use ritornello_volume::transfer::PageOutcome;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn hanging_open_stalls_its_own_volume_only() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dirs = ["disk0", "disk1"].map(|name| dir.path().join(name)).to_vec();
    dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let config = SegmentsConfig {
        dirs,
        segment_bytes: SEGMENT_BYTES,
        io: IoChoice::Pool,
        in_flight_bytes: 0,
    };
    let segments = Segments::open(medium, config).unwrap();
    for id in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        segments.create(SegmentId::new(id.0, id.1)).unwrap();
    }
    let mut both = Run::over(2, 1, 2, 8192);
    both.write(&segments);
    let mut healthy = Run::at(2, 1, 8192, &[], 100);
    healthy.write(&segments);
    segments.close_all();

    schedule.add(Rule::always(MediumFault::Stall).on(Op::Open).at("disk1/seg-"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| both.check(&segments));
        std::thread::sleep(Duration::from_millis(2500));
        let found = healthy.check(&segments);
        let has_ended = waiting.is_finished();
        schedule.heal();
        assert!(!has_ended, "the read that needs the hanging disk has ended");
        assert_eq!(found, [PageOutcome::Verified]);
        assert_eq!(waiting.join().unwrap(), [PageOutcome::Verified; 2]);
    });
}
