//! The bytes of version 1 do not change: each kind of record encodes to the bytes in
//! `tests/golden/1.txt`, and these bytes decode to the record.
//!
//! If a test fails, the change would make stores of this version unreadable, or would make this
//! version write bytes that released builds do not read. `docs/format.md` (*How the format
//! changes*) says what to do instead. A new kind of record gets a new line:
//!
//! ```text
//! RITORNELLO_WRITE_GOLDEN=1 cargo test -p ritornello-format --test golden
//! ```
//!
//! This command appends missing lines, and changes no existing line.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_format::checkpoint::{CheckpointEnd, CheckpointFrame, CheckpointHeader};
use ritornello_format::journal::{
    JournalHeader, JournalRecord, Parsed, Retentions, RunImage, read_frame,
};
use ritornello_format::residency::{Holder, ResidencyHeader, ResidencyRecord, Tier, Tiers, Worker};
use ritornello_format::wire::{Reader, Writer};
use ritornello_format::*;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

/// The recorded bytes of version 1, by the name of the record.
fn recorded() -> BTreeMap<String, Vec<u8>> {
    read(&path())
}

fn read(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.is_empty());
    lines.map(|line| line.split_once(' ').unwrap()).map(|(n, h)| (n.to_owned(), bytes(h))).collect()
}

fn path() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/1.txt")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
        .collect()
}

/// Compares each record in `all` with the recorded bytes of the same name. If
/// `RITORNELLO_WRITE_GOLDEN` is set, appends a line for each name that has no recorded bytes;
/// otherwise such a name fails the test.
fn compare(all: &[(&str, Vec<u8>)]) {
    let recorded = recorded();
    let mut missing = String::new();
    for (name, encoded) in all {
        match recorded.get(*name) {
            Some(golden) => assert_eq!(
                hex(encoded),
                hex(golden),
                "the bytes of `{name}` changed, and version 1 is frozen: see docs/format.md, *How \
                 the format changes*"
            ),
            None => writeln!(missing, "{name} {}", hex(encoded)).unwrap(),
        }
    }
    if missing.is_empty() {
        return;
    }
    assert!(
        std::env::var_os("RITORNELLO_WRITE_GOLDEN").is_some(),
        "no bytes are recorded for these records; run once with RITORNELLO_WRITE_GOLDEN=1 to \
         record them:\n{missing}"
    );
    let mut text = std::fs::read_to_string(path()).unwrap_or_default();
    text.push_str(&missing);
    std::fs::create_dir_all(path().parent().unwrap()).unwrap();
    std::fs::write(path(), text).unwrap();
}

fn manifest() -> Manifest {
    Manifest {
        uuid: *b"0123456789abcdef",
        owner_epoch: 3,
        generations: 5,
        clean: true,
        segment_bytes: 256 << 20,
        capacity: 200 << 30,
        index: "run".into(),
        volumes: vec![
            VolumeRecord { marked: true, ..VolumeRecord::new("segments") },
            VolumeRecord {
                draining: true,
                first_segment: 7,
                marked: true,
                ..VolumeRecord::new("/b")
            },
            VolumeRecord { first_segment: 9, ..VolumeRecord::default() },
        ],
        owner: "host boot".into(),
    }
}

/// The manifest of a store in which a restore left volume 1 out.
fn unsearched() -> Manifest {
    let mut manifest = manifest();
    let volume = &mut manifest.volumes[1];
    (volume.draining, volume.unsearched) = (false, true);
    manifest
}

/// The manifest of a restore that has begun: volume 0 is lost, and volume 1 left out.
fn restoring() -> Manifest {
    let unsearched = unsearched().volumes[1].clone();
    Manifest {
        owner_epoch: 0,
        clean: false,
        volumes: vec![VolumeRecord::default(), unsearched, VolumeRecord::new("segments")],
        ..manifest()
    }
}

