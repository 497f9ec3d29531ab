//! Requests about a store that this process has open: lookups, explanations, flushes, scrubs and
//! settings of scopes. Requests whose body or store is refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_node::{Role, open};
use ritornello_store::{
    CacheCounters, CacheCounts, CacheQueues, Decision, DecisionEstimate, DecisionOutcome,
};
use serde_json::{Value, json};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// No test: the process that [`Owner::start`] starts.
#[test]
fn owner() {
    run_as_owner();
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn id() -> String {
    scope("a model").id().to_string()
}

fn post(address: SocketAddr, target: &str, body: &Value) -> Answer {
    send_as("operate", address, "POST", target, &body.to_string())
}

fn put(address: SocketAddr, id: &str, body: &Value) -> Answer {
    send_as("admin", address, "PUT", &format!("/v1/scopes/{id}"), &body.to_string())
}

#[derive(Debug)]
struct CountsByPosition;

impl CacheCounters for CountsByPosition {
    fn counts(&self) -> CacheCounts {
        std::array::from_fn(|at| 1_000_000 * (at as u64 + 1))
    }

    fn queues(&self) -> CacheQueues {
        [10, 20, 30, 40, 50, 60]
    }
}

#[test]
fn metrics_have_counts_of_caches() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let counters: Arc<dyn CacheCounters> = Arc::new(CountsByPosition);
    node.report_cache(Arc::clone(&counters));
    let service = operating(&[node]);
    let (body, store) = (get(service.address(), "/metrics").body, dir.path().display());
    let value = |name: &str, labels: &str| {
        metric(&body, &format!("ritornello_{name}_total{{store=\"{store}\"{labels}}}"))
    };
    let bytes = |name: &str, tier: &str| {
        metric(&body, &format!("ritornello_{name}_bytes{{store=\"{store}\",tier=\"{tier}\"}}"))
    };
    assert_eq!((bytes("queued", "host"), bytes("loading", "remote")), (Some(10.0), Some(60.0)));
    assert_eq!(value("gate_decisions", ",reason=\"none\""), Some(3e6));
    assert_eq!(value("gate_regret_seconds", ""), Some(5.0));
    assert_eq!(value("remote_calls", ",reason=\"put\""), Some(7e6));
    assert_eq!(value("remote_calls", ",reason=\"failures\""), Some(9e6));
    assert_eq!(value("remote_written_bytes", ""), Some(12e6));
    assert_eq!(value("remote_breaker_openings", ""), Some(13e6));
    assert_eq!(value("remote_breaker_open_seconds", ""), Some(14.0));
    let sum = |call: &str| {
        let labels = format!("{{store=\"{store}\",call=\"{call}\"}}");
        metric(&body, &format!("ritornello_remote_call_seconds_sum{labels}"))
    };
    assert_eq!((sum("get"), sum("put")), (Some(16.0), Some(29.0)));
}

#[test]
fn probe_counts_leading_pages() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    fill(&node, "a model");
    let service = operating(&[node]);
    let address = service.address();
    let mut keys: Vec<String> = keys().iter().map(|key| hex(key)).collect();
    let probe =
        |keys: &[String]| post(address, "/v1/probe", &json!({ "scope": id(), "keys": keys }));
    assert_eq!(probe(&keys).json(), json!({ "pages": PAGES, "requested": PAGES }));
    for (at, key) in keys.iter_mut().enumerate().skip(2) {
        *key = hex(&[0xE0 + at as u8; 16]);
    }
    assert_eq!(probe(&keys).json(), json!({ "pages": 2, "requested": PAGES }));
    assert_eq!(probe(&[]).json(), json!({ "pages": 0, "requested": 0 }));

    let refused = |body: Value| {
        let answer = post(address, "/v1/probe", &body);
        (answer.status, answer.json()["kind"].as_str().unwrap().to_owned())
    };
    let invalid = (400, "invalid".to_owned());
    assert_eq!(refused(json!({ "scope": id(), "keys": ["0g"] })), invalid);
    assert_eq!(refused(json!({ "scope": id(), "keys": ["00"] })), invalid);
    assert_eq!(refused(json!({ "scope": id(), "keys": [7] })), invalid);
    assert_eq!(refused(json!({ "scope": id() })), invalid);
    assert_eq!(refused(json!({ "scope": id(), "keys": [], "more": 1 })), invalid);
    assert_eq!(refused(json!({ "scope": id(), "keys": vec![hex(&[1; 16]); 4097] })), invalid);
    let unknown = (404, "not_found".to_owned());
    for other in ["00".repeat(16), String::new(), "x".repeat(5000), "../..".to_owned()] {
        assert_eq!(refused(json!({ "scope": other, "keys": [] })), unknown);
    }
    assert_eq!(refused(json!({ "scope": id(), "keys": [], "store": "/elsewhere" })), unknown);
}

