//! Roles and tokens, on loopback addresses and on others.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_service::StoreAccess;
use std::net::SocketAddr;
use std::path::Path;

/// Method and path of requests that need the roles `read`, `operate`, `operate` and `admin`, and
/// the status of the answer if the role is sufficient. 409: this process has no store open.
const REQUESTS: [(&str, &str, u16); 4] = [
    ("GET", "/v1/config", 200),
    ("POST", "/v1/flush", 409),
    ("POST", "/v1/scrub", 409),
    ("PUT", "/v1/scopes/00", 409),
];

fn missing_store() -> Vec<std::sync::Arc<StoreAccess>> {
    vec![StoreAccess::new(Path::new("/nonexistent/kv"))]
}

fn statuses(address: SocketAddr, headers: &[&str]) -> [u16; 4] {
    REQUESTS.map(|(method, path, permitted)| {
        let host = host(address);
        let all = [&[&*host, "Content-Type: application/json"], headers].concat();
        let answer = send(address, method, path, &all, "{}");
        assert!([permitted, 401, 403].contains(&answer.status), "{method} {path}: {answer:?}");
        if answer.status == 401 {
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
        }
        answer.status
    })
}

#[test]
fn each_role_permits_its_methods_only() {
    let service = start("127.0.0.1:0", Some(tokens()), missing_store());
    let of = |role| statuses(service.address(), &[&authorization(role)]);
    assert_eq!(of("read"), [200, 403, 403, 403]);
    assert_eq!(of("operate"), [200, 409, 409, 403]);
    assert_eq!(of("admin"), [200, 409, 409, 409]);
    assert_eq!(
        statuses(service.address(), &[]),
        [200, 401, 401, 401],
        "without a token the role is `read`"
    );
    let denied = send_as("read", service.address(), "POST", "/v1/flush", "{}").json();
    assert_eq!(denied["kind"], "denied");
    assert!(denied["message"].as_str().unwrap().contains("needs the role operate"), "{denied}");
}

#[test]
fn service_without_tokens_only_reads() {
    let service = start("127.0.0.1:0", None, missing_store());
    assert_eq!(statuses(service.address(), &[]), [200, 401, 401, 401]);
    let with_token = statuses(service.address(), &[&authorization("admin")]);
    assert_eq!(with_token, [401; 4], "an unknown token is refused");
    let answer = send(service.address(), "POST", "/v1/flush", &[&host(service.address())], "{}");
    assert!(answer.body.contains("--tokens"), "{}", answer.body);
}

#[test]
fn wrong_tokens_are_refused() {
    let service = start("127.0.0.1:0", Some(tokens()), missing_store());
    let admin = authorization("admin");
    let longer = format!("{admin}0");
    let shorter = &admin[..admin.len() - 1];
    let basic = admin.replace("Bearer", "Basic");
    for wrong in [
        "Authorization: Bearer wrong-0123456789abcdef0123456789",
        "Authorization: Bearer ",
        "Authorization: Bearer",
        "Authorization: ",
        "Authorization: Bearer \u{e9}",
        &longer,
        shorter,
        &basic,
        &admin.to_uppercase(),
    ] {
        assert_eq!(statuses(service.address(), &[wrong]), [401; 4], "{wrong}");
    }
    assert_eq!(statuses(service.address(), &[&admin, &admin]), [401; 4]);
    let lower = admin.replace("Bearer", "bearer");
    assert_eq!(
        statuses(service.address(), &[&lower])[0],
        200,
        "the scheme `Bearer` is not case-sensitive"
    );
}

#[test]
fn non_loopback_addresses_need_a_token_for_all_but_health() {
    let service = start("0.0.0.0:0", Some(tokens()), missing_store());
    let address = SocketAddr::from(([127, 0, 0, 1], service.address().port()));
    assert_eq!(statuses(address, &[]), [401; 4]);
    assert_eq!(statuses(address, &[&authorization("read")]), [200, 403, 403, 403]);
    assert_eq!(get(address, "/metrics").status, 401);
    assert_eq!(get(address, "/none").status, 401);
    assert_eq!(get(address, "/livez").status, 200);
    let ready = get(address, "/readyz");
    assert_eq!((ready.status, ready.body.contains("kv")), (503, false), "{}", ready.body);
    let details = send_as("read", address, "GET", "/readyz", "");
    assert!(details.body.contains("/nonexistent/kv"), "{}", details.body);
    let port = address.port();
    for wrong in ["evil.example", "0.0.0.0", "10.0.0.1"] {
        let host = format!("Host: {wrong}:{port}");
        let answer = send(address, "GET", "/livez", &[&host, &authorization("admin")], "");
        assert_eq!(answer.status, 421, "{wrong}");
    }
}

#[test]
fn requests_without_token_do_not_use_up_the_rate_of_others() {
    let service = start("0.0.0.0:0", Some(tokens()), missing_store());
    let address = SocketAddr::from(([127, 0, 0, 1], service.address().port()));
    assert!(flood(address, "/metrics", &[&host(address)]) > 0);
    assert_eq!(send_as("read", address, "GET", "/v1/scrub", "").status, 200);
    assert_eq!(get(address, "/readyz").status, 503, "the store is missing");
}

#[test]
fn requests_of_one_token_do_not_use_up_the_rate_of_another() {
    let service = start("127.0.0.1:0", Some(tokens()), missing_store());
    let address = service.address();
    // Without a token the role is `read`: the service listens on a loopback address.
    assert!(flood(address, "/v1/scrub", &[&host(address)]) > 0);
    assert!(flood(address, "/v1/scrub", &[&host(address), &authorization("read")]) > 0);
    assert_eq!(send_as("operate", address, "GET", "/v1/scrub", "").status, 200);
}