fn scope() -> Scope {
    Scope {
        model: "model".into(),
        weights: vec![1, 2, 3],
        adapter: "adapter".into(),
        dtype: "bfloat16".into(),
        kv_scale: "none".into(),
        page_tokens: 16,
        layers: (2, 4),
        kv_heads: (1, 3),
        head_dim: 64,
        hash_algorithm: "sha256".into(),
        salt: b"salt".to_vec(),
        epoch: b"epoch".to_vec(),
        part: 1,
        extra: BTreeMap::from([("a".into(), "b".into()), ("isa".into(), "amx".into())]),
        layout: "layer_first".into(),
        page_bytes: None,
        chained: true,
    }
}

fn registry() -> ScopeRegistry {
    let settings =
        ScopeSettings { codec: Some(1), quota_bytes: Some(1 << 40), retained_bytes: None };
    ScopeRegistry {
        next: 9,
        scopes: BTreeMap::from([
            (ScopeSlot(3), Arc::new(scope())),
            (ScopeSlot(5), Arc::new(Scope::opaque("opaque", 4096, false))),
        ]),
        settings: BTreeMap::from([(ScopeSlot(5), settings)]),
    }
}

fn extents() -> Vec<Extent> {
    let extent = |number, start, units| Extent { segment: SegmentId::new(1, number), start, units };
    vec![extent(0, 8, 9), extent(1, 64, 70)]
}

fn header() -> RunHeader {
    RunHeader {
        store: manifest().uuid,
        scope: scope().id(),
        slot: ScopeSlot(3),
        generation: 5 << 32 | 6,
        page_bytes: 70_001,
        header_units: 1,
        page_units: 18,
        parent: Some(vec![9; 32]),
        extents: extents(),
        extents_total: 2,
        keys: [vec![1; 8], vec![2; 64]].iter().collect(),
        slices_per_page: 2,
        slices: (0..4).map(|n| Slice { bytes: 35_000 + n, codec: n as u8, checksum: 7 }).collect(),
    }
}

fn place() -> Place {
    Place {
        extents: extents(),
        generation: 5 << 32 | 6,
        header_checksum: 0x0123_4567_89ab_cdef,
        header_units: 1,
        page_units: 18,
    }
}

fn image(parent: Option<(u64, u16)>) -> RunImage<'static> {
    RunImage {
        run: 2 << 32 | 1,
        scope: ScopeSlot(3),
        chained: true,
        parent,
        recency: 44,
        place: Cow::Owned(place()),
        pages: Cow::Owned(vec![PageHash([1; 16]), PageHash::NONE]),
    }
}

fn retentions() -> Retentions {
    Retentions { clock: 1_800_000_000, runs: vec![(2 << 32 | 1, 1_900_000_000), (7, 0)] }
}

#[test]
fn whole_files_match_recordings() {
    let marker = VolumeMarker { store: manifest().uuid, volume: 255 };
    let scope_bytes = {
        let mut writer = Writer::new();
        scope().encode(&mut writer);
        writer.into_vec()
    };
    let reserved = ReservationRecord::Reserved { id: 5, client: "c".into(), extents: extents() };
    let records = [reserved, ReservationRecord::Ended { id: 5 }];
    let all = [
        ("manifest", manifest().encode()),
        ("marker", marker.encode()),
        ("registry", registry().encode()),
        ("registration", ScopeRegistry::registration(ScopeSlot(9), &scope())),
        ("removal", ScopeRegistry::removal(&[ScopeSlot(3), ScopeSlot(9)])),
        ("scope", scope_bytes),
        ("scope-id", scope().id().0.to_vec()),
        ("page-hash", PageHash::of(&scope().id(), &[7; 32]).0.to_vec()),
        ("reservations", ReservationRecord::encode_log(&records)),
        ("run-header", header().encode().unwrap().0),
    ];
    compare(&all);
    let golden = recorded();
    assert_eq!(Manifest::decode(&golden["manifest"]).unwrap(), manifest());
    assert_eq!(VolumeMarker::decode(&golden["marker"]).unwrap(), marker);
    assert_eq!(ScopeRegistry::decode(&golden["registry"]).unwrap().registry, registry());
    assert_eq!(Scope::decode(&mut Reader::new(&golden["scope"])).unwrap(), scope());
    assert_eq!(ReservationRecord::decode_log(&golden["reservations"]).unwrap(), records);
    assert_eq!(RunHeader::decode(&golden["run-header"]).unwrap().0, header());
    let log = [&golden["registry"][..], &golden["registration"], &golden["removal"]].concat();
    let stored = ScopeRegistry::decode(&log).unwrap();
    assert!(stored.is_whole);
    assert_eq!(stored.registry.scopes.keys().collect::<Vec<_>>(), [&ScopeSlot(5)]);
}