#[test]
fn explain_says_why_each_page_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    fill(&node, "a model");
    let (scope, stored) = (scope("a model"), keys());
    node.store().delete(&scope, &[&stored[4]]).unwrap();
    let service = operating(&[Arc::clone(&node)]);
    let address = service.address();
    let mut asked: Vec<String> = stored.iter().map(|key| hex(key)).collect();
    asked.push(hex(&[0xEE; 16]));
    let explain =
        |role: &str, body: &Value| send_as(role, address, "POST", "/v1/explain", &body.to_string());
    let body = json!({ "scope": id(), "keys": asked });
    let answer = explain("read", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    let is_mapped = node.store().stats().unwrap().catalog.io.mode == "mapped";
    let tier = if is_mapped { "host" } else { "disk" };
    let mut spans = answer["spans"].clone();
    let ago = spans[1]["seconds_ago"].take();
    assert!(ago.as_u64() <= answer["remembered_seconds"].as_u64(), "{answer}");
    let span = |at: u32, pages: u32, answer: &str, detail: &str| json!({ "at": at, "pages": pages, "answer": answer, "detail": detail, "seconds_ago": null });
    let expected = json!([
        span(0, 4, "hit", tier),
        span(4, 2, "removed", "deleted"),
        span(6, 1, "unknown", "not_offered"),
    ]);
    assert_eq!((&spans, &answer["is_registered"]), (&expected, &true.into()));

    // A scope that no put has used: its keys are in another scope.
    let other = json!({ "scope": scope_id("unused"), "keys": [hex(&stored[0])] });
    let answer = explain("operate", &other).json();
    assert_eq!(answer["is_registered"], false);
    assert_eq!(answer["spans"], json!([span(0, 1, "other_scope", &id())]));
    let named = json!([{ "id": id(), "model": "a model", "differs": null }]);
    assert_eq!(answer["other_scopes"], named);

    let status = |body: Value| explain("read", &body).status;
    assert_eq!(status(json!({ "scope": "0g", "keys": [] })), 400);
    assert_eq!(status(json!({ "scope": id(), "keys": ["0g"] })), 400);
    assert_eq!(status(json!({ "scope": id(), "keys": vec![hex(&[1; 16]); 4097] })), 400);
    // On a loopback address a request without a token has the role `read`, which permits
    // `/v1/explain` and not `/v1/probe`.
    let headers = [&*host(address), "Content-Type: application/json"];
    let anonymous =
        |target: &str| send(address, "POST", target, &headers, &body.to_string()).status;
    assert_eq!((anonymous("/v1/explain"), anonymous("/v1/probe")), (200, 401));
}

