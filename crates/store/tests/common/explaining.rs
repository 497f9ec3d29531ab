//! Asks why pages are misses, and checks the answers and their counts.

use super::*;
use ritornello_store::{Answer, Explanation};
use std::collections::BTreeMap;

pub fn explain(open: &Open, scope: &Scope, keys: &[Vec<u8>]) -> Explanation {
    let explanation = open.store.explain(scope, &refs(keys)).unwrap();
    let mut next = 0;
    for span in &explanation.spans {
        assert_eq!(span.at, next, "spans must cover all keys in order");
        next += span.pages;
    }
    assert_eq!(next as usize, keys.len());
    explanation
}

/// The answer, detail and number of pages of each span.
pub fn answers(open: &Open, scope: &Scope, keys: &[Vec<u8>]) -> Vec<(Answer, String, u32)> {
    let spans = explain(open, scope, keys).spans.into_iter();
    spans.map(|span| (span.answer, span.detail, span.pages)).collect()
}

pub fn only(answer: Answer, detail: &str, pages: u32) -> Vec<(Answer, String, u32)> {
    vec![(answer, detail.to_owned(), pages)]
}

/// A span of hits. The detail names the tier of the store.
pub fn hits(open: &Open, pages: u32) -> Vec<(Answer, String, u32)> {
    let is_mapped = open.store.stats().unwrap().catalog.io.mode == "mapped";
    only(Answer::Hit, if is_mapped { "host" } else { "disk" }, pages)
}

/// Asserts the answer and the detail of the first span that is not a hit, that this span has an
/// age, and that a lookup counts, under this answer or, if the scope is not registered, under
/// `unregistered`, the pages that it does not find.
pub fn assert_missed(open: &Open, scope: &Scope, keys: &[Vec<u8>], answer: Answer, detail: &str) {
    let explanation = explain(open, scope, keys);
    let missed = explanation.spans.iter().find(|span| span.answer != Answer::Hit);
    let missed = missed.unwrap();
    assert_eq!((missed.answer, missed.detail.as_str()), (answer, detail), "{explanation:?}");
    assert!(missed.seconds_ago.is_some_and(|seconds| seconds <= explanation.remembered_seconds));
    let reason = if explanation.is_registered { answer.word() } else { "unregistered" };
    assert_counted(open, scope, keys, reason);
}

/// Asserts that a lookup of `keys` counts, for `reason`, the pages that it does not find, and no
/// page for another reason.
pub fn assert_counted(open: &Open, scope: &Scope, keys: &[Vec<u8>], reason: &str) {
    let counted = || {
        let counters = open.store.stats().unwrap().catalog.counters.into_iter();
        counters.filter(|(name, _)| name.starts_with("missed_")).collect::<BTreeMap<_, _>>()
    };
    let mut expected = counted();
    let found = open.store.probe(scope, &refs(keys)).unwrap();
    *expected.get_mut(&format!("missed_{reason}")).unwrap() += (keys.len() - found) as u64;
    assert_eq!(counted(), expected);
}
