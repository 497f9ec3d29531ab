//! Answers about stores of other processes, about stores without an owner, and about directories
//! that hold none. Only the tests of a failed takeover and of a hostile model name open their store in
//! this process.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_node::open;
use ritornello_service::StoreAccess;
use rustix::process::Signal;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// No test: the process that [`Owner::start`] starts.
#[test]
fn owner() {
    run_as_owner();
}

#[test]
fn owner_in_another_process_answers() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    let service = observing(&[dir.path()]);
    let address = service.address();
    let store = dir.path().to_str().unwrap();

    let stats = get(address, "/v1/stats").json();
    let found = &stats["stores"][0];
    assert_eq!((&found["store"], &found["state"]), (&store.into(), &"owned".into()));
    assert_eq!(found["owner"]["owner_pid"], owner.pid());
    assert_eq!(found["owner"]["clients"], 0, "the service is no client");
    assert_eq!(found["owner"]["pages"], PAGES);
    assert!(found["files"].is_null() && found["problem"].is_null());

    let scopes = get(address, "/v1/scopes").json();
    let scope = &scopes["stores"][0]["scopes"][0];
    assert_eq!((&scope["model"], &scope["pages"]), (&"a model".into(), &PAGES.into()));
    assert_eq!(scopes["stores"][0]["scopes_total"], 1);

    let config = get(address, "/v1/config").json();
    assert_eq!(config["service"]["address"], address.to_string());
    assert_eq!(config["stores"][0]["capacity_bytes"], 64 << 20);
    assert_eq!(config["stores"][0]["durability"], "cache");

    let ready = get(address, "/readyz");
    assert_eq!((ready.status, &ready.json()["ready"]), (200, &true.into()));

    let metrics = get(address, "/metrics");
    assert_eq!(
        metrics.headers["content-type"],
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    let labels = format!("{{store=\"{store}\"");
    let value = |name: &str| metric(&metrics.body, &format!("ritornello_{name}{labels}"));
    assert_eq!((value("up"), value("owned")), (Some(1.0), Some(1.0)));
    assert_eq!(value("pages"), Some(PAGES as f64));
    assert_eq!(value("stored_pages_total"), Some(PAGES as f64));
    assert_eq!(value("probed_pages_total"), Some(2.0 * PAGES as f64));
    assert_eq!(value("hit_pages_total"), Some(PAGES as f64));
    let missed = |reason: &str| {
        let labels = format!("{labels},tier=\"disk\",reason=\"{reason}\"");
        metric(&metrics.body, &format!("ritornello_missed_pages_total{labels}"))
    };
    assert_eq!((missed("unknown"), missed("evicted")), (Some(PAGES as f64), Some(0.0)));
    assert_eq!(value("admitted_bytes_total"), Some((PAGES as u64 * PAGE) as f64));
    assert!(metrics.body.ends_with("# EOF\n"));
    owner.end();
}

#[test]
fn owner_in_another_process_explains_to_an_observer() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    let service = start("127.0.0.1:0", Some(tokens()), vec![StoreAccess::new(dir.path())]);
    let address = service.address();
    let hex = |key: [u8; 16]| format!("{:032x}", u128::from_be_bytes(key));
    let asked: Vec<String> = keys().into_iter().chain([[0xEE; 16]]).map(hex).collect();
    let pages = json!({ "scope": scope("a model").id().to_string(), "keys": asked }).to_string();
    let explain = |body: &str| send_as("read", address, "POST", "/v1/explain", body);
    let answer = explain(&pages);
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    let spans: Vec<_> =
        answer["spans"].as_array().unwrap().iter().map(|s| (&s["answer"], &s["pages"])).collect();
    assert_eq!(spans, [(&"hit".into(), &PAGES.into()), (&"unknown".into(), &1.into())]);
    let answer = explain(&json!({ "request_id": "cmpl-1" }).to_string());
    assert_eq!(answer.json()["requests"][0]["request_id"], REQUEST, "{answer:?}");
    let listed = get(address, "/v1/decisions").json();
    assert_eq!(listed["decisions"][0]["request_id"], REQUEST, "{listed}");
    // A lookup needs an open store, because the owner counts it.
    let refused = send_as("operate", address, "POST", "/v1/probe", &pages);
    assert_eq!((refused.status, refused.body.contains("--observe")), (409, true), "{refused:?}");
    let owner_of = || get(address, "/v1/stats").json()["stores"][0]["owner"].clone();
    assert_eq!(owner_of()["owner_pid"], owner.pid());
    eventually("the service is a client no longer", || owner_of()["clients"] == 0);

    owner.end();
    for answer in [explain(&pages), get(address, "/v1/decisions")] {
        let is_unowned = answer.body.contains("no process owns the store");
        assert_eq!((answer.status, is_unowned), (409, true), "{answer:?}");
    }
    // The service owns nothing: another process can become the owner.
    assert_eq!(Owner::start(dir.path(), "a model").role, "owner");
}

