//! Loads and saves over the emulated device: windows, order, deadlines, faults.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_device::driver::emulated::Emulated;
use ritornello_device::driver::{Driver, Priority};
use ritornello_device::layout::{Direction, Span};
use ritornello_device::{Device, Moved, Pool, Read, Slots, Way, WayChoice};
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_volume::transfer::Control;
use ritornello_volume::{FragmentMut, PageTarget};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGE: usize = 64 << 10;
const LAYERS: usize = 4;
const BLOCKS: usize = 96;
/// Bytes of pinned memory, enough for 64 pages: a load of more pages reuses slots.
const STAGING: usize = 4 << 20;
/// Value of every byte of the KV memory at first, and again after a test lets the engine compute
/// all blocks.
const POISON: u8 = 0xEE;

/// KV memory in this process, with a tensor for each layer.
struct Rig {
    // Fields are dropped in this order. Dropping the device ends all work on the memory of
    // `tensors`, so the device must be dropped before `tensors`.
    pool: Arc<Pool>,
    device: Arc<Device>,
    emulated: Arc<Emulated>,
    tensors: Vec<Vec<u8>>,
}

impl Rig {
    fn new() -> Self {
        let emulated: Arc<Emulated> = Arc::default();
        let piece = PAGE / LAYERS;
        let mut tensors = vec![vec![POISON; BLOCKS * piece]; LAYERS];
        let spans: Vec<Span> = tensors
            .iter_mut()
            .map(|tensor| Span {
                base: tensor.as_mut_ptr() as u64,
                bytes: piece as u32,
                stride: piece as u64,
            })
            .collect();
        let device = Device::new(Arc::clone(&emulated) as Arc<dyn Driver>, STAGING).unwrap();
        let choice = WayChoice::Always(Way::Kernel { grid: 2 });
        // SAFETY: the rig keeps the tensors.
        let pool = unsafe { device.pool(&spans, BLOCKS as u32, choice, Arc::new(())) }.unwrap();
        Self { pool, device, emulated, tensors }
    }

    fn load(&self, blocks: &[u32], control: &Control, read: &Read<'_>) -> Result<Moved> {
        // SAFETY: nothing else uses the blocks.
        unsafe { self.device.load(&self.pool, blocks, None, control, read) }
    }

    /// Whether a block holds page `page` in all layers.
    fn has(&self, block: u32, page: usize) -> bool {
        let piece = PAGE / LAYERS;
        self.tensors.iter().enumerate().all(|(layer, tensor)| {
            let at = block as usize * piece;
            tensor[at..at + piece]
                .iter()
                .enumerate()
                .all(|(offset, byte)| *byte == byte_of(page, layer * piece + offset))
        })
    }

    fn fill(&mut self, block: u32, page: usize) {
        let piece = PAGE / LAYERS;
        for (layer, tensor) in self.tensors.iter_mut().enumerate() {
            let at = block as usize * piece;
            for (offset, byte) in tensor[at..at + piece].iter_mut().enumerate() {
                *byte = byte_of(page, layer * piece + offset);
            }
        }
    }
}

fn byte_of(page: usize, offset: usize) -> u8 {
    (page * 31 + offset * 7 + (offset >> 8)) as u8
}

fn slot(slots: &Slots, page: usize) -> *mut u8 {
    let mut fragments: Vec<FragmentMut> = Vec::new();
    PageTarget::fragments(slots, page, &mut fragments);
    fragments[0].as_ptr()
}

/// Fills `slots` with pages `pages`: byte `i` of page `n` is `byte_of(n, i)`.
fn fill_slots(pages: &Range<usize>, slots: &Slots) {
    for (at, page) in pages.clone().enumerate() {
        let first = slot(slots, at);
        for offset in 0..PAGE {
            // SAFETY: inside the page; the reader owns it.
            unsafe { first.add(offset).write(byte_of(page, offset)) };
        }
    }
}

