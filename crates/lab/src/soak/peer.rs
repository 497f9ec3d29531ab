//! The peer process of `soak`: a child of this command that works on the same store.

use super::work::{Totals, Workers};
use ritornello_store::Options;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::{Context, open, print};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Interval of the peer's reports.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// The peer process, as its parent sees it.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    ready: Arc<AtomicBool>,
    counts: Arc<[AtomicU64; 3]>,
    listener: Option<std::thread::JoinHandle<()>>,
}

impl Peer {
    /// Starts this command as a child that joins the store in `dir`.
    ///
    /// # Errors
    /// If the child cannot be started.
    pub fn start(context: &Context, dir: &Path, capacity: u64, seed: u64) -> Result<Self, Failure> {
        let Some((program, first)) = context.self_command.split_first() else {
            return Err(Failure::failed(
                "the path of this program is unknown",
                "this program by its full path",
            ));
        };
        let (capacity, seed) = (capacity.to_string(), seed.to_string());
        let mut child = Command::new(program)
            .args(first)
            .args(["soak", "--capacity", &capacity, "--seed", &seed, "--join"])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let counts: Arc<[AtomicU64; 3]> = Arc::default();
        let ready = Arc::new(AtomicBool::new(false));
        let listener = child.stdout.take().map(|output| {
            let (counts, ready) = (Arc::clone(&counts), Arc::clone(&ready));
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    for (count, word) in counts.iter().zip(line.split_whitespace()) {
                        count.store(word.parse().unwrap_or(0), Ordering::Relaxed);
                    }
                    ready.store(true, Ordering::Release);
                }
            })
        });
        let input = child.stdin.take();
        Ok(Self { child, input, ready, counts, listener })
    }

    /// Waits until the child has opened the store. Returns whether it did so within `timeout`.
    pub fn wait_ready(&mut self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        while !self.ready.load(Ordering::Acquire) {
            if Instant::now() > until || matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Kills the child and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Lets the child close the store and end. Returns whether the child ended successfully within
    /// `timeout`.
    pub fn finish(&mut self, timeout: Duration) -> bool {
        drop(self.input.take());
        let until = Instant::now() + timeout;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => return false,
            }
        }
    }

    /// Adds the child's counts to `totals`. The child must have ended.
    pub fn add_totals(mut self, totals: &Totals) {
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        let [operations, bytes, wrong] =
            [0, 1, 2].map(|at| self.counts[at].load(Ordering::Relaxed));
        totals.operations.fetch_add(operations, Ordering::Relaxed);
        totals.bytes.fetch_add(bytes, Ordering::Relaxed);
        totals.wrong_bytes.fetch_add(wrong, Ordering::Relaxed);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs the child: works until standard input ends.
pub fn join(options: &Options, capacity: u64, seed: u64) -> Result<Status, Failure> {
    let node = open::with(options)?;
    let totals = Arc::new(Totals::default());
    let ended = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ended);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        seen.store(true, Ordering::Release);
    });
    let workers = Workers::start(node.store(), &totals, capacity, seed, 1, 1)?;
    let report = || {
        let [operations, bytes, wrong] = [&totals.operations, &totals.bytes, &totals.wrong_bytes]
            .map(|count| count.load(Ordering::Relaxed));
        print::print_stdout(&format!("{operations} {bytes} {wrong}"));
    };
    while !ended.load(Ordering::Acquire) {
        report();
        std::thread::sleep(REPORT_EVERY);
    }
    let soak_store = workers.stop(Duration::from_secs(100));
    report();
    if !soak_store {
        return Err(Failure::failed(
            "a thread of the peer process hung or panicked",
            "report this",
        ));
    }
    node.close()?;
    Ok(Status::Fine)
}
