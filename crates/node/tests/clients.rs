//! A store shared by several processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::{ErrorKind, Scope, ScopeSettings};
use ritornello_node::{Node, Options, Role, open};
use ritornello_store::{
    Answer, CacheCounters, CacheCounts, CacheQueues, LeaseNumber, Leased, PutOptions,
};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    let words: Vec<&str> = command.split(' ').collect();
    match words[..] {
        ["lease-for", millis] => {
            let ttl = Duration::from_millis(millis.parse().unwrap());
            node.store().lease(&scope(), &refs(&keys(1, 10)), ttl).unwrap().pages.to_string()
        }
        // Takes leases until the owner refuses a lease. Answers their number and the error.
        ["hoard"] => {
            let keys = keys(1, 1);
            let lease = || node.store().lease(&scope(), &refs(&keys), Duration::from_secs(600));
            let mut leases = 0;
            loop {
                match lease() {
                    Ok(_) => leases += 1,
                    Err(error) => break format!("{leases} {error}"),
                }
            }
        }
        // Reports that TOKENS tokens were loaded, each of which would have taken 1 ms to compute.
        ["avoid", tokens] => {
            let tokens = tokens.parse().unwrap();
            let prefill = Duration::from_millis(tokens);
            node.store().note_prefill_avoided(tokens, Some(prefill), Duration::from_micros(250));
            "avoided".to_owned()
        }
        // Reports a cache whose counters all have the value COUNT, and which has already ended.
        ["cache", count] => {
            node.report_cache(Arc::new(EqualCounts(count.parse().unwrap())));
            "counted".to_owned()
        }
        // Reports a cache whose queues all have COUNT bytes, until the process ends.
        ["queue", count] => {
            let counters = Arc::new(EqualCounts(count.parse().unwrap()));
            node.report_cache(Arc::clone(&counters) as _);
            std::mem::forget(counters);
            "queued".to_owned()
        }
        // Puts one page into a scope that has the same name as the tests' scope, but twice its page
        // length.
        ["wide"] => {
            let wide = ritornello_format::Scope::opaque("node tests", 2 * PAGE, true);
            let keys = keys(9, 1);
            let bytes = vec![1; 2 * PAGE as usize];
            let pages: [&[u8]; 1] = [&bytes];
            let source = BorrowedPages::new(&pages);
            let (terms, control) = (PutOptions::default(), Control::default());
            match node.store().put_batch(&wide, &refs(&keys), &source, &terms, &control) {
                Ok(outcome) => format!("{outcome:?}"),
                Err(error) => error.to_string(),
            }
        }
        _ => panic!("unknown command: {command}"),
    }
}

#[derive(Debug)]
struct EqualCounts(u64);

impl CacheCounters for EqualCounts {
    fn counts(&self) -> CacheCounts {
        std::array::from_fn(|_| self.0)
    }

    fn queues(&self) -> CacheQueues {
        [self.0; 6]
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// The counts of a client that makes no further calls, and of a client that closes the store, reach
/// the owner.
#[test]
fn owner_counts_puts_and_gets_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("store");
    let node = open(&options(&dir)).unwrap();
    assert_eq!(node.role(), Role::Owner);
    put(node.store(), 1, 5).unwrap();
    let count = |name: &str| node.store().stats().unwrap().catalog.counters[name];
    assert_eq!((count("puts"), count("puts_within_10000000_us"), count("gets")), (1, 1, 0));
    let (mut one, mut other) = (Helper::opened(&dir), Helper::opened(&dir));
    assert_eq!((one.ask("get 1 5"), other.ask("get 1 5")), ("5".to_owned(), "5".to_owned()));
    other.finish();
    let counts = || ["gets", "read_pages", "get_bytes"].map(count);
    eventually("the reports of both clients", || counts() == [2, 10, 10 * PAGE]);
    one.finish();
    assert_eq!(count("gets"), 2);
    node.close().unwrap();
}

/// The number of tokens that a client loaded reaches the owner, also from a client that closes the
/// store.
#[test]
fn owner_counts_avoided_prefill_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("store");
    let node = open(&options(&dir)).unwrap();
    node.store().note_prefill_avoided(10, None, Duration::from_secs(9));
    let count = |name: &str| node.store().stats().unwrap().catalog.counters[name];
    let (mut one, mut other) = (Helper::opened(&dir), Helper::opened(&dir));
    assert_eq!(
        (one.ask("avoid 300"), other.ask("avoid 4000")),
        ("avoided".into(), "avoided".into())
    );
    other.finish();
    let counts = || ["prefill_avoided_tokens", "prefill_untimed_tokens"].map(count);
    eventually("the reports of both clients", || counts() == [4310, 10]);
    assert_eq!((count("prefill_avoided_micros"), count("prefill_load_micros")), (4_300_000, 500));
    one.finish();
    node.close().unwrap();
}

