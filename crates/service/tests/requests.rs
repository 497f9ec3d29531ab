//! Requests that are malformed, slow, oversized, too many, or of other origins; the list of routes,
//! and unusable settings.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_service::{Service, Settings, StoreAccess};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Starts a service of a directory that holds no store: the tests of this file need no store.
fn service() -> Service {
    observing(&[Path::new("/nonexistent/kv")])
}

#[test]
fn document_lists_exactly_the_routes() {
    let dirs = [StoreAccess::new(Path::new("/nonexistent/kv"))];
    let service = start("127.0.0.1:0", Some(tokens()), dirs.into());
    let document = get(service.address(), "/openapi.json").json();
    assert_eq!(document["openapi"].as_str().unwrap().split('.').next(), Some("3"));
    let mut listed = BTreeSet::new();
    let mut anonymous = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let route = (method.to_uppercase(), path.clone());
            let permits = |all: &Vec<Value>| all.iter().any(|scheme| *scheme == json!({}));
            if operation["security"].as_array().is_none_or(permits) {
                anonymous.insert(route.clone());
            }
            listed.insert(route);
        }
    }
    assert!(anonymous.contains(&("POST".to_owned(), "/v1/explain".to_owned())), "{anonymous:?}");
    let expected = ROUTES.map(|(method, path)| (method.to_owned(), path.to_owned()));
    assert_eq!(listed, BTreeSet::from(expected));
    for (method, path) in listed {
        let is_anonymous = anonymous.contains(&(method.clone(), path.clone()));
        let operation = &document["paths"][&path][method.to_lowercase()];
        let described: BTreeSet<&str> =
            operation["responses"].as_object().unwrap().keys().map(String::as_str).collect();
        let is_limited = !["/livez", "/readyz"].contains(&&*path);
        assert_eq!(described.contains("429"), is_limited, "{method} {path}");
        let path = path.replace("{id}", "00");
        let headers = [&*host(service.address()), "Content-Type: application/json"];
        let refused = send(service.address(), &method, &path, &headers, "{}").status == 401;
        assert_eq!(refused, !is_anonymous, "{method} {path}");
        let wrong = "Authorization: Bearer wrong-0123456789abcdef0123456789";
        let headers = [&*host(service.address()), wrong, "Content-Type: application/json"];
        let answer = send(service.address(), &method, &path, &headers, "{}");
        assert_eq!((answer.status, described.contains("401")), (401, true), "{method} {path}");
        let answer = send_as("admin", service.address(), &method, &path, "{}");
        assert!(![404, 405].contains(&answer.status), "{method} {path}: {answer:?}");
        let other = send_as("admin", service.address(), "PATCH", &path, "");
        assert_eq!((other.status, &other.json()["kind"]), (405, &"invalid".into()), "{path}");
    }
    for path in ["/", "/v1", "/v1/stats/", "/v2/stats", "/../etc/passwd", "/metrics%00"] {
        let answer = get(service.address(), path);
        assert_eq!((answer.status, &answer.json()["kind"]), (404, &"not_found".into()), "{path}");
    }
}

const ROUTES: [(&str, &str); 14] = [
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/stats"),
    ("GET", "/v1/scopes"),
    ("GET", "/v1/config"),
    ("GET", "/v1/decisions"),
    ("GET", "/v1/scrub"),
    ("POST", "/v1/probe"),
    ("POST", "/v1/explain"),
    ("POST", "/v1/flush"),
    ("POST", "/v1/scrub"),
    ("PUT", "/v1/scopes/{id}"),
];

