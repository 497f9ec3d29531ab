//! The other process: started, heard, ended or killed.

use super::work::{Crew, Tally};
use crate::exit::{Failure, Status};
use crate::{Context, open, print};
use ritornello_store::Options;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often it says what it has counted.
const REPORT: Duration = Duration::from_millis(100);

/// A child that works on the same store.
pub struct Partner {
    child: Child,
    input: Option<ChildStdin>,
    ready: Arc<AtomicBool>,
    counts: Arc<[AtomicU64; 3]>,
    listener: Option<std::thread::JoinHandle<()>>,
}

impl Partner {
    /// Starts this command again, to join the store in `dir`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(context: &Context, dir: &Path, capacity: u64, seed: u64) -> Result<Self, Failure> {
        let Some((program, first)) = context.again.split_first() else {
            return Err(Failure::failed(
                "this command does not know how to start itself again",
                "",
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

    /// Waits until it has opened the store. Returns whether it did.
    pub fn wait_ready(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while !self.ready.load(Ordering::Acquire) {
            if Instant::now() > until || matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Ends it in the middle of whatever it does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Lets it close the store and end. Returns whether it did, and found nothing wrong.
    pub fn finish(&mut self, patience: Duration) -> bool {
        drop(self.input.take());
        let until = Instant::now() + patience;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => return false,
            }
        }
    }

    /// Adds what it counted; to be called once it has ended.
    pub fn settle(mut self, tally: &Tally) {
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        let [operations, bytes, wrong] =
            [0, 1, 2].map(|at| self.counts[at].load(Ordering::Relaxed));
        tally.operations.fetch_add(operations, Ordering::Relaxed);
        tally.bytes.fetch_add(bytes, Ordering::Relaxed);
        tally.wrong_bytes.fetch_add(wrong, Ordering::Relaxed);
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The child's side: works until standard input ends.
pub fn join(options: &Options, capacity: u64, seed: u64) -> Result<Status, Failure> {
    let node = open::with(options)?;
    let tally = Arc::new(Tally::default());
    let ended = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ended);
    // It ends with the process if the input never does.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        seen.store(true, Ordering::Release);
    });
    let crew = Crew::start(node.store(), &tally, capacity, seed, 1, 1)?;
    let report = || {
        let [operations, bytes, wrong] = [&tally.operations, &tally.bytes, &tally.wrong_bytes]
            .map(|count| count.load(Ordering::Relaxed));
        print::say(&format!("{operations} {bytes} {wrong}"));
    };
    while !ended.load(Ordering::Acquire) {
        report();
        std::thread::sleep(REPORT);
    }
    let home = crew.stop(Duration::from_secs(100));
    report();
    if !home {
        return Err(Failure::failed("a call hung in the other process", ""));
    }
    node.close()?;
    Ok(Status::Fine)
}
