//! Calls that are cancelled, pass their deadline, find no staging memory, panic, or are made by a
//! forked child.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
use common::*;
use ritornello_volume::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A target that cancels the call when the call has requested `after` pages.
struct Cancelling<'a, T: ?Sized> {
    inner: &'a T,
    after: AtomicUsize,
    flag: Arc<AtomicBool>,
}

impl<T: ?Sized> Cancelling<'_, T> {
    fn count(&self) {
        if self.after.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.flag.store(true, Ordering::Release);
        }
    }
}

// SAFETY: forwards the fragments of the inner target, which keeps the contract.
unsafe impl<T: PageTarget + ?Sized> PageTarget for Cancelling<'_, T> {
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        self.count();
        self.inner.fragments(page, out);
    }
}

#[test]
fn cancelled_or_late_call_submits_nothing() {
    for rig in rigs() {
        let mut run = Run::new(1, 3, 50_000, &[]);
        run.write(&rig.segments);
        let cancelled =
            Control { cancelled: Some(Arc::new(AtomicBool::new(true))), ..Control::default() };
        let late = Control { deadline: Some(Instant::now()), ..Control::default() };
        for (control, reason) in [(cancelled, MissReason::Cancelled), (late, MissReason::Deadline)]
        {
            let mut out = vec![vec![0xa5; 50_000]; 3];
            let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
            let target = BorrowedPagesMut::new(&mut slices);
            let outcomes = run.read_controlled(&rig.segments, 0, &target, &control);
            assert_eq!(outcomes, [PageOutcome::Missed(reason); 3]);
            drop(target);
            assert!(out.iter().flatten().all(|&byte| byte == 0xa5));
            let source = OwnedPages::new(run.pages.clone());
            let write =
                RunWrite { place: &run.place, header: &run.header, source: &source, first: 0 };
            let error = rig.segments.write_runs(&[write], &control).remove(0).unwrap_err();
            assert_eq!(error.kind(), ritornello_format::ErrorKind::Retry);
            assert!(error.to_string().contains(reason.word()), "{error}");
        }
        assert!(run.check(&rig.segments).iter().all(|outcome| outcome.is_verified()));
    }
}

#[test]
fn each_page_of_cancelled_call_is_right_or_cancelled() {
    for rig in rigs() {
        let mut runs: Vec<Run> =
            (0..10).map(|n| Run::at(n + 1, 2, 60_000, &[], 5 + n as u32 * 40)).collect();
        runs.iter_mut().for_each(|run| run.write(&rig.segments));
        for after in 1..=18 {
            let flag = Arc::new(AtomicBool::new(false));
            let mut out = vec![vec![0; 60_000]; 20];
            let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
            let inner = BorrowedPagesMut::new(&mut slices);
            let target =
                Cancelling { inner: &inner, after: AtomicUsize::new(after), flag: flag.clone() };
            let keys: Vec<Vec<&[u8]>> = runs.iter().map(Run::keys).collect();
            let reads: Vec<RunRead> = runs
                .iter()
                .enumerate()
                .map(|(n, run)| RunRead {
                    place: &run.place,
                    scope: SCOPE,
                    page_bytes: 60_000,
                    keys: &keys[n],
                    first: 0,
                    target: &target,
                    target_first: 2 * n,
                    encoded: Encoded::Refuse,
                })
                .collect();
            let control = Control { cancelled: Some(flag), ..Control::default() };
            let outcomes: Vec<PageOutcome> =
                rig.segments.read_runs(&reads, &control).into_iter().flatten().collect();
            assert_eq!(outcomes.len(), 20);
            assert_eq!(outcomes[19], PageOutcome::Missed(MissReason::Cancelled));
            for (page, outcome) in outcomes.iter().enumerate() {
                match outcome {
                    PageOutcome::Verified => assert!(out[page] == runs[page / 2].pages[page % 2]),
                    other => assert_eq!(*other, PageOutcome::Missed(MissReason::Cancelled)),
                }
            }
        }
        assert_eq!(rig.segments.staging().in_use, 0);
    }
}

