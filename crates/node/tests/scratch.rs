//! scratch
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
mod common;
use common::*;
use ritornello_node::*;
use std::sync::Arc;
fn own_command(node: &Arc<Node>, _: &str) -> String {
    for t in 0..3u64 { let node = node.clone(); std::thread::spawn(move || { for n in 0.. { let name = t*1_000_000+n; let o = put(node.store(), name, 12).unwrap(); if o.pages == 12 { node.store().flush().unwrap(); say(name); } } }); }
    std::thread::sleep(std::time::Duration::from_millis(600));
    let s = node.store().stats().unwrap().catalog;
    say(format!("S evicted {} segs {} abandoned {} refused {}", s.counters["pages_evicted"], s.segments, s.counters["runs_abandoned"], s.counters["pages_refused"]));
    loop { std::thread::park() }
}
#[test]
fn helper() { serve_as_helper(); }
#[test]
fn local_kill() {
    for _ in 0..10 {
    let dir = tempfile::tempdir().unwrap();
    let mut h = Helper::opened(dir.path());
    h.tell("go");
    let mut names = vec![];
    loop { let l = h.listen(); if l.starts_with('S') { println!("{l}"); break } names.push(l.parse::<u64>().unwrap()) }
    for l in h.kill() { if let Ok(n) = l.parse() { names.push(n) } }
    let node = open(&options(dir.path())).unwrap();
    names.sort();
    let lost: Vec<_> = names.iter().filter(|n| get(node.store(), **n, 12).unwrap() != 12).collect();
    println!("{} flushed, lost {} {:?}", names.len(), lost.len(), &lost[..lost.len().min(10)]);
    }
}
