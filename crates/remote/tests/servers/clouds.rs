//! Runs the backend checks and the restart test of `servers.rs` over emulators of Google Cloud
//! Storage and Azure Blob Storage. Tests that the clients of S3 and of both clouds take endpoints
//! and credentials from the address or from environment variables.

use super::common::proxy::{Proxy, TOKEN};
use super::common::server::{
    ACCOUNT, ACCOUNT_KEY, BUCKET, KEY, Kind, OTHER_ACCOUNT, SECRET, Server,
};
use super::common::{get, keys, long_deadline, probe, put};
use super::{PAGES, check_server_restart, conforms};
use ritornello_remote::open;
use std::env::{current_exe, var};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

/// Environment variable with the address of the remote that [`another_process`] probes.
const LOOK_INTO: &str = "RITORNELLO_TEST_REMOTE";

fn gs(port: u16, prefix: &str) -> String {
    format!("gs://{BUCKET}/{prefix}?anonymous=true&endpoint=http://127.0.0.1:{port}")
}

/// Returns an Azure address without its key, which the environment holds.
fn az(port: u16, prefix: &str) -> String {
    format!("az://{BUCKET}/{prefix}?account={ACCOUNT}&endpoint=http://127.0.0.1:{port}/{ACCOUNT}")
}

/// Probes the remote in another process with the variables in `environment`. Returns the answer
/// that the process prints.
fn probe_in_child(address: &str, environment: &[(&str, &str)]) -> String {
    let ours = |name: &str| ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|its| name.starts_with(its));
    let mut command = Command::new(current_exe().unwrap());
    command.args(["--exact", "clouds::another_process", "--ignored", "--nocapture"]);
    for (name, _) in std::env::vars().filter(|(name, _)| ours(name)) {
        command.env_remove(name);
    }
    let done = command.env(LOOK_INTO, address).envs(environment.iter().copied()).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let out = String::from_utf8(done.stdout).unwrap();
    let result = out.lines().find_map(|line| line.split_once("result: "));
    result.unwrap_or_else(|| panic!("{out}")).1.to_owned()
}

#[test]
#[ignore = "runs as a child process of other tests, which set its environment"]
fn another_process() {
    let Ok(address) = var(LOOK_INTO) else { return };
    let look = || {
        let (tier, all) = (open(&address)?.tier(), keys(1, PAGES));
        let found = probe(&tier, &all, long_deadline())?;
        Ok::<_, ritornello_format::Error>((found, get(&tier, &all, 0..PAGES, long_deadline())))
    };
    match look() {
        Ok((found, read)) => println!("result: {found} found, {read} read"),
        Err(error) => println!("result: {:?}: {error}", error.kind()),
    }
}

fn all_of_them() -> String {
    format!("{PAGES} found, {PAGES} read")
}

#[test]
fn gcs_passes_backend_checks() {
    let server = Server::start(Kind::FakeGcs);
    let proxy = Proxy::before_gcs(server.port);
    conforms(|prefix| gs(proxy.port, prefix));
}

#[test]
fn azure_passes_backend_checks() {
    let server = Server::start(Kind::Azurite);
    conforms(|prefix| az(server.port, prefix));
}

#[test]
fn gcs_restart_during_reads_costs_hits() {
    let mut server = Server::start(Kind::FakeGcs);
    let proxy = Proxy::before_gcs(server.port);
    check_server_restart(&mut server, &gs(proxy.port, "a"));
}

#[test]
fn azure_restart_during_reads_costs_hits() {
    let mut server = Server::start(Kind::Azurite);
    let address = az(server.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), long_deadline()), PAGES);
    // Azurite saves its state a few seconds after a change. Write until both of its files are newer
    // than the put.
    let (put, backend) = (SystemTime::now(), open(&az(server.port, "b")).unwrap().backend);
    let noted =
        |file| server.data().join(file).metadata().is_ok_and(|m| m.modified().unwrap() > put);
    while !["__azurite_db_blob__.json", "__azurite_db_blob_extent__.json"].into_iter().all(noted) {
        assert!(put.elapsed().unwrap() < Duration::from_secs(120));
        backend.set("something", b"more").unwrap();
        sleep(Duration::from_millis(200));
    }
    check_server_restart(&mut server, &address);
}