/// Waits until no slot is in use. Dropped slots are in use until their moves have ended.
fn assert_freed(device: &Device) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while device.staging().in_use > 0 {
        assert!(Instant::now() < deadline, "slots must be freed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn all(pages: usize) -> Moved {
    Moved { pages, bytes: (pages * PAGE) as u64, reason: "" }
}

fn read_all(pages: Range<usize>, slots: Arc<Slots>, _: &Control) -> Result<Moved> {
    fill_slots(&pages, &slots);
    Ok(all(pages.len()))
}

fn blocks_of(pages: usize) -> Vec<u32> {
    (0..pages as u32).map(|page| page * 37 % BLOCKS as u32).collect()
}

#[test]
fn load_fills_blocks_in_several_windows() {
    let rig = Rig::new();
    let blocks = blocks_of(BLOCKS);
    let windows = Mutex::new(Vec::new());
    let read = |pages: Range<usize>, slots: Arc<Slots>, control: &Control| {
        windows.lock().unwrap().push(pages.clone());
        read_all(pages, slots, control)
    };
    assert_eq!(rig.load(&blocks, &Control::default(), &read).unwrap(), all(BLOCKS));
    for (page, block) in blocks.iter().enumerate() {
        assert!(rig.has(*block, page), "page {page}");
    }
    assert!(windows.lock().unwrap().len() > 8, "the load must have several windows");
    assert_eq!(rig.device.staging().in_use, 0);
}

#[test]
fn load_delivers_the_pages_before_the_first_missing_page() {
    let rig = Rig::new();
    let blocks = blocks_of(BLOCKS);
    let read = |pages: Range<usize>, slots: Arc<Slots>, control: &Control| {
        let moved = read_all(pages.clone(), slots, control)?;
        if !pages.contains(&41) {
            return Ok(moved);
        }
        Ok(Moved { reason: "checksum", ..all(41 - pages.start) })
    };
    let loaded = rig.load(&blocks, &Control::default(), &read).unwrap();
    assert_eq!(loaded, Moved { reason: "checksum", ..all(41) });
    for (page, block) in blocks.iter().enumerate().take(41) {
        assert!(rig.has(*block, page), "page {page}");
    }
    assert!(!rig.has(blocks[41], 41), "a page that was not verified must not arrive");
}

#[test]
fn error_of_a_reader_ends_the_load_after_its_copies() {
    for panics in [false, true] {
        let rig = Rig::new();
        rig.emulated.faults().delay_moves(Duration::from_millis(50));
        let read = |pages: Range<usize>, slots: Arc<Slots>, control: &Control| {
            if pages.contains(&20) {
                assert!(!panics, "a fault injected by the test");
                return Err(Error::retry("a fault injected by the test"));
            }
            read_all(pages, slots, control)
        };
        let error = rig.load(&blocks_of(BLOCKS), &Control::default(), &read).unwrap_err();
        assert_eq!(error.kind(), if panics { ErrorKind::Fatal } else { ErrorKind::Retry });
        assert_eq!(rig.device.staging().in_use, 0, "no copy may be in flight");
        assert!(!rig.device.is_broken());
    }
}

/// Runs a load whose copies are held, and calls `stop` when the load has read four windows. When
/// `time` has passed after `stop`, asserts that the load has not been reported. Then calls
/// `repair`, lets the copies run, and asserts that none of them writes to a block after the load
/// was reported.
fn assert_no_copy_after_the_report(
    rig: &mut Rig,
    control: &Control,
    blocks: &[u32],
    time: Duration,
    stop: &(dyn Fn(&Emulated) + Sync),
    repair: &dyn Fn(&Emulated),
) -> Result<Moved> {
    let emulated = Arc::clone(&rig.emulated);
    emulated.faults().delay_moves(Duration::from_millis(50));
    emulated.faults().hold_moves();
    let calls = emulated.calls();
    let (reads, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let read = |pages: Range<usize>, slots: Arc<Slots>, control: &Control| {
        let moved = read_all(pages, slots, control);
        if reads.fetch_add(1, Ordering::AcqRel) == 3 {
            stop(&emulated);
            is_stopped.store(true, Ordering::Release);
        }
        moved
    };
    let loaded = std::thread::scope(|scope| {
        let load = scope.spawn(|| rig.load(blocks, control, &read));
        while !is_stopped.load(Ordering::Acquire) {
            assert!(!load.is_finished(), "the load ended before `stop` was called");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(time);
        assert!(emulated.calls() > calls, "copies must be in flight");
        assert!(!load.is_finished(), "the load was reported while copies were in flight");
        repair(&emulated);
        emulated.faults().release_moves();
        load.join().unwrap()
    });
    // After the report the engine may compute the blocks.
    rig.tensors.iter_mut().for_each(|tensor| tensor.fill(POISON));
    std::thread::sleep(Duration::from_millis(300));
    let is_poisoned = |tensor: &Vec<u8>| tensor.iter().all(|byte| *byte == POISON);
    assert!(rig.tensors.iter().all(is_poisoned), "a copy landed after the load was reported");
    loaded
}

#[test]
fn no_copy_lands_after_a_cancelled_load_was_reported() {
    let mut rig = Rig::new();
    let cancelled = Arc::new(AtomicBool::new(false));
    let control = Control { cancelled: Some(Arc::clone(&cancelled)), ..Control::default() };
    let loaded = assert_no_copy_after_the_report(
        &mut rig,
        &control,
        &blocks_of(BLOCKS),
        Duration::from_millis(100),
        &|_| cancelled.store(true, Ordering::Release),
        &|_| {},
    );
    let loaded = loaded.unwrap();
    assert_eq!(loaded.reason, "cancelled");
    assert!(loaded.pages < BLOCKS);
    assert_eq!(rig.device.staging().in_use, 0);
}

#[test]
fn no_copy_lands_after_a_load_past_its_deadline_was_reported() {
    let mut rig = Rig::new();
    let deadline = Instant::now() + Duration::from_secs(1);
    let control = Control { deadline: Some(deadline), ..Control::default() };
    let loaded = assert_no_copy_after_the_report(
        &mut rig,
        &control,
        &blocks_of(BLOCKS),
        Duration::from_millis(100),
        &|_| std::thread::sleep(deadline.saturating_duration_since(Instant::now())),
        &|_| {},
    );
    let loaded = loaded.unwrap();
    assert_eq!(loaded.reason, "deadline");
    assert!(loaded.pages < BLOCKS);
    assert_eq!(rig.device.staging().in_use, 0);
}

/// The driver refuses calls, although the device has not failed: copies in flight still run.
#[test]
fn no_copy_lands_after_a_load_over_a_refusing_driver_was_reported() {
    let refusals: [fn(&Emulated, u32); 2] = [
        |emulated, calls| emulated.faults().refuse_records(calls),
        |emulated, calls| emulated.faults().refuse_queries(calls),
    ];
    for refuse in refusals {
        let mut rig = Rig::new();
        let loaded = assert_no_copy_after_the_report(
            &mut rig,
            &Control::default(),
            &blocks_of(BLOCKS),
            Duration::from_millis(1300),
            &|emulated| refuse(emulated, u32::MAX),
            &|emulated| refuse(emulated, 0),
        );
        // The refusals break the device, which then refuses the windows that are read later.
        match loaded {
            Ok(loaded) => assert!(loaded.pages < BLOCKS),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Fatal),
        }
        assert!(rig.device.is_broken());
    }
}

#[test]
fn load_after_its_deadline_reads_nothing() {
    let rig = Rig::new();
    let control = Control { deadline: Some(Instant::now()), ..Control::default() };
    let read = |_: Range<usize>, _: Arc<Slots>, _: &Control| -> Result<Moved> {
        panic!("pages were read after the deadline")
    };
    let loaded = rig.load(&blocks_of(4), &control, &read).unwrap();
    assert_eq!(loaded, Moved { pages: 0, bytes: 0, reason: "deadline" });
}

#[test]
fn load_waits_for_earlier_work_of_the_engine() {
    let rig = Rig::new();
    let stream = rig.emulated.create_stream(Priority::Low).unwrap();
    let (release, gate) = channel::<()>();
    let target = rig.tensors[0].as_ptr() as usize;
    rig.emulated
        .run(stream, move || {
            let _ = gate.recv_timeout(Duration::from_secs(30));
            // A step in flight writes to a block that the engine has assigned to another request.
            // SAFETY: inside the tensor, which outlives the device.
            unsafe { (target as *mut u8).write(0x11) };
        })
        .unwrap();
    // SAFETY: created above.
    let after = unsafe { rig.device.mark(stream) }.unwrap();
    let loaded = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            // SAFETY: the load is after the only other access.
            unsafe { rig.device.load(&rig.pool, &[0], Some(after), &Control::default(), &read_all) }
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!load.is_finished(), "the load must wait for the step in flight");
        release.send(()).unwrap();
        load.join().unwrap()
    });
    assert_eq!(loaded.unwrap(), all(1));
    assert!(rig.has(0, 0), "the step's late write must not remain");
    // SAFETY: created above; its work is complete.
    unsafe { rig.emulated.destroy_stream(stream) };
}

