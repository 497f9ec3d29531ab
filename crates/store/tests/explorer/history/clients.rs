//! Client processes in addition to the owner.

use super::History;
use crate::client::Client;
use crate::common::Open;
use crate::kinds::{check_get, leading, present_pages, put};
use crate::operation::Operation;
use crate::unfinished_put::UnfinishedPut;
use ritornello_format::ErrorKind;
use ritornello_store::ClientId;

impl History {
    /// Connects all running processes to the owner, and starts missing clients.
    pub(super) fn connect(&mut self, open: &Open) {
        self.clients.iter().for_each(|client| client.connect(&open.core));
        if let Some(promoted_client) = &self.promoted_client {
            promoted_client.link.connect(open.core.catalog_for(ClientId::LOCAL, ""));
        }
        while self.clients.len() < self.workload.clients {
            let client = self.start_client(open);
            self.clients.push(client);
        }
    }

    fn start_client(&mut self, open: &Open) -> Client {
        self.clients_started += 1;
        Client::new(self.recording.new_process(), &open.core, self.clients_started, &self.names)
    }

    /// If the owner that has died was a client before it became the owner, releases the lock that
    /// it held as a client. The next owner counts this client as dead, and drains the space of its
    /// reservations.
    pub(super) fn end_owner_process(&mut self) {
        if let Some(promoted_client) = self.promoted_client.take() {
            self.names.remove(&promoted_client.name);
        }
    }

    pub(super) fn end_all_processes(&mut self) {
        self.promoted_client = None;
        self.clients.clear();
        self.locked_dead_clients.clear();
        self.names.clear();
    }

    pub(super) fn make_owner(&mut self, client_number: usize) {
        let client = self.clients.remove(client_number);
        self.recording = client.recording.clone();
        self.promoted_client = Some(client);
    }

    /// In one of three calls on average, releases the lock of a dead client, because the kernel may
    /// release locks late.
    pub(super) fn drop_locks(&mut self) {
        if !self.locked_dead_clients.is_empty() && self.extra_rng.one_in(3) {
            let name = self.locked_dead_clients.remove(0);
            self.names.remove(&name);
        }
    }

    /// Marks the unfinished puts of dropped scopes as void: their commits must store no page.
    pub(super) fn void_unfinished_puts(&mut self, of: impl Fn(usize) -> bool) {
        let clients = self.clients.iter_mut().chain(&mut self.promoted_client);
        for unfinished in clients.filter_map(|client| client.unfinished.as_mut()) {
            if of(unfinished.pages().0) {
                unfinished.void = true;
            }
        }
    }

    pub(super) fn apply_client_operation(&mut self, open: &Open, operation: &Operation) {
        match *operation {
            Operation::ClientPut { client_number, at, pages } => {
                self.expect_put(at, pages);
                put(&self.clients[client_number].store, at, pages, 0).unwrap();
            }
            Operation::ClientGet { client_number, at } => {
                let store = &self.clients[client_number].store;
                check_get(store, at, present_pages(store)[at]);
            }
            Operation::ClientFlush { client_number } => {
                self.clients[client_number].store.flush().unwrap()
            }
            Operation::ClientReserve { client_number, at, pages } => {
                let epoch = open.core.manifest().owner_epoch;
                let client = &mut self.clients[client_number];
                if client.unfinished.is_none() {
                    let segments = client.segments.clone();
                    client.unfinished =
                        UnfinishedPut::reserve(client.catalog(), segments, at, pages);
                    client.unfinished.iter_mut().for_each(|unfinished| unfinished.epoch = epoch);
                }
            }
            Operation::ClientEnd { client_number, commit } => {
                self.end_unfinished_put(open, client_number, commit)
            }
            Operation::ClientKill { client_number, at, pages, after, in_flight, maintain } => {
                self.kill_client(open, client_number, (at, pages), (after, in_flight));
                if maintain {
                    open.core.run_once();
                }
            }
            _ => {}
        }
    }

    /// A client, or the owner's process if it has an unfinished put from the time when it was a
    /// client, writes its reserved runs, and commits or aborts. If a new owner has opened the store
    /// since the reservation, the commit fails with `Retry`.
    fn end_unfinished_put(&mut self, open: &Open, client_number: usize, commit: bool) {
        let unfinished = match &mut self.promoted_client {
            Some(Client { unfinished: unfinished @ Some(_), .. }) => unfinished.take(),
            _ => self.clients[client_number].unfinished.take(),
        };
        let Some(unfinished) = unfinished else { return };
        let unfinished = unfinished.write();
        if commit {
            let (at, pages) = unfinished.pages();
            if !unfinished.void {
                self.expect_put(at, pages);
            }
            match unfinished.commit() {
                Ok(()) => {
                    assert_eq!(
                        unfinished.epoch,
                        open.core.manifest().owner_epoch,
                        "the owner committed a reservation of another owner"
                    );
                    return;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
                    assert_ne!(unfinished.epoch, open.core.manifest().owner_epoch, "{error}");
                }
            }
        }
        unfinished.abort();
    }

    /// Kills a client during its puts. The client's connection ends immediately; its lock is
    /// released immediately, or by a later call of [`Self::drop_locks`].
    fn kill_client(
        &mut self,
        open: &Open,
        client_number: usize,
        (at, pages): (usize, usize),
        (after, in_flight): (u64, usize),
    ) {
        self.expect_put(at, pages);
        let unfinished = self.clients[client_number].unfinished.take();
        if let Some(unfinished) = unfinished.as_ref().filter(|unfinished| !unfinished.void) {
            let (at, pages) = unfinished.pages();
            self.bounds.most[at] |= leading(pages);
        }
        let fresh = self.start_client(open);
        let client = std::mem::replace(&mut self.clients[client_number], fresh);
        client.recording.kill(after, in_flight);
        if let Some(unfinished) = unfinished {
            let _ = unfinished.write().commit();
        }
        let _ = put(&client.store, at, pages, 0);
        client.recording.kill_now();
        client.store.close();
        open.core.client_left(client.id);
        if self.extra_rng.one_in(2) {
            self.names.remove(&client.name);
        } else {
            self.locked_dead_clients.push(client.name);
        }
    }
}
