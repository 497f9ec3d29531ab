//! What a remote has must land on the first tier before a request can have it: in time, and where no
//! other prompt pushes it out.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::Scope;
use ritornello_store::PutOptions;
use ritornello_tiers::cache::{Cache, Found, PrefetchPolicy, Readiness, Wish};
use ritornello_tiers::gate::Choice;
use ritornello_volume::memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::tempdir;

/// Each page of a prompt lies in two objects, and the gate is not asked.
const HALVES: Wish = Wish {
    choice: Choice::Always,
    page_tokens: 16,
    page_bytes: 2 * PAGE as u64,
    computed: 0,
    tokens: 0,
};

fn half(name: &str) -> Arc<Scope> {
    Arc::new(Scope::opaque(name, PAGE as u64, true))
}

fn fill(far: &Path, scopes: &[Arc<Scope>], prompts: &[Vec<Vec<u8>>]) {
    let dir = tempdir().unwrap();
    let cache = open(&[&host(&dir, 64), &remote(far)]);
    for (scope, prompt) in scopes.iter().flat_map(|scope| prompts.iter().map(move |p| (scope, p))) {
        let pages: Vec<Vec<u8>> = prompt.iter().map(|key| page(key)).collect();
        let source = BorrowedPages::new(&refs(&pages));
        let (terms, control) = (PutOptions::default(), Control::default());
        let put = cache.submit_put(Arc::clone(scope), boxed(prompt), 0, &source, terms, control);
        assert_eq!(put.unwrap().wait(Some(TTL)).unwrap().pages, prompt.len());
        cache.flush().unwrap();
    }
    assert_eq!(tier(&cache, "remote").dropped_pages, 0);
}

fn answer(cache: &Cache, scope: &Arc<Scope>, prompt: &[Vec<u8>], wish: &Wish) -> Found {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let found = cache.find(scope, &refs(prompt), TTL, wish).unwrap();
        if found.readiness == Readiness::Ready {
            return found;
        }
        assert!(Instant::now() < until, "no answer");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn prompts_that_would_push_each_other_out_are_not_both_brought_and_one_comes_whole() {
    let far = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left"), half("right")]);
    // Of 32 MiB one prompt takes 14 MB in both objects, less than half: `find` can lease all of it.
    let prompts = [keys(1, 0, 350), keys(2, 0, 350)];
    fill(far.path(), &scopes, &prompts);
    let cache = open(&[&host(&dir, 32), &remote(far.path())]);
    for prompt in &prompts {
        for scope in &scopes {
            cache.find(scope, &refs(prompt), TTL, &HALVES).unwrap();
        }
    }
    let came = |prompt: &[Vec<u8>]| {
        scopes.each_ref().map(|scope| answer(&cache, scope, prompt, &HALVES).local)
    };
    let mut both = [came(&prompts[0]), came(&prompts[1])];
    both.sort_unstable();
    assert_eq!(both, [[0, 0], [350, 350]]);
    let prefetch = cache.stats().unwrap().prefetch;
    assert_eq!((prefetch.completed, prefetch.declined, prefetch.failed), (2, 2, 0));
}

/// How much is left of a prompt that was brought, after `meanwhile`, when four times what the first tier
/// holds was put behind it.
fn left_of_what_was_brought(meanwhile: impl FnOnce(&Cache, &Arc<Scope>, &[&[u8]])) -> usize {
    let far = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left")]);
    let wanted = [keys(1, 0, 400)];
    fill(far.path(), &scopes, &wanted);
    let cache = open(&[&host(&dir, 32), &remote(far.path())]);
    let wish = Wish { page_bytes: 0, ..HALVES };
    cache.find(&scopes[0], &refs(&wanted[0]), TTL, &wish).unwrap();
    until("it is there", || cache.stats().unwrap().prefetch.completed == 1);
    meanwhile(&cache, &scopes[0], &refs(&wanted[0]));
    for number in 2..18 {
        put(&cache, &keys(number, 0, 400), 0);
    }
    let never = Wish { choice: Choice::Never, ..wish };
    answer(&cache, &scopes[0], &wanted[0], &never).local
}

#[test]
fn what_was_brought_stays_until_it_is_asked_for() {
    assert_eq!(left_of_what_was_brought(|_, _, _| {}), 400);
}

#[test]
fn what_was_brought_for_nobody_any_more_makes_room() {
    let left = left_of_what_was_brought(|cache, scope, prompt| {
        assert!(!cache.cancel(scope, prompt).unwrap(), "it is over");
    });
    assert!(left < 400);
}

#[test]
fn what_is_expected_to_take_long_is_waited_for() {
    let far = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left")]);
    let prompt = [keys(1, 0, 50)];
    fill(far.path(), &scopes, &prompt);
    let policy = PrefetchPolicy::parse("timeout(0.05, 0)").unwrap();
    let slow = format!("{} rate=2MB", remote(far.path()));
    let cache = open_with(&[&host(&dir, 64), &slow], policy);
    cache.learn_prefill(0, 640, Duration::from_secs(60));
    let wish = Wish { page_bytes: 0, tokens: 801, ..HALVES };
    let found = answer(&cache, &scopes[0], &prompt[0], &wish);
    assert_eq!((found.load, found.brought), (50, 50));
    assert!(found.decision.unwrap().recompute >= Duration::from_secs(60));
}

#[test]
fn what_is_never_loaded_is_not_brought() {
    let far = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left")]);
    let prompt = [keys(1, 0, 40)];
    fill(far.path(), &scopes, &prompt);
    let cache = open(&[&host(&dir, 64), &remote(far.path())]);
    put(&cache, &keys(2, 0, 40), 0);
    let never = Wish { choice: Choice::Never, ..HALVES };
    let found = cache.find(&scopes[0], &refs(&prompt[0]), TTL, &never).unwrap();
    assert_eq!((found.readiness, found.local, found.load), (Readiness::Ready, 0, 0));
    let here = cache.find(&scope(), &refs(&keys(2, 0, 40)), TTL, &never).unwrap();
    assert_eq!((here.local, here.load), (40, 0));
    assert!(here.leases.is_empty());
    assert_eq!(cache.stats().unwrap().prefetch.started, 0);
}