/// The counts of a client's cache reach the owner, also from a client that closes the store.
#[test]
fn owner_counts_caches_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("store");
    let node = open(&options(&dir)).unwrap();
    node.report_cache(Arc::new(EqualCounts(1)));
    let count = |name: &str| node.store().stats().unwrap().catalog.counters[name];
    let (mut one, mut other) = (Helper::opened(&dir), Helper::opened(&dir));
    assert_eq!((one.ask("cache 20"), other.ask("cache 300")), ("counted".into(), "counted".into()));
    other.finish();
    let counts = || ["gate_decisions_all", "remote_breaker_open_micros"].map(count);
    eventually("the reports of both clients", || counts() == [321, 321]);
    assert_eq!((count("remote_calls_exists"), count("prefill_load_micros")), (321, 0));
    one.finish();
    node.close().unwrap();
}

/// The owner knows the present queues of all connected processes; a cache that ended, and a client
/// that left, have none.
#[test]
fn owner_sums_queues_of_connected_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("store");
    let node = open(&options(&dir)).unwrap();
    let own: Arc<dyn CacheCounters> = Arc::new(EqualCounts(1));
    node.report_cache(Arc::clone(&own));
    let queued = || {
        let counters = node.store().stats().unwrap().catalog.counters;
        ["queued_disk_bytes", "loading_remote_bytes", "queued_gets"].map(|name| counters[name])
    };
    eventually("the report of the owner", || queued() == [1, 1, 0]);
    let (mut one, mut other) = (Helper::opened(&dir), Helper::opened(&dir));
    assert_eq!((one.ask("queue 20"), other.ask("queue 300")), ("queued".into(), "queued".into()));
    eventually("the reports of both clients", || queued() == [321, 321, 0]);
    other.finish();
    eventually("the end of a client", || queued() == [21, 21, 0]);
    drop(own);
    eventually("the end of a cache", || queued() == [20, 20, 0]);
    one.finish();
    node.close().unwrap();
}

