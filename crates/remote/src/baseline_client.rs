//! A client that calls the object store directly: the baseline for measuring a remote tier.

use crate::builders::{self, ClientFactory};
use crate::error_map;
use crate::open::without_options;
use crate::parsed_address::ParsedAddress;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{Error as ClientError, ObjectStore, ObjectStoreExt, PutPayload};
use ritornello_format::{Error, Result};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};

/// A client without a tier and without retries. Only the client's timeout limits a request.
pub struct BaselineClient {
    factory: ClientFactory,
    store: Arc<dyn ObjectStore>,
    runtime: Runtime,
}

impl BaselineClient {
    /// A client of the object store at `address`.
    ///
    /// # Errors
    /// `Invalid` as for [`open`](crate::open), or if `address` does not name an object store;
    /// `Retry` if threads cannot be started.
    pub fn open(address: &str) -> Result<Self> {
        let mut address = ParsedAddress::parse(address)?;
        without_options(&mut address);
        if !builders::is_object_store(&address.scheme) {
            return Err(Error::invalid("the baseline client needs an object store: name a bucket")
                .with("address", address));
        }
        let factory = builders::factory(address)?;
        let runtime = Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|error| {
            Error::retry("threads for the client cannot be started: check the limit of threads")
                .because(error)
        })?;
        Ok(Self { store: factory.build()?, factory, runtime })
    }

    /// Writes objects, with at most `at_once` requests in progress.
    ///
    /// # Errors
    /// After all requests, the error of the first of `objects` whose request failed.
    pub fn put(&self, objects: &[(String, Bytes)], at_once: usize) -> Result<()> {
        let put = objects.iter().map(|(name, value)| {
            let (store, path) = (Arc::clone(&self.store), self.path(name));
            let payload = PutPayload::from(value.clone());
            async move { store.put(&path, payload).await.map(drop) }
        });
        self.all(put, at_once).map(drop)
    }

    /// Reads `range` of every object, with at most `at_once` requests in progress. Returns the
    /// number of bytes read.
    ///
    /// # Errors
    /// After all requests, the error of the first of `names` whose request failed.
    pub fn get(&self, names: &[String], range: &Range<u64>, at_once: usize) -> Result<u64> {
        let get = names.iter().map(|name| {
            let (store, path, range) = (Arc::clone(&self.store), self.path(name), range.clone());
            async move { store.get_range(&path, range).await.map(|bytes| bytes.len() as u64) }
        });
        Ok(self.all(get, at_once)?.into_iter().sum())
    }

    fn all<T, F>(&self, futures: impl Iterator<Item = F>, at_once: usize) -> Result<Vec<T>>
    where
        T: Send + 'static,
        F: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        let done: Vec<_> = self.runtime.block_on(async {
            let spawned = futures.map(|future| async move { tokio::spawn(future).await });
            stream::iter(spawned).buffered(at_once).collect().await
        });
        let flatten =
            |done: std::result::Result<object_store::Result<T>, tokio::task::JoinError>| {
                done.map_err(ClientError::from)
                    .and_then(|done| done)
                    .map_err(|error| error_map::to_error(error, &self.factory.name))
            };
        done.into_iter().map(flatten).collect()
    }

    fn path(&self, name: &str) -> Path {
        Path::from(format!("{}/{name}", self.factory.prefix))
    }
}
