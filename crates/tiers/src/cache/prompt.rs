//! A prompt that owns its keys, for background threads.

use crate::remote::Prompt;
use ritornello_format::{PageHash, Scope, ScopeId};
use std::ops::Range;
use std::sync::Arc;

/// Pages in one scope. If the scope is chained, the pages are consecutive pages of a prompt,
/// starting at its first page unless `parent` is set. In an unchained scope they may be any pages.
#[derive(Clone, Debug)]
pub(super) struct PromptPages {
    pub(super) scope: Arc<Scope>,
    pub(super) id: ScopeId,
    pub(super) page_bytes: u64,
    pub(super) keys: Arc<[Box<[u8]>]>,
    pub(super) hashes: Arc<[PageHash]>,
    /// The key of the page before the first listed page, if the list starts inside a prompt.
    pub(super) parent: Option<Box<[u8]>>,
}

impl PromptPages {
    pub(super) fn new(
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        parent: Option<Box<[u8]>>,
    ) -> ritornello_format::Result<Self> {
        let page_bytes = scope.resolved_page_bytes()?;
        let id = scope.id();
        let hashes = keys.iter().map(|key| PageHash::of(&id, key)).collect();
        Ok(Self { scope, id, page_bytes, keys: keys.into(), hashes, parent })
    }

    /// The pages with these indices, in a scope that is not chained.
    pub(super) fn select(&self, pages: &[usize]) -> Self {
        Self {
            keys: pages.iter().map(|page| self.keys[*page].clone()).collect(),
            hashes: pages.iter().map(|page| self.hashes[*page]).collect(),
            parent: None,
            scope: Arc::clone(&self.scope),
            ..*self
        }
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn refs(&self, pages: Range<usize>) -> Vec<&[u8]> {
        self.keys[pages].iter().map(AsRef::as_ref).collect()
    }

    /// Calls `run` with the first `end` pages, as a [`Prompt`].
    pub(super) fn lend<T>(&self, end: usize, run: impl FnOnce(&Prompt<'_>) -> T) -> T {
        let keys = self.refs(0..end);
        run(&Prompt {
            scope: &self.id,
            page_bytes: self.page_bytes,
            chained: self.scope.chained,
            keys: &keys,
        })
    }

    /// The key of the page before `page`.
    pub(super) fn before(&self, page: usize) -> Option<&[u8]> {
        match page.checked_sub(1) {
            Some(before) => self.keys.get(before).map(AsRef::as_ref),
            None => self.parent.as_deref(),
        }
    }

    pub(super) fn bytes(&self, pages: usize) -> u64 {
        pages as u64 * self.page_bytes
    }

    /// Identifies the pages: see [`name_of`].
    pub(super) fn name(&self) -> Option<PageHash> {
        if self.scope.chained {
            return self.hashes.last().copied();
        }
        name_of(&self.scope, &self.refs(0..self.len()))
    }
}

/// Identifies the pages of a lookup: by the hash of the last page, which commits to all pages
/// before it, or in an unchained scope by the hash of all keys. `None` without keys.
pub(super) fn name_of(scope: &Scope, keys: &[&[u8]]) -> Option<PageHash> {
    let last = keys.last()?;
    if scope.chained {
        return Some(PageHash::of(&scope.id(), last));
    }
    // A key has at most 64 bytes, so one byte holds its length.
    let all: Vec<u8> = keys
        .iter()
        .flat_map(|key| std::iter::once(key.len() as u8).chain(key.iter().copied()))
        .collect();
    Some(PageHash::of(&scope.id(), &all))
}
