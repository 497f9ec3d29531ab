//! Why pages are hits or misses, as the owner explains it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::explaining::*;
use common::volumes::{SEQUENCES, fill, reopen};
use common::*;
use ritornello_format::{ErrorKind, Scope, ScopeSettings};
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk, TMPFS};
use ritornello_store::admission::AdmissionMode;
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{
    Answer, CapacityChange, Catalog, ClientId, EXPLAINED_KEYS_MAX, Explanation, IndexKind, Options,
    ReserveRequest,
};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: u64 = 64 << 10;

#[test]
fn explain_counts_as_no_lookup() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    assert_eq!(answers(&open, &scope, &keys), only(Answer::Unknown, "not_offered", 6));
    assert!(!explain(&open, &scope, &keys).is_registered);
    assert_eq!(put(&open.store, &scope, &keys[..4], None).pages, 4);
    let expected = [hits(&open, 4), only(Answer::Unknown, "not_offered", 2)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    let explanation = explain(&open, &scope, &keys);
    assert!(explanation.is_registered && explanation.other_scopes.is_empty());
    let counters = open.store.stats().unwrap().catalog.counters;
    assert_eq!((counters["probes"], counters["hit_pages"]), (0, 0));
    assert!(explain(&open, &scope, &[]).spans.is_empty());
    open.close();
}

/// Engines look up a page that is stored as objects of several scopes with one call.
#[test]
fn lookup_of_several_scopes_counts_each_page_once() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scopes, keys) = ([chained(PAGE), unchained(PAGE)], sequence(1, 10));
    let all: Vec<&Scope> = scopes.iter().collect();
    let lookup = || open.store.lease_all(&all, &refs(&keys), Duration::from_secs(60)).unwrap();
    let counts = || {
        let counters = open.store.stats().unwrap().catalog.counters;
        let of = |name: &str| counters[name];
        assert_eq!(of("probed_pages") % 10, 0);
        (of("probes"), of("hit_pages"), of("missed_removed"), of("missed_unregistered"))
    };
    put(&open.store, &scopes[0], &keys, None);
    assert_eq!(lookup().pages, 0, "the second scope is not registered");
    assert_eq!(open.store.probe(&scopes[1], &refs(&keys)).unwrap(), 0);
    assert_eq!(counts(), (2, 0, 0, 20));
    put(&open.store, &scopes[1], &keys, None);
    open.store.delete(&scopes[1], &refs(&keys[4..])).unwrap();
    assert_eq!(lookup().pages, 4);
    assert_eq!(counts(), (3, 4, 6, 20));
    open.close();
}

#[test]
fn hit_names_the_tier_of_the_store() {
    let (scope, keys) = (chained(PAGE), sequence(1, 4));
    let disk = Arc::new(SimDisk::new(64 * MIB));
    let open = open_on(disk, &options(Path::new("/store"), 12)).unwrap();
    put(&open.store, &scope, &keys, None);
    assert_eq!(answers(&open, &scope, &keys), only(Answer::Hit, "disk", 4));
    open.close();
    let shm = Path::new("/dev/shm");
    if !Host.room(shm).is_ok_and(|room| room.kind == TMPFS) {
        println!("skipped: /dev/shm is not a tmpfs");
        return;
    }
    let dir = tempfile::tempdir_in(shm).unwrap();
    let open = common::open(dir.path(), 12);
    put(&open.store, &scope, &keys, None);
    assert_eq!(answers(&open, &scope, &keys), only(Answer::Hit, "host", 4));
    open.close();
}

#[test]
fn only_chained_pages_are_explained_as_behind_missing() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scopes = [(chained(PAGE), Answer::BehindMissing), (unchained(PAGE), Answer::Hit)];
    for (name, (scope, behind)) in (1..).zip(scopes) {
        let keys = sequence(name, 6);
        put(&open.store, &scope, &keys[3..], None);
        let last = if behind == Answer::Hit { hits(&open, 3) } else { only(behind, "", 3) };
        let expected = [only(Answer::Unknown, "not_offered", 3), last].concat();
        assert_eq!(answers(&open, &scope, &keys), expected);
        assert_eq!(get(&open.store, &scope, &keys).ok[3], behind == Answer::Hit);
        put(&open.store, &scope, &keys[..3], None);
        assert_eq!(answers(&open, &scope, &keys), hits(&open, 6));
    }
    open.close();
}

