//! Column families, their keys and small values. Numbers are big-endian, so that keys sort by their
//! numbers, and the keys of a run in the family `path` are adjacent.

use crate::RunId;
use ritornello_format::{PageHash, ScopeSlot};

/// The column families. `default` holds the [`Counts`](super::record::Counts).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// `scope | run | page` → hash. Holes have no entry.
    Path,
    /// `scope | hash` → run and page.
    Page,
    /// run → [`Record`](super::record::Record).
    Run,
    /// run → [`Use`](super::record::Use).
    Use,
    /// `parent | page | child` → nothing.
    Child,
}

impl Family {
    pub(super) const ALL: [Self; 5] = [Self::Path, Self::Page, Self::Run, Self::Use, Self::Child];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Page => "page",
            Self::Run => "run",
            Self::Use => "use",
            Self::Child => "child",
        }
    }

    pub(super) const fn is_filtered(self) -> bool {
        matches!(self, Self::Page | Self::Run | Self::Use)
    }
}

/// `scope | run | page`: the pages of a run are adjacent, and so are the runs of a sequence that
/// were put in succession.
pub(super) fn path(scope: ScopeSlot, run: RunId, page: u16) -> [u8; 14] {
    let mut key = [0; 14];
    key[..4].copy_from_slice(&scope.0.to_be_bytes());
    key[4..12].copy_from_slice(&run.0.to_be_bytes());
    key[12..].copy_from_slice(&page.to_be_bytes());
    key
}

pub(super) fn read_path(key: &[u8]) -> Option<(ScopeSlot, RunId, u16)> {
    let (scope, rest) = key.split_first_chunk()?;
    let (run, page) = read_page_position(rest)?;
    Some((ScopeSlot(u32::from_be_bytes(*scope)), run, page))
}

/// `scope | hash`.
pub(super) fn page(scope: ScopeSlot, hash: PageHash) -> [u8; 20] {
    let mut key = [0; 20];
    key[..4].copy_from_slice(&scope.0.to_be_bytes());
    key[4..].copy_from_slice(&hash.0);
    key
}

/// `run | page`: the value of an entry of the family `page`.
pub(super) fn page_position(run: RunId, page: u16) -> [u8; 10] {
    let mut value = [0; 10];
    value[..8].copy_from_slice(&run.0.to_be_bytes());
    value[8..].copy_from_slice(&page.to_be_bytes());
    value
}

pub(super) fn read_page_position(value: &[u8]) -> Option<(RunId, u16)> {
    let (run, page) = value.split_first_chunk()?;
    let page = page.try_into().ok()?;
    Some((RunId(u64::from_be_bytes(*run)), u16::from_be_bytes(page)))
}

pub(super) fn run(run: RunId) -> [u8; 8] {
    run.0.to_be_bytes()
}

pub(super) fn read_run(key: &[u8]) -> Option<RunId> {
    Some(RunId(u64::from_be_bytes(key.try_into().ok()?)))
}

/// `parent | page of the parent | child`: the runs attached to a page are adjacent.
pub(super) fn child(parent: RunId, page: u16, child: RunId) -> [u8; 18] {
    let mut key = [0; 18];
    key[..10].copy_from_slice(&page_position(parent, page));
    key[10..].copy_from_slice(&child.0.to_be_bytes());
    key
}

pub(super) fn read_child(key: &[u8]) -> Option<(RunId, RunId)> {
    let (page_position, child) = key.split_first_chunk::<10>()?;
    Some((read_page_position(page_position)?.0, read_run(child)?))
}

pub(super) fn read_hash(value: &[u8]) -> Option<PageHash> {
    value.try_into().ok().map(PageHash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_by_their_numbers_and_decode() {
        let paths = [(0, 1, 300), (0, 256, 0), (0, 256, 1), (1, 2, 65_535), (1, 3, 0), (256, 1, 9)];
        let keys: Vec<_> = paths
            .iter()
            .map(|&(scope, run, page)| path(ScopeSlot(scope), RunId(run), page))
            .collect();
        assert!(keys.is_sorted());
        for (key, (scope, run, page)) in keys.iter().zip(paths) {
            assert_eq!(read_path(key), Some((ScopeSlot(scope), RunId(run), page)));
            assert_eq!(read_path(&key[1..]), None);
        }
        let edges = [(1, 2, 9), (1, 2, 256), (1, 256, 3), (2, 0, 1)];
        let edges = edges.map(|(parent, page, run)| child(RunId(parent), page, RunId(run)));
        assert!(edges.is_sorted());
        assert_eq!(read_child(&edges[1]), Some((RunId(1), RunId(256))));
    }
}
