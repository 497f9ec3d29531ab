//! Puts and gets that run on the I/O threads, each with a ticket.

use crate::io_threads::{Closing, Job, JobKind};
use crate::outcome::Outcome;
use crate::store::{PutOptions, Store, check_sections};
use crate::ticket::Ticket;
use crate::transfer_counts::{STAGING_REFUSALS, TransferCounts};
use ritornello_format::{ErrorKind, Result, Scope};
use ritornello_volume::page_memory::{OffsetPages, PageSource, PageTarget};
use ritornello_volume::staging::StagedPages;
use ritornello_volume::transfer::Control;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

impl Store {
    /// Starts a put. `source` must not change until the ticket is done.
    ///
    /// # Errors
    /// `Invalid` for bad keys or sizes; `Retry` if too many tickets wait, or no thread or eventfd
    /// is available; `Closed` if the store is closed.
    pub fn submit_put(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        source: Arc<dyn PageSource>,
        options: PutOptions,
        control: Control,
    ) -> Result<Ticket> {
        let pages = source.len();
        self.submit(JobKind::Put, keys, pages, control, move |store, keys, control| {
            store.put_batch(&scope, keys, source.as_ref(), &options, control)
        })
    }

    /// Like `submit_put`. If the put does not store all pages, it calls `left` before the ticket is
    /// done. `left` gets the position of the first page that was not stored, and copies of this
    /// page and of the pages after it, up to the first page that staging has no space for. `left`
    /// is not called if the store closes while the put waits in the queue, or if the put panics.
    ///
    /// # Errors
    /// Like `submit_put`.
    pub fn submit_put_or(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        source: Arc<dyn PageSource>,
        options: PutOptions,
        control: Control,
        left: impl FnOnce(usize, StagedPages) + Send + 'static,
    ) -> Result<Ticket> {
        let pages = source.len();
        self.submit(JobKind::Put, keys, pages, control, move |store, keys, control| {
            let outcome = store.put_batch(&scope, keys, source.as_ref(), &options, control);
            let stored = stored_pages(&outcome);
            if stored < pages {
                left(stored, store.staging.copy_leading(source.as_ref(), stored..pages));
            }
            outcome
        })
    }

    /// Starts a put of bytes that are copied into staging before the call returns. If staging is
    /// full, the first page without memory and all later pages are skipped. Leading pages that are
    /// already stored are not copied. If the owner still has these pages when the put runs, the
    /// ticket acknowledges them. If some of them were evicted, the outcome counts the pages before
    /// the first evicted page, with reason `not_found`; only in an unchained scope are later pages
    /// stored.
    ///
    /// # Errors
    /// Like `submit_put`, and like [`Store::probe`].
    pub fn submit_put_copy(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        source: &dyn PageSource,
        options: PutOptions,
        control: Control,
    ) -> Result<Ticket> {
        self.submit_put_copy_or(scope, keys, source, options, control, |_, _| {})
    }

    /// Like `submit_put_copy`. If the leading stored pages of the put do not include all copied
    /// pages, it calls `left` before the ticket is done. `left` gets the position of the first
    /// copied page after these stored pages, and the copies of this page and of all pages after it.
    /// `left` is not called if the store closes while the put waits in the queue, or if the put
    /// panics.
    ///
    /// # Errors
    /// Like `submit_put_copy`.
    pub fn submit_put_copy_or(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        source: &dyn PageSource,
        options: PutOptions,
        control: Control,
        left: impl FnOnce(usize, StagedPages) + Send + 'static,
    ) -> Result<Ticket> {
        let requested = keys.len();
        let first = {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            self.check_batch(&keys, source.len())?;
            self.present_prefix(&scope, &keys)?
        };
        let mut staged = self.staging.copy_leading(source, first..requested);
        let held = first + staged.len();
        if held < requested {
            self.count(&TransferCounts::one(STAGING_REFUSALS, (requested - held) as u64));
        }
        if held == 0 {
            let ticket = Ticket::new(None)?;
            ticket
                .finish(Outcome::none(requested, if requested > 0 { "staging_full" } else { "" }));
            return Ok(ticket);
        }
        self.submit(JobKind::Put, keys, requested, control, move |store, keys, control| {
            let source = OffsetPages::new(&staged, first);
            let outcome = store.put_batch(&scope, &keys[..held], &source, &options, control);
            let stored = stored_pages(&outcome).max(first);
            if stored < held {
                staged.release_before(stored - first);
                left(stored, staged);
            }
            let mut outcome = outcome?;
            if outcome.reason.is_empty() && held < requested {
                outcome.reason = "staging_full";
            }
            outcome.ok.resize(requested, false);
            Ok(outcome)
        })
    }

