//! Remotes that are checked in, made by `examples/make_remote_fixture.rs`: objects of this format
//! are read, with every byte, and objects of an earlier format are not found.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::refs;
use common::remote_fixture::*;
use ritornello_format::{PageHash, RUN_MAGIC, RunHeader};
use ritornello_tiers::remote::{DirectoryBackend, Inventory, Prompt, RejectedObjects, RemoteTier};
use std::fs;
use std::path::{Path, PathBuf};

/// A copy of a fixture.
fn copied(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    copy(&from, dir.path());
    dir
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

fn probe(tier: &RemoteTier, keys: &[Vec<u8>]) -> usize {
    let refs = refs(keys);
    let prompt =
        Prompt { scope: &SCOPE, page_bytes: PAGE_BYTES as u64, chained: true, keys: &refs };
    tier.probe(&prompt, soon()).unwrap()
}

fn get(tier: &RemoteTier, keys: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let refs = refs(keys);
    let prompt =
        Prompt { scope: &SCOPE, page_bytes: PAGE_BYTES as u64, chained: true, keys: &refs };
    let mut out = vec![0; keys.len() * PAGE_BYTES];
    let read = tier.get(&prompt, 0..keys.len(), &mut out, soon()).unwrap();
    out.chunks(PAGE_BYTES).take(read).map(<[u8]>::to_vec).collect()
}

fn inventory(dir: &Path) -> Inventory {
    Inventory::take(&DirectoryBackend::new(dir, "test")).unwrap()
}

#[test]
fn format_1_objects_are_read_with_every_byte() {
    let dir = copied("v1-remotes");
    for (name, is_zstd, is_sealed) in REMOTES {
        let tier = tier(&dir.path().join(name), is_zstd, is_sealed);
        for mut keys in prompts() {
            assert_eq!(probe(&tier, &keys), keys.len(), "{name}");
            let expected: Vec<_> = keys.iter().map(|key| content(key)).collect();
            assert!(get(&tier, &keys) == expected, "WRONG BYTES in {name}");
            // The prompt continues in new objects.
            keys.extend((100..105).map(|at| vec![at; 24]));
            assert_eq!(put(&tier, &keys), keys.len());
            let expected: Vec<_> = keys.iter().map(|key| content(key)).collect();
            assert!(get(&tier, &keys) == expected, "WRONG BYTES in {name}");
        }
        assert_eq!(tier.stats().rejected, RejectedObjects::default(), "{name}");
    }
}

/// This version writes the same bytes as the fixture holds. Compressed objects are not compared,
/// because their bytes depend on the version of zstd.
#[test]
fn plain_and_sealed_objects_match_the_fixture() {
    let (dir, new) = (copied("v1-remotes"), tempfile::tempdir().unwrap());
    make(new.path());
    for (name, _, _) in REMOTES.into_iter().filter(|(_, is_zstd, _)| !is_zstd) {
        let (old, new) = (dir.path().join(name), new.path().join(name));
        let (recorded, made) = (inventory(&old), inventory(&new));
        assert_eq!(recorded.objects.len(), 4, "{name}");
        let names = |of: &Inventory| of.objects.iter().map(|o| o.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&recorded), names(&made), "{name}");
        for object in names(&recorded) {
            let same = fs::read(old.join(&object)).unwrap() == fs::read(new.join(&object)).unwrap();
            assert!(
                same,
                "{object} of {name} changed: see docs/format.md, *How the format changes*"
            );
        }
    }
}

/// An object's name contains its version, so old objects are not found. Renamed to the current
/// version they are misses, because their run header has an older version.
#[test]
fn format_0_objects_are_misses() {
    let dir = copied("v0-remotes");
    for (name, is_zstd, is_sealed) in REMOTES {
        let path = dir.path().join(name);
        let tier = tier(&path, is_zstd, is_sealed);
        let found = inventory(&path);
        assert!(found.objects.is_empty(), "{found:?}");
        let version = if is_sealed { "2" } else { "1" };
        assert_eq!(
            found.others.iter().map(|(of, (n, _))| (of.as_str(), *n)).collect::<Vec<_>>(),
            [(version, 4)]
        );
        for keys in prompts() {
            assert_eq!(probe(&tier, &keys), 0, "{name}");
            assert_eq!(put(&tier, &keys), keys.len());
            assert_eq!(get(&tier, &keys).len(), keys.len());
        }
        let root = path.join("ritornello");
        let now = if is_sealed { "4" } else { "3" };
        fs::remove_dir_all(root.join(now)).unwrap();
        fs::rename(root.join(version), root.join(now)).unwrap();
        let renamed = common::remote_fixture::tier(&path, is_zstd, is_sealed);
        for keys in prompts() {
            assert_eq!(get(&renamed, &keys).len(), 0, "{name}");
        }
    }
    let [_, keys] = prompts();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let hash = PageHash::of(&SCOPE, &keys[0]);
    let object = format!("plain/ritornello/3/{}/{}.1", hex(&SCOPE.0), hex(&hash.0));
    let bytes = fs::read(dir.path().join(object)).unwrap();
    assert!(bytes.starts_with(&RUN_MAGIC));
    let error = RunHeader::decode(&bytes).unwrap_err();
    assert!(error.to_string().contains("version=0, read=1"), "{error}");
}
