//! The policy file of a store: permissions that are rarely given, and calls that clients are
//! denied.
//!
//! The policy is in a file, not among the options, because it belongs to the stored data, applies
//! to every process that opens the store, and is written by users with write access to its
//! directory.

use crate::directory::{Directory, POLICY_FILE};
use ritornello_format::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Hash algorithms without known collisions.
const COLLISION_RESISTANT: [&str; 4] = ["sha256", "sha256_cbor", "sglang-sha256", "blake3"];

/// A call that may be denied to client processes, because it affects pages or space that all
/// processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientCall {
    /// Dropping all scopes.
    Clear,
    /// Dropping a scope with its pages.
    DropScope,
    /// Changing the capacity or the directories.
    ChangeCapacity,
    /// Setting codec, quota or retention of a scope.
    Configure,
}

impl ClientCall {
    /// The call's name in the policy file.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Clear => "clear",
            Self::DropScope => "drop_scope",
            Self::ChangeCapacity => "change_capacity",
            Self::Configure => "configure",
        }
    }
}

/// The permissions of a store. The default, which also applies if the file does not exist, gives no
/// permission and denies no call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StorePolicy {
    /// Keys may come from a hash for which collisions can be constructed. With chosen prompts a
    /// user can then make requests load the pages of a different prompt, as long as the store keeps
    /// these pages.
    pub allow_weak_hashes: bool,
    /// Requests may set the retention of their pages. Retained pages may take half of the store,
    /// which other pages then cannot use.
    pub allow_request_retention: bool,
    /// Calls that the owner denies to other processes.
    pub deny_clients: BTreeSet<ClientCall>,
    /// Path of the policy file, also if the file does not exist.
    #[serde(skip)]
    file: PathBuf,
}

impl StorePolicy {
    fn parse(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| {
                1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count()
            });
            Error::invalid(format!(
                "the store's policy file cannot be read: {}; its only valid lines are \
                 `allow_weak_hashes = true`, `allow_request_retention = true` (or `false`) and \
                 `deny_clients = [\"clear\", \"drop_scope\", \"change_capacity\", \"configure\"]` \
                 (or some of these calls)",
                error.message().trim_end()
            ))
            .with("line", line)
        })
    }

    /// Checks that keys made by `algorithm` may be used.
    ///
    /// # Errors
    /// `Invalid` for a hash that is not known to resist collisions, unless weak hashes are allowed;
    /// the error names the permission.
    pub fn check_hash(&self, algorithm: &str) -> Result<()> {
        if self.allow_weak_hashes || COLLISION_RESISTANT.contains(&algorithm) {
            return Ok(());
        }
        Err(Error::invalid(
            "keys of this hash may collide, and a prompt could get the pages of another prompt: \
             use sha256 or sha256_cbor (LMCache: blake3), or, if all senders of prompts are \
             trusted, write `allow_weak_hashes = true` into the store's policy file and start \
             again",
        )
        .with("hash", algorithm)
        .with("file", self.file.display()))
    }

    /// Checks that a client process may make `call`.
    ///
    /// # Errors
    /// `Invalid` if the policy file denies the call; the error names the file.
    pub fn check_client(&self, call: ClientCall) -> Result<()> {
        if !self.deny_clients.contains(&call) {
            return Ok(());
        }
        Err(Error::invalid(
            "the store's policy file denies this call to client processes: make it in the process \
             that owns the store, or with the engines stopped",
        )
        .with("call", call.word())
        .with("file", self.file.display()))
    }
}

impl Directory {
    /// Reads the policy of the store.
    ///
    /// # Errors
    /// `Invalid` if the file is malformed; file-system errors, with advice.
    pub fn policy(&self) -> Result<StorePolicy> {
        let file = self.path().join(POLICY_FILE);
        let Some(bytes) = self.read(POLICY_FILE)? else {
            return Ok(StorePolicy { file, ..StorePolicy::default() });
        };
        let policy = std::str::from_utf8(&bytes)
            .map_err(|_| {
                Error::invalid("the store's policy file is not UTF-8: rewrite it in UTF-8")
            })
            .and_then(StorePolicy::parse)
            .map_err(|error| error.with("file", file.display()))?;
        Ok(StorePolicy { file, ..policy })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::ErrorKind;

    #[test]
    fn default_policy_is_strict() {
        assert_eq!(StorePolicy::parse("").unwrap(), StorePolicy::default());
        assert_eq!(StorePolicy::parse("# nothing\n").unwrap(), StorePolicy::default());
        let strict = StorePolicy::default();
        for strong in COLLISION_RESISTANT {
            assert!(strict.check_hash(strong).is_ok(), "{strong}");
        }
        for weak in ["xxhash", "xxhash_cbor", "builtin", "sha256_cbor_64bit", "", "unheard-of"] {
            let error = strict.check_hash(weak).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("allow_weak_hashes = true"), "{error}");
        }
    }

    #[test]
    fn permission_is_parsed() {
        let policy = StorePolicy::parse("allow_weak_hashes = true\n").unwrap();
        assert!(policy.check_hash("xxhash").is_ok());
        assert_eq!(
            StorePolicy::parse("allow_weak_hashes = false").unwrap(),
            StorePolicy::default()
        );
    }

    #[test]
    fn calls_are_denied_by_name() {
        let policy =
            StorePolicy::parse("deny_clients = [\"clear\", \"change_capacity\"]\n").unwrap();
        assert!(policy.check_client(ClientCall::DropScope).is_ok());
        for call in [ClientCall::Clear, ClientCall::ChangeCapacity] {
            let error = policy.check_client(call).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(call.word()), "{error}");
            assert!(StorePolicy::default().check_client(call).is_ok());
        }
        assert!(!StorePolicy::default().allow_request_retention);
        assert!(
            StorePolicy::parse("allow_request_retention = true").unwrap().allow_request_retention
        );
    }

    #[test]
    fn errors_name_the_fault_and_the_valid_lines() {
        for (text, named) in [
            ("allow_weak_hashs = true", "allow_weak_hashs"),
            ("\nallow_weak_hashes = 1", "line=2"),
            ("allow_weak_hashes", "line=1"),
            ("[allow]\nweak_hashes = true", "allow"),
            ("file = \"/etc\"", "file"),
            ("deny_clients = [\"flush\"]", "flush"),
            ("allow_weak_hashes = true\ndeny_clients = \"clear\"", "line=2"),
        ] {
            let error = StorePolicy::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let said = error.to_string();
            assert!(said.contains(named) && said.contains("`allow_weak_hashes = true`"), "{said}");
        }
    }
}
