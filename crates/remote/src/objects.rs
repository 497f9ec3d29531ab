//! A backend over an object store: S3, GCS, Azure.
//!
//! Requests of a backend run on the calling thread and on a runtime with [`WORKERS`] threads. The
//! backend's first call in a process, also in a forked one, creates the runtime and the
//! connections; the first call after a `Fatal` error of the client creates them again.

use crate::builders::ClientFactory;
use crate::error_map;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload};
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_tiers::remote::{Backend, Listed};
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::runtime::{Builder, Runtime};

/// Number of threads of the runtime that runs a backend's HTTP requests.
const WORKERS: usize = 2;
/// Maximum number of concurrent requests of one batch.
const REQUESTS_AT_ONCE: usize = 16;
/// Maximum length of a value that is requested without a range. Objects of a remote may be longer,
/// up to a page of 512 MiB, and are requested with a range.
const VALUE_BYTES_MAX: u64 = 128 << 20;

/// A backend over one object store.
pub(crate) struct ObjectBackend {
    factory: ClientFactory,
    client: Mutex<Option<Arc<Client>>>,
    /// Whether an answer of the server has proven that the bucket exists.
    bucket_seen: AtomicBool,
}

/// The client and runtime of one process.
struct Client {
    process: u32,
    store: Arc<dyn ObjectStore>,
    runtime: Option<Runtime>,
}

impl Drop for Client {
    fn drop(&mut self) {
        match self.runtime.take() {
            Some(runtime) if self.process == process::id() => runtime.shutdown_background(),
            // Leak the runtime: this process is a forked child, in which the runtime's threads do
            // not exist.
            Some(runtime) => std::mem::forget(runtime),
            None => {}
        }
    }
}

impl fmt::Debug for ObjectBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.factory.name)
    }
}

impl ObjectBackend {
    pub(crate) fn new(factory: ClientFactory) -> Self {
        Self { factory, client: Mutex::new(None), bucket_seen: AtomicBool::new(false) }
    }

    fn client(&self) -> Result<Arc<Client>> {
        let mut client = self.client.lock();
        if let Some(client) = client.as_ref().filter(|client| client.process == process::id()) {
            return Ok(Arc::clone(client));
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("ritornello-http")
            .enable_all()
            .build()
            .map_err(|error| {
                Error::retry("threads for the remote cannot be started: check the limit of threads")
                    .because(error)
            })?;
        let made = Arc::new(Client {
            process: process::id(),
            store: self.factory.build()?,
            runtime: Some(runtime),
        });
        *client = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Runs the future that `request` returns for the client, on this thread and the threads of the
    /// runtime.
    fn run<T, F: Future<Output = T>>(
        &self,
        request: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Result<T> {
        let client = self.client()?;
        match &client.runtime {
            Some(runtime) => Ok(runtime.block_on(request(Arc::clone(&client.store)))),
            None => Err(Error::retry("the remote's client was shut down")),
        }
    }

    fn path(&self, name: &str) -> Path {
        let prefix = self.factory.prefix.as_ref();
        Path::from(if prefix.is_empty() { name.to_owned() } else { format!("{prefix}/{name}") })
    }

    /// The value in an answer of the server; `None` if the answer says that the object does not
    /// exist.
    fn found<T>(&self, answer: object_store::Result<T>) -> Result<Option<T>> {
        let found = match answer {
            Ok(value) => Some(value),
            Err(error) if error_map::is_not_found(&error) => None,
            Err(error) => return Err(self.client_error(error)),
        };
        self.bucket_seen.store(true, Relaxed);
        Ok(found)
    }

    /// Converts an error of the client. After a `Fatal` error the next call builds a new client,
    /// which rereads keys and tokens.
    fn client_error(&self, error: object_store::Error) -> Error {
        let error = error_map::to_error(error, &self.factory.name);
        if error.kind() == ErrorKind::Fatal {
            drop(self.client.lock().take());
        }
        error
    }

    /// Returns `Ok` if the object exists. The answer to an existence query does not distinguish a
    /// missing bucket from a missing object. Until an answer has proven that the bucket exists,
    /// reads the first byte of the object instead.
    async fn object_exists(
        store: &dyn ObjectStore,
        path: &Path,
        bucket_seen: bool,
    ) -> object_store::Result<()> {
        if bucket_seen {
            return store.head(path).await.map(drop);
        }
        let first = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
        match store.get_opts(path, first).await {
            Err(error) if error_map::is_range_past_end(&error) => Ok(()),
            other => other.map(drop),
        }
    }
}

/// Reads `range`, or a whole value. Returns no bytes if `range` begins at or after the end of the
/// value. Fails, without buffering more, if the server sends more than requested, or a whole value
/// of more than [`VALUE_BYTES_MAX`].
async fn fetch(
    store: &dyn ObjectStore,
    path: &Path,
    range: Option<Range<u64>>,
) -> object_store::Result<Vec<u8>> {
    let is_part = range.is_some();
    let most = range.as_ref().map_or(VALUE_BYTES_MAX, |range| range.end - range.start);
    let options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
    let got = match store.get_opts(path, options).await {
        Err(error) if is_part && error_map::is_range_past_end(&error) => return Ok(Vec::new()),
        got => got?,
    };
    let room = got.range.end.saturating_sub(got.range.start).min(most);
    let mut value = Vec::with_capacity(room as usize);
    let mut chunks = got.into_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if (value.len() + chunk.len()) as u64 > most {
            return Err(object_store::Error::Generic {
                store: "remote",
                source: format!("the server sent more than the {most} requested bytes").into(),
            });
        }
        value.extend_from_slice(&chunk);
    }
    Ok(value)
}

impl Backend for ObjectBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let mut all = self.get_batch(&[(name, range)]);
        all.pop().unwrap_or_else(|| Err(Error::retry("the remote's client was shut down")))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        let mut all = self.exists_batch(&[name]);
        all.pop().unwrap_or_else(|| Err(Error::retry("the remote's client was shut down")))
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.set_shared(name, &Arc::new(value.to_vec()))
    }

