//! A proxy in front of a real server, which injects faults of networks and servers into requests
//! and answers.

use super::server::BUCKET;
use parking_lot::Mutex;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyFault {
    Nothing,
    /// The proxy answers every request with this status.
    Status(u16),
    /// Each answer is delayed by this time.
    Slow(Duration),
    /// Half of the body is sent, then the connection is closed.
    Cut,
    /// Half of the body is sent, and the `Content-Length` of the answer is the length of this half.
    Half,
    /// One byte in the middle of the body is changed.
    Flipped,
    /// The connection is closed before an answer.
    Reset,
    /// S3 requests carry a date in 2020.
    Skewed,
}

/// The only token that the proxy accepts for Google Cloud Storage. It also accepts requests without
/// an authorization header, or with an empty token (`Bearer`).
pub const TOKEN: &str = "Bearer ritornello-token";

pub struct Proxy {
    pub port: u16,
    fault: Arc<Mutex<ProxyFault>>,
    requests: Arc<AtomicU64>,
}

impl Proxy {
    pub fn start(server: u16) -> Self {
        Self::with(server, false)
    }

    /// Starts a proxy in front of fake-gcs-server that fills gaps of the server's XML interface.
    /// The server accepts values only at signed URLs, and returns no ETag for them. The server's
    /// errors do not name the missing resource, and it accepts every token.
    pub fn before_gcs(server: u16) -> Self {
        Self::with(server, true)
    }

    /// Starts a proxy before the server at the port `server`. `gcs`: the server is fake-gcs-server,
    /// and the proxy fills its gaps.
    fn with(server: u16, gcs: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let fault = Arc::new(Mutex::new(ProxyFault::Nothing));
        let requests = Arc::new(AtomicU64::new(0));
        let (shared, count) = (Arc::clone(&fault), Arc::clone(&requests));
        // The thread runs until the test process ends.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (shared, count) = (Arc::clone(&shared), Arc::clone(&count));
                thread::spawn(move || {
                    let _ = serve(&client, server, gcs, &shared, &count);
                    let _ = client.shutdown(Shutdown::Both);
                });
            }
        });
        Self { port, fault, requests }
    }

    pub fn set(&self, fault: ProxyFault) {
        *self.fault.lock() = fault;
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }
}

/// The head of a request or an answer: its lines, and the length of the body.
struct Head {
    lines: Vec<String>,
    length: usize,
}

impl Head {
    fn read(from: &mut impl BufRead) -> std::io::Result<Option<Self>> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if from.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        let mut head = Self { lines, length: 0 };
        head.length =
            head.value("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
        Ok(Some(head))
    }

    fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        to.write_all((self.lines.join("\r\n") + "\r\n\r\n").as_bytes())
    }

    fn is(&self, method: &str) -> bool {
        self.lines.first().is_some_and(|line| line.split(' ').next() == Some(method))
    }

    fn status(&self) -> u16 {
        let line = self.lines.first().and_then(|line| line.split(' ').nth(1));
        line.and_then(|status| status.parse().ok()).unwrap_or(0)
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.lines.iter().find_map(|line| {
            let (known, value) = line.split_once(':')?;
            known.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    fn replace(&mut self, name: &str, value: &str) {
        for line in &mut self.lines {
            if line.split_once(':').is_some_and(|(known, _)| known.eq_ignore_ascii_case(name)) {
                *line = format!("{name}: {value}");
            }
        }
    }
}

fn chunks(from: &mut impl BufRead) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let length = usize::from_str_radix(line.trim_end(), 16).map_err(std::io::Error::other)?;
        let start = body.len();
        body.resize(start + length + 2, 0);
        from.read_exact(&mut body[start..])?;
        body.truncate(start + length);
        if length == 0 {
            return Ok(body);
        }
    }
}

/// Writes an error in the format of S3 and Google Cloud Storage.
fn refuse(to: &mut impl Write, request: &Head, status: u16, code: &str) -> std::io::Result<()> {
    let text = format!("<Error><Code>{code}</Code><Message>made up</Message></Error>");
    let shown = if request.is("HEAD") { "" } else { &text };
    write!(
        to,
        "HTTP/1.1 {status} Made Up\r\nContent-Length: {}\r\nContent-Type: application/xml\r\n\r\n{shown}",
        text.len()
    )
}

fn serve(
    client: &TcpStream,
    server: u16,
    gcs: bool,
    fault: &Mutex<ProxyFault>,
    count: &AtomicU64,
) -> std::io::Result<()> {
    let mut requests = BufReader::new(client.try_clone()?);
    let mut client = client.try_clone()?;
    let mut upstream: Option<(BufReader<TcpStream>, TcpStream)> = None;
    while let Some(mut request) = Head::read(&mut requests)? {
        count.fetch_add(1, Relaxed);
        let fault = *fault.lock();
        let mut body = vec![0; request.length];
        requests.read_exact(&mut body)?;
        let is_head = request.is("HEAD");
        match fault {
            ProxyFault::Reset => return Ok(()),
            ProxyFault::Status(status) => {
                refuse(&mut client, &request, status, &format!("E{status}"))?;
                continue;
            }
            ProxyFault::Skewed => request.replace("x-amz-date", "20200101T000000Z"),
            ProxyFault::Slow(by) => thread::sleep(by),
            _ => {}
        }
        if gcs {
            if request.value("authorization").is_some_and(|said| said != "Bearer" && said != TOKEN)
            {
                refuse(&mut client, &request, 401, "AuthenticationRequired")?;
                continue;
            }
            if request.is("PUT") {
                request.lines[0] =
                    request.lines[0].replace(" HTTP/", "?X-Goog-Algorithm=any HTTP/");
            }
        }
        let (answers, to) = match &mut upstream {
            Some(upstream) => upstream,
            none => {
                let to = TcpStream::connect(("127.0.0.1", server))?;
                none.insert((BufReader::new(to.try_clone()?), to))
            }
        };
        request.write(to)?;
        to.write_all(&body)?;
        let Some(mut answer) = Head::read(answers)? else { return Ok(()) };
        // No client sends `Expect: 100-continue`, so the first answer is the final one. The answer
        // to HEAD has a `Content-Length` but no body.
        let mut body = vec![0; if is_head { 0 } else { answer.length }];
        answers.read_exact(&mut body)?;
        if answer.value("transfer-encoding").is_some() {
            body = chunks(answers)?;
            answer.lines.retain(|line| !line.to_lowercase().starts_with("transfer-encoding"));
            answer.lines.push(format!("Content-Length: {}", body.len()));
        }
        if gcs {
            let bucket = request.lines[0].split(['/', '?', ' ']).nth(2);
            let no_bucket = bucket != Some(BUCKET);
            match answer.status() {
                404 | 500 if no_bucket => {
                    refuse(&mut client, &request, 404, "NoSuchBucket")?;
                    continue;
                }
                404 => {
                    refuse(&mut client, &request, 404, "NoSuchKey")?;
                    continue;
                }
                200 if request.is("PUT") => answer.lines.push("ETag: \"any\"".to_owned()),
                _ => {}
            }
        }
        let half = body.len() / 2;
        match fault {
            ProxyFault::Cut if !body.is_empty() => {
                answer.write(&mut client)?;
                client.write_all(&body[..half])?;
                return Ok(());
            }
            ProxyFault::Half if !body.is_empty() => {
                body.truncate(half);
                answer.replace("Content-Length", &half.to_string());
            }
            ProxyFault::Flipped if !body.is_empty() => body[half] ^= 16,
            _ => {}
        }
        answer.write(&mut client)?;
        client.write_all(&body)?;
    }
    Ok(())
}