#[test]
fn evicted_pages_have_cause_quota_or_space() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (tenant, scope) = (chained(PAGE), unchained(PAGE));
    let quota = ScopeSettings { quota_bytes: Some(MIB), ..ScopeSettings::default() };
    open.store.configure(&tenant, &quota).unwrap();
    for name in 0..4 {
        assert_eq!(put(&open.store, &tenant, &sequence(name, 8), None).pages, 8);
    }
    // Each quota has its own policy, which is `lru`.
    assert_missed(&open, &tenant, &sequence(0, 8), Answer::Evicted, "quota by lru");
    for name in 0..40 {
        put(&open.store, &scope, &sequence(name, 8), None);
    }
    let evicted =
        (0..40).find(|name| open.store.probe(&scope, &refs(&sequence(*name, 8))).unwrap() < 8);
    // `adaptive`, the default, follows `density` at first.
    let detail = "space by density";
    assert_missed(&open, &scope, &sequence(evicted.unwrap(), 8), Answer::Evicted, detail);
    open.close();
}

#[test]
fn evicted_pages_name_the_policy_of_their_eviction() {
    let dir = tempfile::tempdir().unwrap();
    let scope = chained(PAGE);
    let policies = [PolicyKind::Lru, PolicyKind::Arc, PolicyKind::TwoQ, PolicyKind::S3Fifo];
    for (policy, first) in policies.into_iter().zip((0..).step_by(40)) {
        let opts = Options { eviction: policy, ..options(dir.path(), 12) };
        let open = open_on(Arc::new(Host), &opts).unwrap();
        for name in first..first + 40 {
            put(&open.store, &scope, &sequence(name, 8), None);
        }
        let is_evicted =
            |name: &u64| open.store.probe(&scope, &refs(&sequence(*name, 8))).unwrap() < 8;
        let evicted = (first..first + 40).find(is_evicted).unwrap();
        let detail = format!("space by {}", policy.word());
        assert_missed(&open, &scope, &sequence(evicted, 8), Answer::Evicted, &detail);
        open.close();
    }
}

#[test]
fn page_evicted_for_the_index_has_cause_index() {
    let dir = tempfile::tempdir().unwrap();
    let opts = Options {
        index: Some(IndexKind::Run),
        index_memory: Some(1 << 20),
        background_threads: false,
        ..options(dir.path(), 128)
    };
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let scope = chained(4096);
    let refused = (0..).find(|name| {
        if name % 64 == 63 {
            open.store.flush().unwrap();
        }
        put(&open.store, &scope, &sequence(*name, 1), None).pages == 0
    });
    let refused = refused.unwrap();
    assert_missed(&open, &scope, &sequence(refused, 1), Answer::Refused, "index_memory");
    open.core.run_once();
    let is_stored = |name: &u64| open.store.probe(&scope, &refs(&sequence(*name, 1))).unwrap() == 1;
    let evicted = (0..refused).find(|name| !is_stored(name)).unwrap();
    assert_missed(&open, &scope, &sequence(evicted, 1), Answer::Evicted, "index by density");
    open.close();
}

#[test]
fn deleted_pages_and_pages_after_them_have_cause_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &keys[..4], None);
    put(&open.store, &scope, &keys[4..], Some(&keys[3]));
    assert_eq!(open.store.delete(&scope, &refs(&keys[2..3])).unwrap(), 1);
    let expected = [hits(&open, 2), only(Answer::Removed, "deleted", 4)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    assert_missed(&open, &scope, &keys, Answer::Removed, "deleted");
    let hole = unchained(PAGE);
    put(&open.store, &hole, &keys, None);
    open.store.delete(&hole, &refs(&keys[2..3])).unwrap();
    let expected = [hits(&open, 2), only(Answer::Removed, "deleted", 1), hits(&open, 3)];
    assert_eq!(answers(&open, &hole, &keys), expected.concat());
    // A page that is stored again is a hit.
    put(&open.store, &scope, &keys, None);
    assert_eq!(answers(&open, &scope, &keys), hits(&open, 6));
    open.close();
}

