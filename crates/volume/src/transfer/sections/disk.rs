//! Reads sections from disk: all headers first, then the groups of slices in the order of their
//! sections.

use super::Sections;
use super::plan::Plan;
use crate::io_engine::{IoVec, Op, Work};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::staging::StagingBuffer;
use crate::transfer::chunk::{Chunk, RunLayout};
use crate::transfer::in_flight::InFlight;
use crate::transfer::{Control, MissReason, PageOutcome, RunRead};
use ritornello_format::UNIT;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;

/// A call in sections keeps 1/8 of the usual bytes in flight: slices needed last must not delay, in
/// the disk's queue, slices needed first.
const IN_FLIGHT_DIVISOR: usize = 8;

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    sections: &Sections,
    control: &Control,
) -> Vec<Vec<PageOutcome>> {
    let headers = HeaderReads::read(segments, reads, control);
    let plan = Plan::new(segments, reads, headers, sections, control);
    GroupReads::read(segments, reads, plan)
}

fn io_failure(error: &io::Error, chunk: &Chunk) -> MissReason {
    tracing::debug!(%error, segment = chunk.segment.0, offset = chunk.offset, "a read failed");
    MissReason::Io
}

/// An operation that reads `chunk` to `iovecs`.
///
/// # Safety
/// The conditions of [`Op::new`] apply.
unsafe fn op(
    segments: &Segments,
    chunk: &Chunk,
    tag: u64,
    iovecs: Vec<IoVec>,
) -> Result<Op, MissReason> {
    let file = segments.file(chunk.segment).map_err(|error| io_failure(&error, chunk))?;
    // SAFETY: promised by the caller.
    Ok(unsafe { Op::new(tag, file, false, chunk.offset, iovecs) })
}

/// Reads the headers of all runs at the same time.
struct HeaderReads<'a> {
    segments: &'a Segments,
    found: Vec<Result<(RunLayout, Block), MissReason>>,
    /// Why a header failed. Its block stays allocated: other operations may still write to it.
    failed: Vec<Option<MissReason>>,
    chunks: VecDeque<(usize, Chunk)>,
    in_flight: InFlight<(usize, Chunk)>,
}

impl<'a> HeaderReads<'a> {
    fn read(
        segments: &'a Segments,
        reads: &[RunRead<'_>],
        control: &Control,
    ) -> Vec<Result<(RunLayout, Block), MissReason>> {
        let stopped = segments.is_inherited().then_some(MissReason::Io).or_else(|| control.stop());
        let (mut found, mut chunks) = (Vec::with_capacity(reads.len()), Vec::new());
        let mut queue = VecDeque::new();
        for (number, read) in reads.iter().enumerate() {
            let first = u64::from(read.first);
            let pages = first..first + read.keys.len() as u64;
            let layout = RunLayout::new(read.place, read.page_bytes, pages, segments);
            let layout = layout.ok_or(stopped.unwrap_or(MissReason::Place));
            found.push(match (layout, stopped) {
                (Ok(layout), None) => {
                    layout.cut(read.place, 0..layout.header, &mut chunks);
                    queue.extend(chunks.drain(..).map(|chunk| (number, chunk)));
                    Ok((layout, Block::new(layout.header as usize)))
                }
                (Ok(_), Some(reason)) | (Err(reason), _) => Err(reason),
            });
        }
        let in_flight = InFlight::new(segments.in_flight_bytes());
        let failed = vec![None; reads.len()];
        let mut work = Self { segments, found, failed, chunks: queue, in_flight };
        segments.engine().run(&mut work);
        let come = |(found, failed): (Result<_, _>, Option<_>)| failed.map_or(found, Err);
        work.found.into_iter().zip(work.failed).map(come).collect()
    }
}

impl Work for HeaderReads<'_> {
    fn next(&mut self) -> Option<Op> {
        while self.in_flight.has_room() {
            let (number, chunk) = self.chunks.pop_front()?;
            let Ok((_, block)) = &self.found[number] else { continue };
            let Range { start, end } = chunk.logical;
            let to =
                IoVec::new(block.as_ptr().wrapping_add(start as usize), (end - start) as usize);
            let tag = self.in_flight.insert(end - start, (number, chunk.clone()));
            // SAFETY: the block is on the heap, so it does not move with `found`; it is kept and
            // not accessed until the engine returns.
            match unsafe { op(self.segments, &chunk, tag, vec![to]) } {
                Ok(op) => return Some(op),
                Err(_) => self.done(tag, Err(io::ErrorKind::Other.into())),
            }
        }
        None
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some((number, chunk)) = self.in_flight.complete(tag) else { return };
        if let Err(error) = result {
            self.failed[number] = Some(io_failure(&error, &chunk));
        }
    }

