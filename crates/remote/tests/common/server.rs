//! Real S3 servers, each on a free port over a temporary directory.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub const KEY: &str = "ritornello";
pub const SECRET: &str = "ritornello-secret";
pub const BUCKET: &str = "bucket";

/// Which server.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    VersityGw,
    MinIo,
}

pub struct Server {
    kind: Kind,
    pub port: u16,
    dir: tempfile::TempDir,
    process: Option<Child>,
}

impl Server {
    /// Started, with a bucket.
    pub fn start(kind: Kind) -> Self {
        // As long as nobody else takes it meanwhile.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut server = Self { kind, port, dir: tempfile::tempdir().unwrap(), process: None };
        if matches!(kind, Kind::VersityGw) {
            std::fs::create_dir(server.data().join(BUCKET)).unwrap();
        }
        server.resume();
        if matches!(kind, Kind::MinIo) {
            // What is a directory of its drive is a bucket.
            std::fs::create_dir_all(server.data().join(BUCKET)).unwrap();
        }
        server
    }

    pub fn data(&self) -> &Path {
        self.dir.path()
    }

    /// Starts it again, and waits until it answers.
    pub fn resume(&mut self) {
        let address = format!("127.0.0.1:{}", self.port);
        let mut command = match self.kind {
            Kind::VersityGw => {
                let mut command = Command::new(program("versitygw"));
                command
                    .args(["--port", &address, "--keep-alive", "--quiet", "posix"])
                    .arg(self.data());
                command
            }
            Kind::MinIo => {
                let mut command = Command::new(program("minio"));
                command.args(["server", "--quiet", "--address", &address]).arg(self.data());
                command
            }
        };
        let process = command
            .env_clear()
            .env("HOME", self.data())
            .envs([("ROOT_ACCESS_KEY", KEY), ("ROOT_SECRET_KEY", SECRET)])
            .envs([
                ("MINIO_ROOT_USER", KEY),
                ("MINIO_ROOT_PASSWORD", SECRET),
                ("MINIO_BROWSER", "off"),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(process);
        let until = Instant::now() + Duration::from_secs(120);
        while !answers(&address) {
            assert!(Instant::now() < until, "{:?} does not start", self.kind);
            sleep(Duration::from_millis(100));
        }
    }

    /// Kills it.
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

/// Whether somebody is there, and done with getting ready.
fn answers(address: &str) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut server = TcpStream::connect(address)?;
        server.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(server, "GET /{BUCKET} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        server.read_exact(&mut status)?;
        Ok(!status.ends_with(b"503"))
    };
    ask().unwrap_or(false)
}

/// Built by `make s3`.
fn program(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/s3").join(name);
    assert!(path.is_file(), "{} is not there: make s3", path.display());
    path
}
