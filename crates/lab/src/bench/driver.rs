//! Timed puts and gets of whole sequences; contents are made and checked outside the timed
//! sections.

use super::content::{Content, Keys, PageName};
use super::shape::Shape;
use ritornello_store::{Outcome, PutOptions, Store, memory_left};
use ritornello_terminal::exit::Failure;
use ritornello_volume::baseline::{Rate, copy_threads, cpu_seconds};
use ritornello_volume::staging::{Backing, Staging, StagingBuffer};
use ritornello_volume::transfer::Control;
use ritornello_volume::{BorrowedPages, BorrowedPagesMut};
use std::ops::Range;
use std::time::Instant;

/// Maximum bytes of a window, unless one sequence is longer. A window is the sequences that are in
/// memory together. Its contents are made before the timed puts, or checked after the timed gets.
const WINDOW_BYTES_MAX: u64 = 1 << 30;
/// Divisor of the available memory: the quotient is a second maximum of a window's bytes.
const MEMORY_SHARE: u64 = 4;

/// Memory for a window of sequences, in huge pages where the machine has them, and the contents of
/// the sequences.
pub struct LoadDriver {
    shape: Shape,
    content: Content,
    memory: StagingBuffer,
    backing: Backing,
    window: u32,
}

impl LoadDriver {
    /// Allocates the memory of a window and touches it, so that timed calls cause no page faults.
    ///
    /// # Errors
    /// If the memory does not suffice for a window.
    pub fn new(shape: &Shape) -> Result<Self, Failure> {
        let sequence = shape.sequence_bytes() as u64;
        let limit = memory_left() / MEMORY_SHARE;
        let window = (limit.min(WINDOW_BYTES_MAX) / sequence).clamp(1, u64::from(shape.sequences));
        let bytes = (window * sequence) as usize;
        let staging = Staging::new(bytes)?;
        let backing = staging.stats().backing;
        let mut memory = staging.try_take(bytes).ok_or_else(|| {
            Failure::failed("no memory for the buffers", "a smaller --total or smaller pages")
        })?;
        memory.bytes_mut().fill(1);
        // The cast is safe: `window` is at most `shape.sequences`, a `u32`.
        let window = window as u32;
        let content = if shape.is_bfloat16() { Content::numbers(0) } else { Content::new(0) };
        Ok(Self { shape: shape.clone(), content, memory, backing, window })
    }

    /// Returns the number of sequences in a set.
    #[must_use]
    pub fn sequences(&self) -> u32 {
        self.shape.sequences
    }

    /// Returns the kind of memory of the buffers.
    #[must_use]
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Allocates memory of the size and kind of a window.
    ///
    /// # Errors
    /// If the memory does not suffice.
    pub fn allocate_like_window(&self) -> Result<StagingBuffer, Failure> {
        let bytes = self.memory.bytes().len();
        let piece = Staging::new(bytes)?.try_take(bytes);
        let mut piece = piece
            .ok_or_else(|| Failure::failed("no memory for the copies", "a smaller --total"))?;
        piece.bytes_mut().fill(2);
        Ok(piece)
    }

    /// Copies a whole set of sequences, page by page, from `from`, which is as long as a window.
    /// Uses as many threads as a get of one sequence from a store on tmpfs.
    pub fn copy(&mut self, from: &StagingBuffer) -> Rate {
        let (stride, page_bytes) = (self.shape.stride(), self.shape.page_bytes as usize);
        let sequence = self.shape.sequence_bytes();
        let mut sum = none();
        for window in windows(self.shape.sequences, self.window) {
            let sequences = (window.end - window.start) as usize;
            let to = self.memory.bytes_mut().chunks_exact_mut(sequence);
            let pairs = to.zip(from.bytes().chunks_exact(sequence)).take(sequences);
            let (start, cpu) = (Instant::now(), cpu_seconds());
            for (to, from) in pairs {
                copy_pages(to, from, stride, page_bytes);
            }
            let seconds = start.elapsed().as_secs_f64();
            let bytes = bytes_of(&self.shape, &window);
            sum = add(sum, Rate { bytes, seconds, cpu_seconds: cpu_seconds() - cpu });
        }
        sum
    }

    /// Reads the memory of a window once, on one thread.
    pub fn read_memory(&self) -> Rate {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let (words, _) = self.memory.bytes().as_chunks::<8>();
        let sum = words.iter().map(|word| u64::from_ne_bytes(*word)).fold(0, u64::wrapping_add);
        std::hint::black_box(sum);
        let (bytes, seconds) = (self.memory.bytes().len() as u64, start.elapsed().as_secs_f64());
        Rate { bytes, seconds, cpu_seconds: cpu_seconds() - cpu }
    }

    /// Puts the first `sequences` sequences of set `set`, then flushes. Only the calls are timed.
    ///
    /// # Errors
    /// Store errors, and pages that the store did not take.
    pub fn put(&mut self, store: &Store, set: u32, sequences: u32) -> Result<Rate, Failure> {
        let (shape, stride) = (self.shape.clone(), self.shape.stride());
        let mut sum = none();
        for window in windows(sequences, self.window) {
            let keys = keys(&shape, set, &window);
            let names = names(&shape, set, &window);
            for (name, bytes) in names.zip(self.memory.bytes_mut().chunks_exact_mut(stride)) {
                self.content.fill(name, &mut bytes[..shape.page_bytes as usize]);
            }
            let last = window.end == sequences;
            let mut failure = None;
            let memory = self.memory.bytes().chunks_exact(shape.sequence_bytes());
            let rate = Rate::of(bytes_of(&shape, &window), || {
                for (keys, memory) in keys.iter().zip(memory) {
                    let keys = keys.slices();
                    let pages: Vec<&[u8]> = memory
                        .chunks_exact(stride)
                        .map(|page| &page[..shape.page_bytes as usize])
                        .collect();
                    let source = BorrowedPages::new(&pages);
                    let control = Control::default();
                    let done = store.put_batch(
                        &shape.scope,
                        &keys,
                        &source,
                        &PutOptions::default(),
                        &control,
                    )?;
                    failure = failure.take().or_else(|| shortfall("put", &done, keys.len()));
                }
                if last { store.flush() } else { Ok(()) }
            })?;
            if let Some(failure) = failure {
                return Err(failure);
            }
            sum = add(sum, rate);
        }
        Ok(sum)
    }