#[test]
fn broken_device_fails_loads_and_keeps_their_memory() {
    let rig = Rig::new();
    rig.emulated.faults().fail_after(2);
    let error = rig.load(&blocks_of(BLOCKS), &Control::default(), &read_all).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fatal);
    assert!(rig.device.is_broken());
    assert!(rig.device.staging().in_use > 0, "the device may still write to the slots");
    let refused = rig.load(&[0], &Control::default(), &read_all).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fatal);
    // SAFETY: the call is refused.
    assert!(unsafe { rig.device.gather(&rig.pool, &[0], None) }.is_err());
}

#[test]
fn invalid_blocks_are_refused() {
    let rig = Rig::new();
    for blocks in [[0, BLOCKS as u32], [5, 5]] {
        let error = rig.load(&blocks, &Control::default(), &read_all).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    // SAFETY: the call is refused.
    let error = unsafe { rig.device.gather(&rig.pool, &[BLOCKS as u32], None) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn save_leaves_half_of_the_slots_to_loads() {
    let mut rig = Rig::new();
    let blocks = blocks_of(BLOCKS);
    for (page, block) in blocks.iter().enumerate() {
        rig.fill(*block, page);
    }
    // SAFETY: nothing writes to the blocks before the save is stored.
    let save = unsafe { rig.device.gather(&rig.pool, &blocks, None) }.unwrap();
    let pages = save.pages();
    assert!((STAGING / 4..=STAGING / 2).contains(&(pages * PAGE)), "{pages}");
    // SAFETY: nothing writes to the blocks before the save is stored.
    let next = unsafe { rig.device.gather(&rig.pool, &blocks, None) }.unwrap();
    assert!(
        pages + next.pages() <= STAGING / PAGE / 2,
        "saves may take at most half of the pinned memory"
    );
    drop(next);
    assert_eq!(rig.load(&[BLOCKS as u32 - 1], &Control::default(), &read_all).unwrap(), all(1));

    let mut stored = Vec::new();
    let moved = save
        .store(&Control::default(), &mut |pages, slots, _| {
            for (at, page) in pages.clone().enumerate() {
                let first = slot(&slots, at);
                // SAFETY: inside the page; its gather is complete.
                let same = (0..PAGE).all(|at| unsafe { first.add(at).read() } == byte_of(page, at));
                assert!(same, "page {page}");
            }
            stored.extend(pages.clone());
            Ok(all(pages.len()))
        })
        .unwrap();
    assert_eq!(moved, all(pages));
    assert_eq!(stored, (0..pages).collect::<Vec<_>>());
    assert_freed(&rig.device);
}

#[test]
fn save_has_no_pages_while_the_queue_is_full() {
    let rig = Rig::new();
    let slots = rig.device.slots(PAGE, 1, None, &|| false).unwrap();
    let table = rig.device.table(&rig.pool, &slots, &[0], Direction::Gather).unwrap();
    // SAFETY: nothing else accesses the slots and the blocks.
    let submit = |done| unsafe { rig.device.submit(&table, 0..PAGE as u64, None, done) };
    // Stop the mover by a callback that blocks, which callbacks must not do.
    let ((begin, begun), (release, held)) = (channel(), channel::<()>());
    let done = Box::new(move |_| {
        begin.send(()).unwrap();
        held.recv_timeout(Duration::from_secs(30)).unwrap();
    });
    submit(Some(done)).unwrap();
    begun.recv_timeout(Duration::from_secs(30)).unwrap();
    let refusal = loop {
        if let Err(error) = submit(None) {
            break error;
        }
    };
    assert_eq!(refusal.kind(), ErrorKind::Retry);
    // SAFETY: nothing writes to the blocks.
    let gather = || unsafe { rig.device.gather(&rig.pool, &[1, 2], None) }.unwrap();
    let save = gather();
    assert_eq!((save.pages(), save.reason()), (0, "busy"));
    release.send(()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while gather().pages() < 2 {
        assert!(Instant::now() < deadline, "the queue must become free");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(gather().reason(), "");
}

#[test]
fn save_that_finds_no_free_event_is_not_stored() {
    let rig = Rig::new();
    let stream = rig.emulated.create_stream(Priority::Low).unwrap();
    let mut marks = Vec::new();
    let refusal = loop {
        // SAFETY: created above.
        match unsafe { rig.device.mark(stream) } {
            Ok(mark) => marks.push(mark),
            Err(error) => break error,
        }
    };
    assert_eq!(refusal.kind(), ErrorKind::Retry);
    let store = || {
        // SAFETY: nothing writes to the blocks.
        let save = unsafe { rig.device.gather(&rig.pool, &[1, 2], None) }.unwrap();
        save.store(&Control::default(), &mut |pages, _, _| Ok(all(pages.len()))).unwrap()
    };
    assert_eq!(store(), Moved { reason: "busy", ..all(0) });
    assert!(!rig.device.is_broken());
    drop(marks);
    assert_eq!(store(), all(2));
}

#[test]
fn fence_keeps_a_save_from_reading_later_bytes() {
    for is_fenced in [true, false] {
        let mut rig = Rig::new();
        rig.fill(3, 3);
        rig.emulated.faults().delay_moves(Duration::from_millis(50));
        // SAFETY: the fence orders the write below after the gather; without the fence the test
        // expects the bytes of this write.
        let save = unsafe { rig.device.gather(&rig.pool, &[3], None) }.unwrap();
        if is_fenced {
            assert!(save.fence().wait(Instant::now() + Duration::from_secs(30)).unwrap());
        }
        rig.fill(3, 9);
        let mut found = None;
        save.store(&Control::default(), &mut |_, slots, _| {
            let first = slot(&slots, 0);
            // SAFETY: inside the page; its gather is complete.
            found = Some(unsafe { first.read() });
            Ok(all(1))
        })
        .unwrap();
        let expected = if is_fenced { byte_of(3, 0) } else { byte_of(9, 0) };
        assert_eq!(found, Some(expected), "fenced: {is_fenced}");
    }
}

#[test]
fn save_ends_at_the_first_window_that_is_not_stored_whole() {
    let rig = Rig::new();
    let blocks = blocks_of(32);
    // SAFETY: nothing writes to the blocks.
    let save = unsafe { rig.device.gather(&rig.pool, &blocks, None) }.unwrap();
    let windows = AtomicUsize::new(0);
    let moved = save
        .store(&Control::default(), &mut |pages, _, _| {
            if windows.fetch_add(1, Ordering::Relaxed) == 1 {
                return Ok(Moved { reason: "no_space", ..all(pages.len() - 1) });
            }
            Ok(all(pages.len()))
        })
        .unwrap();
    assert_eq!(windows.into_inner(), 2, "a save must end at the first page that is not stored");
    assert_eq!(moved.reason, "no_space");
    assert_freed(&rig.device);
}
