//! A cache whose disk tier is owned by another process, which is killed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_tiers::cache::Cache;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const VARIABLE: &str = "RITORNELLO_TEST_DISK";
const READY: &str = "the disk has all pages";

/// Waits, without a flush, until the disk tier has all pages. Returns how many of them this process
/// wrote.
fn pages_written_by_cache(cache: &Cache) -> u64 {
    let until = Instant::now() + TTL;
    while tier(cache, "disk").queued_bytes > 0 {
        assert!(Instant::now() < until, "pages were not written to the disk");
        std::thread::sleep(Duration::from_millis(5));
    }
    tier(cache, "disk").written_pages
}

/// Runs as the other process, which owns the disk tier and puts a prompt of eight pages.
#[test]
fn owner_process() {
    let Some(list) = std::env::var_os(VARIABLE) else { return };
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&[&host(&dir, 16), list.to_str().unwrap()]);
    assert_eq!(put(&cache, &keys(1, 0, 8), 0), 8);
    assert_eq!(pages_written_by_cache(&cache), 8);
    println!("{READY}");
    loop {
        std::thread::park();
    }
}

#[test]
fn flush_reports_lost_pages_that_disk_tier_had() {
    let (ours, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let disk = disk(&shared, 64);
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "owner_process", "--nocapture"])
        .env(VARIABLE, &disk)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(owner.stdout.take().unwrap()).lines();
    assert!(said.map_while(Result::ok).any(|line| line.contains(READY)));
    let cache = open(&[&host(&ours, 16), &disk]);
    assert_eq!(put(&cache, &keys(1, 0, 8), 0), 8);
    assert_eq!(
        pages_written_by_cache(&cache),
        0,
        "the owner has written the pages, so the cache must write none"
    );
    owner.kill().unwrap();
    owner.wait().unwrap();
    let error = cache.flush().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Miss, "{error}");
    assert_eq!(put(&cache, &keys(1, 0, 8), 0), 8);
    cache.flush().unwrap();
    cache.close().unwrap();
}
