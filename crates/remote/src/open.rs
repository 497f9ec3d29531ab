//! Opens a remote by its address.

use crate::address::Address;
use parking_lot::RwLock;
use ritornello_format::{Error, Result};
use ritornello_tiers::remote::{
    Backend, DirectoryBackend, MemoryBackend, RemoteOptions, RemoteTier,
};
use std::path::Path;
use std::sync::Arc;

/// A remote that was opened.
#[derive(Clone, Debug)]
pub struct Remote {
    /// What it can do.
    pub backend: Arc<dyn Backend>,
    /// How pages are written there.
    pub options: RemoteOptions,
}

impl Remote {
    /// The tier over it.
    #[must_use]
    pub fn tier(self) -> RemoteTier {
        RemoteTier::with_options(self.backend, self.options)
    }
}

/// Opens what has no scheme of ours: `module:Class?argument=value`.
pub type Opener = Arc<dyn Fn(&Address) -> Result<Arc<dyn Backend>> + Send + Sync>;

static SUPPLIED: RwLock<Option<Opener>> = RwLock::new(None);

/// Has `opener` open every address whose scheme is none of ours. Of several the last one counts.
pub fn supply(opener: Opener) {
    *SUPPLIED.write() = Some(opener);
}

/// The schemes that are compiled in, as they are typed.
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
    if SUPPLIED.read().is_some() {
        all.push("MODULE:CLASS");
    }
    all
}

/// Opens the remote at `address`, without asking it anything. Options of every scheme: `zstd=LEVEL`
/// compresses pages. Those of object stores are in `docs/backends.md`.
///
/// # Errors
/// `Invalid` if the address is none, an option is not known, or there is no such scheme; the message
/// says what can be typed instead.
pub fn open(address: &str) -> Result<Remote> {
    let mut address = Address::parse(address)?;
    let options =
        RemoteOptions { zstd: address.take("zstd").map(|level| zstd(&level)).transpose()? };
    let backend: Arc<dyn Backend> = match address.scheme.as_str() {
        "file" => {
            address.finish("zstd")?;
            if !address.place.is_empty() {
                return Err(Error::invalid(
                    "a directory's address has three slashes, as in file:///mnt/kv",
                )
                .with("address", &address));
            }
            Arc::new(DirectoryBackend::new(Path::new(&address.path), &writer()))
        }
        "memory" => {
            address.finish("zstd")?;
            Arc::new(MemoryBackend::default())
        }
        #[cfg(feature = "clients")]
        scheme if crate::builders::knows(scheme) => {
            Arc::new(crate::objects::ObjectBackend::new(crate::builders::plan(address)?))
        }
        _ => supplied(&address)?,
    };
    Ok(Remote { backend, options })
}

fn supplied(address: &Address) -> Result<Arc<dyn Backend>> {
    let opener = SUPPLIED.read().clone();
    match opener {
        // One of ours that is not compiled in, or nobody's: modules have no slashes.
        Some(opener) if address.place.is_empty() && !address.path.is_empty() => opener(address),
        _ => Err(Error::invalid(format!(
            "there is no such remote; type one of {}",
            schemes().join(", ")
        ))
        .with("address", address)),
    }
}

fn zstd(level: &str) -> Result<i32> {
    let level = level.parse().ok().filter(|level| (1..=19).contains(level));
    level.ok_or_else(|| Error::invalid("zstd is a level from 1 to 19, as in ?zstd=3"))
}

/// What tells this process apart from all others that write to the same directory.
fn writer() -> String {
    let host = rustix::system::uname();
    format!("{}-{}", host.nodename().to_string_lossy(), std::process::id())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn what_cannot_be_opened_says_what_can() {
        let told = |address: &str| open(address).unwrap_err().to_string();
        assert!(told("ftp://host/kv").contains("file:///DIR"), "{}", told("ftp://host/kv"));
        assert!(told("file://mnt/kv").contains("three slashes"));
        assert!(told("memory:?zstd=99").contains("from 1 to 19"));
        assert!(told("memory:?zst=1").contains("zst"));
    }

    #[test]
    fn memory_and_directories_open() {
        let dir = tempfile::tempdir().unwrap();
        let absent = open(&format!("file://{}/kv", dir.path().display())).unwrap().backend;
        assert!(absent.exists("a").unwrap_err().to_string().contains("mount or make it"));
        let directory = open(&format!("file://{}?zstd=3", dir.path().display())).unwrap();
        assert_eq!(directory.options.zstd, Some(3));
        directory.backend.set("a/b", b"1").unwrap();
        assert!(dir.path().join("a/b").is_file());
        assert_eq!(open("memory:").unwrap().options.zstd, None);
    }
}
