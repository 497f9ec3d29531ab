//! A conversion between the indexes on disk loses no page, even if interrupted. The index `memory`
//! persists nothing, so its conversion keeps no page.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::Host;
use ritornello_store::{IndexKind, Options, convert_index};
use std::fs;
use std::path::Path;
use std::sync::Arc;

const PAGE: u64 = 4096;

fn with(dir: &Path, index: IndexKind) -> Options {
    Options { index: Some(index), ..options(dir, 16) }
}

#[test]
fn memory_index_is_converted_from_but_not_to() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &with(dir.path(), IndexKind::Memory)).unwrap();
    assert_eq!(put(&open.store, &chained(PAGE), &sequence(1, 4), None).pages, 4);
    open.close();
    let open = open_on(Arc::new(Host), &with(dir.path(), IndexKind::Run)).unwrap();
    assert_eq!(open.store.probe(&chained(PAGE), &refs(&sequence(1, 4))).unwrap(), 0);
    assert_eq!(put(&open.store, &chained(PAGE), &sequence(2, 4), None).pages, 4);
    open.close();
    let refused = open_on(Arc::new(Host), &with(dir.path(), IndexKind::Memory)).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("cannot be converted"), "{refused}");
    let open =
        open_on(Arc::new(Host), &Options { index: None, ..options(dir.path(), 16) }).unwrap();
    assert_eq!(open.store.stats().unwrap().catalog.index, "run");
    assert_eq!(open.store.probe(&chained(PAGE), &refs(&sequence(2, 4))).unwrap(), 4);
    open.close();
}

#[test]
fn interrupted_conversion_is_cleaned_up() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &with(dir.path(), IndexKind::Run)).unwrap();
    assert_eq!(put(&open.store, &chained(PAGE), &sequence(1, 4), None).pages, 4);
    open.close();
    let index = dir.path().join("index");
    for name in ["lsm", "lsm.new"] {
        fs::create_dir(index.join(name)).unwrap();
        fs::write(index.join(name).join("000001.sst"), b"half").unwrap();
    }
    let open = open_on(Arc::new(Host), &with(dir.path(), IndexKind::Run)).unwrap();
    assert_eq!(get(&open.store, &chained(PAGE), &sequence(1, 4)).pages, 4);
    assert!(!index.join("lsm").exists() && !index.join("lsm.new").exists());
    open.close();
    let same = convert_index(Arc::new(Host), dir.path(), IndexKind::Run, None, &mut |_, _| ());
    assert_eq!(same.unwrap().runs, 0, "a conversion to the same index must copy no run");
    let none = tempfile::tempdir().unwrap();
    let none = convert_index(Arc::new(Host), none.path(), IndexKind::Run, None, &mut |_, _| ());
    assert_eq!(none.unwrap_err().kind(), ErrorKind::Invalid);
}

#[cfg(not(feature = "lsm"))]
#[test]
fn missing_index_backend_gives_advice() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &with(dir.path(), IndexKind::Run)).unwrap();
    open.close();
    let directory = ritornello_store::Directory::new(Arc::new(Host), dir.path());
    let mut manifest = directory.manifest().unwrap().unwrap();
    manifest.index = "lsm".to_owned();
    directory.write_manifest(&manifest).unwrap();
    let refused = open_on(Arc::new(Host), &options(dir.path(), 16)).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    let message = refused.to_string();
    assert!(
        message.contains("`lsm`") && message.contains("convert-index DIR --to run"),
        "{message}"
    );
}

#[cfg(feature = "lsm")]
mod lsm {
    use super::*;
    use ritornello_format::{PageHash, ScopeSlot};
    use ritornello_index::conformance::{Content, contents, page, place};
    use ritornello_index::{Backend, NewRun, OpenOptions, PrefixIndex, RunIndex, RunOptions};
    use ritornello_store::{Conversion, Directory};
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    use std::time::Duration;

    /// Number of chains. With each chain, [`make`] inserts five runs of the chain, and three runs
    /// in an unchained scope.
    const CHAINS: u64 = 500;
    /// Number of chains of the store whose conversions are killed.
    const FEW: u64 = 100;

