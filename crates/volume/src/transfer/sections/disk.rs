//! From a disk: all headers first, then what each section needs, in their order.

use super::Sections;
use super::plan::Plan;
use crate::engine::{Op, Span, Work};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::staging::Piece;
use crate::transfer::chunk::{Chunk, Shape};
use crate::transfer::flight::Flight;
use crate::transfer::{Control, MissReason, PageFate, RunRead};
use ritornello_format::UNIT;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;

/// Of the bytes that a call may keep in flight, those that a call in sections does: what is wanted first
/// is not to share the disk with what is wanted last.
const SHARE: usize = 8;

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    sections: &Sections,
    control: &Control,
) -> Vec<Vec<PageFate>> {
    let headers = Headers::read(segments, reads, control);
    let plan = Plan::new(segments, reads, headers, sections, control);
    Bodies::read(segments, reads, plan)
}

fn io_failure(error: &io::Error, chunk: &Chunk) -> MissReason {
    tracing::debug!(%error, segment = chunk.segment.0, offset = chunk.offset, "a read failed");
    MissReason::Io
}

/// An operation that reads `chunk` to `spans`.
///
/// # Safety
/// As for [`Op::new`].
unsafe fn op(
    segments: &Segments,
    chunk: &Chunk,
    tag: u64,
    spans: Vec<Span>,
) -> Result<Op, MissReason> {
    let file = segments.file(chunk.segment).map_err(|error| io_failure(&error, chunk))?;
    // SAFETY: promised by the caller.
    Ok(unsafe { Op::new(tag, file, false, chunk.offset, spans) })
}

/// The headers of some runs, read at once.
struct Headers<'a> {
    segments: &'a Segments,
    found: Vec<Result<(Shape, Block), MissReason>>,
    /// Why a header did not come. Its block stays: other operations may still be writing to it.
    failed: Vec<Option<MissReason>>,
    chunks: VecDeque<(usize, Chunk)>,
    flight: Flight<(usize, Chunk)>,
}

impl<'a> Headers<'a> {
    fn read(
        segments: &'a Segments,
        reads: &[RunRead<'_>],
        control: &Control,
    ) -> Vec<Result<(Shape, Block), MissReason>> {
        let stopped = segments.is_inherited().then_some(MissReason::Io).or_else(|| control.stop());
        let (mut found, mut chunks) = (Vec::with_capacity(reads.len()), Vec::new());
        let mut queue = VecDeque::new();
        for (number, read) in reads.iter().enumerate() {
            let first = u64::from(read.first);
            let pages = first..first + read.keys.len() as u64;
            let shape = Shape::of(read.place, read.page_bytes, pages, segments);
            let shape = shape.ok_or(stopped.unwrap_or(MissReason::Place));
            found.push(match (shape, stopped) {
                (Ok(shape), None) => {
                    shape.cut(read.place, 0..shape.header, &mut chunks);
                    queue.extend(chunks.drain(..).map(|chunk| (number, chunk)));
                    Ok((shape, Block::new(shape.header as usize)))
                }
                (Ok(_), Some(reason)) | (Err(reason), _) => Err(reason),
            });
        }
        let flight = Flight::new(segments.in_flight_bytes());
        let failed = vec![None; reads.len()];
        let mut work = Self { segments, found, failed, chunks: queue, flight };
        segments.engine().run(&mut work);
        let come = |(found, failed): (Result<_, _>, Option<_>)| failed.map_or(found, Err);
        work.found.into_iter().zip(work.failed).map(come).collect()
    }
}

impl Work for Headers<'_> {
    fn next(&mut self) -> Option<Op> {
        while self.flight.has_room() {
            let (number, chunk) = self.chunks.pop_front()?;
            let Ok((_, block)) = &self.found[number] else { continue };
            let Range { start, end } = chunk.logical;
            let to = Span::new(block.as_ptr().wrapping_add(start as usize), (end - start) as usize);
            let tag = self.flight.launch(end - start, (number, chunk.clone()));
            // SAFETY: the block is ours, stays where it is, and is not looked at before the engine
            // has returned.
            match unsafe { op(self.segments, &chunk, tag, vec![to]) } {
                Ok(op) => return Some(op),
                Err(_) => self.done(tag, Err(io::ErrorKind::Other.into())),
            }
        }
        None
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some((number, chunk)) = self.flight.land(tag) else { return };
        if let Err(error) = result {
            self.failed[number] = Some(io_failure(&error, &chunk));
        }
    }

