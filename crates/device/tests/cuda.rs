//! The driver [`Cuda`] over a fake CUDA library: calls, errors and refusals.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;
mod fake;

use common::{Arrangement, Memory, Shape, Tensors, assert_same};
use fake::FakeCuda;
use ritornello_device::driver::cuda::Cuda;
use ritornello_device::driver::{Copies, Driver, Launch, Priority};
use ritornello_device::layout::{Direction, Kernel, MoveEntry, Span};
use ritornello_device::{Device, Pool, Way, WayChoice};
use ritornello_format::ErrorKind;
use ritornello_volume::{PageSource, PageTarget};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn error_of_a_missing_library_names_the_remedy() {
    // SAFETY: no such library exists.
    let error = unsafe { Cuda::open_library(&["/nonexistent/libcuda.so.1"], 0) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let text = error.to_string();
    assert!(text.contains("install driver release 550") && text.contains("nonexistent"), "{text}");
}

#[test]
fn unusable_drivers_are_refused_at_open() {
    for (broken, ordinal, expected) in [
        ("OLD", 0, "too old"),
        ("NO_DEVICE", 0, "no device with this number"),
        ("NO_MAPPING", 0, "cannot map host memory"),
        ("", 1, "no device with this number"),
    ] {
        let fake = FakeCuda::new(broken);
        let error = fake.open(ordinal).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(fake.count("retained"), 0);
    }
}

/// Opens a driver that lacks functions, and returns the functions that the error names.
fn missing_functions(fake: &FakeCuda) -> Vec<String> {
    let error = fake.open(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let text = error.to_string();
    let advice = "lacks functions: install driver release 550";
    assert!(text.contains(advice), "{text}");
    let (_, names) = text.trim_end_matches(']').split_once("missing=").unwrap();
    names.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn error_names_the_functions_that_a_driver_lacks() {
    // A library that is no driver: the error names all functions that a driver must have.
    // SAFETY: the library is loaded already, and no function of it is called.
    let error = unsafe { Cuda::open_library(&["libc.so.6"], 0) }.unwrap_err();
    let text = error.to_string();
    let (_, names) = text.trim_end_matches(']').split_once("missing=").unwrap();
    let needed: Vec<&str> = names.split_whitespace().collect();
    assert!(needed.len() >= 30 && needed.contains(&"cuInit"), "{needed:?}");
    for name in &needed {
        let fake = FakeCuda::without(&[name]);
        assert_eq!(missing_functions(&fake), [*name]);
        assert_eq!(fake.count("retained"), 0, "the driver must not be used without {name}");
    }
    let last = [needed[0], needed[needed.len() - 1]];
    assert_eq!(missing_functions(&FakeCuda::without(&last)), last);
    assert!(FakeCuda::without(&[]).open(0).is_ok());
}

#[test]
fn device_whose_kernels_do_not_load_can_copy() {
    let fake = FakeCuda::new("NO_MODULE");
    let cuda = fake.open(0).unwrap();
    assert!(!cuda.has_kernels());
    let stream = cuda.create_stream(Priority::High).unwrap();
    let (from, mut to) = (Memory::new(64, 1), Memory::new(64, 2));
    let mut copies = Copies::default();
    copies.push(to.base(), from.bytes().as_ptr() as u64, 64);
    // SAFETY: the memory lives until the end of the test; copies of this library are synchronous.
    unsafe { cuda.copy(stream, &copies) }.unwrap();
    assert_same(to.bytes(), from.bytes(), "copied");
    // SAFETY: created above.
    unsafe { cuda.destroy_stream(stream) };
}

#[test]
fn error_of_refused_pinning_has_advice() {
    let mut memory = Memory::new(4096, 0);
    let base = memory.bytes_mut().as_mut_ptr();
    let fake = FakeCuda::new("NO_PINNING");
    // SAFETY: the memory lives until the end of the test.
    let error = unsafe { fake.open(0).unwrap().pin(base, 4096) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Retry);
    let text = error.to_string();
    assert!(text.contains("ulimit -l") && text.contains("CUDA_ERROR_OPERATING_SYSTEM"), "{text}");

    let fake = FakeCuda::new("");
    let cuda = fake.open(0).unwrap();
    // SAFETY: the memory lives until the end of the test.
    unsafe {
        assert_eq!(cuda.pin(base, 4096).unwrap(), base as u64);
        let error = cuda.pin(base, 4096).unwrap_err();
        assert!(error.to_string().contains("pinned already"), "{error}");
        cuda.unpin(base).unwrap();
        assert_eq!(cuda.unpin(base).unwrap_err().kind(), ErrorKind::Fatal);
    }
}

#[test]
fn memory_that_is_not_allocated_is_refused() {
    let fake = FakeCuda::new("");
    let cuda = fake.open(0).unwrap();
    assert_eq!(cuda.allocate(1 << 50).unwrap_err().kind(), ErrorKind::Retry);
    let address = cuda.allocate(1 << 20).unwrap();
    cuda.check_memory(address, 1 << 20).unwrap();
    cuda.check_memory(address + 4096, (1 << 20) - 4096).unwrap();
    let error = cuda.check_memory(address + 1, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    // SAFETY: no work uses the memory.
    unsafe { cuda.free(address) }.unwrap();
    assert!(cuda.check_memory(address, 1).is_err());
}

#[test]
fn kernels_and_copies_move_pages() {
    let shape = Shape {
        pieces: vec![8192, 8192, 4100],
        arrangement: Arrangement::Pairs,
        blocks: 5,
        gap: 64,
        shift: 0,
    };
    for missing in [&["cuMemcpyBatchAsync"][..], &[]] {
        let fake = FakeCuda::without(missing);
        let cuda = fake.open(0).unwrap();
        assert_eq!(cuda.describe(), "Fake, driver for CUDA 12.8");
        let stream = cuda.create_stream(Priority::Low).unwrap();
        let event = cuda.create_event().unwrap();
        let mut tensors = Tensors::new(&shape);
        let mut arena = Memory::new(16 * 4096, 3);
        let moves = [MoveEntry { block: 4, slot: 1 }, MoveEntry { block: 0, slot: 8 }];
        let part = tensors.layout.whole();
        let expected = tensors.after_scatter(&part, &moves, arena.bytes());
        let launch = Launch {
            kernel: Kernel { direction: Direction::Scatter, word: tensors.layout.word() },
            grid: 2,
            spans: tensors.layout.spans().as_ptr() as u64,
            count: part.count(),
            units: part.units,
            moves: moves.as_ptr() as u64,
            pages: 2,
            arena: arena.base(),
        };
        // SAFETY: all memory lives until the end of the test; work of this library is synchronous.
        unsafe {
            cuda.launch(stream, &launch).unwrap();
            cuda.record(event, stream).unwrap();
            cuda.wait(stream, event).unwrap();
            assert!(!cuda.is_complete(event).unwrap());
            assert!(cuda.is_complete(event).unwrap());
        }
        assert_same(tensors.memory.bytes(), &expected, "scattered");

        tensors.memory.bytes_mut().iter_mut().for_each(|byte| *byte ^= 0x42);
        let expected = tensors.after_gather(&part, &moves, arena.bytes());
        let mut copies = Copies::default();
        for entry in moves {
            for (address, offset, bytes) in tensors.layout.pieces(&part, entry.block) {
                let slot = arena.base() + common::slot(&entry) as u64;
                copies.push(slot + offset, address, bytes as usize);
            }
        }
        // SAFETY: all memory lives until the end of the test; work of this library is synchronous.
        unsafe {
            cuda.copy(stream, &copies).unwrap();
            cuda.copy(stream, &Copies::default()).unwrap();
        }
        assert_same(arena.bytes(), &expected, "gathered");
        assert_eq!(fake.count("batches"), i32::from(missing.is_empty()));
        // SAFETY: created above, and not used again.
        unsafe {
            cuda.destroy_event(event);
            cuda.destroy_stream(stream);
        }
        drop(cuda);
        for kind in ["retained", "modules", "streams", "events"] {
            assert_eq!(fake.count(kind), 0, "{kind}");
        }
    }
}

#[test]
fn calls_of_a_failed_device_return_its_error() {
    let fake = FakeCuda::new("");
    let cuda = fake.open(0).unwrap();
    let stream = cuda.create_stream(Priority::High).unwrap();
    let event = cuda.create_event().unwrap();
    let (from, mut to) = (Memory::new(64, 1), Memory::new(64, 2));
    let mut copies = Copies::default();
    copies.push(to.base(), from.bytes().as_ptr() as u64, 64);
    fake.fail_after(1);
    // SAFETY: the memory lives until the end of the test; copies of this library are synchronous.
    let errors = unsafe {
        cuda.copy(stream, &copies).unwrap();
        let failed = cuda.copy(stream, &copies).unwrap_err();
        assert!(failed.to_string().contains("call=cuMemcpyBatchAsync"), "{failed}");
        [
            failed,
            cuda.record(event, stream).unwrap_err(),
            cuda.is_complete(event).unwrap_err(),
            cuda.wait(stream, event).unwrap_err(),
        ]
    };
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Fatal);
        let text = error.to_string();
        assert!(text.contains("code=700") && text.contains("ILLEGAL_ADDRESS"), "{text}");
    }
}

/// A device over the fake library, with a pool of 4 blocks of 2 pieces in its memory.
fn device(fake: &FakeCuda, choice: WayChoice) -> (Arc<Device>, Arc<Pool>, u64) {
    let cuda = fake.open(0).unwrap();
    let base = cuda.allocate(8 * 4096).unwrap();
    let device = Device::new(Arc::new(cuda), 4 << 20).unwrap();
    let spans = [0, 4096].map(|at| Span { base: base + at, bytes: 4096, stride: 8192 });
    // SAFETY: the memory is never freed.
    let pool = unsafe { device.pool(&spans, 4, choice, Arc::new(())) }.unwrap();
    (device, pool, base)
}

#[test]
fn device_moves_pages_both_ways() {
    let soon = Instant::now() + Duration::from_secs(30);
    for choice in [WayChoice::Measure, WayChoice::ByLength, WayChoice::Always(Way::Copies)] {
        let fake = FakeCuda::new("");
        let (device, pool, base) = device(&fake, choice);
        let slots = device.slots(8192, 2, None, &|| false).unwrap();
        let mut fragments = Vec::new();
        (0..2).for_each(|page| PageTarget::fragments(&*slots, page, &mut fragments));
        for (page, fragment) in fragments.iter().enumerate() {
            // SAFETY: inside the slots and the pool; no move is in flight.
            unsafe {
                fragment.as_ptr().write_bytes(page as u8 + 1, 8192);
                (base as *mut u8).write_bytes(9, 8 * 4096);
            }
        }
        let table = device.table(&pool, &slots, &[3, 1], Direction::Scatter).unwrap();
        for part in [4096..8192, 0..4096] {
            // SAFETY: nothing else accesses the memory.
            let ticket = unsafe { device.submit(&table, part, None, None) }.unwrap();
            assert!(ticket.wait(soon).unwrap());
        }
        let back = device.slots(8192, 4, None, &|| false).unwrap();
        let gather = device.table(&pool, &back, &[0, 1, 2, 3], Direction::Gather).unwrap();
        // SAFETY: nothing else accesses the memory.
        let ticket = unsafe { device.submit(&gather, 0..8192, None, None) }.unwrap();
        assert!(ticket.wait(soon).unwrap());
        let mut fragments = Vec::new();
        (0..4).for_each(|page| PageSource::fragments(&*back, page, &mut fragments));
        for (fragment, expected) in fragments.iter().zip([9, 2, 9, 1]) {
            // SAFETY: inside the slots; no move is in flight.
            let page = unsafe { std::slice::from_raw_parts(fragment.as_ptr(), 8192) };
            assert!(page.iter().all(|&byte| byte == expected), "{choice:?}");
        }
        drop((ticket, table, gather, slots, back, pool, device));
        for kind in ["retained", "modules", "streams", "events", "pinned"] {
            assert_eq!(fake.count(kind), 0, "{kind}");
        }
        // The remaining allocation is the pool's memory, which the test does not free.
        assert_eq!(fake.count("allocations"), 1);
    }
}

#[test]
fn failed_device_keeps_pinned_memory() {
    let fake = FakeCuda::new("");
    let (device, pool, _) = device(&fake, WayChoice::Always(Way::Kernel { grid: 2 }));
    let slots = device.slots(8192, 2, None, &|| false).unwrap();
    let table = device.table(&pool, &slots, &[0, 1], Direction::Scatter).unwrap();
    // The copy of the table succeeds, and the launch fails.
    fake.fail_after(1);
    // SAFETY: nothing else accesses the memory.
    let ticket = unsafe { device.submit(&table, 0..8192, None, None) }.unwrap();
    let error = ticket.wait(Instant::now() + Duration::from_secs(30)).unwrap_err();
    assert!(error.to_string().contains("cuLaunchKernel"), "{error}");
    assert!(device.is_broken());
    drop((ticket, table, slots, pool, device));
    // Two arenas stay pinned: the memory of slots, and the memory of tables.
    assert_eq!(fake.count("pinned"), 2);
}

/// The driver refuses to mark the end of a move, although the device has not failed. The copies of
/// the move may still run.
#[test]
fn move_whose_end_the_driver_refuses_to_mark_stays_in_flight() {
    for choice in [WayChoice::Always(Way::Copies), WayChoice::Always(Way::Kernel { grid: 2 })] {
        let fake = FakeCuda::new("");
        let (device, pool, _) = device(&fake, choice);
        let slots = device.slots(8192, 2, None, &|| false).unwrap();
        let table = device.table(&pool, &slots, &[0, 1], Direction::Scatter).unwrap();
        fake.break_part("NO_RECORD");
        // SAFETY: nothing else accesses the memory.
        let ticket = unsafe { device.submit(&table, 0..8192, None, None) }.unwrap();
        let refused = Instant::now() + Duration::from_millis(1300);
        assert!(!ticket.wait(refused).unwrap(), "a move with copies in flight was reported");
        assert!(device.is_broken());
        fake.break_part("");
        assert!(ticket.wait(Instant::now() + Duration::from_secs(30)).unwrap());
    }
}

/// Calls fail with an error after which a device may still work. If the move were never reported,
/// the engine's request would wait for it without end.
#[test]
fn move_is_reported_when_every_query_fails_for_seconds() {
    for repaired in [true, false] {
        let fake = FakeCuda::new("");
        let (device, pool, _) = device(&fake, WayChoice::Always(Way::Copies));
        let slots = device.slots(8192, 2, None, &|| false).unwrap();
        let table = device.table(&pool, &slots, &[0, 1], Direction::Scatter).unwrap();
        fake.break_part("NO_EVENTS");
        // SAFETY: nothing else accesses the memory.
        let ticket = unsafe { device.submit(&table, 0..8192, None, None) }.unwrap();
        let early = Instant::now() + Duration::from_secs(1);
        assert!(!ticket.wait(early).unwrap(), "a move with copies in flight was reported");
        if repaired {
            fake.break_part("");
        }
        let ended = ticket.wait(Instant::now() + Duration::from_secs(30));
        assert_eq!(
            ended.map_err(|error| error.kind()),
            if repaired { Ok(true) } else { Err(ErrorKind::Fatal) }
        );
    }
}

/// After each of these errors CUDA does no more work in the process, so the device must report the
/// move as failed. Otherwise an engine's step that waits for the move would never end.
#[test]
fn move_is_reported_when_an_error_ends_all_work_of_the_process() {
    let codes = [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911];
    for code in codes {
        let fake = FakeCuda::new("");
        let (device, pool, _) = device(&fake, WayChoice::Always(Way::Copies));
        let slots = device.slots(8192, 2, None, &|| false).unwrap();
        let table = device.table(&pool, &slots, &[0, 1], Direction::Scatter).unwrap();
        fake.break_part(&format!("RECORD {code}"));
        // SAFETY: nothing else accesses the memory.
        let ticket = unsafe { device.submit(&table, 0..8192, None, None) }.unwrap();
        let error = ticket.wait(Instant::now() + Duration::from_secs(30)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fatal, "{code}: {error}");
        assert!(device.is_broken());
    }
}
