//! Two machines that share a remote: pages of a different layout are misses, and pages of an
//! equivalent layout are hits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::Scope;
use ritornello_store::PutOptions;
use ritornello_tiers::cache::{Cache, Lookup, LookupOptions, Readiness};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::time::Duration;

const PAGES: usize = 128;

/// Returns the scope of the test's model, with `change` applied.
fn arranged(change: impl FnOnce(&mut Scope)) -> Arc<Scope> {
    let mut scope = Scope {
        dtype: "bfloat16".to_owned(),
        page_tokens: 16,
        layers: (0, 2),
        kv_heads: (0, 2),
        head_dim: 64,
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque("llama", 1, true)
    };
    change(&mut scope);
    Arc::new(scope)
}

fn put_all(cache: &Cache, scope: &Arc<Scope>, keys: &[Vec<u8>]) {
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let pages: Vec<Vec<u8>> = keys.iter().map(|_| vec![0x5a; bytes]).collect();
    let source = BorrowedPages::new(&refs(&pages));
    let control = Control::default();
    let ticket = cache.submit_put_copy(
        Arc::clone(scope),
        boxed(keys),
        0,
        &source,
        PutOptions::default(),
        control,
    );
    let outcome = ticket.unwrap().wait(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(outcome.pages, keys.len());
}

fn find_in(cache: &Cache, scope: &Arc<Scope>, keys: &[Vec<u8>]) -> Lookup {
    let mut answer = None;
    until("the lookup is ready", || {
        let found = cache.lookup(scope, &refs(keys), TTL, &LookupOptions::default()).unwrap();
        let ready = found.readiness == Readiness::Ready;
        answer = Some(found);
        ready
    });
    answer.unwrap()
}

/// Puts pages on one machine under the scope that [`arranged`] returns without a change. Returns
/// the number of pages that another machine finds under `scope`.
fn found_on_another_machine(scope: &Arc<Scope>) -> usize {
    let new = || tempfile::tempdir().unwrap();
    let (one, two, remote_dir) = (new(), new(), new());
    let prompt = keys(1, 0, PAGES);
    {
        let cache = open(&[&host(&one, 64), &remote(remote_dir.path())]);
        put_all(&cache, &arranged(|_| ()), &prompt);
        cache.flush().unwrap();
    }
    let cache = open(&[&host(&two, 64), &remote(remote_dir.path())]);
    let found = find_in(&cache, scope, &prompt);
    release(&cache, &found);
    found.local
}

#[test]
fn pages_of_different_layout_are_misses() {
    assert_eq!(found_on_another_machine(&arranged(|s| s.layout = "page_head".into())), 0);
}

#[test]
fn equivalent_layouts_share_pages() {
    assert_eq!(found_on_another_machine(&arranged(|s| s.layout = "layer_first".into())), PAGES);
    let bytes = arranged(|_| ()).resolved_page_bytes().unwrap();
    assert_eq!(found_on_another_machine(&arranged(|s| s.page_bytes = Some(bytes))), PAGES);
}
