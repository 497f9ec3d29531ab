//! The scope registry: the bytes written, the scopes dropped when it is full, and recovery after a
//! crash.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{ErrorKind, Scope, ScopeSlot};
use ritornello_medium::{
    Access, DiskChange, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk, Watch, Watched,
};
use ritornello_store::{Catalog, ClientId, Directory, Options};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum bytes of live scopes in the registry of a small store.
const BYTES_MAX: u64 = 256 << 10;
/// Maximum length of the registry's file.
const FILE_MAX: u64 = 2 * BYTES_MAX + (64 << 10);

/// Counts the bytes written to the registry. At each change of the registry, and at each rename and
/// sync of a directory, records disks as power losses would leave them.
#[derive(Clone, Debug)]
struct Recorder {
    disk: SimDisk,
    written: Arc<AtomicU64>,
    /// Seeds of the power losses at each change.
    seeds: std::ops::Range<u64>,
    crash_states: Arc<parking_lot::Mutex<Vec<SimDisk>>>,
}

impl Recorder {
    fn new(disk: &SimDisk, seeds: std::ops::Range<u64>) -> Self {
        let (written, crash_states) = Default::default();
        Self { disk: disk.clone(), written, seeds, crash_states }
    }

    fn medium(&self) -> Watched {
        Watched::new(Arc::new(self.disk.clone()), Arc::new(self.clone()))
    }
}

impl Watch for Recorder {
    fn after(&self, change: &DiskChange<'_>) {
        match change {
            DiskChange::Rename(..) | DiskChange::SyncDir(_) => {}
            DiskChange::Write(path, _, length) if is_registry(path) => {
                self.written.fetch_add(*length as u64, Ordering::Relaxed);
            }
            DiskChange::SyncData(path) | DiskChange::SetLen(path, _) if is_registry(path) => {}
            _ => return,
        }
        let states = self.seeds.clone().map(|seed| self.disk.crash(seed));
        self.crash_states.lock().extend(states);
    }
}

fn is_registry(path: &Path) -> bool {
    path.to_string_lossy().contains("SCOPES")
}

fn open_with(medium: impl Medium + 'static) -> Open {
    open_on(Arc::new(medium), &options(Path::new("/store"), 16)).unwrap()
}

fn salted(salt: u64) -> Scope {
    Scope::opaque(&format!("salt {salt}"), 300, true)
}

/// Returns a scope whose description has slightly more than `bytes` bytes.
fn long(salt: u64, bytes: usize) -> Scope {
    Scope::opaque(&format!("salt {salt} {}", "x".repeat(bytes)), 300, true)
}

fn register(open: &Open, scope: &Scope) -> ritornello_format::Result<ScopeSlot> {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    Ok(catalog.resolve(scope, true)?.unwrap().slot)
}

fn known(open: &Open, scope: &Scope) -> Option<ScopeSlot> {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    catalog.resolve(scope, false).unwrap().map(|found| found.slot)
}

fn counter(open: &Open, name: &str) -> u64 {
    open.store.stats().unwrap().catalog.counters[name]
}

fn file_bytes(disk: &SimDisk) -> u64 {
    disk.open(Path::new("/store/SCOPES"), Access::default()).unwrap().length().unwrap()
}

/// Returns whether nothing was appended to the registry since its file was last rewritten.
fn is_head(disk: &SimDisk) -> bool {
    let stored = Directory::new(Arc::new(disk.clone()), Path::new("/store")).registry().unwrap();
    stored.unwrap().appended_bytes == 0
}

#[test]
fn registrations_write_less_than_twice_the_file() {
    let recorder = Recorder::new(&SimDisk::new(64 * MIB), 0..0);
    let open = open_with(recorder.medium());
    for salt in 0..1000 {
        register(&open, &salted(salt)).unwrap();
    }
    let first = recorder.written.swap(0, Ordering::Relaxed);
    let length = file_bytes(&recorder.disk);
    assert!(first < 2 * length, "{first} bytes were written for a file of {length}");
    open.close();
    let open = open_with(recorder.medium());
    assert!((0..1000).all(|salt| known(&open, &salted(salt)).is_some()));
    let reopened = recorder.written.swap(0, Ordering::Relaxed);
    assert!(reopened < 2 * length, "{reopened} bytes were written to open a file of {length}");
    open.close();
}

