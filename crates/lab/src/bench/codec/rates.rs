//! Rates of encoding and decoding from memory to memory, and of copying.

use crate::bench::quantile::median;
use ritornello_codec::{Codec, Kernel, SliceShape, decode_with};
use ritornello_format::Error;
use ritornello_terminal::exit::Failure;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Barrier;

/// Encoded bytes per input byte, and rates of one thread in 10^9 input bytes per second.
pub struct Rates {
    pub size_ratio: f64,
    pub encode_gb_s: f64,
    pub decode_gb_s: f64,
    pub memcpy_gb_s: f64,
}

/// Buffers with copies of the same slices, one share per thread. A share should be larger than the
/// processor's caches, so that every slice comes from memory.
pub struct Buffers(Vec<Share>);

struct Share {
    shapes: Vec<SliceShape>,
    lengths: Vec<usize>,
    /// Codec and length of each frame.
    frames: Vec<(Codec, usize)>,
    input: Vec<u8>,
    /// Encoded frames, each at the position of its slice in `input`.
    encoded: Vec<u8>,
    back: Vec<u8>,
}

impl Buffers {
    /// Fills the buffers of each of `threads` threads with at least one slice, and at least `total`
    /// bytes.
    pub fn new(slices: &[(SliceShape, Vec<u8>)], total: u64, threads: u32) -> Self {
        let share = || {
            let mut share = Share {
                shapes: vec![],
                lengths: vec![],
                frames: vec![],
                input: Vec::with_capacity(total as usize),
                encoded: vec![],
                back: vec![],
            };
            for (shape, slice) in slices.iter().cycle() {
                if !share.input.is_empty() && share.input.len() as u64 >= total {
                    break;
                }
                share.shapes.push(*shape);
                share.lengths.push(slice.len());
                share.input.extend(slice);
            }
            share.frames = vec![(Codec::Raw, 0); share.lengths.len()];
            // Write to `encoded` and `back` once, so that rates include no page faults.
            share.encoded = vec![1; share.input.len()];
            share.back = vec![1; share.input.len()];
            share
        };
        Self((0..threads).map(|_| share()).collect())
    }

    /// Encodes, decodes and copies all slices `runs` times. Returns the mean of the threads' rates,
    /// each the median of the runs.
    pub fn measure(&mut self, codec: Codec, kernel: Kernel, runs: u32) -> Result<Rates, Failure> {
        let barrier = Barrier::new(self.0.len());
        let shares = std::thread::scope(|scope| {
            let threads = self.0.iter_mut().map(|share| {
                let barrier = &barrier;
                scope.spawn(move || share.measure(codec, kernel, runs, barrier))
            });
            let threads: Vec<_> = threads.collect();
            let joined = threads.into_iter().map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Failure::failed("a codec panicked", "report this")))
            });
            joined.collect::<Result<Vec<Rates>, Failure>>()
        })?;
        let mean = |of: fn(&Rates) -> f64| shares.iter().map(of).sum::<f64>() / shares.len() as f64;
        Ok(Rates {
            size_ratio: mean(|rates| rates.size_ratio),
            encode_gb_s: mean(|rates| rates.encode_gb_s),
            decode_gb_s: mean(|rates| rates.decode_gb_s),
            memcpy_gb_s: mean(|rates| rates.memcpy_gb_s),
        })
    }
}

impl Share {
    fn measure(
        &mut self,
        codec: Codec,
        kernel: Kernel,
        runs: u32,
        barrier: &Barrier,
    ) -> Result<Rates, Failure> {
        let (mut encode, mut decode, mut copy) = (vec![], vec![], vec![]);
        let mut outcome = Ok(());
        for _ in 0..runs {
            // Each thread passes every barrier, even if its codec has failed, because the other
            // threads wait there.
            barrier.wait();
            copy.push(timed(|| self.back.copy_from_slice(&self.input)));
            barrier.wait();
            encode.push(timed(|| outcome = outcome_of(&outcome, self.encode(codec, kernel))));
            barrier.wait();
            decode.push(timed(|| outcome = outcome_of(&outcome, self.decode(kernel))));
            if codec.is_lossless() && self.back != self.input {
                outcome = Err(Failure::failed(
                    format!("codec {} with kernel {} loses bits", codec.word(), kernel.word()),
                    "report this",
                ));
            }
        }
        outcome?;
        let encoded: usize = self.frames.iter().map(|(_, length)| length).sum();
        let rate = |seconds: &[f64]| self.input.len() as f64 / median(seconds) / 1e9;
        Ok(Rates {
            size_ratio: encoded as f64 / self.input.len() as f64,
            encode_gb_s: rate(&encode),
            decode_gb_s: rate(&decode),
            memcpy_gb_s: rate(&copy),
        })
    }

    fn encode(&mut self, codec: Codec, kernel: Kernel) -> Result<(), Error> {
        let mut at = 0;
        for ((shape, &length), frame) in self.shapes.iter().zip(&self.lengths).zip(&mut self.frames)
        {
            let slice = at..at + length;
            let (input, out) = (&self.input[slice.clone()], &mut self.encoded[slice]);
            *frame = codec.encode_with(kernel, shape, input, out)?;
            at += length;
        }
        Ok(())
    }

    fn decode(&mut self, kernel: Kernel) -> Result<(), Error> {
        let mut at = 0;
        for (&length, &(codec, encoded)) in self.lengths.iter().zip(&self.frames) {
            let (frame, out) = (&self.encoded[at..at + encoded], &mut self.back[at..at + length]);
            decode_with(kernel, codec.number(), frame, out)?;
            at += length;
        }
        Ok(())
    }
}

/// Returns `before` if it is a failure, otherwise the outcome `now`.
fn outcome_of(before: &Result<(), Failure>, now: Result<(), Error>) -> Result<(), Failure> {
    before.clone().and_then(|()| now.map_err(Failure::from))
}

/// Runs `work`. Returns the processor time of this thread in seconds, which excludes other threads
/// on the same core.
fn timed(work: impl FnOnce()) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    let started = now();
    work();
    now() - started
}