#[test]
fn request_is_explained_with_its_decisions() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    fill(&node, "a model");
    let (scope, stored) = (scope("a model"), keys());
    let refs: Vec<&[u8]> = stored.iter().map(<[u8; 16]>::as_slice).collect();
    let decide = |request: &str, outcome: DecisionOutcome, loaded: u32| {
        let times = DecisionEstimate { with_load_micros: 1_500_000, without_load_micros: 500_000 };
        let estimate = (outcome == DecisionOutcome::Declined).then_some(times);
        let decision = Decision::now(request, scope.id(), outcome).with_pages(&refs);
        node.store().note_decision(Decision { found: 6, loaded, estimate, ..decision });
    };
    decide("cmpl-1-0-5d41402a", DecisionOutcome::Declined, 0);
    decide("cmpl-2-0-7f2ababa", DecisionOutcome::Loaded, 6);
    node.store().delete(&scope, &[&stored[4]]).unwrap();
    let service = operating(&[Arc::clone(&node)]);
    let address = service.address();
    let decisions = |query: &str| get(address, &format!("/v1/decisions{query}"));
    let listed = decisions("").json();
    let ids: Vec<&Value> =
        listed["decisions"].as_array().unwrap().iter().map(|made| &made["request_id"]).collect();
    assert_eq!(ids, ["cmpl-2-0-7f2ababa", "cmpl-1-0-5d41402a"]);
    assert_eq!((&listed["forgotten"], &listed["dropped"]), (&0.into(), &0.into()));
    let mut declined = listed["decisions"][1].clone();
    assert!(declined["unix_seconds"].take().as_f64().unwrap() > 1.7e9);
    let expected = json!({
        "request_id": "cmpl-1-0-5d41402a", "unix_seconds": null, "scope": id(),
        "outcome": "declined", "detail": "", "pages": 6, "found": 6, "loaded": 0,
        "seconds_with_load": 1.5, "seconds_without_load": 0.5,
    });
    assert_eq!(declined, expected);
    assert_eq!(decisions("?limit=1").json()["decisions"], json!([listed["decisions"][0]]));
    for refused in ["?limit=0", "?limit=1025", "?limit=many", "?more=1"] {
        assert_eq!(decisions(refused).status, 400, "{refused}");
    }
    assert_eq!(decisions("?store=/elsewhere").status, 404);

    let explain = |body: Value| send_as("read", address, "POST", "/v1/explain", &body.to_string());
    let answer = explain(json!({ "request_id": "cmpl-1" }));
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    let [request] = &answer["requests"].as_array().unwrap()[..] else { panic!("{answer}") };
    assert_eq!((&request["request_id"], &request["scope"]), (&ids[1].clone(), &id().into()));
    assert_eq!(request["decisions"], json!([listed["decisions"][1]]));
    let spans = request["explanation"]["spans"].as_array().unwrap();
    let answers: Vec<_> = spans.iter().map(|s| (&s["answer"], &s["pages"])).collect();
    assert_eq!(answers, [(&"hit".into(), &4.into()), (&"removed".into(), &2.into())]);
    assert_eq!(explain(json!({ "request_id": "cmpl-9" })).json()["requests"], json!([]));
    let answer = explain(json!({ "request_id": 7 }));
    assert_eq!((answer.status, answer.body.contains("expected a string")), (400, true));
    let answer = explain(json!({ "request_id": "" }));
    assert_eq!((answer.status, answer.body.contains("is empty")), (400, true), "{answer:?}");
    for refused in [json!({}), json!({ "request_id": "r", "keys": [] }), json!({ "scope": id() })] {
        let answer = explain(refused);
        assert_eq!((answer.status, answer.body.contains("request_id")), (400, true), "{answer:?}");
    }
    let metrics = get(address, "/metrics").body;
    let store = node.path().display();
    let count = |outcome: &str| {
        let labels = format!("{{store=\"{store}\",outcome=\"{outcome}\"");
        metric(&metrics, &format!("ritornello_decisions_total{labels}"))
    };
    assert_eq!(
        (count("declined"), count("loaded"), count("missed")),
        (Some(1.), Some(1.), Some(0.))
    );
}

#[test]
fn flushed_pages_survive_owner_kill() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    let service = operating(&[node]);
    let answer = post(service.address(), "/v1/flush", &json!({}));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.json()["seconds"].as_f64().unwrap() >= 0.0);
    owner.kill();
    eventually("this process owns the store and has the flushed pages", || {
        let keys: Vec<String> = keys().iter().map(|key| hex(key)).collect();
        let body = json!({ "scope": id(), "keys": keys });
        post(service.address(), "/v1/probe", &body).json()["pages"] == PAGES
    });
}