    /// Makes a store whose index holds chains, branches, runs linked after their insertion, holes,
    /// and retentions.
    fn make(dir: &Path, chains: u64) -> BTreeMap<u64, Content> {
        open_on(Arc::new(Host), &with(dir, IndexKind::Run)).unwrap().close();
        let index =
            RunIndex::open(Arc::new(Host), &dir.join("index"), RunOptions::default()).unwrap();
        let mut generation = 0;
        let mut insert = |chained, parent, pages: &[PageHash]| {
            generation += 1;
            let place = place(generation, pages.len() as u32);
            let scope = ScopeSlot(u32::from(chained));
            let recency = generation * 3;
            index.insert(&NewRun { scope, chained, parent, pages, place: &place, recency }).unwrap()
        };
        for chain in 0..chains {
            let keys: Vec<PageHash> = (0..32).map(|number| page(chain, number)).collect();
            // Insert pages 16 to 23 first, and link page 16 to page 15 later.
            let late = insert(true, None, &keys[16..24]);
            let first = insert(true, None, &keys[..8]);
            insert(true, Some(keys[7]), &keys[8..16]);
            index.link(ScopeSlot(1), keys[15], keys[16]);
            insert(true, Some(keys[18]), &[page(chain, 100), page(chain, 101)]);
            insert(true, Some(keys[11]), &keys[24..28]);
            for part in 0..3 {
                let loose: Vec<PageHash> =
                    (0..6).map(|n| page(1 << 20 | chain, part * 6 + n)).collect();
                insert(false, None, &loose);
                index.remove(ScopeSlot(0), &[loose[part as usize * 2], loose[5]]);
            }
            match chain % 4 {
                0 => drop(index.truncate(late, 5)),
                1 => index.retain(&[(first, 1000 + chain)], 500 + chain),
                2 => index.touch(first, 1 << 40 | chain),
                _ => drop(index.truncate(first, 4)),
            }
            if chain % 64 == 0 {
                index.sync().unwrap();
            }
        }
        index.sync().unwrap();
        contents(&index)
    }

    fn stored(dir: &Path) -> Backend {
        let manifest = Directory::new(Arc::new(Host), dir).manifest().unwrap().unwrap();
        manifest.index.parse().unwrap()
    }

    /// Returns the index backend that the manifest names, the contents of this index, and its
    /// clock: the latest `clock` that a call of `PrefixIndex::retain` passed.
    fn now(dir: &Path) -> (Backend, BTreeMap<u64, Content>, u64) {
        let backend = stored(dir);
        let index =
            backend.open(Arc::new(Host), &dir.join("index"), &OpenOptions::default()).unwrap();
        (backend, contents(&*index), index.clock())
    }

    fn files(dir: &Path, backend: Backend) -> bool {
        let mut names = fs::read_dir(dir.join("index")).unwrap().flatten().map(|e| e.file_name());
        match backend {
            Backend::Lsm => names.any(|name| name.to_string_lossy().starts_with("lsm")),
            _ => names.any(|name| name.to_string_lossy().contains('-')),
        }
    }

    fn convert(dir: &Path, to: IndexKind) -> Conversion {
        convert_index(Arc::new(Host), dir, to, None, &mut |_, _| ()).unwrap()
    }

    #[test]
    fn conversion_back_and_forth_keeps_all_runs() {
        let dir = tempfile::tempdir().unwrap();
        let expected = make(dir.path(), CHAINS);
        let pages: usize = expected
            .values()
            .map(|run| run.pages.iter().filter(|p| **p != PageHash::NONE).count())
            .sum();
        assert!(expected.len() > 3000 && expected.values().any(|run| run.retain_until > 0));
        for (to, backend, other) in [
            (IndexKind::Lsm, Backend::Lsm, Backend::Run),
            (IndexKind::Run, Backend::Run, Backend::Lsm),
        ] {
            let done = convert(dir.path(), to);
            assert_eq!((done.runs, done.pages), (expected.len() as u64, pages as u64));
            assert_eq!((done.runs_dropped, done.to.as_str()), (0, backend.name()));
            assert!(done.disk_bytes > 0 && done.disk_bytes_before > 0);
            let (found, contents, clock) = now(dir.path());
            assert_eq!(found, backend);
            assert_eq!(contents, expected);
            assert_eq!(clock, 500 + CHAINS - 3);
            assert!(files(dir.path(), backend) && !files(dir.path(), other));
        }
    }