#[test]
fn s3_is_found_by_address_or_environment() {
    let server = Server::start(Kind::VersityGw);
    let address = super::address(server.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), long_deadline()), PAGES);

    let address = address.replace("&profile=server", "");
    let bare = format!("s3://{BUCKET}/a");
    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let unused_endpoint = "http://127.0.0.1:1";
    let probed = |address: &str, more: &[(&str, &str)]| {
        let keys = [("AWS_ACCESS_KEY_ID", KEY), ("AWS_SECRET_ACCESS_KEY", SECRET)];
        probe_in_child(address, &[&keys, more].concat())
    };
    for name in ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"] {
        assert_eq!(probed(&address, &[(name, unused_endpoint)]), all_of_them(), "{name}");
        assert_eq!(probed(&bare, &[(name, &endpoint)]), all_of_them(), "{name}");
    }
}

#[test]
fn gcs_is_found_by_address_or_environment_and_faults_get_advice() {
    let server = Server::start(Kind::FakeGcs);
    let proxy = Proxy::before_gcs(server.port);
    let address = gs(proxy.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), long_deadline()), PAGES);

    let endpoint = format!("http://127.0.0.1:{}", proxy.port);
    let bare = format!("gs://{BUCKET}/a");
    let here = ("GOOGLE_BASE_URL", endpoint.as_str());
    let token = TOKEN.trim_start_matches("Bearer ");
    assert_eq!(probe_in_child(&address, &[]), all_of_them());
    assert_eq!(probe_in_child(&bare, &[here, ("GOOGLE_BEARER_TOKEN", token)]), all_of_them());
    for emulator in [&endpoint, endpoint.trim_start_matches("http://")] {
        let here = ("STORAGE_EMULATOR_HOST", emulator);
        assert_eq!(probe_in_child(&bare, &[here]), all_of_them(), "{emulator}");
    }

    let wrong = probe_in_child(&bare, &[here, ("GOOGLE_BEARER_TOKEN", "something-else")]);
    assert!(wrong.starts_with("Fatal") && wrong.contains("GOOGLE_SERVICE_ACCOUNT"), "{wrong}");
    assert!(!wrong.contains("something-else"), "{wrong}");
    let missing = probe_in_child(&address.replace(BUCKET, "nowhere"), &[]);
    assert!(missing.starts_with("Fatal") && missing.contains("make it"), "{missing}");
    assert!(missing.contains("gs://nowhere"), "{missing}");
}

#[test]
fn azure_is_found_by_address_or_environment_and_faults_get_advice() {
    let server = Server::start(Kind::Azurite);
    let address = az(server.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), long_deadline()), PAGES);

    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let in_account = format!("{endpoint}/{ACCOUNT}");
    let bare = format!("az://{BUCKET}/a");
    let key = ("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY);
    assert_eq!(probe_in_child(&address, &[key]), all_of_them());
    let here = ("AZURE_STORAGE_ENDPOINT", in_account.as_str());
    let name = ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT);
    assert_eq!(probe_in_child(&bare, &[here, name, key]), all_of_them());
    let emulator = ("AZURE_STORAGE_USE_EMULATOR", "true");
    let url = ("AZURITE_BLOB_STORAGE_URL", endpoint.as_str());
    assert_eq!(probe_in_child(&bare, &[emulator, url]), all_of_them());
    // No server listens at the URL in the environment, so the probe finds pages only if the
    // endpoint of the address takes precedence.
    let unused_url = ("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:1");
    assert_eq!(probe_in_child(&address, &[emulator, unused_url, key]), all_of_them());

    let wrong = probe_in_child(&address.replace(ACCOUNT, OTHER_ACCOUNT), &[key]);
    // Azure reports a wrong key as `AuthenticationFailed`, Azurite as `AuthorizationFailure`.
    assert!(wrong.starts_with("Fatal") && wrong.contains("credentials"), "{wrong}");
    assert!(!wrong.contains(ACCOUNT_KEY), "{wrong}");
    let missing = probe_in_child(&address.replace(BUCKET, "nowhere"), &[key]);
    assert!(missing.starts_with("Fatal") && missing.contains("make it"), "{missing}");
    assert!(missing.contains("az://nowhere"), "{missing}");
    let unnamed = probe_in_child(&bare, &[key]);
    assert!(unnamed.starts_with("Invalid") && unnamed.contains("account=NAME"), "{unnamed}");
}