#[test]
fn other_hosts_are_refused_and_no_origin_is_allowed() {
    let service = service();
    let address = service.address();
    let port = address.port();
    let status = |headers: &[&str]| send(address, "GET", "/v1/config", headers, "").status;
    assert_eq!(status(&[&format!("Host: localhost:{port}")]), 200);
    assert_eq!(status(&[&format!("Host: evil.example:{port}")]), 421);
    assert_eq!(status(&["Host: localhost"]), 421);
    assert_eq!(status(&[]), 400);
    assert_eq!(status(&[&host(address), &host(address)]), 400);
    let absolute = format!("http://evil.example:{port}/v1/config");
    assert_eq!(send(address, "GET", &absolute, &[&host(address)], "").status, 421);

    let origin = [&*host(address), "Origin: https://evil.example"];
    for (method, path) in [("GET", "/v1/config"), ("OPTIONS", "/v1/config"), ("GET", "/none")] {
        let answer = send(address, method, path, &origin, "");
        let allowed = answer.headers.keys().filter(|name| name.starts_with("access-control"));
        assert_eq!(allowed.count(), 0, "{answer:?}");
        let header = |name: &str| answer.headers.get(name).map(String::as_str);
        let policy = "default-src 'none'; frame-ancestors 'none'";
        assert_eq!(header("content-security-policy"), Some(policy));
        assert_eq!(header("x-content-type-options"), Some("nosniff"));
        assert_eq!(header("cache-control"), Some("no-store"));
    }
}

#[test]
fn request_in_single_bytes_is_answered() {
    let service = service();
    let mut stream = connect(service.address());
    let request =
        format!("GET /livez HTTP/1.1\r\n{}\r\nConnection: close\r\n\r\n", host(service.address()));
    for byte in request.as_bytes() {
        stream.write_all(&[*byte]).unwrap();
        stream.flush().unwrap();
    }
    assert_eq!(Answer::parse(&read_all(&stream)).unwrap().body, "ok\n");
}

#[test]
fn connection_with_unfinished_headers_is_closed() {
    let service = service();
    let mut slow = connect(service.address());
    slow.write_all(b"GET /livez HTTP/1.1\r\nHost: ").unwrap();
    let idle = connect(service.address());
    let started = Instant::now();
    for stream in [&slow, &idle] {
        let bytes = read_all(stream);
        assert!(Answer::parse(&bytes).is_none_or(|answer| answer.status == 408), "{bytes:?}");
        let took = started.elapsed();
        assert!(took < Duration::from_secs(30), "{took:?}");
    }
    assert!(started.elapsed() > Duration::from_secs(3), "{:?}", started.elapsed());
    assert_eq!(get(service.address(), "/livez").status, 200);
}

#[test]
fn oversized_headers_are_refused() {
    let service = service();
    let address = service.address();
    let large = format!("X-Large: {}", "x".repeat(64 << 10));
    assert_eq!(send_raw(address, &[&host(address), &large]), Some(431));
    let many: Vec<String> = (0..200).map(|number| format!("X-{number}: 1")).collect();
    let mut lines = vec![host(address)];
    lines.extend(many);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    assert_eq!(send_raw(address, &lines), Some(431));
    assert_eq!(get(address, "/livez").status, 200);
}

/// Sends a request whose headers the service may refuse before it has read all of them. Returns
/// the status, or `None` if the connection was reset before the answer was read.
fn send_raw(address: std::net::SocketAddr, headers: &[&str]) -> Option<u16> {
    let stream = connect(address);
    let request = format!("GET /livez HTTP/1.1\r\n{}\r\n\r\n", headers.join("\r\n"));
    let _ = (&stream).write_all(request.as_bytes());
    Answer::parse(&read_all(&stream)).map(|answer| answer.status)
}

#[test]
fn malformed_requests_lose_their_connection_only() {
    let service = service();
    let requests: [&[u8]; 6] = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
    ];
    for request in requests {
        let stream = connect(service.address());
        (&stream).write_all(request).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let bytes = read_all(&stream);
        let status = Answer::parse(&bytes).map(|answer| answer.status);
        assert!(status.is_none_or(|status| status >= 400), "{request:?}: {status:?}");
        assert_eq!(get(service.address(), "/livez").status, 200);
    }
}

#[test]
fn requests_beyond_the_rate_are_refused_and_health_answers() {
    let service = service();
    let address = service.address();
    assert!(flood(address, "/none", &[&host(address)]) > 0);
    assert_eq!(get(address, "/livez").status, 200);
    assert_eq!(get(address, "/readyz").status, 503, "the store is missing");
    eventually("requests are served again", || get(address, "/none").status == 404);
}

