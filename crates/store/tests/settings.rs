//! Settings of a scope persist, and a change of the codec outdates earlier references to the scope.
//! Further tests: which clients may end a reservation, and which directories a store accepts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_codec::Codec;
use ritornello_format::{ErrorKind, Scope, ScopeSettings};
use ritornello_medium::{Host, SimDisk};
use ritornello_store::{Catalog, ClientId, Options, ReserveRequest, StoreCore, parse_codec};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

fn codec(codec: Codec) -> ScopeSettings {
    ScopeSettings { codec: Some(codec.number()), ..ScopeSettings::default() }
}

/// Returns a scope whose layout is known, with numbers of this dtype.
fn numbers(dtype: &str) -> Scope {
    Scope {
        dtype: dtype.to_owned(),
        page_tokens: 4,
        layers: (0, 2),
        kv_heads: (0, 1),
        head_dim: 128,
        layout: "page_first".to_owned(),
        ..chained(4096)
    }
}

fn codec_of(open: &Open, scope: &Scope) -> u8 {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    catalog.resolve(scope, false).unwrap().unwrap().codec
}

#[test]
fn codec_change_makes_old_references_stale() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 8);
    let scope = numbers("bfloat16");
    let catalog = open.core.catalog_for(ClientId(7), "client");
    let old = catalog.resolve(&scope, true).unwrap().unwrap();
    assert_eq!(old.codec, Codec::Raw.number());
    open.store.configure(&scope, &codec(Codec::Int8)).unwrap();
    assert_eq!(catalog.probe(old, &[b"12345678"]).unwrap_err().kind(), ErrorKind::Retry);
    assert_eq!(codec_of(&open, &scope), Codec::Int8.number());
    // A change of the quota alone leaves the reference valid.
    let new = catalog.resolve(&scope, false).unwrap().unwrap();
    let quota = ScopeSettings { quota_bytes: Some(1 << 30), ..codec(Codec::Int8) };
    open.store.configure(&scope, &quota).unwrap();
    assert_eq!(catalog.probe(new, &[b"12345678"]).unwrap(), 0);
    open.close();
}

#[test]
fn lossy_codec_needs_a_supported_dtype() {
    let dir = tempfile::tempdir().unwrap();
    let opts = options(dir.path(), 8);
    let open = open_on(Arc::new(Host), &opts).unwrap();
    for lossy in [Codec::Int8, Codec::Int4] {
        let error = open.store.configure(&numbers("float8_e4m3"), &codec(lossy)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("float8_e4m3") && error.to_string().contains("split"));
        open.store.configure(&numbers("float16"), &codec(lossy)).unwrap();
    }
    for lossless in [Codec::Raw, Codec::Split, Codec::Zstd] {
        open.store.configure(&numbers("float8_e4m3"), &codec(lossless)).unwrap();
    }
    let unknown = ScopeSettings { codec: Some(99), ..ScopeSettings::default() };
    let error = open.store.configure(&numbers("float16"), &unknown).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(parse_codec("gzip").unwrap_err().to_string().contains("split"));
    open.close();
}

#[test]
fn default_codec_applies_to_unset_scopes_that_it_supports() {
    let dir = tempfile::tempdir().unwrap();
    let opts = Options { codec: Codec::Int8, ..options(dir.path(), 8) };
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let (known, unknown, own) = (numbers("bfloat16"), numbers("float8_e4m3"), numbers("float16"));
    open.store.configure(&own, &codec(Codec::Split)).unwrap();
    for scope in [&known, &unknown] {
        open.store.configure(scope, &ScopeSettings::default()).unwrap();
    }
    let codecs = [&known, &unknown, &own].map(|scope| codec_of(&open, scope));
    assert_eq!(codecs, [Codec::Int8, Codec::Raw, Codec::Split].map(Codec::number));
    open.close();
    let open = open_on(Arc::new(Host), &options(dir.path(), 8)).unwrap();
    let codecs = [&known, &unknown, &own].map(|scope| codec_of(&open, scope));
    assert_eq!(codecs, [Codec::Raw, Codec::Raw, Codec::Split].map(Codec::number));
    open.close();
}

