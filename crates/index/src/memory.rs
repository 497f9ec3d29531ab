//! The index backend `memory`: hash maps under one lock, not durable. The backend is the oracle
//! that other backends are tested against, so its code is plain.

use crate::live_extents::join;
use crate::sync::Mutex;
use crate::{IndexStats, MatchedRun, NewRun, PrefixIndex, Removed, RunId, RunView, SyncData};
use ritornello_format::{Error, Extent, PageHash, PageHashes, Place, Result, ScopeSlot};
use std::collections::{BTreeSet, HashMap};

/// An index in hash maps under one lock, not durable. Its methods are described at `trait`
/// [`PrefixIndex`].
#[derive(Debug)]
pub struct MemoryIndex(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    pages: HashMap<(ScopeSlot, PageHash), (RunId, u32)>,
    runs: HashMap<RunId, Run>,
    last: u64,
    clock: u64,
}

#[derive(Debug)]
struct Run {
    view: RunView,
    children: BTreeSet<RunId>,
}

impl Default for MemoryIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryIndex {
    /// An empty index.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(State::default()))
    }
}

impl Run {
    /// The extents of the live pages starting at page `from`.
    fn held(&self, from: usize) -> Vec<Extent> {
        let pages = self.view.pages.iter().enumerate().skip(from);
        let live = pages.filter(|(_, page)| **page != PageHash::NONE);
        live.flat_map(|(page, _)| self.view.place.page(page as u32)).collect()
    }
}

impl State {
    fn attach(&mut self, child: RunId, parent: RunId, page: u32) {
        if let Some(run) = self.runs.get_mut(&child) {
            run.view.parent = Some((parent, page));
        }
        if let Some(run) = self.runs.get_mut(&parent) {
            run.children.insert(child);
        }
    }

    fn truncate(&mut self, run: RunId, keep: u32) -> Vec<Removed> {
        let mut removed = Vec::new();
        let mut removals = vec![(run, keep)];
        while let Some((run, keep)) = removals.pop() {
            let Some(cut) = self.runs.get(&run) else { continue };
            for child in &cut.children {
                let parent = self.runs.get(child).and_then(|run| run.view.parent);
                if parent.is_some_and(|(_, page)| page >= keep) {
                    removals.push((*child, 0));
                }
            }
            removed.extend(self.cut(run, keep as usize));
        }
        removed
    }

    fn cut(&mut self, id: RunId, keep: usize) -> Option<Removed> {
        let run = self.runs.get_mut(&id)?;
        if keep >= run.view.pages.len() {
            return None;
        }
        let whole = run.view.pages[..keep].iter().all(|page| *page == PageHash::NONE);
        let keep = if whole { 0 } else { keep };
        let mut extents = if whole { run.view.place.header() } else { Vec::new() };
        extents.extend(run.held(keep));
        let scope = run.view.scope;
        run.view.place.truncate(keep as u32);
        let hashes = run.view.pages.split_off(keep);
        let mut pages = 0;
        for page in hashes.iter().filter(|page| **page != PageHash::NONE) {
            self.pages.remove(&(scope, *page));
            pages += 1;
        }
        if whole {
            let parent = self.runs.remove(&id).and_then(|run| run.view.parent);
            if let Some(parent) = parent.and_then(|(parent, _)| self.runs.get_mut(&parent)) {
                parent.children.remove(&id);
            }
        }
        Some(Removed { run: id, scope, pages, hashes, whole, extents: join(extents) })
    }

    fn remove(&mut self, scope: ScopeSlot, page: PageHash) -> Vec<Removed> {
        let Some(&(id, at)) = self.pages.get(&(scope, page)) else { return Vec::new() };
        let Some(run) = self.runs.get_mut(&id) else { return Vec::new() };
        if run.view.chained {
            return self.truncate(id, at);
        }
        if run.view.pages.iter().filter(|page| **page != PageHash::NONE).count() == 1 {
            return self.truncate(id, 0);
        }
        run.view.pages[at as usize] = PageHash::NONE;
        let extents = run.view.place.page(at);
        self.pages.remove(&(scope, page));
        vec![Removed { run: id, scope, pages: 1, hashes: vec![page], whole: false, extents }]
    }
}

