//! Measures how long a probe of 256 keys of 32 bytes takes: a client's probe through the socket,
//! and a probe in the owner's process.
//!
//! ```sh
//! cargo run --release -p ritornello-node --example socket_probe
//! ```

use ritornello_format::{Result, Scope};
use ritornello_node::{Options, Role, open};
use ritornello_store::{PutOptions, Store};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

const KEYS: u64 = 256;
const ROUNDS: usize = 20_000;

fn main() -> Result<()> {
    if let Some(dir) = std::env::args_os().nth(1) {
        let node = open(&Options::new(PathBuf::from(dir)))?;
        assert_eq!(node.role(), Role::Client);
        return report("through the socket", node.store());
    }
    let dir = tempfile::tempdir()?;
    let node = open(&Options {
        capacity: Some(64 << 20),
        segment_bytes: Some(1 << 20),
        ..Options::new(dir.path())
    })?;
    let keys = keys();
    let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
    let page = [7u8; 4096];
    let pages = vec![page.as_slice(); keys.len()];
    let source = BorrowedPages::new(&pages);
    let put = node.store().put_batch(
        &scope(),
        &keys,
        &source,
        &PutOptions::default(),
        &Control::default(),
    )?;
    assert_eq!(put.pages, keys.len());
    report("in the owner", node.store())?;
    let child = Command::new(std::env::current_exe()?).arg(dir.path()).status()?;
    assert!(child.success());
    node.close()
}

fn scope() -> Scope {
    Scope::opaque("socket probe", 4096, true)
}

fn keys() -> Vec<[u8; 32]> {
    let digest = |n: u64| {
        let mut key = [0; 32];
        for (at, byte) in key.iter_mut().enumerate() {
            *byte = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 8 * 8)) as u8;
        }
        key
    };
    (0..KEYS).map(digest).collect()
}

fn report(how: &str, store: &Store) -> Result<()> {
    let keys = keys();
    let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
    let scope = scope();
    let mut micros = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let found = store.probe(&scope, &keys)?;
        micros.push(started.elapsed().as_secs_f64() * 1e6);
        assert_eq!(found, keys.len());
    }
    micros.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| micros[(share * (ROUNDS - 1) as f64) as usize];
    println!("{how}: p50 {:.1} us, p99 {:.1} us, best {:.1} us", at(0.5), at(0.99), at(0.0));
    Ok(())
}