#[test]
fn store_without_owner_is_answered_from_its_files() {
    let dir = tempfile::tempdir().unwrap();
    Owner::start(dir.path(), "a model").end();
    let service = observing(&[dir.path()]);
    let address = service.address();
    let found = &get(address, "/v1/stats").json()["stores"][0];
    assert_eq!(found["state"], "unowned");
    assert_eq!(
        (&found["files"]["owner_epoch"], &found["files"]["clean"]),
        (&1.into(), &true.into())
    );
    assert!(found["owner"].is_null());
    let scopes = get(address, "/v1/scopes").json();
    assert_eq!(scopes["stores"][0]["scopes"][0]["model"], "a model");
    assert_eq!(get(address, "/readyz").status, 200);
    let metrics = get(address, "/metrics").body;
    let value = |name| metric(&metrics, &format!("ritornello_{name}{{"));
    assert_eq!((value("up"), value("owned")), (Some(1.0), Some(0.0)));
    assert_eq!((value("owner_epoch"), value("pages")), (Some(1.0), None));
    // The service does not own the store: another process can become its owner.
    assert_eq!(Owner::start(dir.path(), "a model").role, "owner");
}

#[test]
fn unowned_store_that_no_process_can_open_is_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    Owner::start(dir.path(), "a model").end();
    // Reading the registry of scopes fails, also as root.
    std::fs::remove_file(dir.path().join("SCOPES")).unwrap();
    std::fs::create_dir(dir.path().join("SCOPES")).unwrap();
    assert!(open(&options(dir.path())).is_err());
    let service = observing(&[dir.path()]);
    let ready = get(service.address(), "/readyz");
    assert_eq!(ready.status, 503, "{ready:?}");
    let store = &ready.json()["stores"][0];
    assert_eq!(store["state"], "unavailable");
    assert!(store["reason"].as_str().unwrap().contains("SCOPES"), "{store}");
    assert_eq!(metric(&get(service.address(), "/metrics").body, "ritornello_up{"), Some(0.0));
}

#[test]
fn next_owner_is_scraped_after_the_first_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let first = Owner::start(dir.path(), "a model");
    let second = Owner::start(dir.path(), "a model");
    assert_eq!((first.role.as_str(), second.role.as_str()), ("owner", "client"));
    let service = observing(&[dir.path()]);
    let address = service.address();
    let owner_pid = || get(address, "/v1/stats").json()["stores"][0]["owner"]["owner_pid"].clone();
    assert_eq!(owner_pid(), first.pid());
    first.kill();
    // Scrapes during the takeover are answered, and the service never becomes the owner.
    eventually("the second process owns the store", || {
        let metrics = get(address, "/metrics");
        assert_eq!(metrics.status, 200);
        let pid = owner_pid();
        assert!(pid.is_null() || pid != std::process::id());
        pid == second.pid()
    });
    let epoch = metric(&get(address, "/metrics").body, "ritornello_owner_epoch{");
    assert_eq!(epoch, Some(2.0));
    second.end();
}

#[test]
fn stopped_owner_is_not_ready_and_liveness_answers() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    owner.signal(Signal::STOP);
    let service = observing(&[dir.path()]);
    let address = service.address();
    let asking = std::thread::spawn(move || get(address, "/readyz"));
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        let started = Instant::now();
        assert_eq!(get(address, "/livez").body, "ok\n");
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    }
    let ready = asking.join().unwrap();
    assert_eq!(ready.status, 503, "{ready:?}");
    let store = &ready.json()["stores"][0];
    assert_eq!(store["state"], "unavailable");
    assert!(store["reason"].as_str().unwrap().contains("does not answer"), "{store}");
    assert_eq!(metric(&get(address, "/metrics").body, "ritornello_up{"), Some(0.0));
    owner.signal(Signal::CONT);
    eventually("the owner answers", || get(address, "/readyz").status == 200);
}

/// Each connection has further requests to answer when it has answered one.
#[test]
fn pipelined_probes_of_a_stopped_owner_do_not_hold_all_connections() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    owner.signal(Signal::STOP);
    let service = observing(&[dir.path()]);
    let address = service.address();
    let probes = format!("GET /readyz HTTP/1.1\r\n{}\r\n\r\n", host(address)).repeat(20);
    let open: Vec<_> = (0..64).map(|_| connect(address)).collect();
    for mut stream in &open {
        stream.write_all(probes.as_bytes()).unwrap();
    }
    // Time in which the service begins to answer the probes: no event shows this.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(get(address, "/livez").body, "ok\n");
    assert!(read_all(&open[0]).is_empty(), "the oldest connection must be closed");
}

