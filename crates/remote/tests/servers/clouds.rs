//! The same over Google Cloud Storage and Azure Blob Storage, as emulators have them.

use super::common::proxy::{Proxy, TOKEN};
use super::common::server::{
    ACCOUNT, ACCOUNT_KEY, BUCKET, KEY, Kind, OTHER_ACCOUNT, SECRET, Server,
};
use super::common::{get, keys, patient, probe, put};
use super::{PAGES, conforms, dies_and_comes_back};
use ritornello_remote::open;
use std::env::{current_exe, var};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

/// Tells [`another_process`] which remote to look into.
const LOOK_INTO: &str = "RITORNELLO_TEST_REMOTE";

fn gs(port: u16, prefix: &str) -> String {
    format!("gs://{BUCKET}/{prefix}?anonymous=true&endpoint=http://127.0.0.1:{port}")
}

/// The key comes from the environment.
fn az(port: u16, prefix: &str) -> String {
    format!("az://{BUCKET}/{prefix}?account={ACCOUNT}&endpoint=http://127.0.0.1:{port}/{ACCOUNT}")
}

/// What another process with this environment says of the remote.
fn told_elsewhere(address: &str, environment: &[(&str, &str)]) -> String {
    let ours = |name: &str| ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|its| name.starts_with(its));
    let mut command = Command::new(current_exe().unwrap());
    command.args(["--exact", "clouds::another_process", "--ignored", "--nocapture"]);
    for (name, _) in std::env::vars().filter(|(name, _)| ours(name)) {
        command.env_remove(name);
    }
    let done = command.env(LOOK_INTO, address).envs(environment.iter().copied()).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let out = String::from_utf8(done.stdout).unwrap();
    let told = out.lines().find_map(|line| line.split_once("told: "));
    told.unwrap_or_else(|| panic!("{out}")).1.to_owned()
}

#[test]
#[ignore = "a part of others"]
fn another_process() {
    let Ok(address) = var(LOOK_INTO) else { return };
    let look = || {
        let (tier, all) = (open(&address)?.tier(), keys(1, PAGES));
        let found = probe(&tier, &all, patient())?;
        Ok::<_, ritornello_format::Error>((found, get(&tier, &all, 0..PAGES, patient())))
    };
    match look() {
        Ok((found, came)) => println!("told: {found} found, {came} came"),
        Err(error) => println!("told: {:?}: {error}", error.kind()),
    }
}

fn all_of_them() -> String {
    format!("{PAGES} found, {PAGES} came")
}

#[test]
fn google_cloud_storage_does_what_a_backend_must() {
    let server = Server::start(Kind::FakeGcs);
    let proxy = Proxy::before_gcs(server.port);
    conforms(|prefix| gs(proxy.port, prefix));
}

#[test]
fn azure_does_what_a_backend_must() {
    let server = Server::start(Kind::Azurite);
    conforms(|prefix| az(server.port, prefix));
}

#[test]
fn google_cloud_storage_that_dies_and_comes_back_costs_hits() {
    let mut server = Server::start(Kind::FakeGcs);
    let proxy = Proxy::before_gcs(server.port);
    dies_and_comes_back(&mut server, &gs(proxy.port, "a"));
}

#[test]
fn azure_that_dies_and_comes_back_costs_hits() {
    let mut server = Server::start(Kind::Azurite);
    let address = az(server.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), patient()), PAGES);
    // It notes what it has some seconds later, if there was anything to note.
    let (put, backend) = (SystemTime::now(), open(&az(server.port, "b")).unwrap().backend);
    let noted =
        |file| server.data().join(file).metadata().is_ok_and(|m| m.modified().unwrap() > put);
    while !["__azurite_db_blob__.json", "__azurite_db_blob_extent__.json"].into_iter().all(noted) {
        assert!(put.elapsed().unwrap() < Duration::from_secs(120));
        backend.set("something", b"more").unwrap();
        sleep(Duration::from_millis(200));
    }
    dies_and_comes_back(&mut server, &address);
}