#[test]
fn threads_take_turns_with_scarce_staging() {
    let rig = rig(IoChoice::Auto);
    let mut run = Run::new(1, 6, 1 << 20, &[]);
    run.write(&rig.segments);
    let capacity = rig.segments.staging().capacity;
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                let mut out: Vec<Memory> = (0..6).map(|_| Memory::new(1 << 20, 8)).collect();
                let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Memory::slice_mut).collect();
                let target = BorrowedPagesMut::new(&mut slices);
                let outcomes = run.read_into(&rig.segments, 0, &target);
                assert!(outcomes.iter().all(|outcome| outcome.is_verified()), "{outcomes:?}");
            });
        }
    });
    let stats = rig.segments.staging();
    assert!(stats.in_use == 0 && stats.peak > 0 && stats.peak <= capacity);
}

#[test]
fn segments_stay_usable_after_a_source_panics() {
    struct Panics;
    // SAFETY: hands out no fragments.
    unsafe impl PageSource for Panics {
        fn len(&self) -> usize {
            2
        }
        fn fragments(&self, _: usize, _: &mut Vec<Fragment>) {
            panic!("a caller's mistake");
        }
    }
    for rig in rigs() {
        let mut good = Run::at(1, 2, 1 << 20, &[], 5);
        let bad = Run::at(2, 2, 8192, &[], 900);
        let source = OwnedPages::new(good.pages.clone());
        let call = std::panic::AssertUnwindSafe(|| {
            let writes = [
                RunWrite { place: &good.place, header: &good.header, source: &source, first: 0 },
                RunWrite { place: &bad.place, header: &bad.header, source: &Panics, first: 0 },
            ];
            rig.segments.write_runs(&writes, &Control::default())
        });
        assert!(std::panic::catch_unwind(call).is_err());
        good.write(&rig.segments);
        assert!(good.check(&rig.segments).iter().all(|outcome| outcome.is_verified()));
        assert_eq!(rig.segments.staging().in_use, 0);
    }
}

#[test]
fn wait_for_staging_ends_at_deadline_or_cancellation() {
    let staging = Staging::new(1).unwrap();
    let _all = staging.try_take(2 << 20).unwrap();
    let control = Control {
        deadline: Some(Instant::now() + Duration::from_millis(50)),
        ..Control::default()
    };
    let start = Instant::now();
    assert!(control.stage(&staging, 4096).is_none());
    assert!(start.elapsed() < Duration::from_secs(5));
    let flag = Arc::new(AtomicBool::new(false));
    let control = Control { cancelled: Some(flag.clone()), ..Control::default() };
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| control.stage(&staging, 4096).is_none());
        std::thread::sleep(Duration::from_millis(10));
        flag.store(true, Ordering::Release);
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn forked_child_is_refused_and_drops_safely() {
    for rig in rigs() {
        let mut run = Run::new(1, 2, 50_000, &[]);
        run.write(&rig.segments);
        let Rig { dir, segments } = rig;
        // SAFETY: the child allocates little and exits with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: kills the child if it hangs.
            unsafe { libc::alarm(20) };
            let keys = run.keys();
            let mut out = [vec![0; 50_000], vec![0; 50_000]];
            let mut slices: Vec<&mut [u8]> = out.iter_mut().map(Vec::as_mut_slice).collect();
            let read = RunRead {
                place: &run.place,
                scope: SCOPE,
                page_bytes: 50_000,
                keys: &keys,
                first: 0,
                target: &BorrowedPagesMut::new(&mut slices),
                target_first: 0,
                encoded: Encoded::Refuse,
            };
            let outcomes = segments.read_runs(&[read], &Control::default());
            let refused = outcomes == [vec![PageOutcome::Missed(MissReason::Io); 2]];
            drop(segments);
            // SAFETY: exits the child here, without running the test harness.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: the process is our child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(run.check(&segments).iter().all(|outcome| outcome.is_verified()));
        drop(dir);
    }
}