#[test]
fn close_leaves_nothing_appended_to_the_registry() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_with(disk.clone());
    put(&open.store, &salted(0), &sequence(1, 3), None);
    open.close();
    assert!(is_head(&disk), "a close left appended records, which earlier builds cannot read");
    let open = open_with(disk.clone());
    assert_eq!(open.store.probe(&salted(0), &refs(&sequence(1, 3))).unwrap(), 3);
    for salt in 1..4 {
        register(&open, &salted(salt)).unwrap();
    }
    assert!(!is_head(&disk));
    open.close();
    assert!(is_head(&disk));
    let open = open_with(disk);
    assert!(known(&open, &salted(1)).is_some());
    assert_eq!(get(&open.store, &salted(0), &sequence(1, 3)).pages, 3);
    open.close();
}

#[test]
fn full_registry_drops_least_recently_used_empty_scopes() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_with(disk.clone());
    let (full, used, keys) = (long(1000, 4000), long(1001, 4000), sequence(1, 3));
    put(&open.store, &full, &keys, None);
    register(&open, &used).unwrap();
    let mut given = BTreeMap::new();
    for salt in 0..400 {
        let slot = register(&open, &long(salt, 4000)).unwrap();
        assert!(given.insert(slot, salt).is_none(), "two scopes got the same slot");
        assert_eq!(open.store.probe(&used, &refs(&keys)).unwrap(), 0);
        assert!(file_bytes(&disk) <= FILE_MAX, "{}", file_bytes(&disk));
    }
    assert!(given.keys().is_sorted_by_key(|slot| given[slot]));
    assert!(known(&open, &used).is_some(), "a scope used recently must not be dropped");
    assert!(known(&open, &long(0, 4000)).is_none() && known(&open, &long(399, 4000)).is_some());
    assert_eq!(get(&open.store, &full, &keys).pages, 3);
    assert!(counter(&open, "scopes_dropped") > 300);
    open.close();
    let open = open_with(disk);
    assert!(known(&open, &used).is_some() && known(&open, &long(0, 4000)).is_none());
    assert_eq!(get(&open.store, &full, &keys).pages, 3);
    open.close();
}

/// The registry of a large store has space for more scopes than a store may have.
#[test]
fn number_of_scopes_has_a_limit() {
    const SCOPES_MAX: u64 = 65_536;
    let options = options(Path::new("/store"), 256 << 10);
    let open = open_on(Arc::new(SimDisk::new(512 << 30)), &options).unwrap();
    for salt in 0..SCOPES_MAX {
        register(&open, &salted(salt)).unwrap();
    }
    assert_eq!(counter(&open, "scopes_dropped"), 0);
    register(&open, &salted(SCOPES_MAX)).unwrap();
    let dropped = counter(&open, "scopes_dropped");
    assert!((1..=SCOPES_MAX / 64 + 1).contains(&dropped), "{dropped}");
    assert!(known(&open, &salted(0)).is_none() && known(&open, &salted(SCOPES_MAX)).is_some());
    open.forget();
}

/// The index of a store with more than 1,024 scopes is lost. The opening keeps the scopes, which
/// seem to be empty, and an opening for a salvage also keeps them after a put.
#[test]
fn lost_index_of_many_scopes_is_salvaged() {
    const SCOPES: u64 = 1100;
    let disk = SimDisk::new(64 * MIB);
    let options = options(Path::new("/store"), 24);
    let open = open_on(Arc::new(disk.clone()), &options).unwrap();
    let keys = sequence(1, 1);
    for salt in 0..SCOPES {
        assert_eq!(put(&open.store, &salted(salt), &keys, None).pages, 1, "scope {salt}");
    }
    open.close();
    let index = Path::new("/store/index");
    for name in disk.list(index).unwrap() {
        disk.remove(&index.join(name)).unwrap();
    }
    disk.sync_dir(index).unwrap();
    let searched = disk.crash(1);
    let open = open_on(Arc::new(searched.clone()), &options).unwrap();
    let found = open.core.verify(true, &mut |_, _| {}).unwrap();
    assert_eq!((found.pages_salvaged, found.not_salvaged.get("scope")), (SCOPES, None));
    open.close();
    let open = open_on(Arc::new(searched), &options).unwrap();
    for salt in 0..SCOPES {
        assert_eq!(get(&open.store, &salted(salt), &keys).pages, 1, "scope {salt}");
    }
    open.close();

    // The page of another scope overwrites a lost page before the salvage.
    let open = open_on(Arc::new(disk.clone()), &options).unwrap();
    assert_eq!(put(&open.store, &salted(SCOPES), &keys, None).pages, 1);
    open.close();
    let keeping = Options { keep_empty_scopes: true, ..options };
    let open = open_on(Arc::new(disk), &keeping).unwrap();
    let found = open.core.verify(true, &mut |_, _| {}).unwrap();
    assert_eq!((found.pages_salvaged, found.not_salvaged.get("scope")), (SCOPES - 1, None));
    open.close();
}

