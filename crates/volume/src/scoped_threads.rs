//! Threads for one call that shares its work between them and borrows from its caller. A
//! [`ThreadPool`](crate::ThreadPool) outlives its callers, so its jobs borrow nothing.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

/// Calls `work` on this thread and on up to `threads - 1` further threads. Returns the results; an
/// error is the panic of a further thread. If a thread fails to start, continues with fewer
/// threads. Each call of `work` must therefore take its pieces from a list that all threads share.
///
/// Waits until `work` has returned on every thread, and not until the threads have ended. The
/// kernel ends a thread only after its `io_uring` workers, which perform operations that would
/// block, and `work` may have left such operations behind.
pub fn run_on_threads<T: Send>(
    threads: usize,
    name: &str,
    work: impl Fn() -> T + Sync,
) -> Vec<thread::Result<T>> {
    thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        let start = |_: &usize| {
            let (work, sender) = (&work, sender.clone());
            let work = move || {
                // The send fails only if `work` has panicked on the caller's thread.
                let _ = sender.send(catch_unwind(AssertUnwindSafe(work)));
            };
            let thread = thread::Builder::new().name(name.to_owned());
            thread.spawn_scoped(scope, work).is_ok()
        };
        let helpers = (1..threads).filter(start).count();
        let mine = Ok(work());
        std::iter::once(mine).chain(results.iter().take(helpers)).collect()
    })
}

/// Calls `work` for every number below `count` on up to `threads` threads, the caller's included,
/// and returns the results in order.
pub(crate) fn map_on_threads<T: Send>(
    threads: usize,
    count: usize,
    name: &str,
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
    let done = run_on_threads(threads, name, some);
    let done = done.into_iter().map(|part| part.unwrap_or_else(|panic| resume_unwind(panic)));
    let mut done: Vec<_> = done.flatten().collect();
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_mapped_once_in_order() {
        for threads in [1, 2, 4, 9] {
            for count in [0, 1, 3, 1000] {
                let done = map_on_threads(threads, count, "test", |number| number * 3);
                assert_eq!(done, (0..count).map(|number| number * 3).collect::<Vec<_>>());
            }
        }
    }
}