#[test]
fn scrub_finds_damaged_pages() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    fill(&node, "a model");
    node.store().flush().unwrap();
    let service = operating(&[node]);
    let address = service.address();
    let progress = || get(address, "/v1/scrub").json()["stores"][0]["scrub"].clone();
    assert_eq!(progress()["state"], "idle");
    let scrub = || {
        assert_eq!(post(address, "/v1/scrub", &json!({})).status, 202);
        eventually("the scrub ends", || progress()["state"] != "running");
        progress()
    };
    let clean = scrub();
    assert_eq!((&clean["state"], &clean["pages"]), (&"finished".into(), &PAGES.into()), "{clean}");
    assert_eq!((&clean["damaged_pages"], &clean["runs"]), (&0.into(), &clean["runs_total"]));
    let segment = dir.path().join("segments/seg-000000");
    let file = std::fs::File::options().write(true).open(segment).unwrap();
    // Damage a page of the first run, whose header takes the first 4 KiB of the segment.
    file.write_at(&[0xA5; 4096], 3 * 4096).unwrap();
    let damaged = scrub();
    assert_eq!(damaged["state"], "finished");
    assert!(damaged["damaged_pages"].as_u64().unwrap() > 0, "{damaged}");
    assert!(damaged["removed_pages"].as_u64() >= damaged["damaged_pages"].as_u64());
}

#[test]
fn only_owner_scrubs() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner::start(dir.path(), "a model");
    let node = open(&options(dir.path())).unwrap();
    let service = operating(&[node]);
    let refused = post(service.address(), "/v1/scrub", &json!({}));
    assert_eq!(refused.status, 409);
    assert!(refused.body.contains("does not own the store"), "{}", refused.body);
    owner.end();
}

#[test]
fn scope_is_configured_and_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    fill(&node, "a model");
    fill(&node, "another model");
    let service = operating(&[node]);
    let address = service.address();
    let found = |id: &str| {
        // Answers may be a second old: wait, so that the answer has the last change.
        std::thread::sleep(Duration::from_millis(1100));
        let scopes = get(address, "/v1/scopes").json()["stores"][0]["scopes"].clone();
        scopes.as_array().unwrap().iter().find(|scope| scope["id"] == id).cloned()
    };
    let settings = json!({ "quota_bytes": 1 << 20, "retained_bytes": 1 << 19, "codec": "zstd" });
    let changed = put(address, &id(), &settings);
    assert_eq!((changed.status, changed.json()), (200, json!({ "id": id(), "dropped": false })));
    let scope = found(&id()).unwrap();
    assert_eq!((&scope["quota_bytes"], &scope["codec"]), (&(1 << 20).into(), &"zstd".into()));
    assert_eq!(scope["retained_bytes_max"], 1 << 19);

    let refused = |body: Value| put(address, &id(), &body).status;
    assert_eq!(refused(json!({ "quota_bytes": 10, "retained_bytes": 11 })), 400);
    assert_eq!(refused(json!({ "codec": "gif" })), 400);
    assert_eq!(refused(json!({ "quota_bytes": -1 })), 400);
    assert_eq!(refused(json!({ "drop": true, "quota_bytes": 1 })), 400);
    assert_eq!(found(&id()).unwrap()["quota_bytes"], 1 << 20, "a refused change has no effect");

    assert_eq!(put(address, &id(), &json!({})).status, 200);
    assert!(found(&id()).unwrap()["quota_bytes"].is_null(), "omitted settings are defaults");
    let dropped = put(address, &id(), &json!({ "drop": true }));
    assert_eq!(dropped.json(), json!({ "id": id(), "dropped": true }));
    assert_eq!(found(&id()), None);
    assert!(found(&scope_id("another model")).is_some());
    assert_eq!(put(address, &id(), &json!({ "drop": true })).status, 404);
}

fn scope_id(model: &str) -> String {
    scope(model).id().to_string()
}