    fn compute(&mut self) -> bool {
        false
    }
}

/// A group of slices that is being read.
struct PendingGroup {
    group: usize,
    /// The memory of the group, starting at the first byte of its cover; `None` if the group is
    /// read to the target.
    buffer: Option<StagingBuffer>,
    /// Operations in flight, and whether all of the group's are submitted. The group is complete
    /// once all are submitted and completed.
    ops_in_flight: usize,
    all_submitted: bool,
    /// The next slice to verify.
    next_slice: u16,
    result: Result<(), MissReason>,
}

/// Reads groups in the order of the plan.
struct GroupReads<'a> {
    segments: &'a Segments,
    reads: &'a [RunRead<'a>],
    plan: Plan<'a>,
    /// The next group to begin.
    next: usize,
    pending: Vec<Option<PendingGroup>>,
    /// Chunks of the group begun last that are not submitted.
    chunks: VecDeque<Chunk>,
    in_flight: InFlight<(usize, Chunk)>,
    /// Groups that are read and not verified, and their bytes on disk.
    unverified: VecDeque<usize>,
    unverified_bytes: u64,
    stopped: Option<MissReason>,
}

impl<'a> GroupReads<'a> {
    fn read(
        segments: &'a Segments,
        reads: &'a [RunRead<'a>],
        plan: Plan<'a>,
    ) -> Vec<Vec<PageOutcome>> {
        let mut work = Self {
            segments,
            reads,
            plan,
            next: 0,
            pending: Vec::new(),
            chunks: VecDeque::new(),
            in_flight: InFlight::new(segments.in_flight_bytes() / IN_FLIGHT_DIVISOR),
            unverified: VecDeque::new(),
            unverified_bytes: 0,
            stopped: None,
        };
        segments.engine().run(&mut work);
        let rest = work.stopped.unwrap_or(MissReason::Io);
        for group in work.plan.groups.split_off(work.next) {
            work.plan.complete_group(&group, Err(rest));
        }
        work.plan.outcomes()
    }

    /// Begins the next group. `None` if all groups have begun, or no memory is free.
    fn begin(&mut self) -> Option<()> {
        let group = loop {
            let group = self.plan.groups.get(self.next)?.clone();
            if !self.plan.is_missed(&group) {
                break group;
            }
            self.next += 1;
            self.plan.complete_group(&group, Ok(()));
        };
        let (cover, page) = (self.plan.cover(&group), &self.plan.pages[group.page]);
        let aligned = |at: u64| at.is_multiple_of(UNIT);
        // Slices before the group that are shorter on disk than in the page move the group to a
        // different offset of the target.
        let in_place = group.stored.start == page.part(group.slices.start).start
            && aligned(group.stored.start)
            && aligned(group.stored.end)
            && group.stored.end <= page.memory.in_place() as u64
            && group.slices.clone().all(|number| self.plan.is_plain(group.page, number));
        let (arena, bytes) = (self.segments.arena(), (cover.end - cover.start) as usize);
        let mut result = Ok(());
        let mut buffer = None;
        if !in_place {
            buffer = arena.try_take(bytes);
            // Waits for staging memory only while this call holds no staging memory: operations in
            // flight and groups to verify free memory when they complete.
            if buffer.is_none() {
                if !self.in_flight.is_idle() || !self.unverified.is_empty() {
                    return None;
                }
                buffer = arena.take(bytes, self.plan.control);
            }
            if buffer.is_none() {
                result = Err(self.plan.control.stop().unwrap_or(MissReason::Staging));
            }
        }
        let (read, next) = (page.read, group.slices.start);
        self.next += 1;
        if let Err(reason) = result {
            self.plan.complete_group(&group, Err(reason));
            return Some(());
        }
        let mut chunks = Vec::new();
        self.plan.layouts[read].cut(self.reads[read].place, cover, &mut chunks);
        self.chunks = chunks.into();
        let group = self.next - 1;
        self.pending.push(Some(PendingGroup {
            group,
            buffer,
            ops_in_flight: 0,
            all_submitted: false,
            next_slice: next,
            result,
        }));
        Some(())
    }

    /// The operation that reads `chunk` of the group begun last.
    fn build_op(&mut self, chunk: Chunk) -> Option<Op> {
        let at = self.pending.len() - 1;
        let group_read = self.pending[at].as_mut()?;
        let group = &self.plan.groups[group_read.group];
        let Range { start, end } = chunk.logical;
        let (mut iovecs, length) = (Vec::new(), (end - start) as usize);
        match &group_read.buffer {
            Some(buffer) => {
                let skip = (start - self.plan.cover(group).start) as usize;
                iovecs.push(IoVec::new(buffer.as_ptr().wrapping_add(skip), length));
            }
            None => {
                let page = &self.plan.pages[group.page];
                let from = (start - page.start) as usize;
                page.memory.iovecs(from..from + length, &mut iovecs);
            }
        }
        group_read.ops_in_flight += 1;
        group_read.all_submitted = self.chunks.is_empty();
        let tag = self.in_flight.insert(end - start, (at, chunk.clone()));
        // SAFETY: `pending` holds the buffer until all operations of the group complete, and the
        // target is exclusive (`PageTarget`) until the engine returns.
        match unsafe { op(self.segments, &chunk, tag, iovecs) } {
            Ok(op) => Some(op),
            Err(_) => {
                self.done(tag, Err(io::ErrorKind::Other.into()));
                None
            }
        }
    }

    /// Removes a group that is complete, and reports its result to the plan.
    fn finish_group(&mut self, at: usize) {
        if let Some(PendingGroup { group, result, .. }) = self.pending[at].take() {
            let group = self.plan.groups[group].clone();
            self.plan.complete_group(&group, result);
        }
        // Free trailing slots. While chunks remain, the last slot is the group that is being
        // submitted.
        while self.chunks.is_empty() && self.pending.last().is_some_and(Option::is_none) {
            self.pending.pop();
        }
    }

    /// Verifies the next slice of a group that was read. Returns whether the group is finished.
    fn verify_slice(&mut self, at: usize) -> bool {
        let Some(group_read) = &mut self.pending[at] else { return true };
        let group = self.plan.groups[group_read.group].clone();
        let number = group_read.next_slice;
        group_read.next_slice += 1;
        let result = match &group_read.buffer {
            Some(buffer) => {
                let stored = self.plan.stored_at(&group, number);
                let skip = group.stored.start / UNIT * UNIT;
                let bytes = (stored.start - skip) as usize..(stored.end - skip) as usize;
                // SAFETY: the target is exclusive, and the buffer is other memory.
                unsafe { self.plan.deliver(group.page, number, &buffer.bytes()[bytes]) }
            }
            // SAFETY: the slice was read to the target, which is exclusive.
            None => unsafe { self.plan.verify(group.page, number) },
        };
        group_read.result = result;
        group_read.result.is_err() || group_read.next_slice == group.slices.end
    }

    fn bytes_of(&self, at: usize) -> u64 {
        let stored = |group_read: &PendingGroup| &self.plan.groups[group_read.group].stored;
        self.pending[at].as_ref().map(stored).map_or(0, |stored| stored.end - stored.start)
    }
}

