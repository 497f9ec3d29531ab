//! Object-store servers and emulators, each on a free port with a temporary directory.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub const KEY: &str = "ritornello";
pub const SECRET: &str = "ritornello-secret";
pub const BUCKET: &str = "bucket";

/// Azurite's built-in account and its published key.
pub const ACCOUNT: &str = "devstoreaccount1";
pub const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
/// A second account, whose key is the base64 of "something-else".
pub const OTHER_ACCOUNT: &str = "other";
const OTHER_KEY: &str = "c29tZXRoaW5nLWVsc2U=";
/// A shared access signature of [`ACCOUNT`], valid until 2100, which permits creating the
/// container.
const SIGNED: &str = "sv=2019-12-12&ss=b&srt=sco&sp=rwdlac&se=2100-01-01T00%3A00%3A00Z&spr=https%2Chttp\
                      &sig=ZzTGeLMtwFb7xV2LYRu4iwPNIt0Vgyfl2vsiEbW%2F0c4%3D";

/// Which server to run.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    VersityGw,
    MinIo,
    /// An emulator of Google Cloud Storage. The emulator's XML API has gaps, which
    /// [`Proxy::before_gcs`] fills.
    ///
    /// [`Proxy::before_gcs`]: super::proxy::Proxy::before_gcs
    FakeGcs,
    /// An emulator of Azure Blob Storage.
    Azurite,
}

pub struct Server {
    kind: Kind,
    pub port: u16,
    dir: tempfile::TempDir,
    process: Option<Child>,
}

impl Server {
    pub fn start(kind: Kind) -> Self {
        // The port is free unless another process takes it before the server starts.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut server = Self { kind, port, dir: tempfile::tempdir().unwrap(), process: None };
        if matches!(kind, Kind::VersityGw | Kind::FakeGcs) {
            std::fs::create_dir(server.data().join(BUCKET)).unwrap();
        }
        server.resume();
        match kind {
            // A directory in the data directory is a bucket.
            Kind::MinIo => std::fs::create_dir_all(server.data().join(BUCKET)).unwrap(),
            Kind::Azurite => {
                let container = format!("/{ACCOUNT}/{BUCKET}?restype=container&{SIGNED}");
                assert_eq!(status("PUT", &container, port).unwrap(), 201);
            }
            Kind::VersityGw | Kind::FakeGcs => {}
        }
        server
    }

    pub fn data(&self) -> &Path {
        self.dir.path()
    }

    /// Starts the server process and waits until it answers.
    pub fn resume(&mut self) {
        let address = format!("127.0.0.1:{}", self.port);
        let mut command = match self.kind {
            Kind::VersityGw => {
                let mut command = Command::new(program("s3", "versitygw"));
                command
                    .args(["--port", &address, "--keep-alive", "--quiet", "posix"])
                    .arg(self.data());
                command
            }
            Kind::MinIo => {
                let mut command = Command::new(program("s3", "minio"));
                command.args(["server", "--quiet", "--address", &address]).arg(self.data());
                command
            }
            Kind::FakeGcs => {
                let mut command = Command::new(program("emulators", "fake-gcs-server"));
                command
                    .args(["-scheme", "http", "-host", "127.0.0.1", "-public-host", "127.0.0.1"])
                    .args(["-port", &self.port.to_string(), "-filesystem-root"])
                    .arg(self.data());
                command
            }
            Kind::Azurite => {
                let mut command =
                    Command::new(program("emulators", "node_modules/.bin/azurite-blob"));
                command
                    .args(["--silent", "--disableTelemetry", "--skipApiVersionCheck"])
                    .args(["--blobPort", &self.port.to_string(), "--location"])
                    .arg(self.data());
                command
            }
        };
        let process = command
            .env_clear()
            .env("HOME", self.data())
            .env("PATH", std::env::var_os("PATH").unwrap())
            .envs([("ROOT_ACCESS_KEY", KEY), ("ROOT_SECRET_KEY", SECRET)])
            .envs([
                ("MINIO_ROOT_USER", KEY),
                ("MINIO_ROOT_PASSWORD", SECRET),
                ("MINIO_BROWSER", "off"),
            ])
            .env("AZURITE_ACCOUNTS", format!("{ACCOUNT}:{ACCOUNT_KEY};{OTHER_ACCOUNT}:{OTHER_KEY}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(process);
        let until = Instant::now() + Duration::from_secs(120);
        // A server that is not ready answers with status 503, or not at all.
        while status("GET", &format!("/{BUCKET}"), self.port).is_none_or(|status| status == 503) {
            assert!(Instant::now() < until, "{:?} does not start", self.kind);
            sleep(Duration::from_millis(100));
        }
    }

    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the status of the server's answer to a request; `None` without an answer.
fn status(method: &str, path: &str, port: u16) -> Option<u16> {
    let ask = || -> std::io::Result<Vec<u8>> {
        let mut server = TcpStream::connect(("127.0.0.1", port))?;
        server.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(
            server,
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\n\
             Connection: close\r\n\r\n"
        )?;
        let mut status = vec![0; 12];
        server.read_exact(&mut status)?;
        Ok(status)
    };
    String::from_utf8(ask().ok()?).ok()?.split(' ').nth(1)?.parse().ok()
}

/// Binaries built by `make s3` and `make emulators`.
fn program(target: &str, name: &str) -> PathBuf {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build");
    let path = build.join(target).join(name);
    assert!(path.is_file(), "{} does not exist: run `make {target}`", path.display());
    path
}
