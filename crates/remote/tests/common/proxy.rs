//! A proxy in front of a real server, which does to its answers what networks and servers do.

use parking_lot::Mutex;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// This status instead of an answer.
    Status(u16),
    /// Answers come so much later.
    Slow(Duration),
    /// Half of the body, then the connection ends.
    Cut,
    /// Half of the body, with a header that says so.
    Half,
    /// Another byte in the middle of the body.
    Flipped,
    /// The connection ends before there is an answer.
    Reset,
    /// Requests say that they were made hours ago.
    Skewed,
}

pub struct Proxy {
    pub port: u16,
    wrong: Arc<Mutex<Wrong>>,
    requests: Arc<AtomicU64>,
}

impl Proxy {
    pub fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let wrong = Arc::new(Mutex::new(Wrong::Nothing));
        let requests = Arc::new(AtomicU64::new(0));
        let (shared, count) = (Arc::clone(&wrong), Arc::clone(&requests));
        // Ends with the test's process.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (shared, count) = (Arc::clone(&shared), Arc::clone(&count));
                thread::spawn(move || {
                    let _ = serve(&client, server, &shared, &count);
                    let _ = client.shutdown(Shutdown::Both);
                });
            }
        });
        Self { port, wrong, requests }
    }

    pub fn set(&self, wrong: Wrong) {
        *self.wrong.lock() = wrong;
    }

    /// Requests that came.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }
}

/// The lines before a body, and its length.
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
        let value = |line: &String| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        };
        let length = lines.iter().find_map(value).unwrap_or(0);
        Ok(Some(Self { lines, length }))
    }

    fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        to.write_all((self.lines.join("\r\n") + "\r\n\r\n").as_bytes())
    }

    fn replace(&mut self, name: &str, value: &str) {
        for line in &mut self.lines {
            if line.split_once(':').is_some_and(|(known, _)| known.eq_ignore_ascii_case(name)) {
                *line = format!("{name}: {value}");
            }
        }
    }
}

fn serve(
    client: &TcpStream,
    server: u16,
    wrong: &Mutex<Wrong>,
    count: &AtomicU64,
) -> std::io::Result<()> {
    let mut requests = BufReader::new(client.try_clone()?);
    let mut client = client.try_clone()?;
    let mut upstream: Option<(BufReader<TcpStream>, TcpStream)> = None;
    while let Some(mut request) = Head::read(&mut requests)? {
        count.fetch_add(1, Relaxed);
        let wrong = *wrong.lock();
        let mut body = vec![0; request.length];
        requests.read_exact(&mut body)?;
        let is_head = request.lines.first().is_some_and(|line| line.starts_with("HEAD "));
        match wrong {
            Wrong::Reset => return Ok(()),
            Wrong::Status(status) => {
                let text =
                    format!("<Error><Code>E{status}</Code><Message>made up</Message></Error>");
                let shown = if is_head { "" } else { &text };
                write!(
                    client,
                    "HTTP/1.1 {status} Made Up\r\nContent-Length: {}\r\nContent-Type: application/xml\r\n\r\n{shown}",
                    text.len()
                )?;
                continue;
            }
            Wrong::Skewed => request.replace("x-amz-date", "20200101T000000Z"),
            Wrong::Slow(by) => thread::sleep(by),
            _ => {}
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
        // "100 Continue" is not asked for; a HEAD's length is that of a body that does not come.
        let mut body = vec![0; if is_head { 0 } else { answer.length }];
        answers.read_exact(&mut body)?;
        let half = body.len() / 2;
        match wrong {
            Wrong::Cut if !body.is_empty() => {
                answer.write(&mut client)?;
                client.write_all(&body[..half])?;
                return Ok(());
            }
            Wrong::Half if !body.is_empty() => {
                body.truncate(half);
                answer.replace("Content-Length", &half.to_string());
            }
            Wrong::Flipped if !body.is_empty() => body[half] ^= 16,
            _ => {}
        }
        answer.write(&mut client)?;
        client.write_all(&body)?;
    }
    Ok(())
}
