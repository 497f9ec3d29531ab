//! The objects that hold a prompt's pages, and their names.
//!
//! Pages are packed by their position in the prompt, so all writers put the same pages together. A
//! *group* is a power of two of consecutive pages, at most [`PAGES_MAX`] and as many as fit into an
//! object of [`OBJECT_BYTES`]; each full group is one object. The remaining pages are packed in
//! halves of a group, quarters and so on, largest first. When a prompt grows and a group becomes
//! full, the object of this group repeats the pages that the smaller objects hold.
//!
//! In a scope whose keys do not chain, a page's position says nothing about the pages before it:
//! each page is one object.
//!
//! The name of an object consists of its form, its scope, the hash of the key of its *last* page,
//! which commits to all pages before it in a chained scope, and its number of pages. Writers of the
//! same pages in the same form, and only they, write the same name.

use ritornello_format::{PageHash, ScopeId};
use std::fmt::Write;
use std::ops::Range;

/// Maximum bytes of the pages of an object, before compression. A longer page is an object alone.
pub(super) const OBJECT_BYTES: u64 = 8 << 20;
/// Maximum objects, and maximum bytes of several objects, that one call reads or writes
/// concurrently.
const CONCURRENT_OBJECTS: u64 = 4;
const CONCURRENT_BYTES: u64 = 256 << 20;
/// Maximum pages of an object. The run header of an object has room for the keys of all its pages,
/// of up to 64 bytes each.
pub(super) const PAGES_MAX: u64 = 128;

/// The form of an object, which is part of its name: a reader of one form finds no object of the
/// other form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// With checksums, and without a seal.
    Plain,
    /// With a seal, which proves that a holder of the key wrote the object.
    Sealed,
}

impl Form {
    /// Both forms.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Sealed];

    /// Prefix of the names. Changes with the format of objects, that is, with the version of run
    /// headers and of seals, so that no reader finds an object that it cannot read. Builds from
    /// before the first release used 1 and 2.
    pub(super) const fn root(self) -> &'static str {
        match self {
            Self::Plain => "ritornello/3/",
            Self::Sealed => "ritornello/4/",
        }
    }
}

/// Pages in one scope, by their keys: the leading pages of a prompt if the scope is chained.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The scope.
    pub scope: &'a ScopeId,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Whether each key commits to all pages before it. Otherwise `keys` may be any pages of the
    /// scope.
    pub chained: bool,
    /// The key of each page.
    pub keys: &'a [&'a [u8]],
}

impl Prompt<'_> {
    /// The number of pages of a full object of this prompt.
    pub(super) fn group(&self) -> usize {
        if self.chained { group_pages(self.page_bytes) } else { 1 }
    }

    /// The name of the object that holds the pages of `span`.
    pub(super) fn object_name(&self, form: Form, span: &Range<usize>) -> String {
        name(form, self.scope, self.keys[span.end - 1], span.len())
    }
}

/// Returns the number of pages of a full object in a chained scope with pages of this length. The
/// number is a power of two, and full objects begin at its multiples.
pub(crate) fn group_pages(page_bytes: u64) -> usize {
    let fitting = (OBJECT_BYTES / page_bytes.max(1)).clamp(1, PAGES_MAX);
    1 << fitting.ilog2()
}

/// Returns the number of objects that one call reads or writes concurrently. The number is smaller
/// for longer objects, because all of them are in memory.
pub(super) fn concurrent_objects(page_bytes: u64) -> usize {
    let object_bytes = (page_bytes * group_pages(page_bytes) as u64).max(1);
    (CONCURRENT_BYTES / object_bytes).clamp(1, CONCURRENT_OBJECTS) as usize
}

/// Returns the number of pages in the objects that one call reads or writes concurrently. The pages
/// of a caller that moves this number of pages per step take about as much memory as the objects
/// that its call holds, if these are not compressed.
pub(crate) fn step_pages(page_bytes: u64) -> usize {
    concurrent_objects(page_bytes) * group_pages(page_bytes)
}

/// The page ranges of the objects that hold the first `pages` pages, in order.
pub(super) fn spans(pages: usize, group: usize) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let left = pages - at;
        let size = if left >= group { group } else { 1 << left.checked_ilog2()? };
        at += size;
        Some(at - size..at)
    })
}

/// The name of an object of `pages` pages, of which the last page has the key `last`.
pub(super) fn name(form: Form, scope: &ScopeId, last: &[u8], pages: usize) -> String {
    let root = form.root();
    let mut name = String::with_capacity(root.len() + 72);
    name.push_str(root);
    let hash = PageHash::of(scope, last);
    for byte in scope.0 {
        let _ = write!(name, "{byte:02x}");
    }
    name.push('/');
    for byte in hash.0 {
        let _ = write!(name, "{byte:02x}");
    }
    let _ = write!(name, ".{pages}");
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn object_and_concurrency_limits_hold() {
        assert_eq!(group_pages(192 << 10), 32);
        assert_eq!(group_pages(8 << 20), 1);
        assert_eq!(group_pages(64 << 20), 1);
        assert_eq!(concurrent_objects(4096), 4);
        assert_eq!(concurrent_objects(64 << 20), 4);
        assert_eq!(concurrent_objects(126 << 20), 2);
        assert_eq!(concurrent_objects(512 << 20), 1);
        assert_eq!(group_pages(1), 128);
    }

    proptest! {
        #[test]
        fn spans_cover_each_page_once(pages in 0..700_usize, log in 0..8_u32) {
            let group = 1 << log;
            let all: Vec<_> = spans(pages, group).collect();
            prop_assert_eq!(all.iter().map(Range::len).sum::<usize>(), pages);
            prop_assert!(all.windows(2).all(|two| two[0].end == two[1].start));
            prop_assert!(all.iter().all(|span| span.start % span.len() == 0 && span.len() <= group));
            prop_assert!(all.windows(2).all(|two| two[0].len() == group || two[1].len() < two[0].len()));
        }
    }

    #[test]
    fn different_objects_have_different_names() {
        let names = [
            name(Form::Plain, &ScopeId([1; 16]), &[7; 32], 4),
            name(Form::Sealed, &ScopeId([1; 16]), &[7; 32], 4),
            name(Form::Plain, &ScopeId([2; 16]), &[7; 32], 4),
            name(Form::Plain, &ScopeId([1; 16]), &[8; 32], 4),
            name(Form::Plain, &ScopeId([1; 16]), &[7; 32], 2),
        ];
        let unique: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
        let allowed = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '.' | '-' | '/');
        assert!(names.iter().all(|name| name.len() < 200 && name.chars().all(allowed)));
    }
}
