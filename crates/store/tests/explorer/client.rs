//! A client process: its view of the disk, its store, and its connection to the owner.

use crate::client_catalog::ClientCatalog;
use crate::recording_medium::RecordingMedium;
use crate::unfinished_put::UnfinishedPut;
use parking_lot::Mutex;
use ritornello_store::{Catalog, ClientAlive, ClientId, Store, StoreCore, open_segments};
use ritornello_volume::segments::{IoChoice, Segments};
use ritornello_volume::staging::Staging;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Names of the clients that count as alive. They stand in for the lock files of live clients.
#[derive(Clone, Default)]
pub struct Names(Arc<Mutex<BTreeSet<String>>>);

impl Names {
    /// Returns the function with which a core checks whether a client is alive.
    pub fn alive(&self) -> ClientAlive {
        let names = Arc::clone(&self.0);
        Arc::new(move |name| names.lock().contains(name))
    }

    pub fn add(&self, name: &str) {
        self.0.lock().insert(name.to_owned());
    }

    pub fn remove(&self, name: &str) {
        self.0.lock().remove(name);
    }

    pub fn clear(&self) {
        self.0.lock().clear();
    }
}

pub struct Client {
    pub id: ClientId,
    pub name: String,
    pub recording: RecordingMedium,
    pub link: Arc<ClientCatalog>,
    pub segments: Arc<Segments>,
    pub store: Arc<Store>,
    pub unfinished: Option<UnfinishedPut>,
}

impl Client {
    /// Creates client `number` of a history, connected to `owner`.
    pub fn new(
        recording: RecordingMedium,
        owner: &Arc<StoreCore>,
        number: u64,
        names: &Names,
    ) -> Self {
        let (id, name) = (ClientId(number), format!("client-{number}"));
        names.add(&name);
        let medium = Arc::new(recording.medium());
        let (_, segments) = open_segments(medium, Path::new("/store"), IoChoice::Auto).unwrap();
        let link = Arc::new(ClientCatalog::new(recording.clone(), owner.catalog_for(id, &name)));
        let catalog: Arc<dyn Catalog> = Arc::clone(&link) as _;
        let staging = Staging::new(8 << 20).unwrap();
        let store = Store::new(catalog, Arc::clone(&segments), staging);
        Self { id, name, recording, link, segments, store, unfinished: None }
    }

    pub fn connect(&self, owner: &Arc<StoreCore>) {
        self.link.connect(owner.catalog_for(self.id, &self.name));
    }

    pub fn catalog(&self) -> Arc<dyn Catalog> {
        Arc::clone(&self.link) as _
    }
}
