//! The calls that an owner permits to its clients, from the store's policy file.

use ritornello_format::Result;
use ritornello_store::StorePolicy;
use ritornello_store::rule::CallRule;
use std::sync::atomic::{AtomicBool, Ordering};

/// The store's policy, as this process read it when it opened the store, for checks of clients'
/// calls.
#[derive(Debug, Default)]
pub(crate) struct ClientPermissions {
    policy: StorePolicy,
    /// Whether a denied call was logged.
    logged: AtomicBool,
}

impl ClientPermissions {
    pub(crate) fn new(policy: StorePolicy) -> Self {
        Self { policy, logged: AtomicBool::new(false) }
    }

    /// Checks that the policy permits a client to send a request to which `rule` applies.
    ///
    /// # Errors
    /// Any error of [`StorePolicy::check_client`].
    pub(crate) fn check(&self, rule: &CallRule) -> Result<()> {
        let Some(call) = rule.permission else { return Ok(()) };
        self.policy.check_client(call).inspect_err(|error| {
            if !self.logged.swap(true, Ordering::Relaxed) {
                tracing::warn!(%error, "a client's call was denied; later denials are not logged");
            }
        })
    }
}
