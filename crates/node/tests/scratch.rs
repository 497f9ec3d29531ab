mod common;
use common::*;
use ritornello_node::*;
use std::sync::Arc;
fn own_command(_: &Arc<Node>, _: &str) -> String { String::new() }
#[test]
fn helper() { serve_as_helper(); }
#[test]
fn fill() {
    let dir = tempfile::tempdir().unwrap();
    let node = if std::env::var_os("AS_CLIENT").is_some() { let h = Helper::opened(dir.path()); std::mem::forget(h); open(&options(dir.path())).unwrap() } else { open(&options(dir.path())).unwrap() };
    let mut bad = 0;
    for name in 0..3000 {
        let o = put(node.store(), name, 30).unwrap();
        if o.pages < 30 { bad += 1; if bad < 4 || bad % 500 == 0 { let s = node.store().stats().unwrap().catalog; println!("{name}: {} {:?} used {} free {} limbo {} deferred {} reserved {} quar {} leases {} res {} runs {} {:?}", o.pages, o.reason, s.used_bytes, s.free_bytes, s.limbo_bytes, s.deferred_bytes, s.reserved_bytes, s.quarantined_bytes, s.leases, s.reservations, s.runs, s.free_extents); } }
        if name % 1 == 0 { node.store().flush().unwrap(); }
    }
    println!("bad {bad}");
}