/// If the registry is full of scopes with pages, a put to a further scope is a miss with a reason.
#[test]
fn full_registry_of_used_scopes_refuses_a_put() {
    let open = open_with(SimDisk::new(64 * MIB));
    let keys = sequence(1, 1);
    let mut scopes = Vec::new();
    let refused = loop {
        let scope = long(scopes.len() as u64, 16_000);
        let outcome = put(&open.store, &scope, &keys, None);
        if outcome.pages == 0 {
            break outcome;
        }
        scopes.push(scope);
    };
    assert_eq!((refused.reason, refused.ok.as_slice()), ("scopes", [false].as_slice()));
    assert!((10..=16).contains(&scopes.len()), "{}", scopes.len());
    assert_eq!((counter(&open, "refused_scopes"), counter(&open, "scopes_dropped")), (1, 0));
    let resolved = register(&open, &salted(1)).map(drop);
    assert!(resolved.is_ok(), "a short scope must fit into the registry");
    for scope in &scopes {
        assert_eq!(get(&open.store, scope, &keys).pages, 1);
    }
    assert_eq!(open.store.delete(&scopes[3], &refs(&keys)).unwrap(), 1);
    assert_eq!(put(&open.store, &long(77, 16_000), &keys, None).pages, 1);
    assert!(known(&open, &scopes[3]).is_none(), "the empty scope must be dropped");
    let error = register(&open, &long(78, 300_000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Miss);
    assert!(error.to_string().contains("shorten it"), "{error}");
    open.close();
}

/// A full registry drops scopes without pages, but neither a scope to which an operator gave
/// settings nor a scope with a reservation.
#[test]
fn scope_with_quota_or_reservation_is_kept() {
    let open = open_with(SimDisk::new(64 * MIB));
    let (limited, written) = (long(1000, 4000), long(1001, 4000));
    let settings = ritornello_format::ScopeSettings {
        quota_bytes: Some(MIB),
        ..ritornello_format::ScopeSettings::default()
    };
    open.store.configure(&limited, &settings).unwrap();
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(&written, true).unwrap().unwrap();
    let keys = sequence(1, 1);
    let request = ritornello_store::ReserveRequest::default();
    let reserved = catalog.reserve(reference, &refs(&keys), None, &request).unwrap();
    assert_eq!(reserved.runs.len(), 1);
    for salt in 0..200 {
        register(&open, &long(salt, 4000)).unwrap();
    }
    assert!(known(&open, &limited).is_some() && known(&open, &written).is_some());
    catalog.abort(reserved.id).unwrap();
    open.close();
}

/// Power is lost at many changes of the registry. Earlier registrations keep their slots, their
/// pages are found, and no two scopes get one slot.
#[test]
fn crash_while_registering_keeps_registrations() {
    let disk = SimDisk::new(64 * MIB);
    let recorder = Recorder::new(&disk, 0..3);
    let open = open_with(recorder.medium());
    let (kept, keys) = (long(1000, 3000), sequence(1, 3));
    put(&open.store, &kept, &keys, None);
    open.store.flush().unwrap();
    let mut slots: BTreeMap<u64, ScopeSlot> = BTreeMap::new();
    let mut checked = 0;
    for salt in 0..150 {
        let before = slots.clone();
        recorder.crash_states.lock().clear();
        if salt % 5 == 4 {
            open.store.drop_scope(&long(salt - 2, 3000)).unwrap();
            slots.remove(&(salt - 2));
        } else {
            slots.insert(salt, register(&open, &long(salt, 3000)).unwrap());
        }
        slots.retain(|salt, _| known(&open, &long(*salt, 3000)).is_some());
        let check = |state: &Open| {
            for (salt, slot) in before.iter().filter(|(salt, _)| slots.contains_key(salt)) {
                assert_eq!(known(state, &long(*salt, 3000)), Some(*slot), "scope {salt}");
            }
            assert_eq!(get(&state.store, &kept, &keys).pages, 3);
            let next = register(state, &salted(1)).unwrap();
            assert!(
                before.values().all(|slot| *slot < next),
                "the slot {next:?} of a new scope is not above the slots of all earlier scopes"
            );
        };
        // To save time, check the recorded disks of only two salts in ten, and of each salt with
        // more than six disks, because the operations on other salts change the file in the same
        // ways.
        if salt % 10 == 4 || salt % 10 == 5 || recorder.crash_states.lock().len() > 6 {
            for state in std::mem::take(&mut *recorder.crash_states.lock()) {
                let state = open_with(state);
                check(&state);
                state.forget();
                checked += 1;
            }
        }
    }
    assert!(counter(&open, "scopes_dropped") > 0 && checked > 200, "{checked}");
    open.close();
}

/// A scope whose registration is lost has no pages, and no other scope gets its pages.
#[test]
fn lost_registry_tail_mixes_no_scopes() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_with(disk.clone());
    let keys = sequence(1, 3);
    let scopes: Vec<Scope> = (0..3).map(salted).collect();
    let mut ends = Vec::new();
    for scope in &scopes {
        put(&open.store, scope, &keys, None);
        ends.push(file_bytes(&disk));
    }
    let last = known(&open, &scopes[2]).unwrap();
    open.store.flush().unwrap();
    for cut in [ends[1] + 1, ends[1] + 20, ends[2] - 1, ends[1]] {
        let disk = disk.crash(1);
        let access = Access { write: true, create: false, direct: false };
        disk.open(Path::new("/store/SCOPES"), access).unwrap().set_len(cut).unwrap();
        let open = open_with(disk.clone());
        assert_eq!(known(&open, &scopes[2]), None);
        for scope in &scopes[..2] {
            assert_eq!(get(&open.store, scope, &keys).pages, 3, "cut at {cut}");
        }
        let other = salted(9);
        let slot = register(&open, &other).unwrap();
        assert!(slot > last || cut == ends[1], "{slot:?} after {last:?}");
        assert_eq!(open.store.probe(&other, &refs(&keys)).unwrap(), 0);
        assert_eq!(put(&open.store, &other, &keys, None).pages, 3);
        assert_eq!(put(&open.store, &scopes[2], &keys, None).pages, 3);
        open.close();
        let open = open_with(disk);
        for scope in scopes.iter().chain([&other]) {
            assert_eq!(get(&open.store, scope, &keys).pages, 3);
        }
        open.close();
    }
    open.close();
}