/// The decisions of a client that makes no further calls, of a client that closes the store, and of
/// the owner's process reach the owner. The next owner remembers none of them.
#[test]
fn owner_remembers_decisions_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("store");
    let node = open(&options(&dir)).unwrap();
    put(node.store(), 1, 5).unwrap();
    let (mut one, mut other) = (Helper::opened(&dir), Helper::opened(&dir));
    assert_eq!(one.ask("decide cmpl-1-0-5d41402a 1 8"), "decided");
    assert_eq!(other.ask("decide cmpl-2-0-7f2ababa 2 3"), "decided");
    other.finish();
    let decisions = || node.store().decisions(100).unwrap().decisions;
    eventually("the reports of both clients", || decisions().len() == 2);
    decide(node.store(), "cmpl-3", 1, 5);
    let listed = decisions();
    assert_eq!((listed.len(), &*listed[0].request), (3, "cmpl-3"));
    assert!(listed.iter().all(|decision| decision.keys.is_empty()));
    assert_eq!(node.store().decisions(1).unwrap().decisions, listed[..1]);
    let count = |name: &str| node.store().stats().unwrap().catalog.counters[name];
    assert_eq!((count("decisions_loaded"), count("decisions_missed")), (2, 1));

    let found = node.store().explain_request("cmpl-1").unwrap().requests;
    assert_eq!((found.len(), &*found[0].request), (1, "cmpl-1-0-5d41402a"));
    let [decision] = &found[0].decisions[..] else { panic!("{found:?}") };
    assert_eq!((decision.pages, decision.found, decision.loaded), (8, 5, 5));
    let answers: Vec<_> = found[0].explanation.spans.iter().map(|s| (s.answer, s.pages)).collect();
    assert_eq!(answers, [(Answer::Hit, 5), (Answer::Unknown, 3)]);
    let unknown = node.store().explain_request("cmpl-9").unwrap();
    assert_eq!((unknown.requests.len(), unknown.memory.forgotten), (0, 0));

    node.close().unwrap();
    assert_eq!(one.ask("decide cmpl-1-0-5d41402a 1 8"), "decided");
    assert_eq!(one.ask("role"), "owner");
    let next = open(&options(&dir)).unwrap();
    eventually("the next owner has only the decision noted after the takeover", || {
        let listed = next.store().decisions(100).unwrap().decisions;
        assert!(listed.len() < 2, "{listed:?}");
        listed.len() == 1
    });
    next.close().unwrap();
    one.finish();
}

#[test]
fn concurrent_opens_share_one_owner() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("store");
    let mut helpers: Vec<Helper> = (0..6).map(|_| Helper::start(&dir)).collect();
    helpers.iter_mut().for_each(|helper| helper.tell("open"));
    let roles: Vec<String> = helpers.iter_mut().map(Helper::listen).collect();
    assert_eq!(roles.iter().filter(|role| *role == "owner").count(), 1, "{roles:?}");
    assert_eq!(roles.iter().filter(|role| *role == "client").count(), 5, "{roles:?}");
    for (at, helper) in helpers.iter_mut().enumerate() {
        assert_eq!(helper.ask(&format!("put {at} 5")), "5");
    }
    for helper in &mut helpers {
        for name in 0..6 {
            assert_eq!(helper.ask(&format!("get {name} 5")), "5");
        }
    }
    helpers.into_iter().for_each(Helper::finish);
    let left: Vec<_> = std::fs::read_dir(dir.join("clients")).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!dir.join("owner.sock").exists());
}

#[test]
fn client_puts_gets_leases_and_removes() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    let store = node.store();
    assert_eq!(put(store, 1, 40).unwrap().pages, 40);
    assert_eq!(probe(store, 1, 50).unwrap(), 40);
    assert_eq!(get(store, 1, 50).unwrap(), 40);
    let keys = keys(1, 41);
    let there = store.exists(&scope(), &refs(&keys)).unwrap();
    assert_eq!(there.iter().filter(|there| **there).count(), 40);
    let leased = store.lease(&scope(), &refs(&keys), std::time::Duration::from_secs(9)).unwrap();
    assert_eq!(leased.pages, 40);
    assert_eq!(store.stats().unwrap().catalog.leases, 1);
    store.release(leased.lease).unwrap();
    let part = Scope { part: 1, ..scope() };
    let both = |keys| store.lease_all(&[&scope(), &part], keys, std::time::Duration::from_secs(9));
    assert_eq!(both(&refs(&keys)).unwrap(), Leased { pages: 0, lease: LeaseNumber(0) });
    assert_eq!(store.stats().unwrap().catalog.leases, 0);
    assert_eq!(store.touch(&scope(), &refs(&keys)).unwrap(), 40);
    assert_eq!(store.delete(&scope(), &refs(&keys[30..])).unwrap(), 10);
    assert_eq!(probe(store, 1, 40).unwrap(), 30);
    store.flush().unwrap();
    let stats = store.stats().unwrap().catalog;
    assert_eq!((stats.clients, stats.reservations, stats.reserved_bytes), (1, 0, 0));
    assert_eq!(stats.owner_pid as i32, owner.pid());
    store.drop_scope(&scope()).unwrap();
    assert_eq!(probe(store, 1, 40).unwrap(), 0);
    assert_eq!(put(store, 2, 3).unwrap().pages, 3);
    store.clear().unwrap();
    assert_eq!(get(store, 2, 3).unwrap(), 0);
    assert_eq!(put(store, 3, 3).unwrap().pages, 3);
    let short: &[u8] = &[1; 7];
    assert!(store.probe(&scope(), &[short]).is_err());
    let other = ritornello_format::Scope::opaque("node tests", 2 * PAGE, true);
    assert_eq!(store.probe(&other, &refs(&keys)).unwrap(), 0);
    node.close().unwrap();
    assert!(probe(store, 3, 3).is_err());
    owner.finish();
}

