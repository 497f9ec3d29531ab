//! Packs a small store of the current format into a `.tar.gz`, for `tests/fixtures.rs` to open for
//! as long as that format is readable:
//!
//! ```text
//! cargo run -p ritornello-store --example make_fixture -- tests/fixtures/v0.tar.gz
//! ```

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

#[path = "../tests/common/mod.rs"]
mod common;

use common::*;

fn main() {
    let out = std::env::args().nth(1).unwrap_or_else(|| "fixture.tar.gz".to_owned());
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 4);
    let (chained, unchained) = (chained(20_000), unchained(4096));
    let keys = sequence(1, 8);
    put(&open.store, &chained, &keys[..5], None);
    put(&open.store, &chained, &keys[5..], Some(&keys[4]));
    put(&open.store, &unchained, &sequence(2, 4), None);
    open.store.flush().unwrap();
    open.store.delete(&unchained, &refs(&sequence(2, 2)[1..])).unwrap();
    open.close();
    let file = std::fs::File::create(&out).unwrap();
    let packed = flate2::write::GzEncoder::new(file, flate2::Compression::best());
    let mut tar = tar::Builder::new(packed);
    tar.append_dir_all(".", dir.path()).unwrap();
    tar.into_inner().unwrap().finish().unwrap();
    println!("{out}");
}