#[test]
fn request_in_progress_is_answered_before_the_service_stops() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    owner.signal(Signal::STOP);
    let service = observing(&[dir.path()]);
    let address = service.address();
    let asking = std::thread::spawn(move || get(address, "/readyz"));
    std::thread::sleep(Duration::from_millis(300));
    let started = Instant::now();
    service.stop();
    assert_eq!(asking.join().unwrap().status, 503);
    assert!(started.elapsed() > Duration::from_secs(1), "the request must have been in progress");
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn missing_directory_is_not_ready_until_it_holds_a_store() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("kv");
    let service = observing(&[&dir]);
    let address = service.address();
    let ready = get(address, "/readyz");
    assert_eq!((ready.status, &ready.json()["ready"]), (503, &false.into()));
    assert_eq!(get(address, "/livez").status, 200);
    assert_eq!(metric(&get(address, "/metrics").body, "ritornello_up{"), Some(0.0));
    let problem = &get(address, "/v1/stats").json()["stores"][0]["problem"];
    assert!(problem["message"].as_str().unwrap().contains("kv"), "{problem}");
    std::fs::create_dir(&dir).unwrap();
    let owner = Owner::start(&dir, "a model");
    eventually("the store is ready", || get(address, "/readyz").status == 200);
    owner.end();
}

#[test]
fn stores_are_told_apart_by_their_directories() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let owners = dirs.each_ref().map(|dir| Owner::start(dir.path(), "a model"));
    let service = observing(&dirs.each_ref().map(tempfile::TempDir::path));
    let address = service.address();
    for (dir, owner) in dirs.iter().zip(&owners) {
        let name = dir.path().to_str().unwrap();
        let stats = get(address, &format!("/v1/stats?store={name}")).json();
        assert_eq!(stats["stores"].as_array().unwrap().len(), 1);
        assert_eq!(stats["stores"][0]["owner"]["owner_pid"], owner.pid());
    }
    let metrics = get(address, "/metrics").body;
    assert_eq!(metrics.lines().filter(|line| line.starts_with("ritornello_up{")).count(), 2);
    assert_eq!(metrics.lines().filter(|line| line.starts_with("# TYPE ritornello_up ")).count(), 1);
    let unknown = get(address, "/v1/stats?store=/elsewhere");
    assert_eq!((unknown.status, &unknown.json()["kind"]), (404, &"not_found".into()));
    assert_eq!(get(address, "/v1/scopes?shop=/elsewhere").status, 400);
}

#[test]
fn scrapes_within_a_second_share_an_observation() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    let service = observing(&[dir.path()]);
    let address = service.address();
    let took =
        || metric(&get(address, "/metrics").body, "ritornello_observation_seconds{").unwrap();
    let started = Instant::now();
    let durations: Vec<f64> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..16).map(|_| scope.spawn(took)).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    if started.elapsed() < Duration::from_millis(900) {
        assert!(durations.iter().all(|took| *took == durations[0]), "{durations:?}");
    }
    std::thread::sleep(Duration::from_millis(1100));
    assert!(took() != durations[0], "an observation must not be shared after 1.1 s");
    owner.end();
}

#[test]
fn failed_takeover_is_reported_while_the_store_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let access = StoreAccess::new(dir.path());
    access.set_open(Some(Arc::clone(&node)));
    let service = start("127.0.0.1:0", Some(tokens()), vec![Arc::clone(&access)]);
    let address = service.address();
    let flush = || send_as("operate", address, "POST", "/v1/flush", "{}").status;
    assert_eq!((get(address, "/readyz").status, flush()), (200, 200));
    // From here to `close` no thread can observe the store, as during a close that takes long.
    access.set_failed("the index is damaged");
    let reason = || {
        let store = get(address, "/readyz").json()["stores"][0].clone();
        (store["state"] == "unavailable").then(|| store["reason"].as_str().unwrap().to_owned())
    };
    let mut said = None;
    eventually("the store is unavailable", || {
        said = reason();
        said.is_some()
    });
    assert!(said.as_ref().unwrap().contains("the index is damaged"), "{said:?}");
    assert_eq!(flush(), 409, "the service must not use a store that is closed");
    node.close().unwrap();
    eventually("the closed store is observed", || {
        reason().is_some_and(|said| !said.contains("not known now"))
    });
    assert!(reason().unwrap().contains("the index is damaged"));
    access.set_open(Some(open(&options(dir.path())).unwrap()));
    eventually("the store is ready", || get(address, "/readyz").status == 200);
}

#[test]
fn model_name_of_a_scope_cannot_forge_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let hostile = "x\",store=\"y\"} 1\nritornello_up{store=\"forged\"} 0\n# EOF\n\\";
    let node = open(&options(dir.path())).unwrap();
    fill(&node, hostile);
    let service = operating(&[node]);
    let text = get(service.address(), "/metrics").body;
    assert_eq!(text.lines().filter(|line| line.starts_with("ritornello_up{")).count(), 1);
    assert_eq!(text.lines().filter(|line| *line == "# EOF").count(), 1);
    let pages: Vec<_> =
        text.lines().filter(|line| line.starts_with("ritornello_scope_pages{")).collect();
    assert_eq!(pages.len(), 1);
    assert!(pages[0].ends_with(&format!("}} {PAGES}")), "{}", pages[0]);
    let scopes = get(service.address(), "/v1/scopes").json();
    assert_eq!(scopes["stores"][0]["scopes"][0]["model"], hostile);
}