#[test]
fn another_process_finds_what_s3_has_where_the_address_or_the_environment_says() {
    let server = Server::start(Kind::VersityGw);
    let address = super::address(server.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), patient()), PAGES);

    let address = address.replace("&profile=server", "");
    let bare = format!("s3://{BUCKET}/a");
    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let nobody = "http://127.0.0.1:1";
    let told = |address: &str, more: &[(&str, &str)]| {
        let keys = [("AWS_ACCESS_KEY_ID", KEY), ("AWS_SECRET_ACCESS_KEY", SECRET)];
        told_elsewhere(address, &[&keys, more].concat())
    };
    for name in ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"] {
        assert_eq!(told(&address, &[(name, nobody)]), all_of_them(), "{name}");
        assert_eq!(told(&bare, &[(name, &endpoint)]), all_of_them(), "{name}");
    }
}

#[test]
fn another_process_finds_what_google_cloud_storage_has_or_is_told_what_to_mend() {
    let server = Server::start(Kind::FakeGcs);
    let proxy = Proxy::before_gcs(server.port);
    let address = gs(proxy.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), patient()), PAGES);

    let endpoint = format!("http://127.0.0.1:{}", proxy.port);
    let bare = format!("gs://{BUCKET}/a");
    let here = ("GOOGLE_BASE_URL", endpoint.as_str());
    let token = TOKEN.trim_start_matches("Bearer ");
    assert_eq!(told_elsewhere(&address, &[]), all_of_them());
    assert_eq!(told_elsewhere(&bare, &[here, ("GOOGLE_BEARER_TOKEN", token)]), all_of_them());
    for emulator in [&endpoint, endpoint.trim_start_matches("http://")] {
        let here = ("STORAGE_EMULATOR_HOST", emulator);
        assert_eq!(told_elsewhere(&bare, &[here]), all_of_them(), "{emulator}");
    }

    let wrong = told_elsewhere(&bare, &[here, ("GOOGLE_BEARER_TOKEN", "something-else")]);
    assert!(wrong.starts_with("Fatal") && wrong.contains("GOOGLE_SERVICE_ACCOUNT"), "{wrong}");
    assert!(!wrong.contains("something-else"), "{wrong}");
    let missing = told_elsewhere(&address.replace(BUCKET, "nowhere"), &[]);
    assert!(missing.starts_with("Fatal") && missing.contains("make it"), "{missing}");
    assert!(missing.contains("gs://nowhere"), "{missing}");
}

#[test]
fn another_process_finds_what_azure_has_or_is_told_what_to_mend() {
    let server = Server::start(Kind::Azurite);
    let address = az(server.port, "a");
    assert_eq!(put(&open(&address).unwrap().tier(), &keys(1, PAGES), patient()), PAGES);

    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let in_account = format!("{endpoint}/{ACCOUNT}");
    let bare = format!("az://{BUCKET}/a");
    let key = ("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY);
    assert_eq!(told_elsewhere(&address, &[key]), all_of_them());
    let here = ("AZURE_STORAGE_ENDPOINT", in_account.as_str());
    let name = ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT);
    assert_eq!(told_elsewhere(&bare, &[here, name, key]), all_of_them());
    let emulator = ("AZURE_STORAGE_USE_EMULATOR", "true");
    let there = ("AZURITE_BLOB_STORAGE_URL", endpoint.as_str());
    assert_eq!(told_elsewhere(&bare, &[emulator, there]), all_of_them());
    // The address counts before the environment.
    let nobody = ("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:1");
    assert_eq!(told_elsewhere(&address, &[emulator, nobody, key]), all_of_them());

    let wrong = told_elsewhere(&address.replace(ACCOUNT, OTHER_ACCOUNT), &[key]);
    // The service says `AuthenticationFailed`, the emulator `AuthorizationFailure`.
    assert!(wrong.starts_with("Fatal") && wrong.contains("credentials"), "{wrong}");
    assert!(!wrong.contains(ACCOUNT_KEY), "{wrong}");
    let missing = told_elsewhere(&address.replace(BUCKET, "nowhere"), &[key]);
    assert!(missing.starts_with("Fatal") && missing.contains("make it"), "{missing}");
    assert!(missing.contains("az://nowhere"), "{missing}");
    let unnamed = told_elsewhere(&bare, &[key]);
    assert!(unnamed.starts_with("Invalid") && unnamed.contains("account=NAME"), "{unnamed}");
}