    /// Runs `work` in the queue of gets, with a ticket like a get's. `pages` must be the number of
    /// `keys`. `work` may also read from other stores. The control that `work` gets reports a
    /// cancellation of the ticket.
    ///
    /// # Errors
    /// Like `submit_put`.
    pub fn submit_read(
        self: &Arc<Self>,
        keys: Vec<Box<[u8]>>,
        pages: usize,
        control: Control,
        work: impl FnOnce(&[&[u8]], &Control) -> Result<Outcome> + Send + 'static,
    ) -> Result<Ticket> {
        self.submit_timed(JobKind::Get, keys, pages, control, work)
    }

    /// Runs `work` in the queue of puts, with a ticket like a put's. `pages` must be the number of
    /// `keys`. The control that `work` gets reports a cancellation of the ticket.
    ///
    /// # Errors
    /// Like `submit_put`.
    pub fn submit_write(
        self: &Arc<Self>,
        keys: Vec<Box<[u8]>>,
        pages: usize,
        control: Control,
        work: impl FnOnce(&[&[u8]], &Control) -> Result<Outcome> + Send + 'static,
    ) -> Result<Ticket> {
        self.submit_timed(JobKind::Put, keys, pages, control, work)
    }

    /// Starts a get. `target` belongs to the store until the ticket is done. If `control` names
    /// sections of the pages, each section is announced as soon as all pages of this get have it
    /// ([`Ticket::wait_section`]).
    ///
    /// # Errors
    /// Like `submit_put`; `Invalid` if the sections do not make up a page of this scope.
    pub fn submit_get(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        target: Arc<dyn PageTarget>,
        control: Control,
    ) -> Result<Ticket> {
        check_sections(&scope, &control)?;
        let pages = target.len();
        self.submit(JobKind::Get, keys, pages, control, move |store, keys, control| {
            store.get_batch(&scope, keys, target.as_ref(), control)
        })
    }

    /// Runs `work` in the queue of `kind`, and adds the duration of the work to its outcome.
    fn submit_timed(
        self: &Arc<Self>,
        kind: JobKind,
        keys: Vec<Box<[u8]>>,
        pages: usize,
        control: Control,
        work: impl FnOnce(&[&[u8]], &Control) -> Result<Outcome> + Send + 'static,
    ) -> Result<Ticket> {
        self.submit(kind, keys, pages, control, move |_, keys, control| {
            let started = Instant::now();
            Ok(work(keys, control)?.timed(started.elapsed()))
        })
    }

    fn submit(
        self: &Arc<Self>,
        kind: JobKind,
        keys: Vec<Box<[u8]>>,
        pages: usize,
        control: Control,
        work: impl FnOnce(&Self, &[&[u8]], &Control) -> Result<Outcome> + Send + 'static,
    ) -> Result<Ticket> {
        {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            self.check_batch(&keys, pages)?;
        }
        let ticket = Ticket::new(control.sections.clone())?;
        let (store, handle) = (Arc::clone(self), ticket.clone());
        let control = Control { cancelled: Some(ticket.cancelled()), ..control };
        let deadline = control.deadline;
        let work = move |closing: Closing| {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            let outcome = match closing {
                Closing::Yes => Outcome::none(keys.len(), "closed"),
                Closing::No => attempt(keys.len(), || work(&store, &keys, &control)),
            };
            handle.finish(outcome);
        };
        self.io_threads.submit(kind, Job { deadline, work: Box::new(work) })?;
        Ok(ticket)
    }
}

/// Returns the number of leading pages that a put has stored.
fn stored_pages(outcome: &Result<Outcome>) -> usize {
    outcome.as_ref().map_or(0, |outcome| outcome.ok.iter().take_while(|ok| **ok).count())
}

/// Runs a ticket's work. The ticket completes even if the work panics, because a caller waits for
/// it.
fn attempt(pages: usize, work: impl FnOnce() -> Result<Outcome>) -> Outcome {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => {
            // A closed store is not a failure to log; the outcome has the reason.
            if error.kind() != ErrorKind::Closed {
                tracing::warn!(%error, "the put or get of a ticket failed");
            }
            Outcome::none(pages, error.kind().word())
        }
        Err(_) => Outcome::none(pages, "panic"),
    }
}
