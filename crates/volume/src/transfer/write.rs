//! Writing: pages as they come, their checksums while they are in flight, each header last.

use super::chunk::Chunk;
use super::flight::{Cargo, Flight};
use super::outbound::{Outbound, Page};
use super::page::Direct;
use super::refusal::{failed, inherited, stopped};
use super::slices::SliceSums;
use super::{Control, MissReason, RunWrite};
use crate::engine::{Op, Work};
use crate::memory_block::Block;
use crate::segments::Segments;
use ritornello_format::{Error, Result};
use std::collections::VecDeque;
use std::io;

/// Bytes checksummed in one go, between looks at what has landed.
const STEP: usize = 1 << 20;

/// Writes in progress.
pub(super) struct Writing<'a> {
    segments: &'a Segments,
    writes: &'a [RunWrite<'a>],
    control: &'a Control,
    /// The runs that have begun; the last one may still have pages to issue.
    runs: Vec<Outbound<'a>>,
    /// Runs whose pages are issued, and whose header waits for their checksums.
    heads: VecDeque<usize>,
    flight: Flight<Landing>,
    /// Pages that move in place and are to be checksummed.
    to_digest: VecDeque<(usize, usize)>,
    digesting: Option<Digesting<'a>>,
}

struct Landing {
    run: usize,
    chunk: Chunk,
    /// Memory of the operation, held until it has landed.
    _cargo: (Cargo, Option<Block>),
}

struct Digesting<'a> {
    run: usize,
    page: usize,
    at: usize,
    sums: SliceSums<'a>,
}

enum Launch {
    Go(Op),
    Wait,
    Fail(Error),
}