#[test]
fn connection_beyond_the_limit_displaces_the_oldest_without_request() {
    let service = service();
    let address = service.address();
    let mut open: Vec<TcpStream> = (0..64).map(|_| connect(address)).collect();
    // A connection with an unfinished request head counts as one without a request.
    open[0].write_all(b"GET /livez HTTP/1.1\r\nHost: ").unwrap();
    // The answer must come sooner than idle connections are closed, which is after five seconds.
    let started = Instant::now();
    assert_eq!(get(address, "/livez").status, 200);
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(read_all(&open[0]).is_empty());
    let newest = open.last_mut().unwrap();
    let request = format!("GET /livez HTTP/1.1\r\n{}\r\nConnection: close\r\n\r\n", host(address));
    newest.write_all(request.as_bytes()).unwrap();
    assert_eq!(Answer::parse(&read_all(newest)).unwrap().status, 200);
}

#[test]
fn connections_with_unfinished_bodies_are_displaced() {
    let service = service();
    let address = service.address();
    let head = format!(
        "POST /v1/explain HTTP/1.1\r\n{}\r\nContent-Type: application/json\r\n\
         Content-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n",
        host(address)
    );
    let mut open = Vec::new();
    for _ in 0..64 {
        let mut stream = connect(address);
        stream.write_all(head.as_bytes()).unwrap();
        // The service sends this answer when it begins to read the body.
        let mut reading = [0; 25];
        stream.read_exact(&mut reading).unwrap();
        assert_eq!(&reading, b"HTTP/1.1 100 Continue\r\n\r\n");
        open.push(stream);
    }
    // The answers must come sooner than requests end, which is after 15 seconds.
    let started = Instant::now();
    for path in ["/livez", "/metrics"] {
        assert_eq!(get(address, path).status, 200, "{path}");
        assert!(started.elapsed() < Duration::from_secs(8), "{path}: {:?}", started.elapsed());
    }
    assert!(read_all(&open[0]).is_empty(), "the oldest connection must be closed");
    // A body that continues to arrive is answered: these two bytes are JSON of the wrong form.
    let newest = open.last_mut().unwrap();
    newest.write_all(b"{}").unwrap();
    let answer = Answer::parse(&read_all(newest)).unwrap();
    assert!(answer.status == 400 && answer.body.contains("request_id"), "{answer:?}");
}

#[test]
fn undecodable_path_is_refused_as_json() {
    let dirs = [StoreAccess::new(Path::new("/nonexistent/kv"))];
    let service = start("127.0.0.1:0", Some(tokens()), dirs.into());
    let answer = send_as("admin", service.address(), "PUT", "/v1/scopes/%ff", "{}");
    assert_eq!((answer.status, &answer.json()["kind"]), (400, &"invalid".into()), "{answer:?}");
}

#[test]
fn unusable_settings_are_refused() {
    let start_as = |address: &str, dirs: &[&str], names: &[&str]| {
        let stores = dirs.iter().map(|dir| StoreAccess::new(Path::new(dir))).collect();
        let address = address.parse().unwrap();
        let host_names = names.iter().map(|name| (*name).to_owned()).collect();
        let settings = Settings { address, host_names, tokens: None, certificate: None, stores };
        Service::start(settings).unwrap_err().to_string()
    };
    let start = |address: &str, dirs: &[&str]| start_as(address, dirs, &[]);
    let named = start_as("127.0.0.1:0", &["/a"], &["node-3", "http://node-3:7007"]);
    assert!(named.contains("scheme") && named.contains("name=http://node-3:7007"), "{named}");
    assert!(start("127.0.0.1:0", &[]).contains("name at least one directory"));
    assert!(start("127.0.0.1:0", &["/a", "/a"]).contains("named twice"));
    assert!(start("0.0.0.0:0", &["/a"]).contains("--tokens"));
    assert!(start("192.0.2.1:7007", &["/a"]).contains("loopback"));
    let taken = service();
    let error = start(&taken.address().to_string(), &["/a"]);
    assert!(error.contains("free port") && error.contains("address="), "{error}");
}