#[test]
fn pages_of_a_dropped_scope_have_cause_scope_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &keys, None);
    open.store.drop_scope(&scope).unwrap();
    assert_missed(&open, &scope, &keys, Answer::Removed, "scope_dropped");
    let explanation = open.store.explain_by_id(scope.id(), &refs(&keys)).unwrap();
    assert!(!explanation.is_registered);
    put(&open.store, &scope, &keys[..2], None);
    let expected = [hits(&open, 2), only(Answer::Removed, "scope_dropped", 4)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    open.store.clear().unwrap();
    assert_eq!(answers(&open, &scope, &keys), only(Answer::Removed, "scope_dropped", 6));
    open.close();
}

#[test]
fn drop_of_the_scope_replaces_an_earlier_cause() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &keys, None);
    open.store.delete(&scope, &refs(&keys[2..])).unwrap();
    put(&open.store, &scope, &keys, None);
    open.store.drop_scope(&scope).unwrap();
    assert_eq!(answers(&open, &scope, &keys), only(Answer::Removed, "scope_dropped", 6));
    // Page 3 is put after the drop, and deleted after the put: the deletion is its miss cause.
    put(&open.store, &scope, &keys[..4], None);
    open.store.delete(&scope, &refs(&keys[3..])).unwrap();
    let removed = |detail, pages| only(Answer::Removed, detail, pages);
    let expected = [hits(&open, 3), removed("deleted", 1), removed("scope_dropped", 2)];
    assert_eq!(answers(&open, &scope, &keys), expected.concat());
    assert_counted(&open, &scope, &keys, Answer::Removed.word());
    assert_counted(&open, &scope, &keys[4..], Answer::Removed.word());
    open.close();
}

#[test]
fn damaged_page_and_pages_after_it_have_cause_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(4096), sequence(1, 4));
    put(&open.store, &scope, &keys, None);
    open.store.flush().unwrap();
    let segment = dir.path().join("segments/seg-000000");
    let file = std::fs::File::options().write(true).open(segment).unwrap();
    // The header of the run takes the first 4 KiB of the segment.
    file.write_at(&[0xA5; 4096], 3 * 4096).unwrap();
    let found = open.core.verify(false, &mut |_, _| {}).unwrap();
    assert_eq!(found.findings.len(), 1, "{found:?}");
    let expected = [hits(&open, 2), only(Answer::Damaged, "verification", 2)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    assert_missed(&open, &scope, &keys, Answer::Damaged, "verification");
    open.close();
}

#[test]
fn pages_of_an_absent_volume_are_absent_until_it_is_forgotten() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    let scope = chained(PAGE);
    let name = (0..SEQUENCES)
        .find(|name| open.store.probe(&scope, &refs(&sequence(*name, 8))).unwrap() == 0);
    let keys = sequence(name.unwrap(), 8);
    let found = answers(&open, &scope, &keys);
    assert_eq!((found.len(), found[0].0), (1, Answer::AbsentVolume), "{found:?}");
    assert!(found[0].1.starts_with("/b: "), "{found:?}");
    assert_counted(&open, &scope, &keys, Answer::AbsentVolume.word());
    // A put of pages that are in absent space is refused, with the pages after them.
    let longer = [&keys[..], &sequence(99, 2)].concat();
    assert_eq!(put(&open.store, &scope, &longer, None).reason, "absent_space");
    let found = answers(&open, &scope, &longer);
    assert_eq!(found[1..], only(Answer::Refused, "absent_space", 2));
    let forget = CapacityChange::ForgetVolume("/b".to_owned());
    open.core.change_capacity(&forget, Duration::ZERO).unwrap();
    assert_missed(&open, &scope, &keys, Answer::Removed, "directory_forgotten");
    open.close();
}