impl<'a> Writing<'a> {
    pub(super) fn run(
        segments: &'a Segments,
        writes: &'a [RunWrite<'a>],
        control: &'a Control,
    ) -> Vec<Result<u64>> {
        if segments.is_inherited() {
            return writes.iter().map(|_| Err(inherited())).collect();
        }
        let mut writing = Self {
            segments,
            writes,
            control,
            runs: Vec::with_capacity(writes.len()),
            heads: VecDeque::new(),
            flight: Flight::new(segments.in_flight_bytes()),
            to_digest: VecDeque::new(),
            digesting: None,
        };
        segments.engine().run(&mut writing);
        writing.results()
    }

    /// A run that is not finished by now is one that `control` stopped.
    fn results(self) -> Vec<Result<u64>> {
        let stopped = || stopped(self.control.stop().unwrap_or(MissReason::Io));
        let mut results = Vec::with_capacity(self.writes.len());
        for run in self.runs {
            results.push(match (run.failed, run.sealed) {
                (Some(error), _) => Err(error),
                (None, Some((_, sum))) if run.body.is_empty() && run.head.is_empty() => Ok(sum),
                _ => Err(stopped()),
            });
        }
        results.extend(self.writes[results.len()..].iter().map(|_| Err(stopped())));
        results
    }

    /// The run that has a chunk to issue now, and whether it is its head's: a head whose checksums
    /// are known, or else the pages of the newest run, which is begun if need be.
    fn current(&mut self) -> Option<(usize, bool)> {
        loop {
            while let Some(&at) = self.heads.front() {
                let run = &self.runs[at];
                if run.failed.is_some() || run.head.is_empty() {
                    self.heads.pop_front();
                } else if run.open <= run.open_in_head {
                    return Some((at, true));
                } else {
                    break;
                }
            }
            let at = self.runs.len().wrapping_sub(1);
            match self.runs.last_mut() {
                Some(run) if run.failed.is_none() && !run.body.is_empty() => {
                    return Some((at, false));
                }
                Some(run) if run.failed.is_none() && !run.is_body_issued => {
                    run.is_body_issued = true;
                    self.heads.push_back(at);
                    self.queue(at, 0);
                }
                _ => {
                    let write = self.writes.get(self.runs.len())?;
                    let direct = Direct::of(self.segments, self.control);
                    let run = Outbound::begin(self.segments, write, direct)
                        .unwrap_or_else(Outbound::refused);
                    self.runs.push(run);
                }
            }
        }
    }

    /// Has a page checksummed, if it moves in place and is not queued yet.
    fn queue(&mut self, at: usize, page: usize) {
        if let Some(Page { memory, is_queued, .. }) = self.runs[at].pages.get_mut(page)
            && memory.is_in_place()
            && !*is_queued
        {
            *is_queued = true;
            self.to_digest.push_back((at, page));
        }
    }

    fn launch(&mut self, at: usize, is_head: bool) -> Launch {
        let write = &self.writes[at];
        let run = &mut self.runs[at];
        let queue = if is_head { &run.head } else { &run.body };
        let Some(chunk) = queue.front().cloned() else { return Launch::Wait };
        let file = match self.segments.file(chunk.segment) {
            Ok(file) => file,
            Err(error) => return Launch::Fail(failed("a segment cannot be opened", &chunk, error)),
        };
        let mut header = is_head.then(|| Block::new(run.shape.header as usize));
        let idle = self.flight.is_idle();
        let loaded = Cargo::load(
            &chunk,
            run.shape,
            header.as_ref(),
            |page| &run.pages[page].memory,
            // With something of our own in flight there is no need to wait for others.
            |bytes| match self.segments.arena().try_take(bytes) {
                None if idle => self.segments.arena().take(bytes, self.control),
                piece => piece,
            },
        );
        let Some((cargo, spans)) = loaded else {
            let reason = self.control.stop().unwrap_or(MissReason::Staging);
            return if idle { Launch::Fail(stopped(reason)) } else { Launch::Wait };
        };
        run.gather(&cargo, write);
        if let Some(block) = &mut header {
            match run.seal(write) {
                Ok(bytes) => block.bytes_mut()[..bytes.len()].copy_from_slice(bytes),
                Err(error) => return Launch::Fail(error),
            }
        }
        let touched: Vec<usize> = run.shape.parts(&chunk.logical).map(|(page, _)| page).collect();
        let (offset, bytes) = (chunk.offset, chunk.logical.end - chunk.logical.start);
        let landing = Landing { run: at, chunk, _cargo: (cargo, header) };
        let tag = self.flight.launch(bytes, landing);
        for page in touched {
            self.queue(at, page);
        }
        // SAFETY: the source's memory is readable until `run` returns (`PageSource`); `flight`
        // keeps cargo and header until the operation has landed; the engine does not return before.
        Launch::Go(unsafe { Op::new(tag, file, true, offset, spans) })
    }
}

impl Work for Writing<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.control.stop().is_some() || !self.flight.has_room() {
                return None;
            }
            let (at, is_head) = self.current()?;
            match self.launch(at, is_head) {
                Launch::Wait => return None,
                Launch::Go(op) => {
                    let run = &mut self.runs[at];
                    if is_head { &mut run.head } else { &mut run.body }.pop_front();
                    return Some(op);
                }
                Launch::Fail(error) => self.runs[at].fail(error),
            }
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        if let Some(Landing { run, chunk, .. }) = self.flight.land(tag)
            && let Err(error) = result
        {
            self.runs[run].fail(failed("a run could not be written", &chunk, error));
        }
    }

    fn compute(&mut self) -> bool {
        let next = self.digesting.take().or_else(|| {
            let (run, page) = self.to_digest.pop_front()?;
            let sums = self.runs[run].sums_of(&self.writes[run], page);
            Some(Digesting { run, page, at: 0, sums })
        });
        let Some(mut now) = next else { return false };
        let run = &mut self.runs[now.run];
        if run.failed.is_some() {
            return true;
        }
        let page = &mut run.pages[now.page];
        let end = (now.at + STEP).min(page.bytes);
        // SAFETY: a source's memory may be read (`PageSource`).
        unsafe { page.memory.digest(now.at..end, &mut now.sums) };
        if end < page.bytes {
            now.at = end;
            self.digesting = Some(now);
        } else {
            page.learn(now.sums.done());
            run.open -= 1;
        }
        true
    }
}