/// The owner may make calls that are denied to clients, whichever process is the owner.
#[test]
fn policy_file_denies_calls_to_clients() {
    let dir = tempfile::tempdir().unwrap();
    let policy = "deny_clients = [\"clear\", \"drop_scope\", \"change_capacity\", \"configure\"]\n";
    std::fs::write(dir.path().join("policy.toml"), policy).unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    let capacity = store.stats().unwrap().catalog.capacity_bytes;
    let none = ScopeSettings { quota_bytes: Some(0), ..ScopeSettings::default() };
    let denied = [
        store.clear(),
        store.drop_scope(&scope()),
        store.resize(2 * capacity),
        store.configure(&scope(), &none),
    ];
    for error in denied.map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("policy.toml"), "{error}");
    }
    assert_eq!(store.stats().unwrap().catalog.capacity_bytes, capacity);
    assert_eq!(get(store, 1, 4).unwrap(), 4);
    owner.finish();
    assert_eq!(node.ensure_owner().unwrap(), Role::Owner);
    store.drop_scope(&scope()).unwrap();
    store.clear().unwrap();
    node.close().unwrap();
}

#[test]
fn client_threads_run_concurrently() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..24 {
            let store = node.store();
            scope.spawn(move || {
                for round in 0..5 {
                    let name = thread * 100 + round;
                    assert_eq!(put(store, name, 3).unwrap().pages, 3);
                    assert_eq!(get(store, name, 3).unwrap(), 3);
                    if round == 3 {
                        store.flush().unwrap();
                    }
                }
            });
        }
    });
    drop(node);
    owner.finish();
}

#[test]
fn two_opens_in_a_process_share_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let link = tempfile::tempdir().unwrap();
    let link = link.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    let first = open(&options(dir.path())).unwrap();
    let second = open(&Options::new(&link)).unwrap();
    assert!(Arc::ptr_eq(first.store(), second.store()));
    assert_eq!((first.role(), second.role()), (Role::Owner, Role::Owner));
    first.close().unwrap();
    first.close().unwrap();
    assert_eq!(put(second.store(), 1, 2).unwrap().pages, 2);
    let mut other = Helper::opened(dir.path());
    assert_eq!(other.ask("role"), "client");
    drop(second);
    assert_eq!(other.ask("get 1 2"), "2");
    assert_eq!(other.ask("role"), "owner");
    // This process was the owner, and opens the store again as a client.
    let third = open(&options(dir.path())).unwrap();
    assert_eq!(third.role(), Role::Client);
    assert_eq!(get(third.store(), 1, 2).unwrap(), 2);
    other.finish();
}

#[test]
fn concurrent_opens_and_closes_share_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let keep = Helper::opened(dir.path());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    let node = open(&options(dir.path())).unwrap();
                    assert_eq!(node.role(), Role::Client);
                    node.store().stats().unwrap();
                }
            });
        }
    });
    keep.finish();
}

