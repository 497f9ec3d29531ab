//! The emulated device: the order of work within a stream and across streams by events, which is
//! that of CUDA, injected faults, and pinned memory.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_device::driver::emulated::Emulated;
use ritornello_device::driver::{Copies, Driver, Priority, RawStream};
use ritornello_format::ErrorKind;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Queues work that appends `name` to `log` after `delay` milliseconds.
fn log(emulated: &Emulated, stream: RawStream, log: &Arc<Mutex<String>>, name: char, delay: u64) {
    let log = Arc::clone(log);
    let append = move || {
        std::thread::sleep(Duration::from_millis(delay));
        log.lock().unwrap().push(name);
    };
    emulated.run(stream, append).unwrap();
}

/// Queues work that ends when the returned sender is dropped or used.
fn hold(emulated: &Emulated, stream: RawStream) -> Sender<()> {
    let (release, held) = channel();
    emulated.run(stream, move || _ = held.recv()).unwrap();
    release
}

fn finish(emulated: &Emulated, stream: RawStream) {
    let (done, wait) = channel();
    emulated.run(stream, move || done.send(()).unwrap()).unwrap();
    wait.recv_timeout(Duration::from_secs(30)).unwrap();
}

#[test]
fn work_of_a_stream_is_in_order_and_waits_for_events() {
    let emulated = Emulated::default();
    let [a, b] = [Priority::High, Priority::Low].map(|at| emulated.create_stream(at).unwrap());
    let event = emulated.create_event().unwrap();
    let order: Arc<Mutex<String>> = Arc::default();
    log(&emulated, a, &order, '1', 20);
    log(&emulated, a, &order, '2', 20);
    // SAFETY: streams and event exist.
    unsafe {
        emulated.record(event, a).unwrap();
        emulated.wait(b, event).unwrap();
    }
    log(&emulated, b, &order, '3', 0);
    finish(&emulated, b);
    assert_eq!(*order.lock().unwrap(), "123");
}

#[test]
fn event_is_complete_after_its_latest_record() {
    let emulated = Emulated::default();
    let [a, b] = [Priority::High, Priority::Low].map(|at| emulated.create_stream(at).unwrap());
    let event = emulated.create_event().unwrap();
    // SAFETY: streams and event exist until they are destroyed. The emulated device returns an
    // error for a destroyed event.
    unsafe {
        // An event that was never recorded is complete, and nothing waits for it.
        assert!(emulated.is_complete(event).unwrap());
        emulated.wait(b, event).unwrap();
        finish(&emulated, b);
        emulated.record(event, a).unwrap();
        let release = hold(&emulated, a);
        // This wait is for the first record of the event, which is before the held work.
        emulated.wait(b, event).unwrap();
        emulated.record(event, a).unwrap();
        finish(&emulated, b);
        assert!(!emulated.is_complete(event).unwrap());
        drop(release);
        finish(&emulated, a);
        assert!(emulated.is_complete(event).unwrap());
        emulated.destroy_event(event);
        assert_eq!(emulated.is_complete(event).unwrap_err().kind(), ErrorKind::Invalid);
        emulated.destroy_stream(a);
    }
    assert_eq!(emulated.handles(), (0, 1));
    assert!(emulated.run(a, || {}).is_err());
}

#[test]
fn injected_delays_and_failures_take_effect() {
    let emulated = Emulated::default();
    let stream = emulated.create_stream(Priority::High).unwrap();
    let event = emulated.create_event().unwrap();
    let (from, to) = (emulated.allocate(4096).unwrap(), emulated.allocate(4096).unwrap());
    // SAFETY: allocated above.
    unsafe { (from as *mut u8).write_bytes(7, 4096) };
    let mut copies = Copies::default();
    copies.push(to, from, 1);
    // SAFETY: allocated above.
    let read = || unsafe { (to as *const u8).read_volatile() };
    emulated.faults().delay_moves(Duration::from_millis(30));
    let began = Instant::now();
    emulated.faults().hold_moves();
    // SAFETY: stream, event and memory exist until the end of the test.
    unsafe {
        emulated.copy(stream, &copies).unwrap();
        emulated.record(event, stream).unwrap();
        assert!(!emulated.is_complete(event).unwrap());
    }
    emulated.faults().release_moves();
    finish(&emulated, stream);
    assert!(began.elapsed() >= Duration::from_millis(30));
    assert_eq!(read(), 7);

    emulated.faults().fail_after(1);
    // SAFETY: stream, event and memory exist until the end of the test; no copy is in flight when
    // the test writes.
    unsafe {
        (from as *mut u8).write(8);
        emulated.copy(stream, &copies).unwrap();
        finish(&emulated, stream);
        assert_eq!(read(), 8);
        (from as *mut u8).write(9);
        // The call whose copy fails returns no error. Later calls return the error, as CUDA's calls
        // do after a failed kernel.
        emulated.copy(stream, &copies).unwrap();
        finish(&emulated, stream);
        assert_eq!(read(), 8);
        for error in [
            emulated.copy(stream, &copies).unwrap_err(),
            emulated.record(event, stream).unwrap_err(),
            emulated.is_complete(event).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Fatal);
        }
    }
}

#[test]
fn memory_cannot_be_pinned_twice() {
    let emulated = Emulated::default();
    let mut memory = vec![0_u8; 8192];
    let base = memory.as_mut_ptr();
    // SAFETY: the memory outlives the device's use.
    unsafe {
        emulated.pin(base, 8192).unwrap();
        assert!(emulated.pin(base.add(4096), 4096).is_err());
        assert_eq!(emulated.pinned_bytes(), 8192);
        emulated.unpin(base).unwrap();
        assert!(emulated.unpin(base).is_err());
        emulated.faults().refuse_pinning();
        assert_eq!(emulated.pin(base, 8192).unwrap_err().kind(), ErrorKind::Retry);
        assert!(emulated.free(base as u64).is_err());
    }
    assert!(emulated.check_memory(0, 1).is_err() && emulated.check_memory(u64::MAX, 2).is_err());
}