    fn set_shared(&self, name: &str, value: &Arc<Vec<u8>>) -> Result<()> {
        let payload = PutPayload::from(Bytes::from_owner(Shared(Arc::clone(value))));
        let path = self.path(name);
        let answer = self.run(|store| async move { store.put(&path, payload).await })?;
        answer.map_err(|error| self.client_error(error))?;
        self.bucket_seen.store(true, Relaxed);
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        let answer = self.run(|store| async move { store.delete(&path).await })?;
        self.found(answer).map(drop)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        // The client lists only whole path segments, so it may list names that do not begin with
        // `prefix`.
        let parent = self.path(prefix.rsplit_once('/').map_or("", |(parent, _)| parent));
        let root = self.factory.prefix.as_ref();
        let answer = self.run(|store| async move {
            let mut all = store.list(Some(&parent).filter(|parent| !parent.as_ref().is_empty()));
            while let Some(object) = all.next().await {
                let object = object?;
                let path = object.location.as_ref();
                let name = path.strip_prefix(root).unwrap_or(path).trim_start_matches('/');
                if name.starts_with(prefix) {
                    each(Listed {
                        name: name.to_owned(),
                        bytes: object.size,
                        written: object.last_modified.timestamp().max(0) as u64,
                    });
                }
            }
            Ok(())
        })?;
        self.found(answer).map(drop)
    }

    fn exists_batch(&self, names: &[&str]) -> Vec<Result<bool>> {
        let seen = self.bucket_seen.load(Relaxed);
        let paths: Vec<Path> = names.iter().map(|name| self.path(name)).collect();
        let answer = self.run(|store| async move {
            let request = |path| {
                let store = Arc::clone(&store);
                async move { Self::object_exists(store.as_ref(), &path, seen).await }
            };
            stream::iter(paths).map(request).buffered(REQUESTS_AT_ONCE).collect::<Vec<_>>().await
        });
        let answers = answer
            .map(|all| all.into_iter().map(|answer| Ok(self.found(answer)?.is_some())).collect());
        answers.unwrap_or_else(|error| repeat_error(&error, names.len()))
    }

    fn get_batch(&self, requests: &[(&str, Option<Range<u64>>)]) -> Vec<Result<Option<Vec<u8>>>> {
        let paths: Vec<_> =
            requests.iter().map(|(name, range)| (self.path(name), range.clone())).collect();
        let answer = self.run(|store| async move {
            let request = |(path, range)| {
                let store = Arc::clone(&store);
                async move { fetch(store.as_ref(), &path, range).await }
            };
            stream::iter(paths).map(request).buffered(REQUESTS_AT_ONCE).collect::<Vec<_>>().await
        });
        let answers = answer.map(|all| all.into_iter().map(|answer| self.found(answer)).collect());
        answers.unwrap_or_else(|error| repeat_error(&error, requests.len()))
    }
}

/// Keeps the bytes alive while a request uses them.
struct Shared(Arc<Vec<u8>>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Reports one error for each request of a batch.
fn repeat_error<T>(error: &Error, count: usize) -> Vec<Result<T>> {
    (0..count).map(|_| Err(Error::new(error.kind(), error.to_string()))).collect()
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    const SENT_MAX: usize = 256 << 20;

    /// Starts a server that answers one range request of 10 bytes with a body of [`SENT_MAX`]
    /// bytes, and stops when the client closes the connection. Returns the server's port, and the
    /// thread, which returns the number of bytes sent.
    fn endless_server() -> (u16, thread::JoinHandle<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut line = String::new();
            let mut request = BufReader::new(client.try_clone().unwrap());
            while request.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            write!(
                client,
                "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/{SENT_MAX}\r\n\
                 Content-Length: {SENT_MAX}\r\nETag: \"1\"\r\n\
                 Last-Modified: Mon, 23 Nov 2026 07:00:00 GMT\r\n\r\n"
            )
            .unwrap();
            let piece = vec![7; 64 << 10];
            let pieces = 0..SENT_MAX / piece.len();
            pieces.take_while(|_| client.write_all(&piece).is_ok()).count() * piece.len()
        });
        (port, server)
    }

    #[test]
    fn server_that_exceeds_the_range_is_cut_off() {
        let (port, server) = endless_server();
        let address = format!("s3://bucket?endpoint=http://127.0.0.1:{port}&anonymous=true");
        let backend = crate::open(&address).unwrap().backend;
        let error = backend.get("name", Some(0..10)).unwrap_err().to_string();
        assert!(error.contains("more than the 10 requested bytes"), "{error}");
        drop(backend);
        let sent = server.join().unwrap();
        assert!(sent < SENT_MAX / 4, "{sent} bytes were sent before the client closed");
    }
}