#[test]
fn page_is_not_yet_visible_until_its_put_ends() {
    let disk = Arc::new(SimDisk::new(64 << 20));
    let open = open_beside(disk, &options(Path::new("/store"), 24), Arc::new(|_| true)).unwrap();
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &keys[..2], None);
    let client = open.core.catalog_for(ClientId(1), "one");
    let reference = client.resolve(&scope, false).unwrap().unwrap();
    let request = ReserveRequest { timeout: Duration::from_secs(5), ..ReserveRequest::default() };
    let reserve =
        |keys: &[Vec<u8>]| client.reserve(reference, &refs(keys), None, &request).unwrap();
    let with_rest = |answer| [hits(&open, 2), only(answer, "", 4)].concat();
    let reserved = reserve(&keys);
    assert_eq!(answers(&open, &scope, &keys), with_rest(Answer::NotYetVisible));
    client.abort(reserved.id).unwrap();
    assert_eq!(answers(&open, &scope, &keys), with_rest(Answer::Abandoned));
    put(&open.store, &scope, &keys, None);
    assert_eq!(answers(&open, &scope, &keys), hits(&open, 6));
    // The client writes none of the runs, and commits.
    let unwritten = sequence(3, 2);
    let reserved = reserve(&unwritten);
    assert_eq!(answers(&open, &scope, &unwritten), only(Answer::NotYetVisible, "", 2));
    client.commit(reserved.id, &vec![None; reserved.runs.len()]).unwrap();
    assert_eq!(answers(&open, &scope, &unwritten), only(Answer::Abandoned, "", 2));
    // The client dies during a put of other pages.
    let other = sequence(2, 3);
    reserve(&other);
    assert_eq!(answers(&open, &scope, &other), only(Answer::NotYetVisible, "", 3));
    open.core.client_left(ClientId(1));
    assert_eq!(answers(&open, &scope, &other), only(Answer::Abandoned, "", 3));
    open.close();
}

#[test]
fn page_is_not_yet_visible_while_its_put_waits_for_space() {
    let schedule = Schedule::new();
    let disk = Arc::new(Faulty::new(Arc::new(SimDisk::new(64 * MIB)), schedule.clone()));
    let opts = Options { background_threads: false, ..options(Path::new("/store"), 24) };
    let open = open_on(disk, &opts).unwrap();
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    // The put waits until the segment of its pages is created.
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Open).at("/seg-"));
    std::thread::scope(|threads| {
        let stored = threads.spawn(|| put(&open.store, &scope, &keys, None).pages);
        let until = Instant::now() + Duration::from_secs(30);
        let asked = [&keys[..], &sequence(2, 1)].concat();
        let expected =
            [only(Answer::NotYetVisible, "", 6), only(Answer::Unknown, "not_offered", 1)].concat();
        let mut found = Vec::new();
        while found != expected && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
            found = answers(&open, &scope, &asked);
        }
        assert!(!stored.is_finished(), "the put must wait");
        schedule.heal();
        assert_eq!(found, expected);
        assert_eq!(stored.join().unwrap(), 6);
    });
    assert_eq!(answers(&open, &scope, &keys), hits(&open, 6));
    open.close();
}

#[test]
fn page_is_not_yet_visible_while_its_commit_waits_for_a_sync() {
    const PUTS: u64 = 2000;
    let schedule = Schedule::new();
    let disk = Arc::new(Faulty::new(Arc::new(SimDisk::new(256 * MIB)), schedule.clone()));
    let opts = Options {
        index: Some(IndexKind::Run),
        index_memory: Some(1 << 20),
        background_threads: false,
        ..options(Path::new("/store"), 128)
    };
    let open = open_on(disk, &opts).unwrap();
    let scope = chained(4096);
    // About 600 records fill the index's buffer. Then a commit syncs, which stalls.
    schedule.add(Rule::always(MediumFault::Stall).on(Op::SyncData).at("/seg-"));
    let current = AtomicU64::new(0);
    std::thread::scope(|threads| {
        let stored = threads.spawn(|| {
            for name in 0..PUTS {
                current.store(name, Ordering::Relaxed);
                assert_eq!(put(&open.store, &scope, &sequence(name, 1), None).pages, 1);
            }
        });
        let (mut waiting, mut found) = (0, Vec::new());
        while !stored.is_finished() {
            std::thread::sleep(Duration::from_secs(1));
            let name = current.load(Ordering::Relaxed);
            if name == waiting {
                found = answers(&open, &scope, &sequence(name, 1));
                break;
            }
            waiting = name;
        }
        schedule.heal();
        stored.join().unwrap();
        assert!((1..PUTS - 1).contains(&waiting), "no put waited: {waiting}");
        assert_eq!(found, only(Answer::NotYetVisible, "", 1));
    });
    open.close();
}

