//! A prompt that owns its keys, for background threads.

use crate::remote::Prompt;
use ritornello_format::{PageHash, Scope, ScopeId};
use std::ops::Range;
use std::sync::Arc;

/// Consecutive pages of a prompt in one scope, starting at its first page unless `parent` is set.
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

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn refs(&self, pages: Range<usize>) -> Vec<&[u8]> {
        self.keys[pages].iter().map(AsRef::as_ref).collect()
    }

    /// Lends the first `end` pages as a prompt of the remote tier.
    pub(super) fn lend<T>(&self, end: usize, run: impl FnOnce(&Prompt<'_>) -> T) -> T {
        let keys = self.refs(0..end);
        run(&Prompt { scope: &self.id, page_bytes: self.page_bytes, keys: &keys })
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

    /// The hash of the last page, which identifies the prompt.
    pub(super) fn name(&self) -> Option<PageHash> {
        self.hashes.last().copied()
    }
}
