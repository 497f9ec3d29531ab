//! A backend over an object store: S3, GCS, Azure.
//!
//! Requests run on a small runtime of its own, which comes with the first call, as do connections. A
//! process that was forked from one that has them makes its own.

use crate::builders::Plan;
use crate::refusal;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload};
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_tiers::remote::{Backend, Listed};
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::runtime::{Builder, Runtime};

/// Threads that move bytes.
const WORKERS: usize = 2;
/// Requests of one batch at once.
const AT_ONCE: usize = 16;
/// The most memory that is taken at once on a server's word.
const ROOM_MAX: u64 = 64 << 20;

/// See the module.
pub(crate) struct ObjectBackend {
    plan: Plan,
    live: Mutex<Option<Arc<Live>>>,
    /// An answer has shown that the bucket is there.
    bucket_seen: AtomicBool,
}

/// What one process has.
struct Live {
    process: u32,
    store: Arc<dyn ObjectStore>,
    runtime: Option<Runtime>,
}

impl Drop for Live {
    fn drop(&mut self) {
        match self.runtime.take() {
            // Requests under way are given up.
            Some(runtime) if self.process == process::id() => runtime.shutdown_background(),
            // Its threads stayed in the process that was forked.
            Some(runtime) => std::mem::forget(runtime),
            None => {}
        }
    }
}

impl fmt::Debug for ObjectBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.plan.name)
    }
}

impl ObjectBackend {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { plan, live: Mutex::new(None), bucket_seen: AtomicBool::new(false) }
    }

    fn live(&self) -> Result<Arc<Live>> {
        let mut live = self.live.lock();
        if let Some(live) = live.as_ref().filter(|live| live.process == process::id()) {
            return Ok(Arc::clone(live));
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("ritornello-http")
            .enable_all()
            .build()
            .map_err(|error| Error::retry("no threads for the remote").because(error))?;
        let made = Arc::new(Live {
            process: process::id(),
            store: self.plan.build()?,
            runtime: Some(runtime),
        });
        *live = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Runs what `ask` makes of the client, on this thread and the runtime's.
    fn run<T, F: Future<Output = T>>(
        &self,
        ask: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Result<T> {
        let live = self.live()?;
        match &live.runtime {
            Some(runtime) => Ok(runtime.block_on(ask(Arc::clone(&live.store)))),
            None => Err(Error::retry("the remote's client is gone")),
        }
    }

    fn path(&self, name: &str) -> Path {
        let prefix = self.plan.prefix.as_ref();
        Path::from(if prefix.is_empty() { name.to_owned() } else { format!("{prefix}/{name}") })
    }

    /// What came of a question that `None` answers if there is no such object.
    fn heard<T>(&self, said: object_store::Result<T>) -> Result<Option<T>> {
        let heard = match said {
            Ok(value) => Some(value),
            Err(said) if refusal::absent(&said) => None,
            Err(said) => return Err(refusal::error(said, &self.plan.name)),
        };
        self.bucket_seen.store(true, Relaxed);
        Ok(heard)
    }

    /// A question for existence has no answer that tells a missing bucket from a missing object, so
    /// until the bucket has been seen the first byte is read instead.
    async fn there(
        store: &dyn ObjectStore,
        path: &Path,
        bucket_seen: bool,
    ) -> object_store::Result<()> {
        if bucket_seen {
            return store.head(path).await.map(drop);
        }
        let first = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
        match store.get_opts(path, first).await {
            Err(said) if refusal::behind(&said) => Ok(()),
            other => other.map(drop),
        }
    }
}

async fn fetch(
    store: &dyn ObjectStore,
    path: &Path,
    range: Option<Range<u64>>,
) -> object_store::Result<Vec<u8>> {
    let most = range.as_ref().map(|range| range.end - range.start);
    let options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
    let got = match store.get_opts(path, options).await {
        Err(said) if most.is_some() && refusal::behind(&said) => return Ok(Vec::new()),
        got => got?,
    };
    let room = got.range.end.saturating_sub(got.range.start).min(most.unwrap_or(ROOM_MAX));
    let mut value = Vec::with_capacity(room as usize);
    let mut chunks = got.into_stream();
    while let Some(chunk) = chunks.next().await {
        value.extend_from_slice(&chunk?);
    }
    Ok(value)
}

impl Backend for ObjectBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let mut all = self.get_batch(&[(name, range)]);
        all.pop().unwrap_or_else(|| Err(Error::retry("the remote's client is gone")))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        let mut all = self.exists_batch(&[name]);
        all.pop().unwrap_or_else(|| Err(Error::retry("the remote's client is gone")))
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.set_shared(name, &Arc::new(value.to_vec()))
    }

    fn set_shared(&self, name: &str, value: &Arc<Vec<u8>>) -> Result<()> {
        let payload = PutPayload::from(Bytes::from_owner(Shared(Arc::clone(value))));
        let path = self.path(name);
        let said = self.run(|store| async move { store.put(&path, payload).await })?;
        said.map_err(|said| refusal::error(said, &self.plan.name))?;
        self.bucket_seen.store(true, Relaxed);
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        let said = self.run(|store| async move { store.delete(&path).await })?;
        self.heard(said).map(drop)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        // The client lists by whole parts of names.
        let parent = self.path(prefix.rsplit_once('/').map_or("", |(parent, _)| parent));
        let root = self.plan.prefix.as_ref();
        let said = self.run(|store| async move {
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
        self.heard(said).map(drop)
    }

    fn exists_batch(&self, names: &[&str]) -> Vec<Result<bool>> {
        let seen = self.bucket_seen.load(Relaxed);
        let paths: Vec<Path> = names.iter().map(|name| self.path(name)).collect();
        let said = self.run(|store| async move {
            let ask = |path| {
                let store = Arc::clone(&store);
                async move { Self::there(store.as_ref(), &path, seen).await }
            };
            stream::iter(paths).map(ask).buffered(AT_ONCE).collect::<Vec<_>>().await
        });
        let told =
            said.map(|all| all.into_iter().map(|said| Ok(self.heard(said)?.is_some())).collect());
        told.unwrap_or_else(|error| alike(&error, names.len()))
    }

    fn get_batch(&self, asked: &[(&str, Option<Range<u64>>)]) -> Vec<Result<Option<Vec<u8>>>> {
        let paths: Vec<_> =
            asked.iter().map(|(name, range)| (self.path(name), range.clone())).collect();
        let said = self.run(|store| async move {
            let ask = |(path, range)| {
                let store = Arc::clone(&store);
                async move { fetch(store.as_ref(), &path, range).await }
            };
            stream::iter(paths).map(ask).buffered(AT_ONCE).collect::<Vec<_>>().await
        });
        let told = said.map(|all| all.into_iter().map(|said| self.heard(said)).collect());
        told.unwrap_or_else(|error| alike(&error, asked.len()))
    }
}

/// Bytes that a request holds while it needs them.
struct Shared(Arc<Vec<u8>>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// What kept the whole batch from being asked.
fn alike<T>(error: &Error, count: usize) -> Vec<Result<T>> {
    (0..count).map(|_| Err(Error::new(error.kind(), error.to_string()))).collect()
}
