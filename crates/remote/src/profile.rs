//! Credentials from the files of the AWS command line: `~/.aws/credentials` and `~/.aws/config`.

use ritornello_format::{Error, Result};
use std::env::var;
use std::fs::{metadata, read_to_string};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[derive(Default)]
pub(crate) struct Profile {
    pub(crate) id: Option<String>,
    pub(crate) secret: Option<String>,
    pub(crate) token: Option<String>,
    pub(crate) region: Option<String>,
}

/// The name of a profile, and the two files that may define it.
#[derive(Clone, Debug)]
pub(crate) struct ProfileFiles {
    /// The name given by an address or the environment; `None` for the default profile.
    named: Option<String>,
    credentials: Option<PathBuf>,
    config: Option<PathBuf>,
}

/// The version of both files: device, inode, length in bytes, and time of the last modification in
/// seconds and nanoseconds. `None` for a file that cannot be examined.
pub(crate) type Stamp = [Option<(u64, u64, u64, i64, i64)>; 2];

impl ProfileFiles {
    /// The profile `name`; without a name the profile of `AWS_PROFILE`, or else the default
    /// profile.
    pub(crate) fn new(name: Option<&str>) -> Self {
        let named = name.map(str::to_owned).or_else(|| var("AWS_PROFILE").ok());
        let path = |variable: &str, default: &str| {
            let default = || Some(PathBuf::from(var("HOME").ok()?).join(".aws").join(default));
            var(variable).ok().map(PathBuf::from).or_else(default)
        };
        Self {
            named: named.filter(|name| !name.is_empty()),
            credentials: path("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config: path("AWS_CONFIG_FILE", "config"),
        }
    }

    /// Reads the profile. Files that cannot be read count as empty.
    ///
    /// # Errors
    /// `Invalid` if neither file has the named profile.
    pub(crate) fn read(&self) -> Result<Profile> {
        let name = self.named.as_deref().unwrap_or("default");
        let text = |path: &Option<PathBuf>| {
            path.as_deref().and_then(|path| read_to_string(path).ok()).unwrap_or_default()
        };
        match parse(&text(&self.credentials), &text(&self.config), name) {
            Some(profile) => Ok(profile),
            None if self.named.is_none() => Ok(Profile::default()),
            None => Err(Error::invalid(
                "neither ~/.aws/credentials nor ~/.aws/config (or the files that \
                AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE name) has this profile: add it, or \
                correct its name",
            )),
        }
    }

    /// The current version of the files.
    pub(crate) fn stamp(&self) -> Stamp {
        let of = |path: &Path| {
            let found = metadata(path).ok()?;
            Some((found.dev(), found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
        };
        [&self.credentials, &self.config].map(|path| path.as_deref().and_then(of))
    }
}

fn parse(credentials: &str, config: &str, name: &str) -> Option<Profile> {
    let in_config = if name == "default" { name.to_owned() } else { format!("profile {name}") };
    let sections = [section(credentials, name), section(config, &in_config)];
    if sections.iter().all(Option::is_none) {
        return None;
    }
    let value = |key: &str| {
        let mut all = sections.iter().flatten().flatten();
        all.find(|(known, _)| known == key).map(|(_, value)| value.clone())
    };
    Some(Profile {
        id: value("aws_access_key_id"),
        secret: value("aws_secret_access_key"),
        token: value("aws_session_token"),
        region: value("region"),
    })
}

fn section(file: &str, name: &str) -> Option<Vec<(String, String)>> {
    let mut lines = file.lines().map(str::trim);
    lines.find(|line| {
        line.strip_prefix('[').and_then(|line| line.strip_suffix(']')).map(str::trim) == Some(name)
    })?;
    let pairs =
        lines.take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once('='));
    Some(pairs.map(|(key, value)| (key.trim().to_lowercase(), value.trim().to_owned())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_is_read_from_both_files() {
        let credentials = "[default]\naws_access_key_id = A\naws_secret_access_key=B==\n\n[ other ]\naws_access_key_id=C\n";
        let config =
            "[default]\nregion = eu-1\n[profile other]\nregion=eu-2\n[profile third]\nregion=eu-3";
        let read = |name: &str| {
            let profile = parse(credentials, config, name)?;
            Some((profile.id, profile.secret, profile.region))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(read("default"), Some((some("A"), some("B=="), some("eu-1"))));
        assert_eq!(read("other"), Some((some("C"), None, some("eu-2"))));
        assert_eq!(read("third"), Some((None, None, some("eu-3"))));
        assert_eq!(read("fourth"), None);
    }
}
