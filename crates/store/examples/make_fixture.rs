//! Packs a store and a residency of the current format into a `.tar.gz`. Every build that reads
//! this format must open the fixture (`crates/store/tests/fixtures.rs`). Fails if the output file
//! exists. Usage, in the repository's root:
//!
//! ```text
//! cargo run -p ritornello-store --example make_fixture -- tests/fixtures/v1.tar.gz
//! ```

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

#[path = "../tests/common/mod.rs"]
mod common;

fn main() {
    let out = std::env::args().nth(1).unwrap_or_else(|| "fixture.tar.gz".to_owned());
    let dir = tempfile::tempdir().unwrap();
    common::fixture::make(dir.path());
    let file = std::fs::File::create_new(&out).unwrap();
    let packed = flate2::write::GzEncoder::new(file, flate2::Compression::best());
    let mut tar = tar::Builder::new(packed);
    tar.append_dir_all(".", dir.path()).unwrap();
    tar.into_inner().unwrap().finish().unwrap();
    println!("{out}");
}
