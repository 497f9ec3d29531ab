//! Calls that abandon reads of a pipe, which hang until the test writes to the pipe.

use super::*;
use crate::memory_block::Block;
use ritornello_medium::MediumFile;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);
/// Added to the tag of an operation that was not performed.
const NOT_PERFORMED: u64 = 1000;
/// The byte that tests write to a pipe.
const ANSWER: u8 = 0xa5;

/// The read end of a pipe as a file. `io_uring` reads its descriptor, and the pool calls `read_at`.
#[derive(Debug)]
struct PipeFile {
    reader: PipeReader,
    has_descriptor: bool,
    reads: AtomicUsize,
}

impl MediumFile for PipeFile {
    fn read_at(&self, buffer: &mut [u8], _: u64) -> io::Result<usize> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        (&self.reader).read(buffer)
    }
    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
    fn allocate(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn drain(&self) -> io::Result<()> {
        Ok(())
    }
    fn length(&self) -> io::Result<u64> {
        Ok(0)
    }
    fn allocated(&self) -> io::Result<u64> {
        Ok(0)
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.has_descriptor.then(|| self.reader.as_fd())
    }
}

/// The memory of an operation. When it is dropped, sends the operation's tag and the first byte.
struct Memory {
    tag: u64,
    block: Block,
    dropped: Sender<(u64, u8)>,
}

impl AbandonedOp for Memory {
    fn not_performed(&mut self) {
        self.tag += NOT_PERFORMED;
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.dropped.send((self.tag, self.block.bytes()[0]));
    }
}

/// Reads one block from each of some pipes, and abandons the reads after `patience`.
struct Reads {
    ops: Vec<Op>,
    memory: Abandoned,
    /// Files that the threads of the pool must be reading before `patience` begins.
    awaited: Vec<Arc<PipeFile>>,
    patience: Duration,
    created: Instant,
    began: Instant,
    done: Vec<u64>,
}

impl Work for Reads {
    fn next(&mut self) -> Option<Op> {
        self.ops.pop()
    }
    fn done(&mut self, tag: u64, result: io::Result<()>) {
        result.unwrap();
        self.memory.remove(&tag);
        self.done.push(tag);
    }
    fn compute(&mut self) -> bool {
        false
    }
    fn wait(&mut self) -> Wait {
        if self.awaited.iter().any(|file| file.reads.load(Ordering::Relaxed) == 0) {
            assert!(self.created.elapsed() < LONG, "no thread performs the operation");
            self.began = Instant::now();
            return Wait::AtMost(Duration::from_millis(1));
        }
        let left = self.patience.saturating_sub(self.began.elapsed());
        if left.is_zero() {
            Wait::Abandon(std::mem::take(&mut self.memory))
        } else {
            Wait::AtMost(left)
        }
    }
}

struct Fixture {
    engine: Box<dyn IoEngine>,
    files: Vec<Arc<PipeFile>>,
    writers: Vec<PipeWriter>,
    /// Receives the tag and the first byte of memory that is dropped.
    dropped: Receiver<(u64, u8)>,
    /// The sender that each [`Memory`] holds.
    on_drop: Sender<(u64, u8)>,
}

impl Fixture {
    fn new(engine: Box<dyn IoEngine>, pipes: usize) -> Self {
        let has_descriptor = engine.name() == "uring";
        let (files, writers) = (0..pipes)
            .map(|_| {
                let (reader, writer) = io::pipe().unwrap();
                let reads = AtomicUsize::new(0);
                (Arc::new(PipeFile { reader, has_descriptor, reads }), writer)
            })
            .unzip();
        let (on_drop, dropped) = channel();
        Self { engine, files, writers, dropped, on_drop }
    }

    /// A fixture for each engine that waits for operations and works on this machine.
    fn all(pipes: usize) -> Vec<Self> {
        let mut all = vec![Self::new(Box::new(Pool::new()), pipes)];
        // Before Linux 5.11 `io_uring` waits without a limit.
        let has_limit =
            |ring: io_uring::IoUring| ring.params().is_feature_ext_arg().then(Uring::new);
        if let Some(Ok(uring)) = io_uring::IoUring::new(1).ok().and_then(has_limit) {
            all.push(Self::new(Box::new(uring), pipes));
        }
        all
    }

    /// Reads of one block from each of `pipes`, whose numbers are the tags.
    fn reads(&self, pipes: std::ops::Range<u64>, patience: Duration) -> Reads {
        let (mut ops, mut memory, mut awaited) = (Vec::new(), Abandoned::new(), Vec::new());
        for tag in pipes {
            let block = Block::new(1);
            let iovec = IoVec::new(block.as_ptr(), block.len());
            let pipe = &self.files[tag as usize];
            awaited.extend((!pipe.has_descriptor).then(|| Arc::clone(pipe)));
            let file: Arc<dyn MediumFile> = pipe.clone();
            // SAFETY: `memory` owns the block until the operation is done, or passes it to the
            // engine.
            ops.push(unsafe { Op::new(tag, file, false, 0, vec![iovec]) });
            memory.insert(tag, Box::new(Memory { tag, block, dropped: self.on_drop.clone() }));
        }
        let now = Instant::now();
        Reads { ops, memory, awaited, patience, created: now, began: now, done: Vec::new() }
    }

