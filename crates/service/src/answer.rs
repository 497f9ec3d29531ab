//! State that all routes share: the settings of the service, its stores, and their observations.

use crate::certificate::Certificate;
use crate::host::Hosts;
use crate::limits::{REQUESTS_BURST, REQUESTS_PER_SECOND};
use crate::observer::{Observation, Observer};
use crate::problem::Problem;
use crate::rate::RateLimit;
use crate::reread::Reread;
use crate::scrubs::Scrubs;
use crate::settings::Settings;
use crate::store_access::Source;
use crate::tokens::Tokens;
use axum::http::StatusCode;
use ritornello_format::Error;
use ritornello_node::{Node, Observed};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

/// The state of the service.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) address: SocketAddr,
    pub(crate) host_names: Vec<String>,
    pub(crate) hosts: Hosts,
    pub(crate) tokens: Option<Reread<Tokens>>,
    pub(crate) certificate: Option<Reread<Certificate>>,
    /// The limit of the rate of all requests without a known token together.
    pub(crate) rate: RateLimit,
    pub(crate) scrubs: Scrubs,
    pub(crate) observers: Vec<Arc<Observer>>,
    /// The OpenAPI document, which is made from the routes.
    pub(crate) document: OnceLock<String>,
}

impl Shared {
    /// The state of a service that listens on `address`.
    pub(crate) fn new(settings: Settings, address: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            address,
            hosts: Hosts::new(&settings.host_names, settings.certificate.is_some()),
            host_names: settings.host_names,
            tokens: settings.tokens.map(Reread::new),
            certificate: settings.certificate.map(Reread::new),
            rate: RateLimit::new(REQUESTS_PER_SECOND, REQUESTS_BURST),
            scrubs: Scrubs::default(),
            observers: settings.stores.into_iter().map(Observer::new).collect(),
            document: OnceLock::new(),
        })
    }

    /// Returns the observer of the store that `name` names; without a name, the observers of all
    /// stores.
    ///
    /// # Errors
    /// 404 if the service has no such store.
    pub(crate) fn select(&self, name: Option<&str>) -> Result<Vec<Arc<Observer>>, Problem> {
        let Some(name) = name else { return Ok(self.observers.clone()) };
        let found = self.observers.iter().find(|observer| observer.access().name() == name);
        found.map(|observer| vec![Arc::clone(observer)]).ok_or_else(|| {
            Problem::new(
                StatusCode::NOT_FOUND,
                "not_found",
                "the service has no store with this name: /v1/config lists the names",
            )
        })
    }

    /// Asks `question` about the store that `name` names, on a separate thread. The name may be
    /// left out if the service has one store. An answer of `None` says that no process owns the
    /// store.
    ///
    /// # Errors
    /// 400 without a name if there are several stores; 404 if the service has no such store; 409 if
    /// no process owns the store; errors of [`Calls::run`] and of `question`.
    ///
    /// [`Calls::run`]: crate::calls::Calls::run
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        name: Option<&str>,
        question: impl Fn(Source<'_>) -> Result<Option<T>, Error> + Send + 'static,
    ) -> Result<T, Problem> {
        let observer = self.select_one(name)?;
        let access = Arc::clone(observer.access());
        let asked = move || {
            let answer = access.ask(question).or_else(|error| {
                // A store without its directory has no owner: the request is valid.
                let is_absent = access.open_handle().is_none() && !access.dir().exists();
                if is_absent { Ok(None) } else { Err(error) }
            });
            answer.map_err(|error| Problem::from(&error))?.ok_or_else(not_owned)
        };
        observer.access().calls().run(asked).await
    }

    /// Runs `call` on a separate thread, with the name and the open handle of the store that `name`
    /// names. The name may be left out if the service has one store.
    ///
    /// # Errors
    /// 400 without a name if there are several stores; 404 if the service has no such store; 409 if
    /// this process does not have the store open; errors of [`Calls::run`] and of `call`.
    ///
    /// [`Calls::run`]: crate::calls::Calls::run
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        name: Option<&str>,
        call: impl FnOnce(&str, &Node) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let observer = self.select_one(name)?;
        let access = Arc::clone(observer.access());
        let called = move || match access.open_handle() {
            Some(node) => call(access.name(), &node),
            None => Err(not_open()),
        };
        observer.access().calls().run(called).await
    }

    fn select_one(&self, name: Option<&str>) -> Result<Arc<Observer>, Problem> {
        match &self.select(name)?[..] {
            [observer] => Ok(Arc::clone(observer)),
            _ => Err(Problem::invalid("the service has several stores: name one in `store`")),
        }
    }
}

fn not_owned() -> Problem {
    Problem::new(
        StatusCode::CONFLICT,
        "retry",
        "no process owns the store, so no process knows its pages and requests: start the engine, \
         or the service without --observe, and ask again after a miss",
    )
}

fn not_open() -> Problem {
    Problem::new(
        StatusCode::CONFLICT,
        "retry",
        "this process does not have the store open: start the service without --observe, or wait \
         until the store is open",
    )
}

/// A store's name, and its observation.
pub(crate) struct Named {
    pub(crate) store: String,
    pub(crate) observation: Arc<Observation>,
}

/// Observes stores concurrently.
pub(crate) async fn observe_all(observers: Vec<Arc<Observer>>) -> Vec<Named> {
    let begun: Vec<_> = observers
        .into_iter()
        .map(|observer| {
            let store = observer.access().name().to_owned();
            (store, tokio::spawn(async move { observer.current().await }))
        })
        .collect();
    let mut found = Vec::with_capacity(begun.len());
    for (store, task) in begun {
        // A task fails only if it panics, or when the service ends.
        if let Ok(observation) = task.await {
            found.push(Named { store, observation });
        }
    }
    found
}

/// The state of a store in one word.
pub(crate) fn state_word(observation: &Observation) -> &'static str {
    match &observation.observed {
        Ok(Observed::Owned(stats)) if stats.poisoned.is_some() => "poisoned",
        Ok(Observed::Owned(_)) => "owned",
        Ok(Observed::Unowned(_)) => "unowned",
        Err(_) => "unavailable",
    }
}
