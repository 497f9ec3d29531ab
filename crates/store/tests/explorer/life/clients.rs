//! Client processes beside the owner.

use super::Life;
use crate::act::Act;
use crate::client::Client;
use crate::common::Open;
use crate::half::Half;
use crate::kinds::{deliver, leading, present, put};
use ritornello_format::ErrorKind;
use ritornello_store::ClientId;

impl Life {
    /// Connects all live processes to the owner, and starts missing clients.
    pub(super) fn connect(&mut self, open: &Open) {
        self.clients.iter().for_each(|client| client.connect(&open.core));
        if let Some(successor) = &self.successor {
            successor.link.connect(open.core.catalog_for(ClientId::LOCAL, ""));
        }
        while self.clients.len() < self.family.clients {
            let client = self.start_client(open);
            self.clients.push(client);
        }
    }

    fn start_client(&mut self, open: &Open) -> Client {
        self.born += 1;
        Client::new(self.watched.another(), &open.core, self.born, &self.names)
    }

    /// The owner's process is dead, and so are the reservations that it made as a client.
    pub(super) fn end_owner_process(&mut self) {
        if let Some(successor) = self.successor.take() {
            self.names.remove(&successor.name);
        }
    }

    /// A power loss ends all processes.
    pub(super) fn end_all_processes(&mut self) {
        self.successor = None;
        self.clients.clear();
        self.lingering.clear();
        self.names.clear();
    }

    /// Makes client `who` the owner.
    pub(super) fn take_over(&mut self, who: usize) {
        let client = self.clients.remove(who);
        self.watched = client.watched.clone();
        self.successor = Some(client);
    }

    /// At some later time the kernel releases the locks of dead processes.
    pub(super) fn drop_locks(&mut self) {
        if !self.lingering.is_empty() && self.fate.one_in(3) {
            let name = self.lingering.remove(0);
            self.names.remove(&name);
        }
    }

    /// Marks reservations of dropped scopes as void.
    pub(super) fn void_halves(&mut self, of: impl Fn(usize) -> bool) {
        let clients = self.clients.iter_mut().chain(&mut self.successor);
        for half in clients.filter_map(|client| client.half.as_mut()) {
            if of(half.pages().0) {
                half.void = true;
            }
        }
    }

    pub(super) fn act_of_client(&mut self, open: &Open, act: &Act) {
        match *act {
            Act::ClientPut { who, at, pages } => {
                self.expect_put(at, pages);
                put(&self.clients[who].store, at, pages, 0).unwrap();
            }
            Act::ClientGet { who, at } => {
                let store = &self.clients[who].store;
                deliver(store, at, present(store)[at]);
            }
            Act::ClientFlush { who } => self.clients[who].store.flush().unwrap(),
            Act::ClientReserve { who, at, pages } => {
                let epoch = open.core.manifest().owner_epoch;
                let client = &mut self.clients[who];
                if client.half.is_none() {
                    let segments = client.segments.clone();
                    client.half = Half::reserve(client.catalog(), segments, at, pages);
                    client.half.iter_mut().for_each(|half| half.epoch = epoch);
                }
            }
            Act::ClientEnd { who, commit } => self.end_half(open, who, commit),
            Act::ClientKill { who, at, pages, after, in_flight, maintain } => {
                self.kill_client(open, who, (at, pages), (after, in_flight));
                if maintain {
                    open.core.run_once();
                }
            }
            _ => {}
        }
    }

    /// A client writes what it reserved. If another owner opened the store since, the space was
    /// withheld for it, and its commit fails with `Retry`.
    fn end_half(&mut self, open: &Open, who: usize, commit: bool) {
        let half = match &mut self.successor {
            Some(Client { half: half @ Some(_), .. }) => half.take(),
            _ => self.clients[who].half.take(),
        };
        let Some(half) = half else { return };
        let half = half.write();
        if commit {
            let (at, pages) = half.pages();
            if !half.void {
                self.expect_put(at, pages);
            }
            match half.commit() {
                Ok(()) => {
                    assert_eq!(half.epoch, open.core.manifest().owner_epoch, "another owner's");
                    return;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
                    assert_ne!(half.epoch, open.core.manifest().owner_epoch, "{error}");
                }
            }
        }
        half.abort();
    }

    /// A client dies within its puts. Its connection ends at once, its locks possibly later.
    fn kill_client(
        &mut self,
        open: &Open,
        who: usize,
        (at, pages): (usize, usize),
        (after, in_flight): (u64, usize),
    ) {
        self.expect_put(at, pages);
        let half = self.clients[who].half.take();
        if let Some(half) = half.as_ref().filter(|half| !half.void) {
            let (at, pages) = half.pages();
            self.bounds.most[at] |= leading(pages);
        }
        let fresh = self.start_client(open);
        let client = std::mem::replace(&mut self.clients[who], fresh);
        client.watched.kill(after, in_flight);
        if let Some(half) = half {
            // The client may be dead by then.
            let _ = half.write().commit();
        }
        let _ = put(&client.store, at, pages, 0);
        client.watched.kill_now();
        client.store.close();
        open.core.client_left(client.id);
        if self.fate.one_in(2) {
            self.names.remove(&client.name);
        } else {
            self.lingering.push(client.name);
        }
    }
}
