//! Opens a remote by its address.

use crate::parsed_address::ParsedAddress;
use parking_lot::RwLock;
use ritornello_format::{Error, Result};
use ritornello_tiers::remote::{
    Backend, DirectoryBackend, KeyRing, MemoryBackend, RemoteOptions, RemoteTier,
};
use std::path::Path;
use std::sync::Arc;

/// A backend, and the options with which a tier writes and verifies objects in it.
#[derive(Clone, Debug)]
pub struct ConfiguredBackend {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// How pages are written, and which objects are accepted.
    pub options: RemoteOptions,
}

impl ConfiguredBackend {
    /// A tier over the backend.
    #[must_use]
    pub fn tier(self) -> RemoteTier {
        RemoteTier::with_options(self.backend, self.options)
    }
}

/// Opens addresses whose scheme is not built in: `module:Class?argument=value`.
pub type Opener = Arc<dyn Fn(&ParsedAddress) -> Result<Arc<dyn Backend>> + Send + Sync>;

static OPENER: RwLock<Option<Opener>> = RwLock::new(None);

/// Registers `opener` for the addresses with a path and without an authority (`MODULE:CLASS`) whose
/// scheme is not built in, and replaces an earlier opener.
pub fn register_opener(opener: Opener) {
    *OPENER.write() = Some(opener);
}

/// Returns the forms of address that [`open`] accepts in this build, as users type them.
#[must_use]
pub fn schemes() -> Vec<&'static str> {
    let mut all = Vec::new();
    if cfg!(feature = "s3") {
        all.push("s3://BUCKET/PREFIX");
    }
    if cfg!(feature = "gcs") {
        all.push("gs://BUCKET/PREFIX");
    }
    if cfg!(feature = "azure") {
        all.push("az://CONTAINER/PREFIX");
    }
    all.extend(["file:///DIR", "memory:"]);
    if OPENER.read().is_some() {
        all.push("MODULE:CLASS");
    }
    all
}

/// Opens the remote at `address`, without sending a request. Options of every scheme: `zstd=LEVEL`
/// (1 to 19) compresses pages; `key=/FILE` names a key file, with which objects are sealed and
/// verified. Options of object stores are in `docs/backends.md`.
///
/// # Errors
/// `Invalid`, with advice, if the address or an option is invalid, the scheme is unknown, or the
/// key file cannot be used; errors of a registered opener. A remote is never opened without the key
/// that its address names.
pub fn open(address: &str) -> Result<ConfiguredBackend> {
    let opened = open_deferred(address)?;
    opened.options.keys.as_deref().map_or(Ok(()), KeyRing::load)?;
    Ok(opened)
}

/// Like [`open`], but the first call of the remote's [tier](ConfiguredBackend::tier) reads the key
/// file. While the file cannot be used, nothing is sent: calls fail or miss, as for a remote that
/// refuses access, and later calls read the file again.
///
/// # Errors
/// `Invalid`, with advice, if the address or an option is invalid, or the scheme is unknown; errors
/// of a registered opener.
pub fn open_deferred(address: &str) -> Result<ConfiguredBackend> {
    let mut address = ParsedAddress::parse(address)?;
    let options = options(&mut address)?;
    let backend: Arc<dyn Backend> = match address.scheme.as_str() {
        "file" => {
            let shared = match address.take("mode").as_deref() {
                None | Some("private") => false,
                Some("shared") => true,
                Some(_) => {
                    return Err(Error::invalid(
                        "mode is private (this user only), or shared (the directory's group, too)",
                    )
                    .with("address", &address));
                }
            };
            address.finish("mode, zstd and key")?;
            if !address.authority.is_empty() {
                return Err(Error::invalid(
                    "a directory's address has three slashes, as in file:///mnt/kv",
                )
                .with("address", &address));
            }
            let backend = DirectoryBackend::new(Path::new(&address.path), &writer_name());
            Arc::new(if shared { backend.shared() } else { backend })
        }
        "memory" => {
            address.finish("zstd and key")?;
            Arc::new(MemoryBackend::default())
        }
        #[cfg(feature = "clients")]
        scheme if crate::builders::is_object_store(scheme) => {
            Arc::new(crate::objects::ObjectBackend::new(crate::builders::factory(address)?))
        }
        _ => open_registered(&address)?,
    };
    Ok(ConfiguredBackend { backend, options })
}

fn open_registered(address: &ParsedAddress) -> Result<Arc<dyn Backend>> {
    let opener = OPENER.read().clone();
    match opener {
        // The address of a registered backend (MODULE:CLASS) has no `//`. The scheme of any other
        // address is unknown or not compiled in.
        Some(opener) if address.authority.is_empty() && !address.path.is_empty() => opener(address),
        _ => Err(Error::invalid(format!(
            "the remote's scheme is unknown: use one of {}",
            schemes().join(", ")
        ))
        .with("address", address)),
    }
}

