//! Writes remotes of the current format, as directories, for `tests/remote_fixtures.rs` to read for
//! as long as that format is readable. The argument names the directory to create (default:
//! `remotes`); the command fails if this directory exists. In the root of the repository:
//!
//! ```text
//! cargo run -p ritornello-tiers --example make_remote_fixture -- tests/fixtures/v1-remotes
//! ```

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

#[path = "../tests/common/mod.rs"]
mod common;

fn main() {
    let out = std::env::args().nth(1).unwrap_or_else(|| "remotes".to_owned());
    std::fs::create_dir(&out).unwrap();
    common::remote_fixture::make(out.as_ref());
    println!("{out}");
}