#[test]
fn pages_whose_write_failed_are_abandoned() {
    let schedule = Schedule::new();
    let disk = Arc::new(Faulty::new(Arc::new(SimDisk::new(64 * MIB)), schedule.clone()));
    let opts = Options { background_threads: false, ..options(Path::new("/store"), 24) };
    let open = open_on(disk, &opts).unwrap();
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &keys[..2], None);
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/seg-"));
    assert_eq!(put(&open.store, &scope, &keys, None).reason, "io");
    let expected = [hits(&open, 2), only(Answer::Abandoned, "", 4)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    assert_missed(&open, &scope, &keys, Answer::Abandoned, "");
    schedule.heal();
    put(&open.store, &scope, &keys, None);
    assert_eq!(answers(&open, &scope, &keys), hits(&open, 6));
    open.close();
}

#[test]
fn run_is_abandoned_if_another_put_stored_a_page_of_it() {
    let disk = Arc::new(SimDisk::new(64 * MIB));
    let open = open_beside(disk, &options(Path::new("/store"), 24), Arc::new(|_| true)).unwrap();
    let (scope, keys) = (unchained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &sequence(2, 1), None);
    let client = open.core.catalog_for(ClientId(1), "one");
    let reference = client.resolve(&scope, false).unwrap().unwrap();
    let request = ReserveRequest { timeout: Duration::from_secs(5), ..ReserveRequest::default() };
    let reserved = client.reserve(reference, &refs(&keys), None, &request).unwrap();
    assert_eq!(reserved.runs.len(), 1);
    assert_eq!(put(&open.store, &scope, &keys[..2], None).pages, 2);
    let committed = client.commit(reserved.id, &[Some(0)]).unwrap();
    assert_eq!((committed.stored, committed.refused), (2, None));
    let expected = [hits(&open, 2), only(Answer::Abandoned, "", 4)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    open.close();
}

#[test]
fn refused_pages_have_the_reason_of_their_put() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scope = chained(PAGE);
    let quota = ScopeSettings { quota_bytes: Some(MIB), ..ScopeSettings::default() };
    open.store.configure(&scope, &quota).unwrap();
    put(&open.store, &scope, &sequence(1, 14), None);
    let ttl = Duration::from_secs(60);
    let lease = open.store.lease(&scope, &refs(&sequence(1, 14)), ttl).unwrap();
    assert_eq!(put(&open.store, &scope, &sequence(2, 8), None).reason, "quota");
    assert_missed(&open, &scope, &sequence(2, 8), Answer::Refused, "quota");
    open.store.release(lease.lease).unwrap();
    // A put that alone exceeds the quota stores its first pages.
    let long = sequence(3, 40);
    let stored = put(&open.store, &scope, &long, None).pages as u32;
    let expected = [hits(&open, stored), only(Answer::Refused, "quota", 40 - stored)].concat();
    assert_eq!(answers(&open, &scope, &long), expected);
    open.close();
    let admission = AdmissionMode::SecondSight;
    let opts = Options { admission, ..options(dir.path(), 12) };
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let keys = sequence(4, 8);
    put(&open.store, &scope, &keys[..6], None);
    assert_eq!(answers(&open, &scope, &keys[..6]), only(Answer::Refused, "admission", 6));
    put(&open.store, &scope, &keys, None);
    let expected = [hits(&open, 6), only(Answer::Refused, "admission", 2)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    open.close();
}

#[test]
fn explanation_names_the_most_similar_scope_with_the_keys() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let keys = sequence(1, 6);
    let stored = Scope { dtype: "bfloat16".into(), salt: b"one".to_vec(), ..chained(PAGE) };
    // This scope also has the keys, but differs in more fields from the scope that is asked about:
    // the explanation must name the scope with fewer differences.
    let farther = Scope { part: 3, kv_scale: "x".into(), ..stored.clone() };
    for scope in [&farther, &stored] {
        assert_eq!(put(&open.store, scope, &keys[..5], None).pages, 5);
    }
    let asked = Scope { dtype: "fp8".into(), ..stored.clone() };
    put(&open.store, &asked, &keys[..1], None);
    let id = stored.id().to_string();
    let expected =
        [hits(&open, 1), only(Answer::OtherScope, &id, 4), only(Answer::Unknown, "not_offered", 1)];
    assert_eq!(answers(&open, &asked, &keys), expected.concat());
    let explanation = explain(&open, &asked, &keys);
    let [other] = &explanation.other_scopes[..] else { panic!("{explanation:?}") };
    assert_eq!((&other.id, other.model.as_str()), (&id, "chained"));
    let fields = |explanation: &Explanation| {
        let differs = explanation.other_scopes[0].differs.as_ref().unwrap().iter();
        differs.map(|d| [&d.field, &d.asked, &d.stored].map(String::clone)).collect::<Vec<_>>()
    };
    assert_eq!(fields(&explanation), [["dtype", "fp8", "bfloat16"].map(str::to_owned)]);
    // An explanation compares a scope that was never registered if the request passes the scope's
    // description, but not if the request passes only the scope's id.
    let unregistered = Scope { salt: b"two".to_vec(), ..stored.clone() };
    let explanation = explain(&open, &unregistered, &keys);
    assert!(!explanation.is_registered);
    assert_eq!(fields(&explanation), [["salt", "hidden", "hidden"].map(str::to_owned)]);
    let by_id = open.store.explain_by_id(unregistered.id(), &refs(&keys)).unwrap();
    assert!(by_id.other_scopes.iter().all(|other| other.differs.is_none()), "{by_id:?}");
    assert_eq!(by_id.spans[0].answer, Answer::OtherScope);
    // The miss cause of a page precedes other scopes that have its key.
    open.store.delete(&asked, &refs(&keys[..1])).unwrap();
    assert_eq!(answers(&open, &asked, &keys)[0], only(Answer::Removed, "deleted", 1)[0]);
    open.close();
}