#[test]
fn store_in_a_path_too_long_for_a_socket_opens() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("d".repeat(100)).join("e".repeat(100));
    let owner = Helper::opened(&deep);
    let node = open(&options(&deep)).unwrap();
    assert_eq!(node.role(), Role::Client);
    assert_eq!(put(node.store(), 1, 2).unwrap().pages, 2);
    drop(node);
    owner.finish();
}

#[test]
fn files_deny_access_by_other_users() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("store");
    std::fs::create_dir(&made).unwrap();
    std::fs::set_permissions(&made, PermissionsExt::from_mode(0o755)).unwrap();
    let owner = Helper::opened(&made);
    let node = open(&options(&made)).unwrap();
    assert_eq!(put(node.store(), 1, 2).unwrap().pages, 2);
    assert_eq!(mode(&made), 0o700);
    for entry in
        std::fs::read_dir(&made).unwrap().chain(std::fs::read_dir(made.join("clients")).unwrap())
    {
        let entry = entry.unwrap();
        let allowed = if entry.file_type().unwrap().is_dir() { 0o700 } else { 0o600 };
        assert_eq!(mode(&entry.path()), allowed, "{entry:?}");
    }
    drop(node);
    owner.finish();
}

#[test]
fn killed_writers_space_is_reclaimed() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let reserved = || node.store().stats().unwrap().catalog.reserved_bytes;
    for round in 0..5 {
        let mut client = Helper::opened(dir.path());
        client.tell(&format!("work {} 300 1000000", (round + 1) * 1_000_000));
        loop {
            eventually("a reservation exists", || reserved() > 0);
            client.stop();
            // Leave the owner time to answer the request that the client sent before the stop.
            std::thread::sleep(std::time::Duration::from_millis(100));
            if reserved() > 0 {
                break;
            }
            client.signal(libc::SIGCONT);
        }
        std::thread::sleep(std::time::Duration::from_millis(1500));
        assert!(reserved() > 0, "space of a client that hangs must stay reserved");
        client.kill();
        eventually("the killed client's space is free", || reserved() == 0);
        assert_eq!(node.store().stats().unwrap().catalog.clients, 0);
    }
    assert_eq!(put(node.store(), 1, 100).unwrap().pages, 100);
}

#[test]
fn leases_of_a_killed_client_end() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 10).unwrap().pages, 10);
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("lease 1 10"), "10");
    assert_eq!(node.store().stats().unwrap().catalog.leases, 1);
    client.kill();
    eventually("the lease ends", || node.store().stats().unwrap().catalog.leases == 0);
}

#[test]
fn lease_limit_of_a_client_leaves_leases_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 10).unwrap().pages, 10);
    let mut hoarder = Helper::opened(dir.path());
    let mut other = Helper::opened(dir.path());
    let said = hoarder.ask("hoard");
    let (leases, why) = said.split_once(' ').unwrap();
    assert!(leases.parse::<usize>().unwrap() >= 1000 && why.contains("too many leases"), "{said}");
    assert_eq!(other.ask("get 1 10"), "10");
    assert_eq!(other.ask("lease-for 600000"), "10");
    assert_eq!(get(node.store(), 1, 10).unwrap(), 10);
    hoarder.kill();
    eventually("the killed client's leases end", || {
        node.store().stats().unwrap().catalog.leases == 1
    });
    other.finish();
}

#[test]
fn scopes_of_different_page_lengths_are_separate() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let mut client = Helper::opened(dir.path());
    assert_eq!(put(node.store(), 1, 3).unwrap().pages, 3);
    let said = client.ask("wide");
    assert!(said.contains("pages: 1"), "{said}");
    assert_eq!(node.store().stats().unwrap().catalog.scopes, 2);
    assert_eq!(client.ask("get 1 3"), "3");
    assert_eq!(get(node.store(), 1, 3).unwrap(), 3);
    client.finish();
}
