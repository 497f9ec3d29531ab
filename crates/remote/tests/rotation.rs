//! Key rotation while a remote is open. Environment variables name the credential files, so each
//! client runs in a separate process with these variables. The server is a minimal HTTP server that
//! checks the key id.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_format::ErrorKind;
use ritornello_remote::open;
use std::env::{current_exe, var};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

const DIR: &str = "RITORNELLO_TEST_DIR";
const PORT: &str = "RITORNELLO_TEST_PORT";

/// Answers 404 to requests that are signed with the key named in the file `allowed`, and refuses
/// all other requests. Records the key id of every request, "" for an unsigned request.
fn serve(dir: PathBuf) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&seen);
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let _ = answer(client, &dir, &keep);
        }
    });
    (port, seen)
}

fn answer(mut client: TcpStream, dir: &Path, seen: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let (mut key, mut line) = (String::new(), String::new());
    let mut request = BufReader::new(client.try_clone()?);
    while request.read_line(&mut line)? > 2 {
        if let Some((_, rest)) = line.split_once("Credential=") {
            key = rest.split('/').next().unwrap_or_default().to_owned();
        }
        line.clear();
    }
    let (status, code) = match fs::read_to_string(dir.join("allowed")) {
        Ok(allowed) if allowed == key => ("404 Not Found", "NoSuchKey"),
        _ => ("403 Forbidden", "InvalidAccessKeyId"),
    };
    seen.lock().unwrap().push(key);
    let body = format!("<Error><Code>{code}</Code></Error>");
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Runs the test `name` of this file in another process, as a client whose AWS profile is in a
/// temporary directory. Returns the key ids that the server received.
fn with_files(name: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let (port, seen) = serve(dir.path().to_owned());
    let mut command = Command::new(current_exe().unwrap());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
        command.env_remove(name);
    }
    let done = command
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(DIR, dir.path())
        .env(PORT, port.to_string())
        .env("HOME", dir.path())
        .env("AWS_SHARED_CREDENTIALS_FILE", dir.path().join("credentials"))
        .env("AWS_CONFIG_FILE", dir.path().join("config"))
        .env("AWS_METADATA_ENDPOINT", format!("http://127.0.0.1:{port}"))
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let seen = seen.lock().unwrap();
    seen.clone()
}

/// Rotates the key: renames a new file over the old file.
fn rotate(dir: &Path, key: &str) {
    let text = format!("[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n");
    fs::write(dir.join("new"), text).unwrap();
    fs::rename(dir.join("new"), dir.join("credentials")).unwrap();
}

fn allow(dir: &Path, key: &str) {
    fs::write(dir.join("allowed"), key).unwrap();
}

fn directory_and_address() -> Option<(PathBuf, String)> {
    let (dir, port) = (var(DIR).ok()?, var(PORT).ok()?);
    Some((dir.into(), format!("s3://bucket?endpoint=http://127.0.0.1:{port}")))
}

#[test]
fn rotated_key_is_used_by_the_next_request() {
    assert_eq!(with_files("child_uses_rotated_key"), ["one", "one", "two"]);
}

#[test]
#[ignore = "runs in the child process of the test rotated_key_is_used_by_the_next_request"]
fn child_uses_rotated_key() {
    let Some((dir, address)) = directory_and_address() else { return };
    rotate(&dir, "one");
    allow(&dir, "one");
    let backend = open(&address).unwrap().backend;
    assert!(!backend.exists("a").unwrap());
    assert!(!backend.exists("a").unwrap());
    rotate(&dir, "two");
    allow(&dir, "two");
    assert!(!backend.exists("a").unwrap());
}

#[test]
fn half_written_file_keeps_last_key() {
    assert_eq!(with_files("child_reads_half_written_file"), ["one", "one"]);
}

#[test]
#[ignore = "runs in the child process of the test half_written_file_keeps_last_key"]
fn child_reads_half_written_file() {
    let Some((dir, address)) = directory_and_address() else { return };
    rotate(&dir, "one");
    allow(&dir, "one");
    let backend = open(&address).unwrap().backend;
    assert!(!backend.exists("a").unwrap());
    fs::write(dir.join("credentials"), "[default]\naws_access").unwrap();
    assert!(!backend.exists("a").unwrap());
}

#[test]
fn file_created_after_opening_is_found() {
    let seen = with_files("child_opens_before_file_exists");
    assert_eq!(seen.last().map(String::as_str), Some("one"), "{seen:?}");
}

#[test]
#[ignore = "runs in the child process of the test file_created_after_opening_is_found"]
fn child_opens_before_file_exists() {
    let Some((dir, address)) = directory_and_address() else { return };
    allow(&dir, "one");
    let backend = open(&address).unwrap().backend;
    let error = backend.exists("a").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fatal, "{error}");
    rotate(&dir, "one");
    assert!(!backend.exists("a").unwrap());
}
