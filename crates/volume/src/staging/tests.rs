use super::*;
use crate::page_memory::{BorrowedPages, OwnedPages};
use crate::transfer::Control;

#[test]
fn buffers_are_aligned_and_freed_whole() {
    let staging = Staging::new(2 << 20).unwrap();
    let buffers: Vec<StagingBuffer> =
        [1, 4096, 5000, 1 << 20].into_iter().map(|n| staging.try_take(n).unwrap()).collect();
    for buffer in &buffers {
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
    }
    assert_eq!(staging.stats().in_use, 4096 * 4 + (1 << 20));
    drop(buffers);
    assert_eq!(staging.stats().in_use, 0);
    assert_eq!(staging.stats().peak, 4096 * 4 + (1 << 20));
    assert!(staging.try_take(2 << 20).is_some());
    assert!(staging.try_take((2 << 20) + 1).is_none());
}

#[test]
fn waiter_gets_freed_memory_or_stops_at_deadline() {
    let staging = Staging::new(1).unwrap();
    let all = staging.try_take(2 << 20).unwrap();
    let soon = Control {
        deadline: Some(Instant::now() + Duration::from_millis(30)),
        ..Control::default()
    };
    assert!(soon.stage(&staging, 1).is_none());
    let other = Arc::clone(&staging);
    let waiter = std::thread::spawn(move || Control::default().stage(&other, 4096).is_some());
    std::thread::sleep(Duration::from_millis(20));
    drop(all);
    assert!(waiter.join().unwrap());
}

#[test]
fn calls_that_do_not_wait_leave_memory_to_a_waiter() {
    let staging = Staging::new(2 << 20).unwrap();
    let (held, rest) = (staging.try_take(1 << 20).unwrap(), staging.try_take(1 << 19).unwrap());
    let other = Arc::clone(&staging);
    let waiter = std::thread::spawn(move || Control::default().stage(&other, 2 << 20));
    while staging.state.lock().waiting == 0 {
        std::thread::yield_now();
    }
    drop(rest);
    assert!(staging.try_take(1).is_none(), "free memory must be left to the waiter");
    drop(held);
    let buffer = waiter.join().unwrap();
    assert_eq!(buffer.unwrap().bytes().len(), 2 << 20);
    assert!(staging.try_take(2 << 20).is_some());
}

#[test]
fn copies_are_padded_with_zeroes() {
    let staging = Staging::new(1).unwrap();
    staging.try_take(1 << 20).unwrap().bytes_mut().fill(0xff);
    let source = BorrowedPages::fragmented(&[vec![&[1; 10], &[2; 5000]], vec![&[3; 4096]]]);
    let staged = staging.try_copy(&source, 0..2).unwrap();
    assert!(staged.padded(0) && staged.len() == 2);
    let mut out = Vec::new();
    staged.fragments(0, &mut out);
    assert_eq!(out.iter().map(Fragment::len).sum::<usize>(), 5010);
    let page = staged.pages[0].0.bytes();
    assert_eq!((page[9], page[10], page[5009]), (1, 2, 2));
    assert!(page[5010..].iter().all(|&byte| byte == 0) && page.len() == 8192);
}

#[test]
fn copy_that_does_not_fit_takes_nothing() {
    let staging = Staging::new(2 << 20).unwrap();
    let source = OwnedPages::new(vec![vec![1; 1 << 20]; 3]);
    assert!(staging.try_copy(&source, 0..3).is_none());
    assert!(staging.try_copy(&source, 2..4).is_none());
    assert_eq!(staging.stats().in_use, 0);
}