    #[test]
    fn opening_with_a_different_index_converts() {
        let dir = tempfile::tempdir().unwrap();
        let kinds = [IndexKind::Run, IndexKind::Lsm, IndexKind::Run];
        for (at, kind) in (1u64..).zip(kinds) {
            let open = open_on(Arc::new(Host), &with(dir.path(), kind)).unwrap();
            for name in 1..at {
                assert_eq!(get(&open.store, &chained(PAGE), &sequence(name, 9)).pages, 9);
                assert_eq!(get(&open.store, &unchained(PAGE), &sequence(name, 3)).pages, 3);
            }
            assert_eq!(put(&open.store, &chained(PAGE), &sequence(at, 9), None).pages, 9);
            assert_eq!(put(&open.store, &unchained(PAGE), &sequence(at, 3), None).pages, 3);
            assert_eq!(open.store.stats().unwrap().catalog.index, kind.word());
            open.close();
        }
    }

    #[test]
    fn index_too_large_for_memory_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let expected = make(dir.path(), CHAINS);
        convert(dir.path(), IndexKind::Lsm);
        let refused = convert_index(
            Arc::new(Host),
            dir.path(),
            IndexKind::Run,
            Some(512 << 10),
            &mut |_, _| (),
        );
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        assert!(refused.to_string().contains("--to run:"), "{refused}");
        let (backend, contents, _) = now(dir.path());
        assert_eq!((backend, contents), (Backend::Lsm, expected));
        assert!(!files(dir.path(), Backend::Run), "the unfinished index must be removed");
    }

    /// Not a test: the process that [`killed_conversion_keeps_every_run`] kills.
    #[test]
    fn converting_child() {
        let Some(dir) = std::env::var_os("RITORNELLO_TEST_CONVERTED_DIR") else { return };
        let dir = Path::new(&dir);
        let to = if stored(dir) == Backend::Run { IndexKind::Lsm } else { IndexKind::Run };
        println!("\nbegun");
        let mut printed = None;
        convert_index(Arc::new(Host), dir, to, None, &mut |runs, total| {
            let part = Some(4 * runs / total);
            if printed != part {
                printed = part;
                println!("copied {}/4", 4 * runs / total);
            }
        })
        .unwrap();
        println!("done");
    }

    /// Runs [`converting_child`] in a process, and kills it `pause` after it printed `word`.
    fn kill_after(dir: &Path, word: &str, pause: Duration) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "lsm::converting_child", "--nocapture"])
            .env("RITORNELLO_TEST_CONVERTED_DIR", dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == word), "the child never printed {word}");
        std::thread::sleep(pause);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn killed_conversion_keeps_every_run() {
        let dir = tempfile::tempdir().unwrap();
        let expected = make(dir.path(), FEW);
        kill_after(dir.path(), "done", Duration::ZERO);
        assert_eq!(now(dir.path()).0, Backend::Lsm);
        let (mut switched, mut stayed) = (0, 0);
        for point in 0..27u32 {
            let (word, pause) = match point % 9 {
                0 => ("begun", Duration::from_millis(u64::from(point))),
                1 => ("copied 1/4", Duration::ZERO),
                2 => ("copied 3/4", Duration::from_millis(u64::from(point / 9))),
                // Between "copied 4/4" and "done" the child syncs the copy, replaces the manifest
                // and removes the old files.
                tail => {
                    ("copied 4/4", Duration::from_micros(u64::from(point / 9 * 6 + tail) * 1500))
                }
            };
            let before = stored(dir.path());
            kill_after(dir.path(), word, pause);
            let (after, contents, clock) = now(dir.path());
            assert_eq!(contents, expected, "{before} to {after}, killed {pause:?} after {word:?}");
            assert_eq!(clock, 500 + FEW - 3);
            *if before == after { &mut stayed } else { &mut switched } += 1;
            // A conversion to the index in use removes the files of the other index.
            if point % 5 == 4 {
                let (kind, other) = match after {
                    Backend::Run => (IndexKind::Run, Backend::Lsm),
                    _ => (IndexKind::Lsm, Backend::Run),
                };
                convert(dir.path(), kind);
                assert!(
                    !files(dir.path(), other),
                    "files of the index {other} remain; the kill came {pause:?} after {word:?}"
                );
            }
        }
        println!("of 27 killed conversions {stayed} left the old index, {switched} the new index");
        assert!(stayed >= 6, "only {stayed} of 27 killed conversions left the old index");
    }
}
