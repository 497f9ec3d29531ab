//! Threads that share a large batch of copies: one thread does not saturate the memory channels of
//! a server.

use crate::scoped_threads::map_on_threads;
use std::sync::OnceLock;

/// Minimum bytes per thread. With fewer bytes, starting a thread takes more time than the thread
/// saves.
const BYTES_PER_THREAD: u64 = 16 << 20;
/// Maximum threads of one call.
const THREADS_MAX: usize = 4;
/// A call uses at most one thread for each eight processors that this process may use, and at least
/// one, to leave the other processors to the work of the engine.
const PROCESSORS_PER_THREAD: usize = 8;

/// Calls `work` for every number below `count` on [`copy_threads`] threads, where `bytes` is the
/// total to copy. Returns the results in order.
pub(super) fn map_pages<T: Send>(
    count: usize,
    bytes: u64,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    match copy_threads(count, bytes) {
        1 => (0..count).map(work).collect(),
        threads => map_on_threads(threads, count, "ritornello-copy", work),
    }
}

/// Number of threads for `count` pages of `bytes` in all, at least one.
pub(crate) fn copy_threads(count: usize, bytes: u64) -> usize {
    let useful = usize::try_from(bytes / BYTES_PER_THREAD).unwrap_or(THREADS_MAX).min(count);
    useful.clamp(1, copy_threads_max())
}

/// Maximum threads of one call on this machine, computed once because `available_parallelism` reads
/// files.
pub(crate) fn copy_threads_max() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| threads_of(std::thread::available_parallelism().map_or(1, usize::from)))
}

/// Maximum threads of one call on a machine with `processors` processors.
fn threads_of(processors: usize) -> usize {
    (processors / PROCESSORS_PER_THREAD).clamp(1, THREADS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_for_each_eight_processors() {
        let threads = [1, 8, 15, 16, 31, 32, 256].map(threads_of);
        assert_eq!(threads, [1, 1, 1, 2, 3, 4, 4]);
    }
}
