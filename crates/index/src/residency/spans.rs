//! The sets of holders of a run's pages, as spans of pages with the same set.

use super::sets::{EMPTY, SetId};
use std::ops::Range;

/// Spans over the pages of a run. The length of the run is stored in the run only. A run with a
/// single set needs no memory on the heap.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// The set of the pages before the first span of `rest`.
    first: SetId,
    /// The starts and sets of further spans, in order. Neighbouring spans have different sets.
    rest: Vec<Span>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    start: u16,
    set: SetId,
}

impl Spans {
    pub(super) const BYTES: usize = size_of::<Span>();

    pub(super) fn capacity(&self) -> usize {
        self.rest.capacity()
    }

    /// The span of a page: its set, and the first page after the span, `u16::MAX` for the last
    /// span.
    #[inline]
    pub(super) fn at(&self, page: u16) -> (SetId, u16) {
        let next = self.rest.partition_point(|span| span.start <= page);
        let set = next.checked_sub(1).map_or(self.first, |before| self.rest[before].set);
        (set, self.rest.get(next).map_or(u16::MAX, |span| span.start))
    }

    /// The spans of a run of `length` pages.
    pub(super) fn all(&self, length: u16) -> impl Iterator<Item = (Range<u16>, SetId)> + '_ {
        let ends = self.rest.iter().map(|span| span.start).chain([length]);
        let first = std::iter::once(Span { start: 0, set: self.first });
        let spans = first.chain(self.rest.iter().copied());
        spans.zip(ends).map(|(span, end)| (span.start..end, span.set))
    }

    /// Appends new pages, which start at `start` and have the set `set`.
    pub(super) fn extend(&mut self, start: u16, set: SetId) {
        if start == 0 {
            *self = Self { first: set, rest: Vec::new() };
        } else if self.at(start).0 != set {
            if self.rest.len() == self.rest.capacity() {
                self.rest.reserve_exact(1 + self.rest.len() / 2);
            }
            self.rest.push(Span { start, set });
        }
    }

    /// Removes all pages after the first `length` pages.
    pub(super) fn truncate(&mut self, length: u16) {
        let kept = self.rest.partition_point(|span| span.start < length);
        self.rest.truncate(kept);
    }

    /// Replaces the sets of the pages in `range` of a run of `length` pages. For each span in
    /// `range`, `change` gets the set and the number of pages of the span that are in `range`, and
    /// returns the new set.
    pub(super) fn change(
        &mut self,
        range: Range<u16>,
        length: u16,
        mut change: impl FnMut(SetId, u64) -> SetId,
    ) {
        if self.rest.is_empty() && range == (0..length) {
            self.first = change(self.first, length.into());
            return;
        }
        let old = std::mem::take(self);
        let mut add = |start, set| self.extend(start, set);
        for (span, set) in old.all(length) {
            let (from, to) = (span.start.max(range.start), span.end.min(range.end));
            if from >= to {
                add(span.start, set);
                continue;
            }
            if span.start < from {
                add(span.start, set);
            }
            add(from, change(set, u64::from(to - from)));
            if to < span.end {
                add(to, set);
            }
        }
    }

    /// Removes the pages whose set is [`EMPTY`].
    pub(super) fn compact(&mut self, length: u16) {
        let old = std::mem::take(self);
        let mut next = 0;
        for (span, set) in old.all(length).filter(|(_, set)| *set != EMPTY) {
            self.extend(next, set);
            next += span.end - span.start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(spans: &Spans, length: u16) -> Vec<SetId> {
        spans.all(length).flat_map(|(span, set)| span.map(move |_| set)).collect()
    }

    proptest! {
        #[test]
        fn spans_match_a_plain_list_of_sets(
            ops in prop::collection::vec((0u16..40, 1u16..40, 0u32..3, 0u8..8), 1..60),
        ) {
            let (mut spans, mut model) = (Spans::default(), Vec::new());
            for (start, count, set, kind) in ops {
                let length = model.len() as u16;
                let range = start.min(length)..(start + count).min(length);
                match kind {
                    0 => {
                        spans.truncate(range.end.max(1).min(length));
                        model.truncate(range.end.max(1).into());
                    }
                    1 => {
                        spans.compact(length);
                        model.retain(|set| *set != EMPTY);
                    }
                    2..4 => {
                        spans.extend(length, set);
                        model.resize(model.len() + usize::from(count), set);
                    }
                    _ => {
                        let mut changed = 0;
                        spans.change(range.clone(), length, |old, pages| {
                            changed += pages;
                            (old + set) % 3
                        });
                        prop_assert_eq!(changed, range.len() as u64);
                        for page in range {
                            let page = usize::from(page);
                            model[page] = (model[page] + set) % 3;
                        }
                    }
                }
                prop_assert_eq!(list(&spans, model.len() as u16), model.clone());
                for (page, set) in (0..).zip(&model) {
                    prop_assert_eq!(spans.at(page).0, *set);
                }
                prop_assert!(spans.rest.windows(2).all(|pair| pair[0].set != pair[1].set));
            }
        }
    }
}