    fn compute(&mut self) -> bool {
        false
    }
}

/// A stretch on its way.
struct Landing {
    stretch: usize,
    /// Where it lands, if not where it is to be; its first byte is that of the stretch's cover.
    piece: Option<Piece>,
    /// Operations that have not landed, and whether all have begun.
    flying: usize,
    begun: bool,
    /// The next slice to be verified.
    next: u16,
    result: Result<(), MissReason>,
}

/// Stretches, read in their order.
struct Bodies<'a> {
    segments: &'a Segments,
    reads: &'a [RunRead<'a>],
    plan: Plan<'a>,
    /// The stretch to begin with next.
    next: usize,
    landings: Vec<Option<Landing>>,
    /// Of the landing that was begun last.
    chunks: VecDeque<Chunk>,
    flight: Flight<(usize, Chunk)>,
    /// Landings that have landed and are not verified, and the bytes of these.
    landed: VecDeque<usize>,
    landed_bytes: u64,
    stopped: Option<MissReason>,
}

impl<'a> Bodies<'a> {
    fn read(
        segments: &'a Segments,
        reads: &'a [RunRead<'a>],
        plan: Plan<'a>,
    ) -> Vec<Vec<PageFate>> {
        let mut work = Self {
            segments,
            reads,
            plan,
            next: 0,
            landings: Vec::new(),
            chunks: VecDeque::new(),
            flight: Flight::new(segments.in_flight_bytes() / SHARE),
            landed: VecDeque::new(),
            landed_bytes: 0,
            stopped: None,
        };
        segments.engine().run(&mut work);
        let rest = work.stopped.unwrap_or(MissReason::Io);
        for stretch in work.plan.stretches.split_off(work.next) {
            work.plan.settle(&stretch, Err(rest));
        }
        work.plan.fates()
    }

    /// Begins with the next stretch. `None`: there is none, or no memory for it now.
    fn begin(&mut self) -> Option<()> {
        let stretch = loop {
            let stretch = self.plan.stretches.get(self.next)?.clone();
            if !self.plan.is_lost(&stretch) {
                break stretch;
            }
            self.next += 1;
            self.plan.settle(&stretch, Ok(()));
        };
        let (cover, page) = (self.plan.cover(&stretch), &self.plan.pages[stretch.page]);
        let aligned = |at: u64| at.is_multiple_of(UNIT);
        let in_place = aligned(stretch.stored.start)
            && aligned(stretch.stored.end)
            && stretch.stored.end <= page.memory.in_place() as u64
            && stretch.slices.clone().all(|number| self.plan.is_plain(stretch.page, number));
        let (arena, bytes) = (self.segments.arena(), (cover.end - cover.start) as usize);
        let mut result = Ok(());
        let mut piece = None;
        if !in_place {
            piece = arena.try_take(bytes);
            // With something of our own under way there is no need to wait for others: it gives back
            // what it holds.
            if piece.is_none() {
                if !self.flight.is_idle() || !self.landed.is_empty() {
                    return None;
                }
                piece = arena.take(bytes, self.plan.control);
            }
            if piece.is_none() {
                result = Err(self.plan.control.stop().unwrap_or(MissReason::Staging));
            }
        }
        let (read, next) = (page.read, stretch.slices.start);
        self.next += 1;
        if let Err(reason) = result {
            self.plan.settle(&stretch, Err(reason));
            return Some(());
        }
        let mut chunks = Vec::new();
        self.plan.shapes[read].cut(self.reads[read].place, cover, &mut chunks);
        self.chunks = chunks.into();
        let stretch = self.next - 1;
        self.landings.push(Some(Landing { stretch, piece, flying: 0, begun: false, next, result }));
        Some(())
    }

    /// The next operation of the landing that was begun last.
    fn launch(&mut self, chunk: Chunk) -> Option<Op> {
        let at = self.landings.len() - 1;
        let landing = self.landings[at].as_mut()?;
        let stretch = &self.plan.stretches[landing.stretch];
        let Range { start, end } = chunk.logical;
        let (mut spans, length) = (Vec::new(), (end - start) as usize);
        match &landing.piece {
            Some(piece) => {
                let skip = (start - self.plan.cover(stretch).start) as usize;
                spans.push(Span::new(piece.as_ptr().wrapping_add(skip), length));
            }
            None => {
                let page = &self.plan.pages[stretch.page];
                let from = (start - page.start) as usize;
                page.memory.spans(from..from + length, &mut spans);
            }
        }
        landing.flying += 1;
        landing.begun = self.chunks.is_empty();
        let tag = self.flight.launch(end - start, (at, chunk.clone()));
        // SAFETY: the piece is the landing's until all its operations have landed, and the target is
        // ours (`PageTarget`) until the engine has returned.
        match unsafe { op(self.segments, &chunk, tag, spans) } {
            Ok(op) => Some(op),
            Err(_) => {
                self.done(tag, Err(io::ErrorKind::Other.into()));
                None
            }
        }
    }

    /// Takes note that a landing is over.
    fn end(&mut self, at: usize) {
        if let Some(Landing { stretch, result, .. }) = self.landings[at].take() {
            let stretch = self.plan.stretches[stretch].clone();
            self.plan.settle(&stretch, result);
        }
        // What is over at the end is forgotten; the last one may still be issuing.
        while self.chunks.is_empty() && self.landings.last().is_some_and(Option::is_none) {
            self.landings.pop();
        }
    }

    /// Verifies a slice of a landing that has landed.
    fn check(&mut self, at: usize) -> bool {
        let Some(landing) = &mut self.landings[at] else { return true };
        let stretch = self.plan.stretches[landing.stretch].clone();
        let number = landing.next;
        landing.next += 1;
        let result = match &landing.piece {
            Some(piece) => {
                let stored = self.plan.stored_at(&stretch, number);
                let skip = stretch.stored.start / UNIT * UNIT;
                let bytes = (stored.start - skip) as usize..(stored.end - skip) as usize;
                // SAFETY: the target is ours, and the piece is other memory.
                unsafe { self.plan.deliver(stretch.page, number, &piece.bytes()[bytes]) }
            }
            // SAFETY: it has landed in the target, which is ours.
            None => unsafe { self.plan.verify(stretch.page, number) },
        };
        landing.result = result;
        landing.result.is_err() || landing.next == stretch.slices.end
    }

    fn bytes_of(&self, at: usize) -> u64 {
        let stored = |landing: &Landing| &self.plan.stretches[landing.stretch].stored;
        self.landings[at].as_ref().map(stored).map_or(0, |stored| stored.end - stored.start)
    }
}

