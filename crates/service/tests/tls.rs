//! Encrypted connections, and files that change while the service runs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use ritornello_service::{Certificate, Service, Settings, StoreAccess, Tokens};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::fs::{Permissions, rename, set_permissions, write};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A certificate for `localhost` and its files.
struct Issued {
    der: CertificateDer<'static>,
    chain: PathBuf,
    key: PathBuf,
}

/// Issues a certificate, and writes it to files that replace those of the last call.
fn issue(dir: &Path) -> Issued {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (chain, key) = (dir.join("tls.crt"), dir.join("tls.key"));
    replace(&chain, &cert.pem(), 0o644);
    replace(&key, &signing_key.serialize_pem(), 0o600);
    Issued { der: cert.der().clone(), chain, key }
}

fn replace(path: &Path, text: &str, mode: u32) {
    let new = path.with_extension("new");
    write(&new, text).unwrap();
    set_permissions(&new, Permissions::from_mode(mode)).unwrap();
    rename(&new, path).unwrap();
}

fn start_with(certificate: Certificate, tokens: Option<Tokens>) -> Service {
    let stores = vec![StoreAccess::new(Path::new("/nonexistent/kv"))];
    Service::start(Settings {
        address: "127.0.0.1:0".parse().unwrap(),
        host_names: Vec::new(),
        tokens,
        certificate: Some(certificate),
        stores,
    })
    .unwrap()
}

/// Sends a GET of a client that trusts `trusted`. `None` if the handshake fails.
fn get_tls(address: SocketAddr, trusted: &CertificateDer<'static>, target: &str) -> Option<Answer> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let session = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(session, connect(address));
    let port = address.port();
    let request =
        format!("GET {target} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    Answer::parse(&bytes)
}

#[test]
fn connections_are_encrypted_by_the_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let issued = issue(dir.path());
    let service = start_with(Certificate::read(&issued.chain, &issued.key).unwrap(), None);
    let answer = get_tls(service.address(), &issued.der, "/v1/config").unwrap();
    assert_eq!((answer.status, &answer.json()["service"]["has_tls"]), (200, &true.into()));
    let elsewhere = tempfile::tempdir().unwrap();
    let other = issue(elsewhere.path());
    assert!(
        get_tls(service.address(), &other.der, "/livez").is_none(),
        "a client that trusts another certificate must fail"
    );
    // A request that is not encrypted gets no answer, and does not disturb others.
    let mut plain = connect(service.address());
    plain.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(Answer::parse(&read_all(&plain)).is_none());
    // Connections without a handshake take all places. A new client displaces one of them.
    let silent: Vec<_> = (0..80).map(|_| connect(service.address())).collect();
    assert_eq!(get_tls(service.address(), &issued.der, "/livez").unwrap().status, 200);
    let began = Instant::now();
    for stream in &silent {
        assert!(read_all(stream).is_empty(), "a connection without a handshake is closed");
    }
    assert!(began.elapsed() < Duration::from_secs(30));
    let _silent = connect(service.address());
    service.stop();
}

#[test]
fn changed_certificate_and_tokens_are_used_without_restart() {
    let dir = tempfile::tempdir().unwrap();
    let old = issue(dir.path());
    let file = dir.path().join("tokens");
    let token = |name: &str| format!("{name}-0123456789abcdef0123456789");
    replace(&file, &format!("operate {}", token("old")), 0o600);
    let certificate = Certificate::read(&old.chain, &old.key).unwrap();
    let service = start_with(certificate, Some(Tokens::read(&file).unwrap()));
    assert!(get_tls(service.address(), &old.der, "/livez").is_some());
    // While the key file holds the key of another certificate, the service uses the certificate and
    // key from before the change.
    let key = std::fs::read_to_string(&old.key).unwrap();
    let new = issue(dir.path());
    let new_key = std::fs::read_to_string(&new.key).unwrap();
    replace(&new.key, &key, 0o600);
    std::thread::sleep(Duration::from_secs(6));
    assert!(get_tls(service.address(), &old.der, "/livez").is_some());
    replace(&new.key, &new_key, 0o600);
    let until = Instant::now() + Duration::from_secs(60);
    while get_tls(service.address(), &new.der, "/livez").is_none() {
        assert!(Instant::now() < until, "the new certificate is not used");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(get_tls(service.address(), &old.der, "/livez").is_none());
    service.stop();

    let service = start(
        "127.0.0.1:0",
        Some(Tokens::read(&file).unwrap()),
        vec![StoreAccess::new(Path::new("/nonexistent/kv"))],
    );
    let address = service.address();
    let status = |name: &str| {
        let header = format!("Authorization: Bearer {}", token(name));
        send(address, "GET", "/v1/config", &[&host(address), &header], "").status
    };
    assert_eq!((status("old"), status("new")), (200, 401));
    // A token file that other users can read is not used: the old token stays valid.
    replace(&file, &format!("operate {}", token("new")), 0o644);
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!((status("old"), status("new")), (200, 401));
    set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while status("new") != 200 {
        assert!(Instant::now() < until, "the new token is not accepted");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(status("old"), 401);
    service.stop();
}

#[test]
fn unusable_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let issued = issue(dir.path());
    let refusal = |chain: &Path, key: &Path| {
        let error = Certificate::read(chain, key).unwrap_err().to_string();
        assert!(!error.contains("marker") && !error.contains("109, 97, 114"), "{error}");
        error
    };
    let none = dir.path().join("none");
    assert!(refusal(&none, &issued.key).contains("none"));
    assert!(refusal(&issued.chain, &none).contains("none"));
    for mode in [0o644, 0o604, 0o660] {
        set_permissions(&issued.key, Permissions::from_mode(mode)).unwrap();
        assert!(refusal(&issued.chain, &issued.key).contains("chmod g-w,o="));
    }
    set_permissions(&issued.key, Permissions::from_mode(0o640)).unwrap();
    assert!(Certificate::read(&issued.chain, &issued.key).is_ok());
    write(&none, "no PEM").unwrap();
    set_permissions(&none, Permissions::from_mode(0o600)).unwrap();
    assert!(refusal(&none, &issued.key).contains("PEM"));
    assert!(refusal(&issued.chain, &none).contains("PEM"));
    // Errors of malformed files contain no part of the files. `marker` stands for the bytes of a
    // key.
    let begin = "-----BEGIN PRIVATE KEY-----";
    for text in [
        format!("{begin} marker -----END PRIVATE KEY-----"),
        format!("{begin}\\nmarker\\n-----END PRIVATE KEY-----\n"),
        format!("{begin}\nmarker"),
        format!("{begin}\nmarker%\n-----END PRIVATE KEY-----\n"),
    ] {
        replace(&none, &text, 0o600);
        assert!(refusal(&issued.chain, &none).contains("no usable private key"), "{text}");
        assert!(refusal(&none, &issued.key).contains("no usable certificate"), "{text}");
    }
    replace(&none, &"marker\n".repeat(1 << 18), 0o600);
    assert!(refusal(&none, &issued.key).contains("too long"));
    assert!(refusal(&issued.chain, &none).contains("too long"));
    let pipe = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg("-m600").arg(&pipe).status();
    assert!(made.unwrap().success());
    assert!(refusal(&pipe, &issued.key).contains("not a regular file"));
    let other = std::fs::read_to_string(&issued.key).unwrap();
    let issued = issue(dir.path());
    replace(&issued.key, &other, 0o600);
    assert!(refusal(&issued.chain, &issued.key).contains("of this certificate"));
}
