//! Builds the client of an object store from an address, by scheme.

use crate::error_map;
use crate::parsed_address::ParsedAddress;
use crate::tls_check::{is_readable, split_endpoint};
#[cfg(feature = "gcs")]
use object_store::StaticCredentialProvider;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use ritornello_format::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// Time limit of a request, including the transfer of its body, if the address has no `timeout`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

type Store = Arc<dyn ObjectStore>;
type Build = Box<dyn Fn() -> object_store::Result<Store> + Send + Sync>;

pub(crate) struct ClientFactory {
    /// The remote's address without its options, for messages.
    pub(crate) name: String,
    pub(crate) prefix: Path,
    build: Build,
}

impl ClientFactory {
    /// Builds a client, without connecting.
    ///
    /// # Errors
    /// `Invalid` if the client cannot be built from the configuration.
    pub(crate) fn build(&self) -> Result<Store> {
        // This call fails if the process has installed another provider of cryptography, which then
        // stays in use.
        let _ = rustls::crypto::ring::default_provider().install_default();
        (self.build)().map_err(|error| {
            Error::invalid(
                "the remote's client cannot be built: correct the options of the address, or the \
                 variables of the environment",
            )
            .with("remote", &self.name)
            .because(error_map::without_secrets(&error.to_string()))
        })
    }
}

/// Whether `scheme` is the scheme of an object store that is compiled in.
pub(crate) fn is_object_store(scheme: &str) -> bool {
    (cfg!(feature = "s3") && scheme == "s3")
        || (cfg!(feature = "gcs") && scheme == "gs")
        || (cfg!(feature = "azure") && scheme == "az")
}

/// Returns the factory of clients for an address whose scheme [is an object
/// store](is_object_store), from the options of the address and from environment variables.
///
/// # Errors
/// `Invalid` if the address names no bucket, if an option or a variable of the environment is
/// invalid, if a named profile does not exist, or if the client cannot be built.
pub(crate) fn factory(mut address: ParsedAddress) -> Result<ClientFactory> {
    let name = address.to_string();
    if address.authority.is_empty() {
        return Err(Error::invalid(format!(
            "name the bucket, as in {}://BUCKET/PREFIX",
            address.scheme
        ))
        .with("address", name));
    }
    let prefix = Path::from(address.path.as_str());
    let timeout = match address.take("timeout") {
        None => REQUEST_TIMEOUT,
        Some(text) => text
            .parse()
            .ok()
            .filter(|s| (1..=600).contains(s))
            .map(Duration::from_secs)
            .ok_or_else(|| {
                Error::invalid("timeout is a number of seconds from 1 to 600")
                    .with("address", &name)
            })?,
    };
    let options = ClientOptions::new()
        .with_timeout(timeout)
        .with_connect_timeout(CONNECT_TIMEOUT.min(timeout));
    let allow_http = flag(&mut address, "allow_http")?;
    // `readable`: whether other machines on the network can read the requests.
    let (build, readable): (Build, bool) = match address.scheme.as_str() {
        #[cfg(feature = "s3")]
        "s3" => s3(address, options)?,
        #[cfg(feature = "gcs")]
        "gs" => gcs(address, options)?,
        #[cfg(feature = "azure")]
        "az" => azure(address, options)?,
        _ => {
            return Err(Error::invalid(
                "this object store is not compiled in: use a build with its cargo feature",
            )
            .with("address", name));
        }
    };
    if readable && !allow_http {
        // Do not log the endpoint, because it may hold a user and a password.
        tracing::warn!(
            remote = name,
            "this remote is reached by plain HTTP: other machines on the network can read and change its pages; use an \
             https:// endpoint, or add allow_http=true to the address to accept that"
        );
    }
    let factory = ClientFactory { name, prefix, build };
    factory.build()?;
    Ok(factory)
}

/// Returns a configuration without retries: the remote tier that uses the client retries, with a
/// budget and deadlines.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

#[cfg(feature = "s3")]
fn s3(mut address: ParsedAddress, options: ClientOptions) -> Result<(Build, bool)> {
    use crate::credentials::ProfileCredentials;
    use crate::profile::ProfileFiles;
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key};

    let mut builder =
        AmazonS3Builder::from_env().with_bucket_name(&address.authority).with_retry(no_retries());
    let named = address.take("profile");
    let files = ProfileFiles::new(named.as_deref());
    let profile = files.read()?;
    // Credentials in the environment take precedence over the files, but not over a profile that
    // the address names.
    let from_files = named.is_some() || !names_credentials(&builder);
    let region = address
        .take("region")
        .or_else(|| builder.get_config_value(&Key::Region))
        .or(profile.region);
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    // Look for the S3-specific endpoint first, because the client prefers it.
    let default = [Key::S3Endpoint, Key::Endpoint];
    let endpoint = address
        .take("endpoint")
        .or_else(|| default.iter().find_map(|key| builder.get_config_value(key)));
    let style = address.take("style");
    let bucket_in_host = match style.as_deref() {
        None => endpoint.is_none(),
        Some("virtual") => true,
        Some("path") => false,
        Some(_) => {
            return Err(Error::invalid("style is path (HOST/BUCKET) or virtual (BUCKET.HOST)")
                .with("address", &address));
        }
    };
    builder = builder.with_virtual_hosted_style_request(bucket_in_host);
    let (mut plain, mut readable) = (false, false);
    if let Some(endpoint) = endpoint {
        let (scheme, host) = split_endpoint(&endpoint)?;
        plain = scheme == "http";
        readable = is_readable(&endpoint);
        let endpoint = if bucket_in_host {
            format!("{scheme}://{}.{host}", address.authority)
        } else {
            endpoint
        };
        builder = builder.with_config(Key::S3Endpoint, endpoint);
    }
    if flag(&mut address, "anonymous")? {
        builder = builder.with_skip_signature(true);
    }
    address
        .finish("endpoint, style, region, profile, anonymous, allow_http, timeout, zstd and key")?;
    builder = builder.with_client_options(options.with_allow_http(plain));
    let build = move || {
        let mut builder = builder.clone();
        // Open the files for each HTTP client, because a file may appear, or receive its key, after
        // the remote was opened.
        if let Some(files) = ProfileCredentials::open(files.clone()).filter(|_| from_files) {
            builder = builder.with_credentials(Arc::new(files));
        }
        Ok(Arc::new(builder.build()?) as Store)
    };
    Ok((Box::new(build), readable))
}

