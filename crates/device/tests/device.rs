//! A device over the emulated driver: moves, fences, faults.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Arrangement, Shape, Tensors, assert_same, poison, shapes};
use proptest::prelude::*;
use ritornello_device::driver::emulated::Emulated;
use ritornello_device::driver::{Driver, Priority, RawStream};
use ritornello_device::layout::{Direction, MoveEntry, Span, Word};
use ritornello_device::{Device, MoveTicket, Pool, Slots, Table, Way, WayChoice};
use ritornello_format::ErrorKind;
use ritornello_volume::{Fragment, FragmentMut, PageSource, PageTarget};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const STAGING: usize = 8 << 20;
const KERNEL: WayChoice = WayChoice::Always(Way::Kernel { grid: 4 });
const COPIES: WayChoice = WayChoice::Always(Way::Copies);
/// Time that a test gives work to run too early, if a fence fails to delay it.
const DELAY: Duration = Duration::from_millis(50);

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A device with a pool in memory of this process.
struct Rig {
    // Fields are dropped in this order. The device ends all work on the memory of `tensors`, so it
    // must be dropped before `tensors`.
    pool: Arc<Pool>,
    device: Arc<Device>,
    emulated: Arc<Emulated>,
    tensors: Tensors,
}

impl Rig {
    fn new(shape: &Shape, choice: WayChoice) -> Self {
        Self::with(Arc::default(), shape, choice)
    }

    fn with(emulated: Arc<Emulated>, shape: &Shape, choice: WayChoice) -> Self {
        let tensors = Tensors::new(shape);
        let device = Device::new(Arc::clone(&emulated) as Arc<dyn Driver>, STAGING).unwrap();
        // SAFETY: the rig keeps the tensors.
        let pool =
            unsafe { device.pool(&tensors.spans, shape.blocks, choice, Arc::new(())) }.unwrap();
        Self { pool, device, emulated, tensors }
    }

    fn page_bytes(&self) -> u64 {
        self.pool.layout().page_bytes()
    }

    /// Slots whose bytes depend on their position and on `seed`.
    fn slots(&self, pages: usize, seed: u8) -> Arc<Slots> {
        let now = Some(Instant::now());
        let slots = self.device.slots(self.page_bytes() as usize, pages, now, &|| false).unwrap();
        for page in 0..pages {
            let mut fragments: Vec<FragmentMut> = Vec::new();
            PageTarget::fragments(&*slots, page, &mut fragments);
            for at in 0..fragments[0].len() {
                // SAFETY: inside the page; no move is in flight.
                unsafe { fragments[0].as_ptr().add(at).write(poison(at + page * 4097, seed)) };
            }
        }
        slots
    }

    fn table(&self, slots: &Arc<Slots>, blocks: &[u32], direction: Direction) -> Arc<Table> {
        self.device.table(&self.pool, slots, blocks, direction).unwrap()
    }

    fn submit(&self, table: &Arc<Table>, part: Range<u64>) -> MoveTicket {
        // SAFETY: each test orders its accesses, or shows what happens if it does not.
        unsafe { self.device.submit(table, part, None, None) }.unwrap()
    }

    fn whole(&self) -> Range<u64> {
        0..self.page_bytes()
    }

    /// A stream that serves as an engine's stream.
    fn stream(&self) -> RawStream {
        self.emulated.create_stream(Priority::Low).unwrap()
    }

    /// Waits until all work of a stream is complete.
    fn finish(&self, stream: RawStream) {
        let (done, wait) = mpsc::channel();
        self.emulated.run(stream, move || done.send(()).unwrap()).unwrap();
        wait.recv_timeout(Duration::from_secs(30)).unwrap();
    }

    /// Lets the work of an engine's stream run while moves are held. With a fence the work must
    /// wait for the moves, so this call only gives it [`DELAY`] to run too early. Without a fence
    /// this call waits until the work is complete.
    fn let_engine_run(&self, stream: RawStream, is_fenced: bool) {
        if is_fenced {
            std::thread::sleep(DELAY);
        } else {
            self.finish(stream);
        }
    }

    /// The first byte of a block.
    fn first_byte(&self, block: u32) -> *mut u8 {
        let span = self.tensors.spans[0];
        (span.base + u64::from(block) * span.stride) as *mut u8
    }
}

