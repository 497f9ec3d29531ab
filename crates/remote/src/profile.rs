//! Credentials from the files that the AWS command line keeps: `~/.aws/credentials` and `~/.aws/config`.

use ritornello_format::{Error, Result};
use std::env::var;
use std::path::PathBuf;

/// What a profile says.
#[derive(Default)]
pub(crate) struct Profile {
    pub(crate) id: Option<String>,
    pub(crate) secret: Option<String>,
    pub(crate) token: Option<String>,
    pub(crate) region: Option<String>,
}

/// The profile `name`, or the one that the environment names, or the default one. Files that are not
/// there say nothing.
///
/// # Errors
/// `Invalid` if a profile that was named is in neither file.
pub(crate) fn read(name: Option<&str>) -> Result<Profile> {
    let named =
        name.map(str::to_owned).or_else(|| var("AWS_PROFILE").ok()).filter(|name| !name.is_empty());
    let name = named.as_deref().unwrap_or("default");
    let file = |variable: &str, usual: &str| {
        let place = var(variable).ok().map(PathBuf::from);
        let place =
            place.or_else(|| Some(PathBuf::from(var("HOME").ok()?).join(".aws").join(usual)));
        place.and_then(|place| std::fs::read_to_string(place).ok()).unwrap_or_default()
    };
    let credentials = file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
    let config = file("AWS_CONFIG_FILE", "config");
    match parse(&credentials, &config, name) {
        Some(profile) => Ok(profile),
        None if named.is_none() => Ok(Profile::default()),
        None => {
            Err(Error::invalid("there is no such profile in ~/.aws/credentials or ~/.aws/config")
                .with("profile", name))
        }
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
    fn a_profile_is_read_from_both_files() {
        let credentials = "[default]\naws_access_key_id = A\naws_secret_access_key=B==\n\n[ other ]\naws_access_key_id=C\n";
        let config =
            "[default]\nregion = eu-1\n[profile other]\nregion=eu-2\n[profile third]\nregion=eu-3";
        let said = |name: &str| {
            let profile = parse(credentials, config, name)?;
            Some((profile.id, profile.secret, profile.region))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(said("default"), Some((some("A"), some("B=="), some("eu-1"))));
        assert_eq!(said("other"), Some((some("C"), None, some("eu-2"))));
        assert_eq!(said("third"), Some((None, None, some("eu-3"))));
        assert_eq!(said("fourth"), None);
    }
}
