//! Reads runs.
//!
//! Pages are read in parts: a part is the slices of one page that one section is the first to need,
//! or the whole page if the call names no sections. [`disk::read`] reads the parts from files, and
//! [`mapped::read`] copies them from mapped segments, in the order of their sections. Both verify
//! each part against the header of its run, and share [`ReadJob`]: the header's description of each
//! part, the outcome of each page, and the sections that have arrived.
//!
//! A read of files without sections reads the header of a run together with its pages. All other
//! reads read all headers first.
//!
//! A slice is the smallest part of a page that can be verified. Each slice is read with the first
//! section that needs one of its bytes, so that no slice is read twice, even if a section ends
//! inside a slice.

use super::check::{Expected, decode_header, slices_of, total};
use super::chunk::RunLayout;
use super::lanes::{self, Lanes};
use super::page::{Direct, PageMemory};
use super::sections::Arrivals;
use super::{Control, Encoded, MissReason, PageOutcome, RunRead, Sections, disk, mapped};
use crate::segments::{Moved, Segments};
use ritornello_format::{RunHeader, Slice, UNIT, units_of};
use std::ops::Range;

impl Segments {
    /// Reads pages, and returns for each read the outcome of each of its pages.
    ///
    /// A call that is cancelled, or whose deadline passes, ends about 50 milliseconds later if its
    /// reads in flight write to staging memory and header blocks only. It leaves these reads
    /// behind: they keep their memory and files until the kernel has completed them, and count as
    /// in flight on their volumes. While 64 lanes have left reads behind, and while the kernel
    /// writes to the target's memory, the call waits for all its reads.
    /// When a read that was left behind completes, a blocking system call of the thread that called
    /// this function may fail with `EINTR`.
    ///
    /// If `control` names sections, the call reads section by section, each for all pages of all
    /// reads, and leaves the memory of sections that arrived in an earlier call unchanged
    /// ([`Sections::arrived`]). A section counts as arrived when every page *of this call* has it.
    /// Pass sections only if the threads that wait for them use no page that another call reads.
    /// Sections are ignored if `control` names a single section, or if any read of the call
    /// delivers pages as stored ([`Encoded::AsStored`]) or has pages that are not as long as the
    /// sections together.
    pub fn read_runs(&self, reads: &[RunRead<'_>], control: &Control) -> Vec<Vec<PageOutcome>> {
        let sections = control.sections.as_deref().filter(|sections| sections.fit(reads));
        if self.is_mapped() {
            return mapped::read(self, reads, control, sections);
        }
        if sections.is_some() {
            // Read in one lane, because sections must arrive in order, over all pages.
            let in_flight = lanes::in_flight(self, reads);
            return disk::read(self, reads, control, sections, in_flight, None).0;
        }
        if self.is_inherited() {
            return disk::read(self, reads, control, None, self.in_flight_bytes, None).0;
        }
        let is_encoded =
            |read: &RunRead<'_>| u64::from(read.place.page_units) < units_of(read.page_bytes);
        let are_staged = control.through_staging || reads.iter().any(is_encoded);
        let lanes = Lanes::of(self, reads, Moved::Read, are_staged);
        let is_complete = |run: &Vec<PageOutcome>| run.iter().all(|page| page.is_verified());
        if let Some(in_flight) = lanes.only() {
            let times = lanes.volume_times();
            let (outcomes, waited) = disk::read(self, reads, control, None, in_flight, times);
            lanes.end(waited, outcomes.iter().all(is_complete));
            return outcomes;
        }
        lanes.run(reads, is_complete, |reads, in_flight, times| {
            disk::read(self, reads, control, None, in_flight, times)
        })
    }
}

/// The state of one [`Segments::read_runs`] call.
pub(super) struct ReadJob<'a> {
    pub(super) segments: &'a Segments,
    pub(super) reads: &'a [RunRead<'a>],
    pub(super) control: &'a Control,
    /// `None` if pages are read as a whole.
    pub(super) arrivals: Option<Arrivals<'a>>,
    /// The reads that have begun.
    pub(super) runs: Vec<RunState>,
    pub(super) parts: Vec<Part>,
    stopped: Option<MissReason>,
}

/// A run that is being read.
pub(super) struct RunState {
    pub(super) layout: RunLayout,
    pub(super) header: Header,
    pages: Vec<Page>,
    /// Number of pages without an outcome.
    undecided: usize,
}

pub(super) enum Header {
    Awaited,
    Valid(Box<RunHeader>),
    /// The header is wrong or could not be read, or all pages have their outcome.
    Done,
}

struct Page {
    memory: PageMemory,
    /// Number of parts without a result.
    open: usize,
    outcome: Option<PageOutcome>,
}

/// Slices of one page that are read together.
pub(super) struct Part {
    pub(super) run: usize,
    /// Index of the page in the keys of its read ([`RunRead::keys`]).
    pub(super) page: usize,
    pub(super) section: usize,
    pub(super) slices: Range<u16>,
    /// Byte range of these slices in the page as stored on disk.
    pub(super) stored: Range<u64>,
}