    /// Marks the stored leading pages of all sequences of `set` as used, without reading bytes.
    ///
    /// # Errors
    /// Store errors.
    pub fn touch(&self, store: &Store, set: u32) -> Result<(), Failure> {
        for keys in keys(&self.shape, set, &(0..self.shape.sequences)) {
            store.touch(&self.shape.scope, &keys.slices())?;
        }
        Ok(())
    }

    /// Gets the first `sequences` sequences of set `set`, and compares every byte unless the codec
    /// is lossy. Only the calls are timed.
    ///
    /// # Errors
    /// Store errors, missing pages, and wrong bytes.
    pub fn get(&mut self, store: &Store, set: u32, sequences: u32) -> Result<Rate, Failure> {
        let (shape, stride) = (self.shape.clone(), self.shape.stride());
        let mut sum = none();
        for window in windows(sequences, self.window) {
            let keys = keys(&shape, set, &window);
            // Clear the beginning of each page. Otherwise the check below could accept bytes that
            // an earlier pass left in memory.
            for page in self.memory.bytes_mut().chunks_exact_mut(stride) {
                page[..64.min(stride)].fill(0);
            }
            let mut failure = None;
            let memory = self.memory.bytes_mut().chunks_exact_mut(shape.sequence_bytes());
            let rate = Rate::of(bytes_of(&shape, &window), || {
                for (keys, memory) in keys.iter().zip(memory) {
                    let keys = keys.slices();
                    let mut pages: Vec<&mut [u8]> = memory
                        .chunks_exact_mut(stride)
                        .map(|page| &mut page[..shape.page_bytes as usize])
                        .collect();
                    let target = BorrowedPagesMut::new(&mut pages);
                    let control = Control::default();
                    let done = store.get_batch(&shape.scope, &keys, &target, &control)?;
                    failure = failure.take().or_else(|| shortfall("get", &done, keys.len()));
                }
                Ok(())
            })?;
            if let Some(failure) = failure {
                return Err(failure);
            }
            let names = names(&shape, set, &window);
            for (name, bytes) in names.zip(self.memory.bytes().chunks_exact(stride)) {
                if shape.codec.is_lossless()
                    && !self.content.holds(name, &bytes[..shape.page_bytes as usize])
                {
                    return Err(Failure::failed(
                        format!(
                            "WRONG BYTES in {name:?}: the store returned bytes that were never put"
                        ),
                        "report this, with the disk and the file system",
                    ));
                }
            }
            sum = add(sum, rate);
        }
        Ok(sum)
    }
}

fn copy_pages(to: &mut [u8], from: &[u8], stride: usize, page_bytes: usize) {
    let pages = to.len() / stride;
    let threads = copy_threads(pages, (pages * page_bytes) as u64);
    let share = pages.div_ceil(threads) * stride;
    let copy = |to: &mut [u8], from: &[u8]| {
        for (to, from) in to.chunks_exact_mut(stride).zip(from.chunks_exact(stride)) {
            std::hint::black_box(&mut to[..page_bytes]).copy_from_slice(&from[..page_bytes]);
        }
    };
    if threads == 1 {
        return copy(to, from);
    }
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(share).zip(from.chunks(share)) {
            scope.spawn(move || copy(to, from));
        }
    });
}

fn shortfall(what: &str, outcome: &Outcome, asked: usize) -> Option<Failure> {
    (outcome.pages < asked).then(|| {
        Failure::failed(
            format!("a {what} of {asked} pages ended after {}: {}", outcome.pages, outcome.reason),
            "`ritornello doctor` on the same directory",
        )
    })
}

fn windows(sequences: u32, window: u32) -> impl Iterator<Item = Range<u32>> {
    (0..sequences).step_by(window as usize).map(move |from| from..sequences.min(from + window))
}

fn keys(shape: &Shape, set: u32, window: &Range<u32>) -> Vec<Keys> {
    window.clone().map(|sequence| Keys::of(set, sequence, shape.sequence_pages)).collect()
}

fn names(shape: &Shape, set: u32, window: &Range<u32>) -> impl Iterator<Item = PageName> {
    let pages = shape.sequence_pages;
    window
        .clone()
        .flat_map(move |sequence| (0..pages).map(move |page| PageName { set, sequence, page }))
}

fn bytes_of(shape: &Shape, window: &Range<u32>) -> u64 {
    u64::from(window.end - window.start) * u64::from(shape.sequence_pages) * shape.page_bytes
}

const fn none() -> Rate {
    Rate { bytes: 0, seconds: 0.0, cpu_seconds: 0.0 }
}

fn add(a: Rate, b: Rate) -> Rate {
    Rate {
        bytes: a.bytes + b.bytes,
        seconds: a.seconds + b.seconds,
        cpu_seconds: a.cpu_seconds + b.cpu_seconds,
    }
}
