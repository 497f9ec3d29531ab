//! Threads for one call that shares its work between them and borrows from its caller. A
//! [`ThreadPool`](crate::ThreadPool) outlives its callers, so its jobs borrow nothing.

use std::thread;

/// Calls `work` on this thread and on up to `threads - 1` further threads. Returns the results; an
/// error is the panic of a further thread. If a thread fails to start, continues with fewer
/// threads: so `work` must take its pieces from a list that all threads share.
pub fn run_on_threads<T: Send>(
    threads: usize,
    name: &str,
    work: impl Fn() -> T + Sync,
) -> Vec<thread::Result<T>> {
    thread::scope(|scope| {
        let start = |_| {
            let thread = thread::Builder::new().name(name.to_owned());
            thread.spawn_scoped(scope, &work).ok()
        };
        let helpers: Vec<_> = (1..threads).filter_map(start).collect();
        let mine = Ok(work());
        std::iter::once(mine).chain(helpers.into_iter().map(|helper| helper.join())).collect()
    })
}
