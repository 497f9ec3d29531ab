//! The service of `serve` while it gets requests that are far too large, and while it takes over
//! the store of a killed service.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{HTTP, PAGES, Served, filled, get, listening, scratch, stats, text};
use rustix::process::Signal;
use serde_json::Value;
use std::fs::{Permissions, read_to_string, set_permissions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// Maximum time of an answer: twice the time that the service waits for a store.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends a request with a JSON body, and returns status and problem of the answer.
fn post(address: SocketAddr, target: &str, body: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut answers = stream.try_clone().unwrap();
    // Read while the body is sent: the service closes the connection of a body that it refuses.
    let reading = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = answers.read_to_end(&mut bytes);
        String::from_utf8(bytes).unwrap()
    });
    let head = format!(
        "POST {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let _ = stream.write_all(body.as_bytes());
    let answer = reading.join().unwrap();
    let (head, problem) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(problem).unwrap())
}

/// The largest resident memory that the process had so far, in bytes.
fn peak_memory(pid: u32) -> u64 {
    let status = read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let kib: u64 = line.trim().strip_suffix(" kB").unwrap().parse().unwrap();
    kib << 10
}

#[test]
fn request_with_a_million_keys_is_refused_in_bounded_memory() {
    let dir = scratch();
    filled(dir.path());
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, format!("operate {TOKEN}\n")).unwrap();
    set_permissions(&tokens, Permissions::from_mode(0o600)).unwrap();
    let mut served = Served::start(dir.path(), &[&HTTP[..], &["--tokens", text(&tokens)]].concat());
    let address = listening(&mut served);
    assert!(served.says().starts_with("ready"));
    // The first answers take memory that the service keeps.
    assert_eq!(get(address, "/metrics").0, 200);
    let scope = "00".repeat(16);
    let few = format!("{{\"scope\":\"{scope}\",\"keys\":[\"{scope}\"]}}");
    assert_eq!(post(address, "/v1/explain", &few).0, 200);

    let before = peak_memory(served.child.id());
    let keys = format!("\"{scope}\",").repeat(1_000_000);
    let body = format!("{{\"scope\":\"{scope}\",\"keys\":[{}]}}", keys.trim_end_matches(','));
    std::thread::scope(|scope| {
        let targets = ["/v1/explain", "/v1/probe", "/v1/explain", "/v1/probe"];
        let body = &body;
        let asking = targets.map(|target| scope.spawn(move || post(address, target, body)));
        while asking.iter().any(|thread| !thread.is_finished()) {
            let started = Instant::now();
            assert_eq!(get(address, "/livez"), (200, "ok\n".to_owned()));
            assert!(started.elapsed() < ANSWER_TIMEOUT, "{:?}", started.elapsed());
        }
        for thread in asking {
            let (status, problem) = thread.join().unwrap();
            assert_eq!((status, &problem["kind"]), (413, &"invalid".into()), "{problem}");
            assert!(problem["message"].as_str().unwrap().contains("shorten it"), "{problem}");
        }
    });
    // About as many keys as a body of the maximum length can name.
    let keys = "\"\",".repeat(340_000);
    let body = format!("{{\"scope\":\"{scope}\",\"keys\":[{}]}}", keys.trim_end_matches(','));
    for target in ["/v1/explain", "/v1/probe"] {
        let (status, problem) = post(address, target, &body);
        assert_eq!((status, &problem["kind"]), (400, &"invalid".into()), "{problem}");
        assert!(problem["message"].as_str().unwrap().contains("too many keys"), "{problem}");
    }
    // The four bodies of a million keys have 140 MB together.
    let grown = peak_memory(served.child.id()) - before;
    assert!(grown < 64 << 20, "{grown}");
    assert_eq!(post(address, "/v1/explain", &few).0, 200);
    assert_eq!(served.end(Signal::TERM).0, Some(0));
}

/// The value of a metric of the service's only store, and whether it exists.
fn value(metrics: &str, name: &str) -> Option<u64> {
    let begin = format!("ritornello_{name}{{");
    let line = metrics.lines().find(|line| line.starts_with(&begin))?;
    Some(line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

/// Scrapes the metrics. Asserts that they are complete, and that they report the stored pages if an
/// owner answers, and no pages otherwise. Returns the owner's epoch; `None` if no owner answered.
fn scrape(address: SocketAddr) -> Option<u64> {
    let started = Instant::now();
    let (status, metrics) = get(address, "/metrics");
    assert!(started.elapsed() < ANSWER_TIMEOUT, "{:?}", started.elapsed());
    assert!(status == 200 && metrics.ends_with("# EOF\n"), "{status}: {metrics}");
    if (value(&metrics, "up").unwrap(), value(&metrics, "owned").unwrap()) != (1, 1) {
        assert_eq!(value(&metrics, "pages"), None, "{metrics}");
        return None;
    }
    assert_eq!(value(&metrics, "pages"), Some(PAGES as u64), "{metrics}");
    value(&metrics, "owner_epoch")
}

#[test]
fn second_service_of_a_store_is_scraped_while_it_takes_over() {
    let dir = scratch();
    filled(dir.path());
    let mut first = Served::start(dir.path(), &HTTP);
    let first_address = listening(&mut first);
    assert!(first.says().starts_with("ready"));
    let mut second = Served::start(dir.path(), &HTTP);
    let address = listening(&mut second);
    assert!(second.says().starts_with("waiting"));
    for address in [first_address, address] {
        // The test made the store as its first owner.
        assert_eq!(scrape(address), Some(2));
        let owner = stats(address)["stores"][0]["owner"]["owner_pid"].clone();
        assert_eq!(owner, first.child.id());
    }
    let (scraped, begun) = mpsc::channel();
    let scraping = std::thread::spawn(move || {
        let started = Instant::now();
        loop {
            match scrape(address) {
                Some(epoch) if epoch > 2 => break,
                epoch => assert!(matches!(epoch, None | Some(2)), "{epoch:?}"),
            }
            // The test waits for the first scrape only.
            let _ = scraped.send(());
            assert!(
                started.elapsed() < Duration::from_secs(180),
                "the second service owns nothing"
            );
            // The service serves 100 requests per second without a token, after a burst of 200.
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    begun.recv().unwrap();
    first.signal(Signal::KILL);
    first.child.wait().unwrap();
    scraping.join().unwrap();
    assert!(second.says().starts_with("ready"));
    assert_eq!(stats(address)["stores"][0]["owner"]["owner_pid"], second.child.id());
    assert_eq!(get(address, "/readyz").0, 200);
    assert_eq!(second.end(Signal::TERM).0, Some(0));
}