impl PrefixIndex for MemoryIndex {
    fn insert(&self, new: &NewRun<'_>) -> Result<RunId> {
        let distinct: BTreeSet<_> = new.pages.iter().collect();
        let malformed = new.pages.is_empty()
            || new.pages.len() > usize::from(u16::MAX)
            || distinct.len() < new.pages.len()
            || distinct.contains(&PageHash::NONE);
        let misplaced = !new.place.extents.is_empty()
            && new.place.check(new.pages.len() as u32, u32::MAX).is_err();
        if malformed || misplaced {
            return Err(Error::invalid(
                "the run has no pages or too many, equal hashes, a hash of zeroes, or a place of \
                 another length",
            ));
        }
        let mut state = self.0.lock();
        if new.pages.iter().any(|page| state.pages.contains_key(&(new.scope, *page))) {
            return Err(Error::invalid(
                "a page is in the index already: insert only missing pages",
            ));
        }
        let parent = new.parent.map(|page| state.pages.get(&(new.scope, page)).copied());
        if parent == Some(None) {
            return Err(Error::invalid(
                "the parent is not in the index: insert it first, or leave it out",
            ));
        }
        state.last += 1;
        let run = RunId(state.last);
        for (at, page) in new.pages.iter().enumerate() {
            state.pages.insert((new.scope, *page), (run, at as u32));
        }
        let view = RunView {
            scope: new.scope,
            chained: new.chained,
            parent: None,
            pages: new.pages.to_vec(),
            place: new.place.clone(),
            recency: new.recency,
            retain_until: 0,
        };
        state.runs.insert(run, Run { view, children: BTreeSet::new() });
        if let Some((parent, page)) = parent.flatten().filter(|_| new.chained) {
            state.attach(run, parent, page);
        }
        Ok(run)
    }

    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
        let mut state = self.0.lock();
        let Some(&(child, 0)) = state.pages.get(&(scope, child)) else { return };
        let Some(&(parent, page)) = state.pages.get(&(scope, parent)) else { return };
        let free = |run: &Run| run.view.chained && run.view.parent.is_none();
        if child != parent && state.runs.get(&child).is_some_and(free) {
            state.attach(child, parent, page);
        }
    }

    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed> {
        self.0.lock().truncate(run, keep)
    }

    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        let mut state = self.0.lock();
        (0..pages.len()).flat_map(|at| state.remove(scope, pages.at(at))).collect()
    }

    fn drop_scope(&self, scope: ScopeSlot) -> Vec<Removed> {
        let mut state = self.0.lock();
        let runs = state.runs.iter().filter(|(_, run)| run.view.scope == scope);
        let runs: Vec<RunId> = runs.map(|(id, _)| *id).collect();
        let removed = runs.into_iter().flat_map(|run| state.truncate(run, 0));
        removed.map(Removed::without_hashes).collect()
    }

    fn relocate(&self, id: RunId, place: &Place) -> Option<Removed> {
        let mut state = self.0.lock();
        let run = state.runs.get_mut(&id)?;
        let pages = run.view.pages.len() as u32;
        if !place.extents.is_empty() && place.check(pages, u32::MAX).is_err() {
            return None;
        }
        let mut extents = run.view.place.header();
        extents.extend(run.held(0));
        run.view.place = place.clone();
        let scope = run.view.scope;
        let (hashes, extents) = (Vec::new(), join(extents));
        Some(Removed { run: id, scope, pages: 0, hashes, whole: false, extents })
    }

    fn probe(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        let state = self.0.lock();
        let present = |at: &usize| state.pages.contains_key(&(scope, pages.at(*at)));
        (0..pages.len()).take_while(present).count()
    }

    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<MatchedRun> {
        let state = self.0.lock();
        let mut matched: Vec<MatchedRun> = Vec::new();
        for at in 0..pages.len() {
            let Some(&(run, page)) = state.pages.get(&(scope, pages.at(at))) else { break };
            match matched.last_mut() {
                Some(last) if last.run == run && last.first + last.pages == page => last.pages += 1,
                _ => matched.push(MatchedRun { run, first: page, pages: 1, at: at as u32 }),
            }
        }
        matched
    }

    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool> {
        let state = self.0.lock();
        (0..pages.len()).map(|at| state.pages.contains_key(&(scope, pages.at(at)))).collect()
    }

    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)> {
        self.0.lock().pages.get(&(scope, page)).copied()
    }

    fn place(&self, run: RunId) -> Option<Place> {
        self.0.lock().runs.get(&run).map(|run| run.view.place.clone())
    }

    fn page(&self, run: RunId, at: u32) -> Option<PageHash> {
        let maps = self.0.lock();
        let page = *maps.runs.get(&run)?.view.pages.get(at as usize)?;
        (page != PageHash::NONE).then_some(page)
    }

    fn run(&self, run: RunId) -> Option<RunView> {
        self.0.lock().runs.get(&run).map(|run| run.view.clone())
    }

    fn parent(&self, run: RunId) -> Option<RunId> {
        let (parent, _) = self.0.lock().runs.get(&run)?.view.parent?;
        Some(parent)
    }

    fn has_children(&self, run: RunId) -> bool {
        self.0.lock().runs.get(&run).is_some_and(|run| !run.children.is_empty())
    }

    fn touch(&self, run: RunId, recency: u64) {
        if let Some(run) = self.0.lock().runs.get_mut(&run) {
            run.view.recency = run.view.recency.max(recency);
        }
    }

    fn retain(&self, runs: &[(RunId, u64)], clock: u64) {
        let mut state = self.0.lock();
        state.clock = state.clock.max(clock);
        for (run, until) in runs {
            if let Some(run) = state.runs.get_mut(run) {
                run.view.retain_until = *until;
            }
        }
    }

    fn clock(&self) -> u64 {
        self.0.lock().clock
    }

    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView)) {
        let runs: Vec<RunId> = self.0.lock().runs.keys().copied().collect();
        for run in runs {
            if let Some(view) = self.run(run) {
                visit(run, view);
            }
        }
    }

    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        sync_data()
    }

    fn stats(&self) -> IndexStats {
        let state = self.0.lock();
        let slot = size_of::<(ScopeSlot, PageHash, RunId, u32)>() + 1;
        let run = size_of::<(RunId, Run)>() + size_of::<Extent>();
        let memory = state.pages.len() * (slot * 8 / 7 + 16) + state.runs.len() * run;
        IndexStats {
            runs: state.runs.len() as u64,
            pages: state.pages.len() as u64,
            memory_bytes: memory as u64,
            ..IndexStats::default()
        }
    }
}
