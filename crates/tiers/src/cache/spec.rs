//! The list of a cache's tiers, fastest first:
//!
//! ```text
//! host 8GiB [DIR]   disk DIR [/DIR...] [200GiB]   s3://bucket/prefix | file:///mnt/kv | memory: | module:Class
//! ```
//!
//! A disk tier may have several directories, one per disk; a word with a slash is a directory.
//! The text of a tier may have two options: `write=`, with a [`WritePolicy`], and `rate=`, with a
//! limit in bytes per second.

use super::tier_policies::WritePolicy;
use crate::remote::RemoteAddress;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, Result, checksum, parse_bytes};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// The end of the error messages of this module: an example of a valid list.
const VALID_LIST: &str = "a list of tiers is, fastest first: \"host 8GiB\", \"disk /nvme/kv 200GiB\", \"s3://bucket/prefix\" \
     (at least one of the first two is required)";
/// The file system in memory that holds the default directories of host tiers.
const TMPFS_ROOT: &str = "/dev/shm";

/// One tier of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierSpec {
    /// The tier's location.
    pub location: TierLocation,
    /// When the tier is written; ignored for the first tier.
    pub write: WritePolicy,
    /// Limit of the bytes per second that this process moves to and from the tier.
    pub rate: Option<u64>,
}

/// The location of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierLocation {
    /// A store in a file system in memory.
    Host {
        /// The directory; by default one in `/dev/shm`, whose name is derived from the user and
        /// from the tiers below the host tier.
        dir: Option<PathBuf>,
        /// Capacity in bytes.
        capacity: u64,
    },
    /// A store on disk.
    Disk {
        /// The directory.
        dir: PathBuf,
        /// Further directories, one per disk.
        further_dirs: Vec<PathBuf>,
        /// Capacity in bytes; required to create the store.
        capacity: Option<u64>,
    },
    /// A remote shared by several machines, by its address.
    Remote(RemoteAddress),
}

impl TierSpec {
    /// Parses one tier.
    ///
    /// # Errors
    /// `Invalid`; the message shows a valid list, unless only a size or a policy is malformed.
    pub fn parse(text: &str) -> Result<Self> {
        let (options, words): (Vec<&str>, Vec<&str>) =
            text.split_whitespace().partition(|word| is_option(word));
        let location = match words[..] {
            ["host", size] => TierLocation::Host { dir: None, capacity: parse_bytes(size)? },
            ["host", size, dir] => {
                TierLocation::Host { dir: Some(dir.into()), capacity: parse_bytes(size)? }
            }
            ["disk", dir, ref rest @ ..] => {
                let (further, capacity) = match rest.split_last() {
                    Some((size, further)) if !size.contains('/') => {
                        (further, Some(parse_bytes(size)?))
                    }
                    _ => (rest, None),
                };
                if !further.iter().all(|word| word.contains('/')) {
                    return Err(invalid_list("a disk has directories, then a size", text));
                }
                let further_dirs = further.iter().map(PathBuf::from).collect();
                TierLocation::Disk { dir: dir.into(), further_dirs, capacity }
            }
            [address] if address.contains(':') => TierLocation::Remote(address.into()),
            _ => return Err(invalid_list("not a tier", RemoteAddress::shown(text))),
        };
        let mut spec = Self { location, write: WritePolicy::default(), rate: None };
        for option in options {
            match option.split_once('=') {
                Some(("write", policy)) => spec.write = WritePolicy::parse(policy)?,
                Some(("rate", rate)) => {
                    spec.rate = Some(parse_bytes(rate.trim_end_matches("/s"))?.max(1));
                }
                other => {
                    let name = other.map_or("", |(name, _)| name);
                    return Err(invalid_list(
                        "unknown option (the options are write= and rate=)",
                        name,
                    ));
                }
            }
        }
        Ok(spec)
    }

    /// Parses a list of tiers.
    ///
    /// # Errors
    /// `Invalid`; the message shows a valid list, unless only a size or a policy is malformed.
    pub fn list<T: AsRef<str>>(texts: &[T]) -> Result<Vec<Self>> {
        let list: Vec<Self> =
            texts.iter().map(|text| Self::parse(text.as_ref())).collect::<Result<_>>()?;
        let given = || {
            let shown = |text: &T| format!("{:?}", RemoteAddress::shown(text.as_ref()));
            texts.iter().map(shown).collect::<Vec<_>>().join(", ")
        };
        if list.is_empty() {
            return Err(invalid_list("the list has no tier", "nothing"));
        }
        for two in list.windows(2) {
            let (above, below) = (two[0].tier(), two[1].tier());
            if above == below {
                return Err(invalid_list("two tiers of the same kind", given()));
            }
            if above > below {
                return Err(invalid_list("tiers out of order", given()));
            }
        }
        if list[0].tier() == Tier::Remote {
            return Err(invalid_list("a remote needs a local tier above it", given()));
        }
        Ok(list)
    }

    /// Returns `text`, the text of one tier, without the user info and the options of an address.
    #[must_use]
    pub fn shown(text: &str) -> String {
        let is_local = text.split_whitespace().next().is_some_and(|kind| !kind.contains(':'));
        // The path of a directory may contain `@` and `?`.
        let shown = |word: &str| match is_local && word.starts_with('/') {
            true => word.to_owned(),
            false => RemoteAddress::shown(word),
        };
        text.split_whitespace().map(shown).collect::<Vec<_>>().join(" ")
    }

    /// The kind of tier at this location.
    #[must_use]
    pub fn tier(&self) -> Tier {
        match self.location {
            TierLocation::Host { .. } => Tier::Host,
            TierLocation::Disk { .. } => Tier::Disk,
            TierLocation::Remote(_) => Tier::Remote,
        }
    }
}