/// Removes the options that every scheme accepts from the address, and returns them.
fn options(address: &mut ParsedAddress) -> Result<RemoteOptions> {
    Ok(RemoteOptions {
        zstd: address.take("zstd").map(|level| zstd(&level)).transpose()?,
        keys: address.take("key").map(|path| keys(&path)).transpose()?.map(Arc::new),
    })
}

/// Removes from an address the options that every scheme accepts, for callers that do not use them.
#[cfg(feature = "clients")]
pub(crate) fn without_options(address: &mut ParsedAddress) {
    for option in ["zstd", "key"] {
        drop(address.take(option));
    }
}

fn keys(path: &str) -> Result<KeyRing> {
    let path = Path::new(path);
    if path.is_absolute() {
        return Ok(KeyRing::deferred(path));
    }
    // Do not quote the value, which may be the key itself.
    Err(Error::invalid("key is the absolute path of a key file, as in ?key=/etc/ritornello/key"))
}

fn zstd(level: &str) -> Result<i32> {
    let level = level.parse().ok().filter(|level| (1..=19).contains(level));
    level.ok_or_else(|| Error::invalid("zstd is a level from 1 to 19, as in ?zstd=3"))
}

/// The name of this process among the writers of a directory: the host's name and the process id.
fn writer_name() -> String {
    let host = rustix::system::uname();
    format!("{}-{}", host.nodename().to_string_lossy(), std::process::id())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn errors_say_what_a_valid_address_has() {
        let message = |address: &str| open(address).unwrap_err().to_string();
        assert!(message("ftp://host/kv").contains("file:///DIR"), "{}", message("ftp://host/kv"));
        assert!(message("file://mnt/kv").contains("three slashes"));
        assert!(message("memory:?zstd=99").contains("from 1 to 19"));
        assert!(message("memory:?zst=1").contains("zst"));
    }

    #[test]
    fn memory_and_directories_open() {
        let dir = tempfile::tempdir().unwrap();
        let missing = open(&format!("file://{}/kv", dir.path().display())).unwrap().backend;
        assert!(missing.exists("a").unwrap_err().to_string().contains("mount or make it"));
        let directory = open(&format!("file://{}?zstd=3", dir.path().display())).unwrap();
        assert_eq!(directory.options.zstd, Some(3));
        directory.backend.set("a/b", b"1").unwrap();
        assert!(dir.path().join("a/b").is_file());
        assert_eq!(open("memory:").unwrap().options.zstd, None);
    }

    #[test]
    fn directory_is_private_unless_shared() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o7777
        };
        let opened = |options: &str| {
            open(&format!("file://{}{options}", dir.path().display())).unwrap().backend
        };
        let root = Permissions::from_mode(0o2755);
        std::fs::set_permissions(dir.path(), root).unwrap();
        opened("").set("a/b/c", b"1").unwrap();
        assert_eq!((mode("a"), mode("a/b"), mode("a/b/c")), (0o2700, 0o2700, 0o600));
        opened("?mode=shared").set("d/e/f", b"1").unwrap();
        assert_eq!((mode("d"), mode("d/e"), mode("d/e/f")), (0o2770, 0o2770, 0o660));
        // Existing directories keep their mode.
        opened("").set("d/e/g", b"1").unwrap();
        assert_eq!((mode(""), mode("d/e"), mode("d/e/g")), (0o2755, 0o2770, 0o600));
        let error = open("file:///x?mode=hunter2").unwrap_err().to_string();
        assert!(error.contains("shared") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn only_valid_key_file_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("the key");
        let address = format!("memory:?key={}", file.display().to_string().replace(' ', "%20"));
        let message = || open(&address).unwrap_err().to_string();
        assert!(message().contains("cannot be opened"), "{}", message());
        let deferred = open_deferred(&address).unwrap();
        assert!(deferred.options.keys.as_ref().unwrap().ids().is_empty());
        let hex = "5a".repeat(32);
        std::fs::write(&file, format!("new {hex}\nold {}\n", "33".repeat(32))).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        assert!(message().contains("chmod 600"), "{}", message());
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let remote = open(&address).unwrap();
        assert_eq!(remote.options.keys.as_ref().unwrap().ids(), ["new", "old"]);
        deferred.options.keys.as_ref().unwrap().load().unwrap();
        assert_eq!(deferred.options, remote.options);
        assert!(!format!("{remote:?}").contains("5a5a"));
        // A key in place of the key file's path is refused, and is not shown.
        let direct = open(&format!("memory:?key={hex}")).unwrap_err().to_string();
        assert!(direct.contains("absolute path") && !direct.contains("5a5a"), "{direct}");
        assert!(open_deferred(&format!("memory:?key={hex}")).is_err());
    }
}