#[test]
fn manifests_of_unclean_and_restored_stores_match_recordings() {
    let unclean = Manifest { clean: false, ..manifest() };
    let manifests = [
        ("manifest-unsearched", unsearched()),
        ("manifest-unclean", unclean),
        ("manifest-restoring", restoring()),
    ];
    compare(&manifests.each_ref().map(|(name, manifest)| (*name, manifest.encode())));
    let golden = recorded();
    for (name, manifest) in &manifests {
        assert_eq!(&Manifest::decode(&golden[*name]).unwrap(), manifest, "{name}");
        assert_eq!(manifest.is_being_restored(), *name == "manifest-restoring", "{name}");
    }
}

#[test]
fn slice_checksum_matches_recording() {
    let mut sum = SliceChecksum::new(&[7; 32], 5 << 32 | 6, 3);
    sum.update(b"bytes");
    compare(&[("slice-checksum", sum.finish().to_le_bytes().to_vec())]);
}

#[test]
fn index_files_match_recordings() {
    let journal = [
        ("insert", JournalRecord::Insert(image(Some((9, 4))))),
        ("insert-root", JournalRecord::Insert(image(None))),
        ("cut", JournalRecord::Cut(vec![(1, 2), (3, 0)])),
        ("punch", JournalRecord::Punch(vec![(1, 2)])),
        ("link", JournalRecord::Link { child: 1, parent: 2, page: 3 }),
        ("relocate", JournalRecord::Relocate { run: 1, place: Cow::Owned(place()) }),
        ("touch", JournalRecord::Touch(vec![(1, 2), (3, 4)])),
        ("retain", JournalRecord::Retain(retentions())),
    ];
    let mut all = Vec::new();
    for (sequence, (name, record)) in (100..).zip(&journal) {
        let mut writer = Writer::new();
        record.encode(sequence, &mut writer);
        all.push((*name, writer.into_vec()));
    }
    let head = JournalHeader { number: 3, first: 100 };
    let checkpoint = CheckpointHeader { id: 2, journal: 3, first: 100 };
    let end = CheckpointEnd { last: 107, reuse: 2, runs: 1, pages: 1 };
    let frame = |encode: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::new();
        encode(&mut writer);
        writer.into_vec()
    };
    let images = frame(&|writer| {
        image(Some((9, 4))).encode(writer);
        image(None).encode(writer);
    });
    let sequence = |ordinal| checkpoint.sequence(ordinal);
    all.extend([
        ("journal", head.encode()),
        ("checkpoint", checkpoint.encode()),
        ("runs", frame(&|writer| CheckpointFrame::encode_runs(sequence(0), &images, writer))),
        (
            "retained",
            frame(&|writer| CheckpointFrame::encode_retained(sequence(1), &retentions(), writer)),
        ),
        ("end", frame(&|writer| CheckpointFrame::encode_end(sequence(2), &end, writer))),
    ]);
    compare(&all);
    let golden = recorded();
    for (name, record) in &journal {
        let Parsed::Frame(frame) = read_frame(&golden[*name]) else { panic!("{name}") };
        assert_eq!(&JournalRecord::decode(frame.kind, frame.body).unwrap(), record, "{name}");
    }
    assert_eq!(JournalHeader::decode(&golden["journal"]).unwrap(), head);
    assert_eq!(CheckpointHeader::decode(&golden["checkpoint"]).unwrap(), checkpoint);
    let decoded = |name: &str| {
        let Parsed::Frame(frame) = read_frame(&golden[name]) else { panic!("{name}") };
        CheckpointFrame::decode(frame.kind, frame.body).unwrap()
    };
    assert_eq!(decoded("end"), CheckpointFrame::End(end));
    assert_eq!(decoded("retained"), CheckpointFrame::Retained(retentions()));
    let CheckpointFrame::Runs(runs) = decoded("runs") else { panic!() };
    let runs: Vec<_> = runs.map(Result::unwrap).collect();
    assert_eq!(runs, [image(Some((9, 4))), image(None)]);
}

