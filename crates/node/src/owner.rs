//! What a process holds while it owns a store.
//!
//! An owner that closes removes its socket file last, when everything is durable. So a file that
//! is left behind says that its owner died, and with it the puts of its last seconds.

use crate::authority::Authority;
use crate::home::Home;
use crate::presence;
use crate::server::Server;
use crate::socket;
use crate::term::Term;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_medium::Medium;
use ritornello_store::{Alive, ClientId, Durability, Engine, Options, Session};
use std::sync::Arc;

/// The engine, this process's session with it, and the server for the others.
pub(crate) struct Owner {
    engine: Arc<Engine>,
    session: Session,
    term: Term,
    server: Mutex<Option<Server>>,
}

impl Owner {
    /// Opens the store and listens. The caller holds the lock of `home`.
    pub(crate) fn open(
        home: &Arc<Home>,
        medium: &Arc<dyn Medium>,
        options: &Options,
    ) -> Result<Self> {
        let looked_at = Arc::clone(home);
        let alive: Alive = Arc::new(move |name| presence::is_alive(&looked_at, name));
        let engine = Engine::open(Arc::clone(medium), options, alive)?;
        let authority: Arc<dyn Authority> = Arc::new(Arc::clone(&engine));
        let manifest = engine.manifest();
        let term = Term {
            store: manifest.uuid,
            owner: manifest.epoch,
            clean: socket::present(home).is_none(),
            durable: options.durability == Durability::Durable,
        };
        match Server::start(home, authority, term) {
            Ok(server) => Ok(Self {
                term,
                session: engine.session(ClientId::LOCAL, ""),
                engine,
                server: Mutex::new(Some(server)),
            }),
            Err(error) => {
                // The engine was given nothing to lose.
                let _ = engine.close();
                Err(error)
            }
        }
    }

    /// The engine.
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Its own.
    pub(crate) fn term(&self) -> &Term {
        &self.term
    }

    /// This process's own catalog.
    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Hangs up on the clients, who find the next owner, and closes the engine. What is inside is
    /// the result of the last sync: the engine is closed whatever that says.
    ///
    /// # Errors
    /// `Retry` if a client's call is stuck in the engine, on a disk that does not answer: the
    /// directory must not be anybody else's before that has ended.
    pub(crate) fn close(&self) -> Result<Result<()>> {
        let mut server = self.server.lock();
        if let Some(server) = server.as_mut() {
            server.stop();
        }
        let closed = self.engine.close();
        if !server.as_ref().is_none_or(Server::is_deserted) {
            return Err(Error::retry("a call of another process does not end: close again later"));
        }
        if let Some(server) = server.take()
            && closed.is_ok()
        {
            server.sign_off();
        }
        Ok(closed)
    }
}