/// The bytes of all pages of `slots`, each padded to a multiple of 4 KiB.
fn bytes_of(slots: &Slots) -> Vec<u8> {
    let mut bytes = Vec::new();
    for page in 0..PageSource::len(slots) {
        let mut fragments: Vec<Fragment> = Vec::new();
        PageSource::fragments(slots, page, &mut fragments);
        let length = fragments[0].len().next_multiple_of(4096);
        // SAFETY: the page and its padding are readable, and no move is in flight.
        bytes.extend(unsafe { std::slice::from_raw_parts(fragments[0].as_ptr(), length) });
    }
    bytes
}

/// The entries of a table that moves each block to or from its page in the bytes that [`bytes_of`]
/// returns, at the page's offset in units of 4 KiB.
fn entries(blocks: &[u32], page_bytes: u64) -> Vec<MoveEntry> {
    let units = page_bytes.div_ceil(4096) as u32;
    blocks
        .iter()
        .enumerate()
        .map(|(page, &block)| MoveEntry { block, slot: page as u32 * units })
        .collect()
}

fn small() -> Shape {
    Shape { pieces: vec![4096, 4096], arrangement: Arrangement::Pairs, blocks: 6, gap: 0, shift: 0 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn sections_arrive_and_nothing_else_changes(
        shape in prop::sample::select(vec![Word::B16, Word::B8, Word::B4, Word::B1])
            .prop_flat_map(|word| shapes(word.bytes())),
        choice in prop::sample::select(vec![KERNEL, COPIES, WayChoice::ByLength]),
        pages in 1_usize..6,
        cut in 0_usize..6,
    ) {
        let mut rig = Rig::new(&shape, choice);
        let blocks: Vec<u32> = (0..shape.blocks).rev().take(pages).collect();
        let slots = rig.slots(blocks.len(), 0x77);
        let moves = entries(&blocks, rig.page_bytes());
        let spans = rig.pool.layout().spans();
        let cut = spans[cut % spans.len()].offset;
        let parts: Vec<_> =
            [0..cut, cut..rig.page_bytes()].into_iter().filter(|part| !part.is_empty()).collect();

        let whole = rig.pool.layout().whole();
        let expected = rig.tensors.after_scatter(&whole, &moves, &bytes_of(&slots));
        let table = rig.table(&slots, &blocks, Direction::Scatter);
        for ticket in parts.iter().map(|part| rig.submit(&table, part.clone())).collect::<Vec<_>>() {
            assert!(ticket.wait(soon()).unwrap());
        }
        assert_same(rig.tensors.memory.bytes(), &expected, "scattered");

        rig.tensors.memory.bytes_mut().iter_mut().for_each(|byte| *byte ^= 0x3c);
        let last = parts[parts.len() - 1].clone();
        let part = rig.pool.layout().part(&last).unwrap();
        let expected = rig.tensors.after_gather(&part, &moves, &bytes_of(&slots));
        let pool = rig.tensors.memory.bytes().to_vec();
        let table = rig.table(&slots, &blocks, Direction::Gather);
        assert!(rig.submit(&table, last).wait(soon()).unwrap());
        assert_same(&bytes_of(&slots), &expected, "gathered");
        assert_same(rig.tensors.memory.bytes(), &pool, "pool after the gather");
    }
}

#[test]
fn driver_calls_per_section_do_not_grow_with_blocks() {
    let shape = Shape {
        pieces: vec![64; 8],
        arrangement: Arrangement::Together,
        blocks: 8192,
        gap: 0,
        shift: 0,
    };
    let tensors = Tensors::new(&shape);
    let emulated: Arc<Emulated> = Arc::default();
    let device = Device::new(Arc::clone(&emulated) as Arc<dyn Driver>, 40 << 20).unwrap();
    // SAFETY: the tensors are dropped last.
    let pool = unsafe { device.pool(&tensors.spans, 8192, KERNEL, Arc::new(())) }.unwrap();
    for pages in [64, 1024, 8192] {
        let slots = device.slots(512, pages, None, &|| false).unwrap();
        let blocks: Vec<u32> = (0..pages as u32).collect();
        let table = device.table(&pool, &slots, &blocks, Direction::Scatter).unwrap();
        assert!(table.uses_kernel());
        for section in 0..8 {
            let (calls, launches) = (emulated.calls(), emulated.launches());
            let part = section * 64..(section + 1) * 64;
            // SAFETY: nothing else accesses slots or tensors.
            let ticket = unsafe { device.submit(&table, part, None, None) }.unwrap();
            assert!(ticket.wait(soon()).unwrap());
            // The first move also queues the copy of the table to the device.
            let expected = if section == 0 { 3 } else { 2 };
            assert_eq!(emulated.calls() - calls, expected, "{pages} pages, section {section}");
            assert_eq!(emulated.launches() - launches, 1);
        }
    }
}

/// Whether an engine's kernel that follows a load finds the loaded bytes, if the load is late.
fn load_is_seen(is_fenced: bool, choice: WayChoice) -> bool {
    let rig = Rig::new(&small(), choice);
    let slots = rig.slots(1, 0x11);
    let loaded = bytes_of(&slots)[0];
    let stream = rig.stream();
    rig.emulated.faults().hold_moves();
    let table = rig.table(&slots, &[3], Direction::Scatter);
    let ticket = rig.submit(&table, rig.whole());
    if is_fenced {
        // SAFETY: the stream exists.
        assert!(unsafe { ticket.fence(stream, soon()) }.unwrap());
    }
    let (at, (tell, seen)) = (rig.first_byte(3) as usize, mpsc::channel());
    // SAFETY: the byte lives as long as the rig.
    let read = move || tell.send(unsafe { (at as *const u8).read_volatile() }).unwrap();
    rig.emulated.run(stream, read).unwrap();
    rig.let_engine_run(stream, is_fenced);
    rig.emulated.faults().release_moves();
    let seen = seen.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(ticket.wait(soon()).unwrap());
    // SAFETY: the load is complete.
    assert_eq!(unsafe { rig.first_byte(3).read() }, loaded);
    seen == loaded
}

#[test]
fn fence_makes_the_engine_wait_for_a_load() {
    for choice in [KERNEL, COPIES] {
        assert!(load_is_seen(true, choice));
        // Without the fence the check fails, so the check would find a missing fence.
        assert!(!load_is_seen(false, choice));
    }
}

/// Whether a block that is recomputed after an abandoned load keeps the recomputed bytes.
fn recomputed_block_survives(is_fenced: bool) -> bool {
    let rig = Rig::new(&small(), KERNEL);
    let slots = rig.slots(1, 0x11);
    let recomputed = !bytes_of(&slots)[0];
    let stream = rig.stream();
    rig.emulated.faults().hold_moves();
    let table = rig.table(&slots, &[2], Direction::Scatter);
    let ticket = rig.submit(&table, rig.whole());
    // The deadline of the load passes: the engine computes the block itself.
    assert!(!ticket.wait(Instant::now()).unwrap());
    if is_fenced {
        // SAFETY: the stream exists.
        assert!(unsafe { ticket.fence(stream, soon()) }.unwrap());
    }
    let at = rig.first_byte(2) as usize;
    // SAFETY: the byte lives as long as the rig.
    rig.emulated
        .run(stream, move || unsafe { (at as *mut u8).write_volatile(recomputed) })
        .unwrap();
    rig.let_engine_run(stream, is_fenced);
    rig.emulated.faults().release_moves();
    rig.finish(stream);
    assert!(ticket.wait(soon()).unwrap());
    // SAFETY: the load is complete.
    unsafe { rig.first_byte(2).read() == recomputed }
}

#[test]
fn fence_keeps_a_late_load_from_recomputed_blocks() {
    assert!(recomputed_block_survives(true));
    assert!(!recomputed_block_survives(false));
}

/// Whether a save contains the bytes that an engine's kernel computes before it, if the kernel is
/// late. If `is_marked`, the save waits for a mark behind the kernel.
fn save_is_complete(is_marked: bool) -> bool {
    let rig = Rig::new(&small(), KERNEL);
    let slots = rig.slots(1, 0x11);
    let computed = !poison(0, 0x5a);
    let stream = rig.stream();
    let at = rig.first_byte(1) as usize;
    let (release, held) = mpsc::channel::<()>();
    let compute = move || {
        held.recv_timeout(Duration::from_secs(30)).unwrap();
        // SAFETY: the byte lives as long as the rig.
        unsafe { (at as *mut u8).write_volatile(computed) };
    };
    rig.emulated.run(stream, compute).unwrap();
    // SAFETY: the stream exists.
    let after = is_marked.then(|| unsafe { rig.device.mark(stream) }.unwrap());
    let table = rig.table(&slots, &[1], Direction::Gather);
    // SAFETY: if the kernel is marked, the move reads after it; if not, the test expects that the
    // move reads too early.
    let ticket = unsafe { rig.device.submit(&table, rig.whole(), after, None) }.unwrap();
    if is_marked {
        assert!(!ticket.wait(Instant::now() + DELAY).unwrap());
    } else {
        assert!(ticket.wait(soon()).unwrap());
    }
    release.send(()).unwrap();
    assert!(ticket.wait(soon()).unwrap());
    rig.finish(stream);
    bytes_of(&slots)[0] == computed
}

#[test]
fn save_waits_for_the_kernels_before_it() {
    assert!(save_is_complete(true));
    assert!(!save_is_complete(false));
}

#[test]
fn load_ends_while_an_earlier_load_waits_for_the_engine() {
    let rig = Rig::new(&small(), KERNEL);
    let (stream, slots) = (rig.stream(), [rig.slots(1, 0x11), rig.slots(1, 0x22)]);
    let (release, held) = mpsc::channel::<()>();
    let compute = move || held.recv_timeout(Duration::from_secs(30)).unwrap();
    rig.emulated.run(stream, compute).unwrap();
    // SAFETY: the stream exists.
    let after = unsafe { rig.device.mark(stream) }.unwrap();
    let [first, second] = [0, 1].map(|at| rig.table(&slots[at], &[at as u32], Direction::Scatter));
    // SAFETY: the moves have different blocks, which nothing else accesses.
    let first = unsafe { rig.device.submit(&first, rig.whole(), Some(after), None) }.unwrap();
    // SAFETY: as for `first`.
    let second = unsafe { rig.device.submit(&second, rig.whole(), None, None) }.unwrap();
    assert!(second.wait(soon()).unwrap());
    assert!(!first.wait(Instant::now()).unwrap());
    release.send(()).unwrap();
    assert!(first.wait(soon()).unwrap());
    rig.finish(stream);
}

/// The driver runs a load, and at first refuses to mark the end of the load. If the load were
/// reported as failed immediately, the engine would compute the block while the load still writes
/// to it.
#[test]
fn load_whose_end_cannot_be_marked_at_first_ends_after_its_copies() {
    for choice in [KERNEL, COPIES] {
        let rig = Rig::new(&small(), choice);
        let slots = rig.slots(1, 0x11);
        let loaded = bytes_of(&slots)[0];
        rig.emulated.faults().hold_moves();
        rig.emulated.faults().refuse_records(20);
        let ticket = rig.submit(&rig.table(&slots, &[2], Direction::Scatter), rig.whole());
        let in_flight = Instant::now() + Duration::from_millis(100);
        assert!(!ticket.wait(in_flight).unwrap(), "the load was reported before its copies ended");
        rig.emulated.faults().release_moves();
        assert!(ticket.wait(soon()).unwrap());
        // SAFETY: the load is complete.
        assert_eq!(unsafe { rig.first_byte(2).read() }, loaded);
    }
}

/// Whether a save contains the bytes of its block, although the engine writes to the block before
/// the save is complete.
fn saved_block_may_be_reused(is_fenced: bool) -> bool {
    let rig = Rig::new(&small(), COPIES);
    let slots = rig.slots(1, 0x11);
    let stream = rig.stream();
    let at = rig.first_byte(4);
    // SAFETY: no work is in flight.
    let saved = unsafe { at.read() };
    rig.emulated.faults().hold_moves();
    let table = rig.table(&slots, &[4], Direction::Gather);
    let ticket = rig.submit(&table, rig.whole());
    if is_fenced {
        // SAFETY: the stream exists.
        assert!(unsafe { ticket.fence(stream, soon()) }.unwrap());
    }
    let at = at as usize;
    // SAFETY: the byte lives as long as the rig.
    rig.emulated.run(stream, move || unsafe { (at as *mut u8).write_volatile(!saved) }).unwrap();
    rig.let_engine_run(stream, is_fenced);
    rig.emulated.faults().release_moves();
    rig.finish(stream);
    assert!(ticket.wait(soon()).unwrap());
    bytes_of(&slots)[0] == saved
}

#[test]
fn fence_keeps_the_engine_from_blocks_being_saved() {
    assert!(saved_block_may_be_reused(true));
    assert!(!saved_block_may_be_reused(false));
}

#[test]
fn fence_returns_at_its_deadline() {
    let rig = Rig::new(&small(), KERNEL);
    let slots = rig.slots(1, 0x11);
    let table = rig.table(&slots, &[0], Direction::Scatter);
    // Stop the mover by a callback that blocks, which callbacks must not do.
    let ((begin, begun), (release, held)) = (mpsc::channel(), mpsc::channel::<()>());
    let done = Box::new(move |_| {
        begin.send(()).unwrap();
        held.recv_timeout(Duration::from_secs(30)).unwrap();
    });
    // SAFETY: nothing else accesses the memory.
    unsafe { rig.device.submit(&table, rig.whole(), None, Some(done)) }.unwrap();
    begun.recv_timeout(Duration::from_secs(30)).unwrap();
    let ticket = rig.submit(&table, rig.whole());
    let stream = rig.stream();
    let calls = rig.emulated.calls();
    let deadline = Instant::now() + Duration::from_millis(20);
    // SAFETY: the stream exists.
    assert!(!unsafe { ticket.fence(stream, deadline) }.unwrap());
    assert!(!ticket.wait(Instant::now()).unwrap());
    assert_eq!(rig.emulated.calls(), calls);
    release.send(()).unwrap();
    assert!(ticket.wait(soon()).unwrap());
    // SAFETY: the stream exists.
    assert!(unsafe { ticket.fence(stream, Instant::now()) }.unwrap());
}

#[test]
fn failed_device_reports_every_move_and_keeps_memory() {
    for choice in [KERNEL, COPIES] {
        let rig = Rig::new(&small(), choice);
        let slots = rig.slots(6, 0x11);
        let table = rig.table(&slots, &[0, 1, 2, 3, 4, 5], Direction::Scatter);
        rig.emulated.faults().delay_moves(Duration::from_millis(5));
        // The third of the six moves fails. With kernels the copy of the table counts as a move.
        rig.emulated.faults().fail_after(if choice == KERNEL { 3 } else { 2 });
        let reports = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let tickets: Vec<MoveTicket> = (0..6)
            .map(|_| {
                let reports = Arc::clone(&reports);
                let done = move |result: ritornello_format::Result<()>| {
                    reports[usize::from(result.is_err())].fetch_add(1, Ordering::Relaxed);
                };
                // SAFETY: nothing else accesses the memory.
                unsafe { rig.device.submit(&table, rig.whole(), None, Some(Box::new(done))) }
                    .unwrap()
            })
            .collect();
        let outcomes: Vec<_> = tickets.iter().map(|ticket| ticket.wait(soon())).collect();
        let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
        // The first two moves count as complete only if the mover polls before the third fails.
        assert!((4..=6).contains(&failed), "{outcomes:?}");
        for outcome in &outcomes[6 - failed..] {
            assert_eq!(outcome.as_ref().unwrap_err().kind(), ErrorKind::Fatal);
        }
        assert!(rig.device.is_broken());
        // SAFETY: the call is refused, so no memory is accessed.
        let refused = unsafe { rig.device.submit(&table, rig.whole(), None, None) }.unwrap_err();
        assert!(refused.to_string().contains("restart the engine"), "{refused}");
        let stream = rig.stream();
        // SAFETY: the stream exists.
        unsafe {
            assert!(tickets[5].fence(stream, soon()).is_err());
            assert!(rig.device.mark(stream).is_err());
            assert!(rig.device.pool(&rig.tensors.spans, 6, choice, Arc::new(())).is_err());
        }
        drop((table, slots));
        let Rig { pool, device, emulated, tensors } = rig;
        // The device may still write to the slots.
        assert!(device.staging().in_use >= 6 * 8192);
        drop((pool, device));
        assert!(emulated.pinned_bytes() >= STAGING);
        assert_eq!(
            [0, 1].map(|at: usize| reports[at].load(Ordering::Relaxed)),
            [6 - failed, failed]
        );
        drop((emulated, tensors));
    }
}

#[test]
fn opening_needs_pinning_but_no_kernels() {
    let emulated: Arc<Emulated> = Arc::default();
    emulated.faults().refuse_pinning();
    let error = Device::new(Arc::clone(&emulated) as Arc<dyn Driver>, STAGING).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Retry);
    assert_eq!(emulated.handles(), (0, 0));

    let emulated: Arc<Emulated> = Arc::default();
    emulated.faults().remove_kernels();
    for choice in [KERNEL, WayChoice::ByLength, WayChoice::Measure] {
        let rig = Rig::with(Arc::clone(&emulated), &small(), choice);
        let slots = rig.slots(2, 0x21);
        let table = rig.table(&slots, &[5, 0], Direction::Scatter);
        assert!(!table.uses_kernel());
        let whole = rig.pool.layout().whole();
        let moves = entries(&[5, 0], rig.page_bytes());
        let expected = rig.tensors.after_scatter(&whole, &moves, &bytes_of(&slots));
        assert!(rig.submit(&table, rig.whole()).wait(soon()).unwrap());
        assert_same(rig.tensors.memory.bytes(), &expected, "copied");
    }
}

