//! Decisions about the pages of requests, as the owner remembers and explains them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{Scope, ScopeId};
use ritornello_store::{
    Answer, DECISION_KEYS_MAX, Decision, DecisionEstimate, DecisionOutcome,
    EXPLAINED_DECISIONS_MAX, LISTED_DECISIONS_MAX, RequestExplanation, Store,
};

const PAGE: u64 = 64 << 10;

/// Looks up `keys`, and records the decision to load the found pages, or a miss if none is found.
fn decide(store: &Store, id: &str, scope: &Scope, keys: &[Vec<u8>]) -> u32 {
    let found = store.probe(scope, &refs(keys)).unwrap() as u32;
    let outcome = if found > 0 { DecisionOutcome::Loaded } else { DecisionOutcome::Missed };
    let decision = Decision::now(id, scope.id(), outcome).with_pages(&refs(keys));
    store.note_decision(Decision { found, loaded: found, ..decision });
    found
}

fn answers(explained: &RequestExplanation) -> Vec<(Answer, u32)> {
    let spans = explained.requests.iter().flat_map(|request| &request.explanation.spans);
    spans.map(|span| (span.answer, span.pages)).collect()
}

#[test]
fn request_is_explained_by_its_id() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &keys[..4], None);
    assert_eq!(decide(&open.store, "cmpl-1-0-5d41402a", &scope, &keys), 4);
    let declined = Decision {
        found: 4,
        detail: "slow disk".to_owned(),
        estimate: Some(DecisionEstimate { with_load_micros: 9, without_load_micros: 7 }),
        ..Decision::now("cmpl-1-0-5d41402a", scope.id(), DecisionOutcome::Declined)
    };
    open.store.note_decision(declined.clone().with_pages(&refs(&keys)));
    decide(&open.store, "cmpl-10-0-5d41402a", &scope, &keys[..1]);

    let explained = open.store.explain_request("cmpl-1").unwrap();
    let [request] = &explained.requests[..] else { panic!("{explained:?}") };
    assert_eq!((&*request.request, request.scope), ("cmpl-1-0-5d41402a", scope.id()));
    let [newest, oldest] = &request.decisions[..] else { panic!("{request:?}") };
    assert_eq!(*newest, Decision { pages: 6, ..declined });
    assert_eq!((oldest.outcome, oldest.loaded, oldest.pages), (DecisionOutcome::Loaded, 4, 6));
    assert!(newest.unix_millis >= oldest.unix_millis && oldest.unix_millis > 0);
    assert_eq!(answers(&explained), [(Answer::Hit, 4), (Answer::Unknown, 2)]);

    // The explanation shows the pages as they are now, and the decision as it was recorded.
    open.store.delete(&scope, &refs(&keys[2..3])).unwrap();
    let explained = open.store.explain_request("cmpl-1-0").unwrap();
    let expected = [(Answer::Hit, 2), (Answer::Removed, 2), (Answer::Unknown, 2)];
    assert_eq!(answers(&explained), expected);
    assert_eq!(explained.requests[0].decisions[1].found, 4);
    for (id, requests) in [("cmpl", 2), ("cmpl-1-0-5d41402", 0), ("cmpl-2", 0)] {
        let explained = open.store.explain_request(id).unwrap();
        assert_eq!(explained.requests.len(), requests, "{id}");
    }
    let error = open.store.explain_request("").unwrap_err();
    assert!(error.to_string().contains("is empty"), "{error}");
    open.close();
}

#[test]
fn decisions_in_several_scopes_are_explained_separately() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (stored, other, keys) = (chained(PAGE), unchained(PAGE), sequence(1, 3));
    put(&open.store, &stored, &keys, None);
    decide(&open.store, "r", &stored, &keys);
    decide(&open.store, "r", &other, &keys);
    let explained = open.store.explain_request("r").unwrap();
    let scopes: Vec<ScopeId> = explained.requests.iter().map(|request| request.scope).collect();
    assert_eq!(scopes, [other.id(), stored.id()], "the scope of the newest decision must be first");
    assert_eq!(answers(&explained), [(Answer::OtherScope, 3), (Answer::Hit, 3)]);
    // A decision without keys has nothing to explain.
    open.store.note_decision(Decision::now("s", stored.id(), DecisionOutcome::TooShort));
    let explained = open.store.explain_request("s").unwrap();
    assert_eq!((explained.requests.len(), answers(&explained)), (1, vec![]));
    open.close();
}

#[test]
fn listings_are_limited_and_have_no_keys() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, 2));
    for number in 0..LISTED_DECISIONS_MAX + 5 {
        decide(&open.store, &format!("r-{number}"), &scope, &keys);
    }
    let listing = open.store.decisions(usize::MAX).unwrap();
    assert_eq!((listing.decisions.len(), listing.memory.forgotten), (LISTED_DECISIONS_MAX, 0));
    assert!(listing.decisions.iter().all(|decision| decision.keys.is_empty()));
    assert_eq!(listing.decisions[0].request, format!("r-{}", LISTED_DECISIONS_MAX + 4));
    assert_eq!(open.store.decisions(3).unwrap().decisions, listing.decisions[..3]);
    let explained = open.store.explain_request("r").unwrap();
    assert_eq!(explained.requests.len(), EXPLAINED_DECISIONS_MAX);
    let counters = open.store.stats().unwrap().catalog.counters;
    assert_eq!(counters["decisions_missed"], LISTED_DECISIONS_MAX as u64 + 5);
    assert_eq!((counters["decisions_loaded"], counters["dropped_decisions"]), (0, 0));
    open.close();
}

#[test]
fn long_prompt_is_explained_to_its_last_kept_key() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, DECISION_KEYS_MAX + 4));
    let id = "r".repeat(500);
    decide(&open.store, &id, &scope, &keys);
    let explained = open.store.explain_request(&id).unwrap();
    assert_eq!(answers(&explained), [(Answer::Unknown, DECISION_KEYS_MAX as u32)]);
    let decision = &explained.requests[0].decisions[0];
    assert_eq!((decision.request.len(), decision.pages), (128, DECISION_KEYS_MAX as u32 + 4));
    open.close();
}

#[test]
fn next_owner_remembers_no_decision() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path(), 12);
    decide(&first.store, "r", &chained(PAGE), &sequence(1, 2));
    assert_eq!(first.store.decisions(9).unwrap().decisions.len(), 1);
    first.close();
    let next = open(dir.path(), 12);
    let listing = next.store.decisions(9).unwrap();
    assert!(listing.decisions.is_empty() && listing.memory.remembered_seconds < 60);
    next.close();
}
