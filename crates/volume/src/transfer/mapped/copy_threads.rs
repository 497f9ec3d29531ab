//! Threads that share a large batch of copies: one thread does not saturate the memory channels of
//! a server.

use crate::run_on_threads;
use std::panic::resume_unwind;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Minimum bytes per thread: copying fewer bytes takes less time than starting a thread saves.
const BYTES_PER_THREAD: u64 = 16 << 20;
/// Maximum threads of one call.
const THREADS_MAX: usize = 4;
/// Processors of the machine per copying thread: the calling process uses the other processors.
const PROCESSORS_PER_THREAD: usize = 8;

/// Calls `work` for every number below `count` on as many threads as `bytes` in all justify, and
/// returns the results in order.
pub(super) fn map_pages<T: Send>(
    count: usize,
    bytes: u64,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    match copy_threads(count, bytes) {
        1 => (0..count).map(work).collect(),
        threads => map_on_threads(threads, count, work),
    }
}

/// Number of threads for `count` pages of `bytes` in all, at least one.
pub(crate) fn copy_threads(count: usize, bytes: u64) -> usize {
    let useful = usize::try_from(bytes / BYTES_PER_THREAD).unwrap_or(THREADS_MAX).min(count);
    useful.clamp(1, threads_of_machine())
}

/// Calls `work` for every number below `count` on up to `threads` threads, the caller's included.
fn map_on_threads<T: Send>(
    threads: usize,
    count: usize,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let some = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return done;
            }
            done.push((number, work(number)));
        }
    };
    let done = run_on_threads(threads, "ritornello-copy", some);
    let done = done.into_iter().map(|part| part.unwrap_or_else(|panic| resume_unwind(panic)));
    let mut done: Vec<_> = done.flatten().collect();
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Maximum threads of one call on this machine, computed once because `available_parallelism` reads
/// files.
fn threads_of_machine() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        (processors / PROCESSORS_PER_THREAD).clamp(1, THREADS_MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_mapped_once_in_order() {
        for threads in [1, 2, 4, 9] {
            for count in [0, 1, 3, 1000] {
                let done = map_on_threads(threads, count, |number| number * 3);
                assert_eq!(done, (0..count).map(|number| number * 3).collect::<Vec<_>>());
            }
        }
        assert_eq!(map_pages(3, 0, |number| number), [0, 1, 2]);
    }
}