/// Whether `word` is an option: it has a `=`, and only lower-case letters before its first `=`. A
/// path such as `/nvme/a=b` is not an option, because it begins with `/`.
fn is_option(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_lowercase()))
}

fn invalid_list(what: &str, given: impl Display) -> Error {
    Error::invalid(format!("{what}: {VALID_LIST}")).with("given", given)
}

/// Default directory of the host tier: the same for all processes of a user that list the same
/// tiers below it. The name does not depend on further directories of the disk tier, so adding a
/// disk does not change the directory.
pub(super) fn host_dir(list: &[TierSpec]) -> PathBuf {
    let mut below = Vec::new();
    for spec in list {
        match &spec.location {
            TierLocation::Host { .. } => continue,
            TierLocation::Disk { dir, .. } => {
                let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.clone());
                below.extend(dir.as_os_str().as_encoded_bytes());
            }
            TierLocation::Remote(address) => {
                // The options may hold a secret, and the directory's name is public, so only a
                // cryptographic hash of the options goes into the name.
                let (front, options) = address.expose().split_once('?').unzip();
                below.extend(front.unwrap_or(address.expose()).as_bytes());
                below.extend(
                    options
                        .map(|options| blake3::hash(options.as_bytes()))
                        .iter()
                        .flat_map(|hash| *hash.as_bytes()),
                );
            }
        }
        below.push(0);
    }
    let user = rustix::process::geteuid().as_raw();
    Path::new(TMPFS_ROOT).join(format!("ritornello-{user}-{:016x}", checksum(&below)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tier_list_parses() {
        let list = TierSpec::list(&[
            "host 8GiB /dev/shm/kv",
            "disk /nvme/kv 200GiB write=selective(2) rate=100MiB",
            "s3://bucket/prefix write=none",
        ])
        .unwrap();
        let disk = |further: &[&str], capacity| TierLocation::Disk {
            dir: "/nvme/kv".into(),
            further_dirs: further.iter().map(PathBuf::from).collect(),
            capacity,
        };
        assert_eq!(
            list[0].location,
            TierLocation::Host { dir: Some("/dev/shm/kv".into()), capacity: 8 << 30 }
        );
        assert_eq!((list[1].write, list[1].rate), (WritePolicy::Selective(2), Some(100 << 20)));
        assert_eq!(list[2].location, TierLocation::Remote("s3://bucket/prefix".into()));
        assert_eq!(list[2].write, WritePolicy::Never);
        assert_eq!(list[1].location, disk(&[], Some(200 << 30)));
        for (text, capacity) in
            [("disk /nvme/kv /a /b/c 1GiB", Some(1 << 30)), ("disk /nvme/kv /a /b/c", None)]
        {
            assert_eq!(TierSpec::parse(text).unwrap().location, disk(&["/a", "/b/c"], capacity));
        }
        assert!(TierSpec::list(&["disk /nvme/a=b"]).is_ok());
    }

    #[test]
    fn errors_show_valid_list() {
        let lists: [&[&str]; 11] = [
            &[],
            &["disk /a", "host 1GiB"],
            &["s3://a/b"],
            &["host 1GiB", "s3://a/b", "disk /a"],
            &["host 1GiB", "host 1GiB"],
            &["disk /a", "disk /b"],
            &["host"],
            &["tape /dev/st0"],
            &["disk /a speed=9"],
            &["disk"],
            &["disk /a 1GiB 2GiB"],
        ];
        for list in lists {
            let error = TierSpec::list(list).unwrap_err().to_string();
            assert!(error.contains("\"host 8GiB\", \"disk /nvme/kv 200GiB\""), "{error}");
        }
        assert!(TierSpec::list(&["host 8G"]).unwrap_err().to_string().contains("8GiB"));
    }

    #[test]
    fn errors_hide_address_options() {
        let lists: [&[&str]; 5] = [
            &["s3://a/b?password=hunter2"],
            &["host 1GiB", "s3://a/b?password=hunter2", "disk /a"],
            &["host 1GiB", "s3://a/b?password=my hunter2"],
            &["host 1GiB", "s3://a/b?x=1 password=hunter2"],
            &["s3://me:hunter2@a/b"],
        ];
        for list in lists {
            let error = TierSpec::list(list).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        let list = TierSpec::list(&["host 1GiB", "m:C?password=hunter2"]).unwrap();
        assert!(!format!("{list:?}").contains("hunter2"), "{list:?}");
        assert_eq!(TierSpec::shown("m:C?password=hunter2 write=none"), "m:C?… write=none");
        assert_eq!(TierSpec::shown("disk /a@b/c?d 1GiB"), "disk /a@b/c?d 1GiB");
        assert_eq!(TierSpec::shown("s3://me:hun /ter2@a"), "s3://… a");
    }

    #[test]
    fn default_host_directory_depends_on_lower_tiers_only() {
        let at = |list: &[&str]| host_dir(&TierSpec::list(list).unwrap());
        assert_eq!(at(&["host 1GiB", "disk /a"]), at(&["host 2GiB", "disk /a 9GiB"]));
        assert_eq!(at(&["host 1GiB", "disk /a"]), at(&["host 1GiB", "disk /a /b 9GiB"]));
        assert_ne!(at(&["host 1GiB", "disk /a"]), at(&["host 1GiB", "disk /b"]));
        assert_ne!(at(&["host 1GiB", "s3://a?x=1"]), at(&["host 1GiB", "s3://a?x=2"]));
    }
}