impl Work for Bodies<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.stopped.is_none() {
                self.stopped = self.plan.control.stop();
            }
            // What has landed is of no use to anybody before it is verified.
            let most = self.segments.in_flight_bytes() / SHARE / 4;
            let is_behind = self.landed_bytes >= most as u64;
            if is_behind || !self.flight.has_room() {
                return None;
            }
            // A stretch that has begun is read to its end.
            if let Some(chunk) = self.chunks.pop_front() {
                match self.launch(chunk) {
                    None => continue,
                    op => return op,
                }
            }
            if self.stopped.is_some() {
                return None;
            }
            self.begin()?;
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some((at, chunk)) = self.flight.land(tag) else { return };
        let Some(landing) = &mut self.landings[at] else { return };
        landing.flying -= 1;
        if let Err(error) = result {
            landing.result = Err(io_failure(&error, &chunk));
        }
        if landing.flying > 0 || !landing.begun {
            return;
        }
        if landing.result.is_err() {
            self.end(at);
        } else {
            self.landed_bytes += self.bytes_of(at);
            self.landed.push_back(at);
        }
    }

    fn compute(&mut self) -> bool {
        let Some(&at) = self.landed.front() else { return false };
        if self.check(at) {
            self.landed.pop_front();
            self.landed_bytes -= self.bytes_of(at);
            self.end(at);
        }
        true
    }
}