    /// Completes the read of a pipe, if it is in flight.
    fn answer(&self, pipe: usize) {
        (&self.writers[pipe]).write_all(&[ANSWER; 4096]).unwrap();
    }

    /// Asserts that no memory is dropped for a short time.
    #[track_caller]
    fn assert_held(&self) {
        let early = self.dropped.recv_timeout(SHORT);
        assert_eq!(early, Err(RecvTimeoutError::Timeout), "{}", self.engine.name());
    }

    /// Waits until memory is dropped.
    #[track_caller]
    fn next_dropped(&self) -> (u64, u8) {
        self.dropped.recv_timeout(LONG).unwrap()
    }

    fn is_open(&self, pipe: usize) -> bool {
        Arc::strong_count(&self.files[pipe]) > 1
    }
}

#[test]
fn abandoned_operations_keep_memory_and_file_until_they_complete() {
    for all in Fixture::all(2) {
        let mut reads = all.reads(0..2, SHORT);
        let began = Instant::now();
        let waited = all.engine.run(&mut reads);
        assert!(waited > Duration::ZERO && reads.began.elapsed() >= SHORT);
        assert!(began.elapsed() < LONG && reads.done.is_empty());
        drop(reads);
        all.assert_held();
        assert!(all.is_open(0) && all.is_open(1));
        all.answer(1);
        assert_eq!(all.next_dropped(), (1, ANSWER), "{}", all.engine.name());
        assert!(!all.is_open(1));
        all.assert_held();
        all.answer(0);
        assert_eq!(all.next_dropped(), (0, ANSWER));
    }
}

#[test]
fn operations_that_complete_in_time_are_not_abandoned() {
    for all in Fixture::all(2) {
        let mut reads = all.reads(0..2, LONG);
        std::thread::scope(|scope| {
            let writers = &all.writers;
            scope.spawn(move || {
                for mut writer in writers {
                    std::thread::sleep(SHORT);
                    writer.write_all(&[ANSWER; 4096]).unwrap();
                }
            });
            assert!(all.engine.run(&mut reads) > Duration::ZERO);
        });
        let mut dropped = [all.next_dropped(), all.next_dropped()];
        reads.done.sort_unstable();
        dropped.sort_unstable();
        assert_eq!(reads.done, [0, 1]);
        drop(reads);
        assert_eq!(dropped, [(0, ANSWER), (1, ANSWER)]);
        assert!(!all.is_open(0) && !all.is_open(1));
    }
}

/// The kernel completes an operation on the thread that submitted it, or without this thread if it
/// has ended.
#[test]
fn abandoned_operation_completes_whatever_its_thread_does() {
    for all in Fixture::all(3) {
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let engine = &all.engine;
            let mut reads = all.reads(0..1, SHORT);
            scope.spawn(move || engine.run(&mut reads)).join().unwrap();
            let (wake, asleep) = channel::<()>();
            let (left, has_left) = channel();
            let (mut reads, has_left_too) = (all.reads(1..2, SHORT), left.clone());
            scope.spawn(move || {
                engine.run(&mut reads);
                has_left_too.send(()).unwrap();
                let _ = asleep.recv();
            });
            let (mut reads, stop) = (all.reads(2..3, SHORT), &stop);
            scope.spawn(move || {
                engine.run(&mut reads);
                left.send(()).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let have_left = [has_left.recv_timeout(LONG), has_left.recv_timeout(LONG)];
            let early = all.dropped.recv_timeout(SHORT);
            let dropped = [0, 1, 2].map(|pipe| {
                all.answer(pipe);
                all.dropped.recv_timeout(LONG)
            });
            // End the threads before an assertion can fail.
            stop.store(true, Ordering::Relaxed);
            drop(wake);
            assert_eq!((have_left, early), ([Ok(()); 2], Err(RecvTimeoutError::Timeout)));
            let [of_ended, of_asleep, of_running] = dropped.map(Result::unwrap);
            // The kernel may cancel the read of a pipe whose thread has ended.
            assert_eq!(of_ended.0, 0, "{}", all.engine.name());
            assert_eq!([of_asleep, of_running], [(1, ANSWER), (2, ANSWER)]);
        });
    }
}

#[test]
fn operation_abandoned_before_it_has_a_thread_is_not_performed() {
    let all = Fixture::new(Box::new(Pool::new()), 17);
    all.engine.run(&mut all.reads(0..16, SHORT));
    let mut last = all.reads(16..17, SHORT);
    last.awaited.clear();
    all.engine.run(&mut last);
    assert_eq!(all.next_dropped().0, NOT_PERFORMED + 16);
    all.assert_held();
    all.answer(3);
    assert_eq!(all.next_dropped(), (3, ANSWER));
    assert_eq!(all.files[16].reads.load(Ordering::Relaxed), 0);
    (0..16).for_each(|pipe| all.answer(pipe));
}

/// Threads of the pool and of abandoned rings outlive the engine.
#[test]
fn abandoned_operation_outlives_its_engine() {
    for mut all in Fixture::all(1) {
        all.engine.run(&mut all.reads(0..1, SHORT));
        all.engine = Box::new(Inline);
        all.assert_held();
        all.answer(0);
        assert_eq!(all.next_dropped(), (0, ANSWER));
    }
}