#[test]
fn invalid_tables_parts_and_pools_are_refused() {
    let rig = Rig::new(&small(), KERNEL);
    let slots = rig.slots(3, 0x11);
    for (blocks, direction) in [
        (&[][..], Direction::Scatter),
        (&[0, 1, 2, 3], Direction::Scatter),
        (&[6], Direction::Gather),
        (&[1, 0, 1], Direction::Scatter),
    ] {
        let error = rig.device.table(&rig.pool, &slots, blocks, direction).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    // A gather may copy one block to two slots.
    let table = rig.table(&slots, &[1, 0, 1], Direction::Gather);
    for part in [0..1, 1..4096, 0..8193, 4096..4096] {
        // SAFETY: the call is refused, so no memory is accessed.
        assert!(unsafe { rig.device.submit(&table, part, None, None) }.is_err());
    }
    let other = Rig::new(&small(), KERNEL);
    assert!(other.device.table(&rig.pool, &slots, &[0], Direction::Gather).is_err());
    let short = rig.device.slots(4096, 1, None, &|| false).unwrap();
    assert!(rig.device.table(&rig.pool, &short, &[0], Direction::Gather).is_err());
    let span = Span { base: rig.tensors.spans[0].base, bytes: 8, stride: 8 };
    // SAFETY: the call is refused, so no memory is accessed.
    assert!(unsafe { rig.device.pool(&[span, span], 1, KERNEL, Arc::new(())) }.is_err());
}

#[test]
fn slots_are_padded_and_freed_when_dropped() {
    let rig = Rig::new(
        &Shape { pieces: vec![5000], arrangement: Arrangement::Separate, ..small() },
        KERNEL,
    );
    let in_use = rig.device.staging().in_use;
    let slots = rig.slots(3, 0x11);
    assert_eq!(rig.device.staging().in_use, in_use + 3 * 8192);
    let table = rig.table(&slots, &[0, 1, 2], Direction::Gather);
    assert!(rig.submit(&table, rig.whole()).wait(soon()).unwrap());
    for page in 0..3 {
        assert!(slots.padded(page));
        assert!(bytes_of(&slots)[page * 8192 + 5000..][..3192].iter().all(|&byte| byte == 0));
    }
    let mut fragments = Vec::new();
    PageTarget::fragments(&*slots, 3, &mut fragments);
    assert!(fragments.is_empty());
    drop((table, slots));
    assert_eq!(rig.device.staging().in_use, in_use);
    let now = Some(Instant::now());
    assert!(rig.device.slots(4096, STAGING / 4096 + 1, now, &|| false).is_none());
    let all = rig.device.slots(4096, STAGING / 4096, now, &|| false).unwrap();
    assert!(rig.device.slots(4096, 1, now, &|| false).is_none());
    assert!(rig.device.slots(4096, 1, None, &|| true).is_none());
    drop(all);
}

#[test]
fn moves_use_no_kernel_while_memory_of_tables_is_full() {
    let rig = Rig::new(&small(), KERNEL);
    let now = Some(Instant::now());
    // Tables have separate memory, so tables can be made although slots fill all of staging.
    let slots = rig.device.slots(8192, STAGING / 8192, now, &|| false).unwrap();
    let table = || rig.table(&slots, &[0, 1], Direction::Scatter);
    let with_kernels: Vec<_> = std::iter::repeat_with(table)
        .take(100_000)
        .take_while(|table| table.uses_kernel())
        .collect();
    assert!((1024..100_000).contains(&with_kernels.len()), "{}", with_kernels.len());
    let without = table();
    assert!(!without.uses_kernel());
    assert!(rig.submit(&without, rig.whole()).wait(soon()).unwrap());
    // A pool copies its spans to the device through the memory of tables. Registering a pool
    // therefore fails while tables fill this memory, and can be tried again when moves have ended.
    // SAFETY: the rig keeps the tensors.
    let pool = || unsafe { rig.device.pool(&rig.tensors.spans, 6, KERNEL, Arc::new(())) };
    assert_eq!(pool().unwrap_err().kind(), ErrorKind::Retry);
    assert!(!rig.device.is_broken());
    drop(with_kernels);
    assert!(table().uses_kernel());
    pool().unwrap();
}

#[test]
fn closing_completes_moves() {
    let rig = Rig::new(&small(), KERNEL);
    let slots = rig.slots(2, 0x11);
    let table = rig.table(&slots, &[0, 1], Direction::Scatter);
    let moves = entries(&[0, 1], rig.page_bytes());
    let whole = rig.pool.layout().whole();
    let expected = rig.tensors.after_scatter(&whole, &moves, &bytes_of(&slots));
    rig.emulated.faults().delay_moves(DELAY);
    let ticket = rig.submit(&table, rig.whole());
    // `fence` returns once the move is queued on the device.
    let stream = rig.stream();
    // SAFETY: the stream exists.
    assert!(unsafe { ticket.fence(stream, soon()) }.unwrap());
    let Rig { pool, device, emulated, tensors } = rig;
    drop((pool, device));
    assert!(ticket.wait(Instant::now()).unwrap());
    assert_same(tensors.memory.bytes(), &expected, "scattered");
    assert!(emulated.pinned_bytes() >= STAGING, "slots keep the pinned memory");
    drop((table, slots));
    assert_eq!(emulated.pinned_bytes(), 0);
    drop(ticket);
    assert_eq!(emulated.handles(), (0, 1));
}

#[test]
fn panicking_callback_does_not_end_the_mover() {
    let rig = Rig::new(&small(), KERNEL);
    let slots = rig.slots(1, 0x11);
    let table = rig.table(&slots, &[0], Direction::Scatter);
    let done = Box::new(|_| panic!("a panic injected by the test"));
    // SAFETY: nothing else accesses the memory.
    unsafe { rig.device.submit(&table, rig.whole(), None, Some(done)) }.unwrap();
    assert!(rig.submit(&table, rig.whole()).wait(soon()).unwrap());
}

#[test]
fn measuring_the_ways_leaves_the_pool_unchanged() {
    let shape = Shape { pieces: vec![8192; 4], ..small() };
    let rig = Rig::new(&shape, WayChoice::Measure);
    let measured = rig.pool.ways().measured();
    assert!(!measured.is_empty());
    assert_eq!(measured[0].pieces, 64);
    assert!(measured.iter().all(|row| !row.kernel.is_zero() && !row.copies.is_zero()));
    let poisoned: Vec<u8> =
        (0..rig.tensors.memory.bytes().len()).map(|at| poison(at, 0x5a)).collect();
    assert_same(rig.tensors.memory.bytes(), &poisoned, "pool");
    assert_eq!(rig.device.staging().in_use, 0);
}