/// One operation on the registry fails. Acknowledged registrations and drops survive a power loss.
#[test]
fn failed_change_keeps_acknowledged_scopes() {
    for fault in [MediumFault::Io, MediumFault::NoSpace, MediumFault::Short] {
        for (op, at) in [(Op::Write, "SCOPES"), (Op::SyncData, "SCOPES"), (Op::SyncDir, "/store")] {
            for nth in 1..8 {
                let (disk, schedule) = (SimDisk::new(64 * MIB), Schedule::new());
                let open = open_with(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
                schedule.add(Rule::nth(nth, fault).on(op).at(at));
                let mut acknowledged = BTreeMap::new();
                let mut dropped = Vec::new();
                for salt in 0..12 {
                    if let Ok(slot) = register(&open, &salted(salt)) {
                        acknowledged.insert(salt, slot);
                    }
                    if salt % 3 == 2 && acknowledged.remove(&(salt - 1)).is_some() {
                        match open.store.drop_scope(&salted(salt - 1)) {
                            Ok(()) => dropped.push(salt - 1),
                            Err(_) => assert!(known(&open, &salted(salt - 1)).is_some()),
                        }
                    }
                }
                let state = open_with(disk.crash(nth));
                for (salt, slot) in acknowledged {
                    assert_eq!(known(&state, &salted(salt)), Some(slot), "{fault:?} {op:?} {nth}");
                }
                for salt in dropped {
                    assert_eq!(known(&state, &salted(salt)), None, "{fault:?} {op:?} {nth}");
                }
                state.close();
                open.forget();
            }
        }
    }
}