#[test]
fn restart_forgets_causes_and_resets_remembered_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let (scope, keys) = (chained(PAGE), sequence(1, 4));
    put(&open.store, &scope, &keys, None);
    open.store.delete(&scope, &refs(&keys[2..])).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert!(explain(&open, &scope, &keys).remembered_seconds >= 1);
    assert!(explain(&open, &scope, &keys).spans[1].seconds_ago >= Some(1));
    open.close();
    let opened = Instant::now();
    let open = common::open(dir.path(), 12);
    let expected = [hits(&open, 2), only(Answer::Unknown, "not_offered", 2)].concat();
    assert_eq!(answers(&open, &scope, &keys), expected);
    assert_counted(&open, &scope, &keys, Answer::Unknown.word());
    assert!(explain(&open, &scope, &keys).remembered_seconds <= opened.elapsed().as_secs());
    open.close();
}

#[test]
fn too_many_and_malformed_keys_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scope = chained(PAGE);
    let most = sequence(1, EXPLAINED_KEYS_MAX);
    assert_eq!(
        answers(&open, &scope, &most),
        only(Answer::Unknown, "not_offered", most.len() as u32)
    );
    for keys in [sequence(1, EXPLAINED_KEYS_MAX + 1), vec![vec![0; 7]]] {
        let error = open.store.explain(&scope, &refs(&keys)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    open.close();
}

/// `cargo test -p ritornello-store --test explain -- --ignored --nocapture`
#[test]
#[ignore = "long: a measurement, which prints its figures"]
fn explanation_time_of_256_keys() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 256);
    for number in 0..512 {
        let scope = Scope { salt: vec![number as u8, (number >> 8) as u8], ..chained(4096) };
        put(&open.store, &scope, &sequence(number, 2), None);
    }
    let scope = chained(4096);
    put(&open.store, &scope, &sequence(5000, 256), None);
    for (what, keys) in [("hits", sequence(5000, 256)), ("unknown", sequence(9999, 256))] {
        let mut took: Vec<Duration> = (0..200)
            .map(|_| {
                let started = Instant::now();
                explain(&open, &scope, &keys);
                started.elapsed()
            })
            .collect();
        took.sort_unstable();
        println!("256 keys, {what}: median {:?}, longest {:?}", took[100], took[199]);
    }
    open.close();
}