impl<'a> ReadJob<'a> {
    pub(super) fn new(
        segments: &'a Segments,
        reads: &'a [RunRead<'a>],
        control: &'a Control,
        sections: Option<&'a Sections>,
    ) -> Self {
        Self {
            segments,
            reads,
            control,
            arrivals: sections.map(Arrivals::new),
            runs: Vec::with_capacity(reads.len()),
            parts: Vec::new(),
            stopped: segments.is_inherited().then_some(MissReason::Io),
        }
    }

    /// Whether the call was cancelled, its deadline passed, or the segments were opened before a
    /// fork; no further operation may then start.
    pub(super) fn is_stopped(&mut self) -> bool {
        if self.stopped.is_none() {
            self.stopped = self.control.stop();
        }
        self.stopped.is_some()
    }

    /// Begins the next read. Returns the layout of its run, and the pages to read, numbered in the
    /// run. `None` if the place, or the memory of every page, is unusable: all pages of the read
    /// then miss.
    pub(super) fn begin(&mut self, direct: Direct) -> Option<(RunLayout, Range<u64>)> {
        let read = &self.reads[self.runs.len()];
        let first = u64::from(read.first);
        let pages = first..first + read.keys.len() as u64;
        let layout = RunLayout::new(read.place, read.page_bytes, pages.clone(), self.segments);
        let page = |page| {
            let memory = layout.and_then(|layout| {
                let as_stored = matches!(read.encoded, Encoded::AsStored);
                let bytes = if as_stored { layout.page } else { read.page_bytes } as usize;
                PageMemory::of_target(read.target, read.target_first + page, bytes, direct)
            });
            let reason = if layout.is_some() { MissReason::Memory } else { MissReason::Place };
            let outcome = memory.is_none().then_some(PageOutcome::Missed(reason));
            Page { memory: memory.unwrap_or_else(PageMemory::empty), open: 0, outcome }
        };
        let states: Vec<Page> = (0..read.keys.len()).map(page).collect();
        let undecided = states.iter().filter(|page| page.outcome.is_none()).count();
        self.runs.push(RunState {
            layout: layout.unwrap_or(RunLayout::EMPTY),
            header: if undecided > 0 { Header::Awaited } else { Header::Done },
            pages: states,
            undecided,
        });
        layout.filter(|_| undecided > 0).map(|layout| (layout, pages))
    }

    /// Decodes the header of a run from `bytes`, or records why the header cannot be read.
    pub(super) fn set_header(&mut self, run: usize, bytes: Result<&[u8], MissReason>) {
        match bytes.and_then(|bytes| decode_header(&self.reads[run], bytes)) {
            Ok(header) => self.runs[run].header = Header::Valid(Box::new(header)),
            Err(reason) => {
                self.runs[run].header = Header::Done;
                for page in 0..self.runs[run].pages.len() {
                    self.decide(run, page, PageOutcome::Missed(reason));
                }
            }
        }
    }

    /// Divides the pages of all runs that have begun into parts, in the order of their sections.
    /// Pages of a run without a valid header miss.
    pub(super) fn cut_pages(&mut self) {
        let mut are_all_expected = self.runs.len() == self.reads.len();
        for run in 0..self.runs.len() {
            for page in 0..self.runs[run].pages.len() {
                let before = self.parts.len();
                let cut = self.cut_page(run, page);
                self.runs[run].pages[page].open = self.parts.len() - before;
                let outcome = match cut {
                    Err(reason) => PageOutcome::Missed(reason),
                    // All sections of this page arrived in an earlier call.
                    Ok(()) if self.parts.len() == before => PageOutcome::Verified,
                    Ok(()) => continue,
                };
                are_all_expected &= outcome.is_verified();
                self.decide(run, page, outcome);
            }
        }
        if let Some(arrivals) = &mut self.arrivals {
            self.parts.sort_by_key(|part| part.section);
            arrivals.begin(self.parts.iter().map(|part| part.section), are_all_expected);
        }
    }

    fn cut_page(&mut self, run: usize, page: usize) -> Result<(), MissReason> {
        if let Some(PageOutcome::Missed(reason)) = self.runs[run].pages[page].outcome {
            return Err(reason);
        }
        let Some(arrivals) = &self.arrivals else {
            let whole = self.whole(run, page)?;
            self.parts.push(whole);
            return Ok(());
        };
        let page_bytes = self.reads[run].page_bytes;
        let slices = self.runs[run].slices_of(&self.reads[run], page)?;
        let (before, mut to) = (self.parts.len(), 0);
        for (number, slice) in (0..).zip(slices) {
            let from = to;
            to += u64::from(slice.bytes);
            let decoded = Slice::part(number, slices.len() as u16, page_bytes);
            let Some(section) = arrivals.section_of(&decoded) else { continue };
            match self.parts[before..].last_mut() {
                Some(last) if last.section == section => {
                    last.slices.end = number + 1;
                    last.stored.end = to;
                }
                _ => {
                    let slices = number..number + 1;
                    self.parts.push(Part { run, page, section, slices, stored: from..to });
                }
            }
        }
        Ok(())
    }

    /// A whole page as one part.
    ///
    /// # Errors
    /// The miss reason if the header does not match the page.
    pub(super) fn whole(&self, run: usize, page: usize) -> Result<Part, MissReason> {
        let slices = self.runs[run].slices_of(&self.reads[run], page)?;
        let numbers = 0..slices.len() as u16;
        Ok(Part { run, page, section: 0, slices: numbers, stored: 0..total(slices) })
    }

    /// Adds a whole page as one part before the run's header is known. Until then the part has the
    /// length of the page's space and no slices; [`ReadJob::whole`] makes the part that replaces
    /// it.
    pub(super) fn push_unknown(&mut self, run: usize, page: usize) {
        self.runs[run].pages[page].open = 1;
        let stored = 0..self.runs[run].layout.page;
        self.parts.push(Part { run, page, section: 0, slices: 0..0, stored });
    }

    /// A part as the header describes it; `None` if the header is not known, or already freed.
    pub(super) fn expected(&self, part: usize) -> Option<Expected<'_, 'a>> {
        let Part { run, page, slices, stored, .. } = &self.parts[part];
        let (state, read) = (&self.runs[*run], &self.reads[*run]);
        let Header::Valid(header) = &state.header else { return None };
        Some(Expected {
            read,
            key: read.keys[*page],
            slices: header.slices_of(read.first as usize + page),
            numbers: slices.clone(),
            stored: stored.clone(),
            target: &state.pages[*page].memory,
            arrived_bytes: self.arrivals.as_ref().map_or(0, |arrivals| arrivals.arrived_bytes),
        })
    }

    /// Records that a part is verified, or why its page misses. Called at most once for each part.
    pub(super) fn complete(&mut self, part: usize, result: Result<(), MissReason>) {
        let Part { run, page, section, .. } = self.parts[part];
        let open = &mut self.runs[run].pages[page].open;
        *open -= 1;
        match result {
            Err(reason) => self.decide(run, page, PageOutcome::Missed(reason)),
            Ok(()) if *open == 0 => self.decide(run, page, PageOutcome::Verified),
            Ok(()) => {}
        }
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.complete(section, result.is_ok());
        }
    }

    /// Sets the outcome of a page, unless it has one.
    pub(super) fn decide(&mut self, run: usize, page: usize, outcome: PageOutcome) {
        let run = &mut self.runs[run];
        if run.pages[page].outcome.is_none() {
            run.pages[page].outcome = Some(outcome);
            run.undecided -= 1;
        }
        // Thousands of runs may be read in one call: free the headers of finished runs. With
        // sections the header stays, because a page that missed may still have unverified parts of
        // earlier sections, whose check needs the header.
        if run.undecided == 0 && self.arrivals.is_none() {
            run.header = Header::Done;
        }
    }

    /// Whether the page of a part has its outcome.
    pub(super) fn is_decided(&self, part: usize) -> bool {
        let Part { run, page, .. } = self.parts[part];
        self.runs[run].pages[page].outcome.is_some()
    }

    /// The memory of a part's page.
    pub(super) fn target(&self, part: usize) -> &PageMemory {
        let Part { run, page, .. } = self.parts[part];
        &self.runs[run].pages[page].memory
    }

    /// Offset in the run of the first byte of a part's page.
    pub(super) fn page_start(&self, part: usize) -> u64 {
        let Part { run, page, .. } = self.parts[part];
        self.runs[run].layout.pages(0..u64::from(self.reads[run].first) + page as u64).end
    }

    /// Range in the run of the units of 4 KiB that contain a part.
    pub(super) fn cover(&self, part: usize) -> Range<u64> {
        let (start, stored) = (self.page_start(part), &self.parts[part].stored);
        start + stored.start / UNIT * UNIT..start + stored.end.next_multiple_of(UNIT)
    }

    /// The outcome of every page. A page that was not read completely misses, with the reason for
    /// which the call stopped, or `Io` if it did not stop.
    pub(super) fn outcomes(&self) -> Vec<Vec<PageOutcome>> {
        let rest = PageOutcome::Missed(self.stopped.unwrap_or(MissReason::Io));
        let of =
            |run: &RunState| run.pages.iter().map(|page| page.outcome.unwrap_or(rest)).collect();
        let mut outcomes: Vec<Vec<PageOutcome>> = self.runs.iter().map(of).collect();
        let unbegun = self.reads[outcomes.len()..].iter();
        outcomes.extend(unbegun.map(|read| vec![rest; read.keys.len()]));
        outcomes
    }
}

impl RunState {
    fn slices_of(&self, read: &RunRead<'_>, page: usize) -> Result<&[Slice], MissReason> {
        match &self.header {
            Header::Valid(header) => slices_of(read, header, page),
            Header::Awaited | Header::Done => Err(MissReason::Io),
        }
    }
}
