//! The lines that `serve` prints.

use ritornello_terminal::Context;
use ritornello_terminal::print::{bytes, print_stdout};
use serde::Serialize;
use std::net::SocketAddr;
use std::path::Path;

/// A line of output.
#[derive(Default, Serialize)]
pub(super) struct Event<'a> {
    /// `listening`, `ready`, `waiting`, `failed`, `reopening` or `closed`.
    pub(super) event: &'a str,
    /// The store that the event concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) dir: Option<&'a Path>,
    /// The address on which the HTTP service listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) address: Option<SocketAddr>,
    /// Whether the service encrypts its connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tls: Option<bool>,
    /// Process id of the owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) owner_pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) capacity_bytes: Option<u64>,
    /// With `reopening`: why the store's path cannot be opened yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<&'a str>,
}

impl<'a> Event<'a> {
    /// An event of the store in `dir`.
    pub(super) fn of_store(event: &'a str, dir: &'a Path) -> Self {
        Self { event, dir: Some(dir), ..Self::default() }
    }

    /// The event `listening`: the service listens on `address`, with `tls` over encrypted
    /// connections.
    pub(super) fn listening(address: SocketAddr, tls: bool) -> Self {
        Self { event: "listening", address: Some(address), tls: Some(tls), ..Self::default() }
    }
}

/// Prints the event.
pub(super) fn emit(context: &Context, event: &Event<'_>) {
    if context.json {
        print_stdout(&serde_json::to_string(event).unwrap_or_default());
        return;
    }
    print_stdout(&text(event));
}

fn text(event: &Event<'_>) -> String {
    let Some(dir) = event.dir.map(Path::display) else {
        let scheme = if event.tls == Some(true) { "https" } else { "http" };
        let address = event.address.map(|address| format!(" on {scheme}://{address}"));
        return event.event.to_owned() + &address.unwrap_or_default();
    };
    match (event.event, event.owner_pid, event.capacity_bytes) {
        ("ready", Some(pid), Some(capacity)) => {
            format!("ready: process {pid} owns {dir}, {}", bytes(capacity))
        }
        ("waiting", Some(pid), _) => {
            format!(
                "waiting: process {pid} owns {dir}; this process takes over when that process ends"
            )
        }
        ("failed", ..) => {
            format!(
                "failed: a write or sync of {dir} failed; the store is reopened when its disk takes writes"
            )
        }
        ("reopening", ..) => match event.reason {
            None => format!(
                "reopening: {dir} no longer leads to the store; the store is closed, and the path is opened again"
            ),
            Some(reason) => format!("reopening: {dir} cannot be opened yet: {reason}"),
        },
        (event, ..) => format!("{event}: {dir}"),
    }
}
