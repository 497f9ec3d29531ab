//! Copies the consistent runs of an index into another index, between any two backends. A copy of a
//! run may have another name ([`RunId`]) than the run.

use crate::{NewRun, PrefixIndex, RunId, RunView, SyncData};
use ritornello_format::{ErrorKind, PageHash, Result, ScopeSlot};
use std::collections::HashMap;

/// Bytes after which the copy is synced, so that few of its changes wait in memory.
const SYNC_BYTES: usize = 4 << 20;

/// The result of [`copy`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Number of runs in the copy.
    pub runs: u64,
    /// Number of pages in the copy.
    pub pages: u64,
    /// Number of runs dropped as inconsistent, including their descendants.
    pub dropped: u64,
}

/// Inserts every consistent run of `from` into `to`, which is empty, and makes `to` durable. A run
/// is consistent if `to` accepts it, its parent is consistent, and it has no holes in a chained
/// scope. `from` must not change during the call. Scopes, parents, holes, places, recency,
/// retentions and the clock are kept. A run is copied after its parent, even if the parent was
/// inserted after the run. Calls `progress` with the number of runs copied so far.
///
/// # Errors
/// Errors of `sync_data`, of syncs of `to`, and of inserts, except `Invalid`, for which the run is
/// dropped. After an error `to` holds a part of the copy.
pub fn copy(
    from: &dyn PrefixIndex,
    to: &dyn PrefixIndex,
    sync_data: SyncData<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<Copied> {
    let mut work = Copier {
        from,
        to,
        sync_data,
        progress,
        waiting: HashMap::new(),
        links: Vec::new(),
        unsynced: 0,
        copied: Copied::default(),
    };
    let mut failed = Ok(());
    from.for_each(&mut |run, view| {
        if failed.is_ok() {
            failed = work.copy_run(run, view);
        }
    });
    failed?;
    work.copy_waiting()?;
    to.retain(&[], from.clock());
    to.sync_after(sync_data)?;
    Ok(work.copied)
}

struct Copier<'a> {
    from: &'a dyn PrefixIndex,
    to: &'a dyn PrefixIndex,
    sync_data: SyncData<'a>,
    progress: &'a mut dyn FnMut(u64),
    /// Runs that wait for their parent, by parent.
    waiting: HashMap<RunId, Vec<RunId>>,
    /// Links to make at the end: scope, page of the parent run, first page of the child run.
    links: Vec<(ScopeSlot, PageHash, PageHash)>,
    /// Bytes inserted since the last sync, approximately.
    unsynced: usize,
    copied: Copied,
}

impl Copier<'_> {
    /// Copies a run if its parent has been copied, and then the runs that wait for this run. A run
    /// whose parent has not been copied waits; a run whose parent page does not exist is dropped.
    fn copy_run(&mut self, run: RunId, view: RunView) -> Result<()> {
        let mut ready = vec![(run, view)];
        while let Some((run, view)) = ready.pop() {
            let parent = match view.parent {
                None => None,
                Some((parent, page)) => match self.from.page(parent, page) {
                    Some(hash) if self.to.locate(view.scope, hash).is_some() => Some(hash),
                    Some(_) => {
                        self.waiting.entry(parent).or_default().push(run);
                        continue;
                    }
                    None => {
                        self.drop_behind(run);
                        continue;
                    }
                },
            };
            if !self.insert(run, &view, parent)? {
                self.drop_behind(run);
                continue;
            }
            for child in self.waiting.remove(&run).unwrap_or_default() {
                ready.extend(self.from.run(child).map(|view| (child, view)));
            }
        }
        Ok(())
    }

    /// Copies the runs that still wait. These runs wait because their parent was dropped or waits
    /// too, or because they are attached to each other in a ring, which an intact index does not
    /// have. Inserts them without links to their parents, and then links each run to its parent, or
    /// removes the run if its parent was dropped.
    fn copy_waiting(&mut self) -> Result<()> {
        while let Some(&parent) = self.waiting.keys().next() {
            let children = self.waiting.remove(&parent).unwrap_or_default();
            for child in children {
                let Some(view) = self.from.run(child) else { continue };
                let behind = view.parent.and_then(|(parent, page)| self.from.page(parent, page));
                let (Some(behind), Some(first)) = (behind, view.pages.first().copied()) else {
                    self.drop_behind(child);
                    continue;
                };
                self.links.push((view.scope, behind, first));
                self.copy_run(child, RunView { parent: None, ..view })?;
            }
        }
        for (scope, parent, child) in std::mem::take(&mut self.links) {
            if self.to.locate(scope, parent).is_some() {
                self.to.link(scope, parent, child);
                continue;
            }
            for gone in self.to.remove(scope, &[child]) {
                self.copied.pages -= u64::from(gone.pages);
                self.copied.runs -= 1;
                self.copied.dropped += 1;
            }
        }
        Ok(())
    }

    /// Counts a run, and all runs that wait for the run, as dropped. Children of the run that are
    /// visited later are dropped by [`Self::copy_waiting`].
    fn drop_behind(&mut self, run: RunId) {
        let mut gone = vec![run];
        while let Some(run) = gone.pop() {
            self.copied.dropped += 1;
            gone.extend(self.waiting.remove(&run).unwrap_or_default());
        }
    }

    /// Inserts a run. Returns whether `to` accepted it.
    fn insert(&mut self, run: RunId, view: &RunView, parent: Option<PageHash>) -> Result<bool> {
        let mut pages = view.pages.clone();
        // A removed page has no hash. Insert the run with a substitute hash for each removed page,
        // and remove the substitutes after that.
        let mut stand_ins = Vec::new();
        for (at, page) in pages.iter_mut().enumerate().filter(|(_, page)| **page == PageHash::NONE)
        {
            page.0[..8].copy_from_slice(&run.0.to_le_bytes());
            page.0[8..12].copy_from_slice(&(at as u32).to_le_bytes());
            page.0[12..].fill(0xa5);
            stand_ins.push(*page);
        }
        // A consistent run of a chained scope has no holes: removing a page cuts the run.
        if view.chained && !stand_ins.is_empty() {
            return Ok(false);
        }
        let inserted = self.to.insert(&NewRun {
            scope: view.scope,
            chained: view.chained,
            parent,
            pages: &pages,
            place: &view.place,
            recency: view.recency,
        });
        let name = match inserted {
            Ok(name) => name,
            Err(error) if error.kind() == ErrorKind::Invalid => {
                tracing::warn!(
                    %error,
                    ?run,
                    "a run of the index is inconsistent and is not copied: its pages become misses"
                );
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if !stand_ins.is_empty() {
            self.to.remove(view.scope, &stand_ins);
        }
        if view.retain_until > 0 {
            self.to.retain(&[(name, view.retain_until)], 0);
        }
        self.copied.runs += 1;
        self.copied.pages += (pages.len() - stand_ins.len()) as u64;
        self.unsynced += 128 + size_of::<PageHash>() * pages.len();
        if self.unsynced > SYNC_BYTES {
            self.unsynced = 0;
            self.to.sync_after(self.sync_data)?;
        }
        (self.progress)(self.copied.runs);
        Ok(true)
    }
}