#[test]
fn residency_files_match_recordings() {
    let pages = || Cow::<[_]>::Owned(vec![PageHash([1; 16]), PageHash([2; 16])]);
    let holder = |worker, tiers| Holder { worker: Worker(worker), tiers };
    let some = Tiers::from(Tier::Device).with(Tier::Remote.into());
    let stored = |parent, holders| ResidencyRecord::Stored {
        scope: ScopeSlot(3),
        parent,
        holders: Cow::Owned(holders),
        pages: pages(),
    };
    let holders = vec![holder(1, some), holder(9, Tiers::from(Tier::Host))];
    let records = [
        ("resident", stored(Some(PageHash([3; 16])), holders)),
        ("resident-root", stored(None, vec![holder(1, Tier::Disk.into())])),
        (
            "absent",
            ResidencyRecord::Removed {
                scope: ScopeSlot(3),
                holder: holder(4, Tiers::ALL),
                pages: pages(),
            },
        ),
        ("worker-cleared", ResidencyRecord::ClearedWorker(Worker(5))),
        ("scope-cleared", ResidencyRecord::ClearedScope(ScopeSlot(3))),
        ("copied", ResidencyRecord::Complete),
    ];
    let head = ResidencyHeader { number: 3, first: 99 };
    let mut all = vec![("residency", head.encode())];
    for (sequence, (name, record)) in (99..).zip(&records) {
        let mut writer = Writer::new();
        record.encode(sequence, &mut writer);
        all.push((*name, writer.into_vec()));
    }
    compare(&all);
    let golden = recorded();
    assert_eq!(ResidencyHeader::decode(&golden["residency"]).unwrap(), head);
    for (name, record) in &records {
        let Parsed::Frame(frame) = read_frame(&golden[*name]) else { panic!("{name}") };
        assert_eq!(&ResidencyRecord::decode(frame.kind, frame.body).unwrap(), record, "{name}");
    }
}

/// `0.txt` has files of version 0, as the last build of that version wrote them.
#[test]
fn version_0_is_refused_with_both_versions() {
    let old = read(&path().with_file_name("0.txt"));
    let refused = |what: &str, error: Error| {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let both = format!("this {what} is of format 0, and this Ritornello reads format 1: ");
        assert!(error.to_string().contains(&both), "{error}");
    };
    refused("store", Manifest::decode(&old["manifest"]).unwrap_err());
    refused("volume marker", VolumeMarker::decode(&old["marker"]).unwrap_err());
    refused("scope registry", ScopeRegistry::decode(&old["registry"]).unwrap_err());
    refused("journal", JournalHeader::decode(&old["journal"]).unwrap_err());
    refused("checkpoint", CheckpointHeader::decode(&old["checkpoint"]).unwrap_err());
    refused("residency log", ResidencyHeader::decode(&old["residency"]).unwrap_err());
    // A run header of another version is a miss, because it is found among other bytes.
    let error = RunHeader::decode(&old["run-header"]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Miss);
    assert!(error.to_string().contains("version=0, read=1"), "{error}");
    assert_eq!(RunHeader::store_of(&old["run-header"]), None);
    // A reservation log of version 0 had no header. Its records are not read.
    assert_eq!(ReservationRecord::decode_log(&old["reservations"]).unwrap(), []);
}