/// Whether the environment, from which `builder` was made, has an access key or names a web identity
/// or a container's role.
#[cfg(feature = "s3")]
fn names_credentials(builder: &object_store::aws::AmazonS3Builder) -> bool {
    use object_store::aws::AmazonS3ConfigKey as Key;

    let set = |key| builder.get_config_value(&key).is_some();
    set(Key::AccessKeyId)
        || set(Key::WebIdentityTokenFile)
        || set(Key::ContainerCredentialsRelativeUri)
        // The client uses this address only together with the file.
        || set(Key::ContainerCredentialsFullUri) && set(Key::ContainerAuthorizationTokenFile)
}

#[cfg(feature = "gcs")]
fn gcs(mut address: ParsedAddress, options: ClientOptions) -> Result<(Build, bool)> {
    use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey as Key};

    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&address.authority)
        .with_retry(no_retries());
    let named = address.take("endpoint").or_else(|| builder.get_config_value(&Key::BaseUrl));
    let mut anonymous = flag(&mut address, "anonymous")?;
    // Google's own clients read `STORAGE_EMULATOR_HOST` too. An emulator needs no credentials.
    let endpoint = named.or_else(|| {
        let host = std::env::var("STORAGE_EMULATOR_HOST").ok().filter(|host| !host.is_empty())?;
        anonymous = true;
        Some(if host.contains("://") { host } else { format!("http://{host}") })
    });
    let (mut plain, mut readable) = (false, false);
    if let Some(endpoint) = endpoint {
        plain = split_endpoint(&endpoint)?.0 == "http";
        readable = is_readable(&endpoint);
        builder = builder.with_base_url(endpoint.trim_end_matches('/'));
    }
    if anonymous {
        // Without credentials the client would query the machine's metadata service before each
        // write.
        let none = StaticCredentialProvider::new(GcpCredential { bearer: String::new() });
        builder = builder.with_skip_signature(true).with_credentials(Arc::new(none));
    }
    address.finish("endpoint, anonymous, allow_http, timeout, zstd and key")?;
    builder = builder.with_client_options(options.with_allow_http(plain));
    Ok((Box::new(move || Ok(Arc::new(builder.clone().build()?) as Store)), readable))
}

#[cfg(feature = "azure")]
fn azure(mut address: ParsedAddress, options: ClientOptions) -> Result<(Build, bool)> {
    use object_store::azure::{AzureConfigKey as Key, MicrosoftAzureBuilder};

    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(&address.authority)
        .with_retry(no_retries());
    if let Some(account) = address.take("account") {
        builder = builder.with_account(account);
    }
    let (mut plain, mut readable) = (false, false);
    let named = address.take("endpoint");
    if named.is_some() {
        // The environment may select the emulator, but an explicit endpoint is not the emulator's
        // address.
        builder = builder.with_use_emulator(false);
    }
    if let Some(endpoint) = named.or_else(|| builder.get_config_value(&Key::Endpoint)) {
        plain = split_endpoint(&endpoint)?.0 == "http";
        readable = is_readable(&endpoint);
        builder = builder.with_endpoint(endpoint);
    }
    let emulator = builder.get_config_value(&Key::UseEmulator);
    if builder.get_config_value(&Key::AccountName).is_none() && emulator.as_deref() == Some("false")
    {
        return Err(Error::invalid("name the storage account: add ?account=NAME to the address")
            .with("address", &address));
    }
    if flag(&mut address, "anonymous")? {
        builder = builder.with_skip_signature(true);
    }
    address.finish("account, endpoint, anonymous, allow_http, timeout, zstd and key")?;
    builder = builder.with_client_options(options.with_allow_http(plain));
    Ok((Box::new(move || Ok(Arc::new(builder.clone().build()?) as Store)), readable))
}

fn flag(address: &mut ParsedAddress, name: &'static str) -> Result<bool> {
    match address.take(name).as_deref() {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => {
            Err(Error::invalid(format!("{name} must be true or false")).with("address", address))
        }
    }
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    use super::names_credentials;
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key};

    #[test]
    fn keys_and_roles_in_the_environment_precede_the_default_profile() {
        let built = |keys: &[Key]| {
            let set = |builder: AmazonS3Builder, key: &Key| builder.with_config(*key, "x");
            names_credentials(&keys.iter().fold(AmazonS3Builder::new(), set))
        };
        assert!(!built(&[]));
        assert!(!built(&[Key::ContainerCredentialsFullUri]));
        assert!(built(&[Key::AccessKeyId]));
        assert!(built(&[Key::WebIdentityTokenFile]));
        assert!(built(&[Key::ContainerCredentialsRelativeUri]));
        assert!(built(&[Key::ContainerCredentialsFullUri, Key::ContainerAuthorizationTokenFile]));
    }
}