impl Work for GroupReads<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.stopped.is_none() {
                self.stopped = self.plan.control.stop();
            }
            // Limit bytes that wait for verification: a section is of no use to its waiter before
            // it is verified, so verifying comes before reading more.
            let most = self.segments.in_flight_bytes() / IN_FLIGHT_DIVISOR / 4;
            let is_behind = self.unverified_bytes >= most as u64;
            if is_behind || !self.in_flight.has_room() {
                return None;
            }
            // Finish a group that has begun even after a stop: its memory is in use until all its
            // chunks complete.
            if let Some(chunk) = self.chunks.pop_front() {
                match self.build_op(chunk) {
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
        let Some((at, chunk)) = self.in_flight.complete(tag) else { return };
        let Some(group_read) = &mut self.pending[at] else { return };
        group_read.ops_in_flight -= 1;
        if let Err(error) = result {
            group_read.result = Err(io_failure(&error, &chunk));
        }
        if group_read.ops_in_flight > 0 || !group_read.all_submitted {
            return;
        }
        if group_read.result.is_err() {
            self.finish_group(at);
        } else {
            self.unverified_bytes += self.bytes_of(at);
            self.unverified.push_back(at);
        }
    }

    fn compute(&mut self) -> bool {
        let Some(&at) = self.unverified.front() else { return false };
        if self.verify_slice(at) {
            self.unverified.pop_front();
            self.unverified_bytes -= self.bytes_of(at);
            self.finish_group(at);
        }
        true
    }
}