#[test]
fn settings_survive_power_loss_until_the_drop() {
    let opts = options(Path::new("/store"), 8);
    for seed in 0..16 {
        let disk = SimDisk::new(64 * MIB);
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        let scope = numbers("bfloat16");
        let quota = ScopeSettings { quota_bytes: Some(3 * MIB), ..codec(Codec::Zstd) };
        open.store.configure(&scope, &quota).unwrap();
        let disk = disk.crash(seed);
        open.forget();
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        assert_eq!(codec_of(&open, &scope), Codec::Zstd.number(), "seed {seed}");
        open.store.drop_scope(&scope).unwrap();
        let disk = disk.crash(seed);
        open.forget();
        let open = open_on(Arc::new(disk), &opts).unwrap();
        assert_eq!(open.store.probe(&scope, &[b"12345678"]).unwrap(), 0);
        open.store.configure(&numbers("float16"), &ScopeSettings::default()).unwrap();
        let catalog = open.core.catalog_for(ClientId::LOCAL, "");
        assert_eq!(
            catalog.resolve(&scope, false).unwrap(),
            None,
            "the scope must be dropped: seed {seed}"
        );
        open.close();
    }
}

#[test]
fn client_of_another_name_cannot_end_a_reservation() {
    let dir = tempfile::tempdir().unwrap();
    // The liveness check reports every client as alive.
    let core =
        StoreCore::open(Arc::new(Host), &options(dir.path(), 8), Arc::new(|_| true)).unwrap();
    let scope = chained(4096);
    let (mine, theirs) =
        (core.catalog_for(ClientId(1), "me"), core.catalog_for(ClientId(2), "them"));
    let reference = mine.resolve(&scope, true).unwrap().unwrap();
    let request = ReserveRequest { timeout: Duration::from_secs(5), ..ReserveRequest::default() };
    let reserved = mine.reserve(reference, &[b"12345678"], None, &request).unwrap();
    assert_eq!(reserved.runs.len(), 1);
    assert_eq!(theirs.commit(reserved.id, &[None]).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(theirs.abort(reserved.id).unwrap_err().kind(), ErrorKind::Invalid);
    let reserved_bytes = || core.stats().unwrap().reserved_bytes;
    assert!(reserved_bytes() > 0, "the reservation must remain");
    // After client 1 has left, its reservation is withheld. Only a client of the same name, here
    // "me", or the owner's own process may end it.
    core.client_left(ClientId(1));
    assert_eq!(theirs.abort(reserved.id).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(reserved_bytes() > 0);
    core.catalog_for(ClientId(3), "me").abort(reserved.id).unwrap();
    assert_eq!(reserved_bytes(), 0);
    theirs.abort(reserved.id).unwrap();
    core.close().unwrap();
}

/// A path with symbolic links or dots names the same directory as the path without them.
#[test]
fn alias_of_a_directory_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, link, store) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("s"));
    std::fs::create_dir(&disk).unwrap();
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    let with = |paths: &[&std::path::Path]| ritornello_store::Options {
        paths: paths.iter().map(|path| path.to_path_buf()).collect(),
        ..options(&store, 8)
    };
    let dotted = dir.path().join("b/../a/./");
    for twice in [[&*disk, &*link], [&*disk, &*dotted], [&*link, &*dotted]] {
        let error = open_on(Arc::new(Host), &with(&twice)).map(Open::close).unwrap_err();
        assert!(error.to_string().contains("named twice"), "{error}");
    }
    open_on(Arc::new(Host), &with(&[&disk])).unwrap().close();
    for same in [&disk, &link, &dotted] {
        open_on(Arc::new(Host), &with(&[same])).unwrap().close();
    }
    // The store ignores the paths of the options, and opens with its own paths.
    let others = open_on(Arc::new(Host), &with(&[dir.path()])).unwrap();
    let paths = others.core.stats().unwrap().paths;
    assert!(paths.len() == 1 && paths[0].dir.ends_with('a'), "{paths:?}");
    others.close();
}

#[test]
fn new_store_refuses_foreign_segments() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    let with = |store: &str| ritornello_store::Options {
        paths: vec![disk.clone()],
        ..options(&dir.path().join(store), 8)
    };
    let ours = open_on(Arc::new(Host), &with("ours")).unwrap();
    let (scope, keys) = (chained(4096), sequence(1, 4));
    assert_eq!(put(&ours.store, &scope, &keys, None).pages, 4);
    ours.close();
    let error = open_on(Arc::new(Host), &with("theirs")).map(Open::close).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("a volume of another store"), "{error}");
    let ours = open_on(Arc::new(Host), &with("ours")).unwrap();
    assert_eq!(get(&ours.store, &scope, &keys).pages, 4);
    ours.close();
}

/// A crash during the creation of a store left a half-written reservation log. A store can still be
/// created in this directory.
#[test]
fn half_written_reservation_log_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("RESERVATIONS.new"), b"half").unwrap();
    open(dir.path(), 8).close();
}