#[test]
fn policy_denies_drop_of_scope_to_client() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("policy.toml"), "deny_clients = [\"drop_scope\"]").unwrap();
    let owner = Owner::start(dir.path(), "a model");
    let node = open(&options(dir.path())).unwrap();
    let service = operating(&[node]);
    let denied = put(service.address(), &id(), &json!({ "drop": true }));
    assert_eq!(denied.status, 400, "{denied:?}");
    assert!(denied.body.contains("policy.toml"), "{}", denied.body);
    owner.end();
}

#[test]
fn flush_by_observer_or_of_unnamed_store_is_refused() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let nodes = dirs.each_ref().map(|dir| open(&options(dir.path())).unwrap());
    let service = operating(&nodes);
    let unnamed = post(service.address(), "/v1/flush", &json!({}));
    assert_eq!((unnamed.status, unnamed.body.contains("several stores")), (400, true));
    let name = dirs[1].path().canonicalize().unwrap();
    let named = post(service.address(), "/v1/flush", &json!({ "store": name }));
    assert_eq!(named.status, 200, "{named:?}");

    let stores = vec![ritornello_service::StoreAccess::new(dirs[0].path())];
    let observer = start("127.0.0.1:0", Some(tokens()), stores);
    let refused = post(observer.address(), "/v1/flush", &json!({}));
    assert_eq!((refused.status, refused.body.contains("--observe")), (409, true));
}

#[test]
fn bodies_of_wrong_type_or_length_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let service = operating(&[node]);
    let address = service.address();
    let (host, token) = (host(address), authorization("operate"));
    let status = |kind: &str, body: &str| {
        send(address, "POST", "/v1/flush", &[&*host, &token, kind], body).status
    };
    assert_eq!(status("Content-Type: application/json; charset=utf-8", "{}"), 200);
    assert_eq!(status("Content-Type: text/plain", "{}"), 415);
    assert_eq!(status("Accept: */*", "{}"), 415);
    let json = "Content-Type: application/json";
    for body in ["", "{", "[]", "7", "{\"store\": 7}", "\u{feff}{}", "{} {}"] {
        assert_eq!(status(json, body), 400, "{body}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(status(json, &deep), 400);

    // The service refuses a long body by its stated length, or when it has read 1 MiB of the body.
    let long = " ".repeat(2 << 20);
    for length in [format!("Content-Length: {}", long.len()), "Transfer-Encoding: chunked".into()] {
        let stream = connect(address);
        let head =
            format!("POST /v1/flush HTTP/1.1\r\n{host}\r\n{token}\r\n{json}\r\n{length}\r\n");
        (&stream).write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).unwrap();
        let body = if length.starts_with("Content") {
            long.clone()
        } else {
            format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len())
        };
        let _ = (&stream).write_all(body.as_bytes());
        // The connection may be reset before the answer is read.
        let answer = Answer::parse(&read_all(&stream));
        assert!(answer.is_none_or(|answer| answer.status == 413), "{length}");
    }
    assert_eq!(status(json, "{}"), 200);
}

#[test]
fn body_in_parts_is_read_and_unfinished_body_times_out() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let service = operating(&[node]);
    let address = service.address();
    let head = format!(
        "POST /v1/flush HTTP/1.1\r\n{}\r\n{}\r\nContent-Type: application/json\r\n\
         Connection: close\r\nContent-Length: 2\r\n\r\n",
        host(address),
        authorization("operate")
    );
    let mut stream = connect(address);
    for part in [head.as_str(), "{", "}"] {
        stream.write_all(part.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(Answer::parse(&read_all(&stream)).unwrap().status, 200);

    let mut unfinished = connect(address);
    unfinished.write_all(head.as_bytes()).unwrap();
    unfinished.write_all(b"{").unwrap();
    let started = Instant::now();
    let answer = Answer::parse(&read_all(&unfinished)).unwrap();
    assert_eq!((answer.status, &answer.json()["kind"]), (503, &"retry".into()));
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    assert_eq!(get(address, "/livez").status, 200);
}
