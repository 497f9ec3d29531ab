//! The read of pages of one object.

use super::call_executor::{CallExecutor, Operation, PendingCall};
use super::object::{self, Contents, ObjectBytes};
use super::options::RemoteOptions;
use super::packing::Prompt;
use super::rejected::RejectReason;
use ritornello_format::Result;
use std::ops::Range;
use std::time::Instant;

/// A read of `pages` of a prompt, which are a part of the object that holds the pages `span`.
pub(super) struct ObjectRead<'a> {
    pub(super) options: &'a RemoteOptions,
    pub(super) prompt: &'a Prompt<'a>,
    pub(super) span: Range<usize>,
    pub(super) pages: Range<usize>,
}

/// The fetched bytes of an object: one range from its beginning, or its header and a separate range
/// of pages.
pub(super) struct FetchedObject {
    head: Vec<u8>,
    body: Option<(u64, Vec<u8>)>,
    /// Bytes fetched, including a first range that turned out not to be the range of the pages.
    bytes: u64,
}

impl FetchedObject {
    fn new(head: Vec<u8>, body: Option<(u64, Vec<u8>)>) -> Self {
        let bytes = (head.len() + body.as_ref().map_or(0, |(_, body)| body.len())) as u64;
        Self { head, body, bytes }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl ObjectRead<'_> {
    pub(super) fn name(&self) -> String {
        self.prompt.object_name(self.options.form(), &self.span)
    }

    /// The range of the pages, counted from the first page of the object.
    fn inside(&self) -> Range<usize> {
        self.pages.start - self.span.start..self.pages.end - self.span.start
    }

    /// Fetches the header of the object and the bytes of the pages, in one request if `pages` begin
    /// with the object's first page. The call returns `None` if the object is missing.
    pub(super) fn start(
        &self,
        executor: &CallExecutor,
        deadline: Instant,
    ) -> Result<PendingCall<Option<FetchedObject>>> {
        let Self { prompt, span, pages, .. } = self;
        let name = self.name();
        let (form, keys, scope) = (self.options.form(), self.options.keys.clone(), *prompt.scope);
        let (page_bytes, pages_in) = (prompt.page_bytes, span.len());
        let begin =
            object::first_page_offset(form, prompt.keys[span.clone()].iter().map(|k| k.len()));
        let place = |page: usize| begin + (page - span.start) as u64 * prompt.page_bytes;
        let (from, to) = (place(pages.start), place(pages.end));
        let inside = self.inside();
        executor.start(Operation::Get, deadline, move |remote| {
            if from == begin {
                let head = remote.get(&name, Some(0..to))?;
                return Ok(head.map(|head| FetchedObject::new(head, None)));
            }
            let requests = [(name.as_str(), Some(0..begin)), (name.as_str(), Some(from..to))];
            let mut answers = remote.get_batch(&requests).into_iter();
            let (Some(head), Some(body)) = (answers.next(), answers.next()) else {
                return Ok(None);
            };
            let (Some(head), Some(body)) = (head?, body?) else { return Ok(None) };
            // The requested range holds the pages if the object is not compressed. If the header
            // names another range, fetch that range. Ignore here a header that cannot be read, or
            // that differs from the prompt in the page length or from the object's name in the
            // number of pages: a forged header could cause fetches of any length.
            let verify = keys.as_deref().map(|keys| (keys, &scope));
            let actual = Contents::read(&head, form, verify).ok().filter(|contents| {
                contents.header.page_bytes == page_bytes && contents.header.keys.len() == pages_in
            });
            let actual = actual.map(|contents| contents.stored_range(inside.clone()));
            match actual.filter(|actual| *actual != (from..to)) {
                None => Ok(Some(FetchedObject::new(head, Some((from, body))))),
                Some(actual) => {
                    let unused = body.len() as u64;
                    let body = remote.get(&name, Some(actual.clone()))?;
                    Ok(body.map(|body| {
                        let fetched = FetchedObject::new(head, Some((actual.start, body)));
                        FetchedObject { bytes: fetched.bytes + unused, ..fetched }
                    }))
                }
            }
        })
    }

    /// Copies the pages to `out`. Returns the number of pages copied, and the reason if a page was
    /// rejected.
    pub(super) fn unpack(
        &self,
        fetched: &FetchedObject,
        out: &mut [u8],
    ) -> (usize, Option<RejectReason>) {
        let Self { prompt, span, .. } = self;
        let verify = self.options.keys.as_deref().map(|keys| (keys, prompt.scope));
        let checked =
            Contents::read(&fetched.head, self.options.form(), verify).and_then(|contents| {
                contents.check(prompt.scope, &prompt.keys[span.clone()], prompt.page_bytes)?;
                Ok(contents)
            });
        let part = match &fetched.body {
            None => ObjectBytes { at: 0, bytes: &fetched.head },
            Some((at, bytes)) => ObjectBytes { at: *at, bytes },
        };
        match checked {
            Ok(contents) => contents.unpack(&part, self.inside(), out),
            Err(why) => (0, Some(why)),
        }
    }
}
