//! `ritornello serve`: a process that owns stores for others, and answers about stores over HTTP.

mod event;
mod keeper;
mod notify;
mod signals;

use clap::Args;
use event::{Event, emit};
use keeper::{FailedStores, Keeper};
use notify::{OPENING_TIMEOUT, Readiness};
use ritornello_codec::Codec;
use ritornello_service::{Certificate, Service, Settings, StoreAccess, Tokens};
use ritornello_store::{Durability, Options, parse_index};
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::value::{codec, size};
use signals::{Ending, Happening};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
A store needs no service: the first process that opens it owns it, and when the owner ends another
process takes over. With this command the owner is a process that outlives engines, with separate
memory and limits.

If another process owns the store, this command waits, and takes over when the owner ends; with
--must-own it fails instead, with exit code 2. SIGTERM, SIGINT and SIGHUP end the command: clients'
calls finish, all puts are made durable, and a client takes over; a second signal ends the command
immediately. If a disk is mounted over the directory, or the directory is replaced by another
store's, this command opens the directory at the path again. Each change of the command's role is a
line on standard output: `ready`, `waiting`, `failed`, `reopening`, `closed`; with --json one object
per line.

--http answers over HTTP about the stores: /livez, /readyz, /metrics (OpenMetrics), /v1/stats,
/v1/scopes, /v1/config, and /openapi.json, which describes all routes. Without --tokens the service
listens on loopback addresses only and permits only reading; with a token of the role operate or
admin a request may look up pages, flush, scrub, and set or drop scopes. --tls-certificate encrypts
the connections. Files of tokens, certificate and key are read again when they change. With
--observe the command opens no store, so it never owns one: owners answer, also inside engines, and
of a store without an owner its files are read. The command then prints `listening` only.

With --http and several directories, a store that cannot be opened, for example because its disk
is not mounted, ends the command only if all stores fail: /readyz and /metrics tell which store
fails, and it is tried again every few seconds.

Examples:
  ritornello serve /nvme/kv --capacity 200GiB
  ritornello serve /nvme/kv --must-own
  ritornello serve /nvme/kv --json
  ritornello serve /nvme0/kv /nvme1/kv --http 127.0.0.1:7007
  ritornello serve /nvme/kv --observe --http 127.0.0.1:7007
  ritornello serve /nvme/kv --http 0.0.0.0:7007 --http-host kv1.example --tokens /etc/kv/tokens \
    --tls-certificate /etc/kv/tls.crt --tls-key /etc/kv/tls.key")]
pub struct ServeArgs {
    /// The stores' directories
    #[arg(required = true, value_name = "DIR")]
    pub dirs: Vec<PathBuf>,
    /// The store's capacity: creates a missing store, resizes an existing store
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
    /// When a put is complete: cache (once visible) or durable (once synced to disk)
    #[arg(long, default_value = "cache")]
    pub durability: String,
    /// The index: run, lsm, memory, or run with a memory ceiling of at least 16MiB, such as
    /// run:8GiB [default: the store's index; run for a new store]
    #[arg(long)]
    pub index: Option<String>,
    /// Codec of pages: raw, split, zstd, int8 or int4
    #[arg(long, default_value = "raw", value_parser = codec)]
    pub codec: Codec,
    /// Fail if another process owns the store
    #[arg(long)]
    pub must_own: bool,
    /// Answer over HTTP on this address, such as 127.0.0.1:7007
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<SocketAddr>,
    /// File of tokens: a line per token, `read`, `operate` or `admin` and the token; mode 0600 or
    /// 0400
    #[arg(long, value_name = "FILE", requires = "http")]
    pub tokens: Option<PathBuf>,
    /// Encrypt connections with this certificate: a PEM file, with the certificates that lead to its
    /// authority
    #[arg(long, value_name = "FILE", requires_all = ["http", "tls_key"])]
    pub tls_certificate: Option<PathBuf>,
    /// The private key of --tls-certificate: a PEM file that not every user can read
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Name or address, without port, under which clients may reach the service besides localhost
    /// and the address of --http, for example through a proxy; may be repeated
    #[arg(long, value_name = "NAME", requires = "http")]
    pub http_host: Vec<String>,
    /// Open no store: only answer over HTTP
    #[arg(
        long,
        requires = "http",
        conflicts_with_all = ["capacity", "durability", "index", "codec", "must_own"]
    )]
    pub observe: bool,
}

/// Owns stores until a signal, or waits to own them, and answers over HTTP if an address is given.
///
/// # Errors
/// If an argument is invalid, signals cannot be caught, the address cannot be used, a store cannot
/// be opened, taken over or closed, or another process owns it and `--must-own` is set. The first
/// failed store ends the command, which then closes the other stores. With `--http` and several
/// stores, a store that cannot be opened or taken over is tried again, until all stores failed.
pub fn run(context: &Context, args: &ServeArgs) -> Result<Status, Failure> {
    let (sender, happened) = mpsc::channel();
    let ending = Arc::new(Ending::default());
    signals::forward(sender.clone(), Arc::clone(&ending))?;
    let stores: Vec<_> = args.dirs.iter().map(|dir| StoreAccess::new(dir)).collect();
    let keepers = if args.observe { Vec::new() } else { options(args)? };
    let service = match args.http {
        Some(address) => Some(start_service(context, args, address, &stores)?),
        None => None,
    };
    let readiness = Readiness::new(keepers.len());
    let on_open = || readiness.opened();
    // Only the service tells an operator which store failed while the command continues.
    let failed_max = if service.is_some() { keepers.len() } else { 1 };
    let failed_stores = FailedStores::new(failed_max);
    std::thread::scope(|scope| {
        let (mut stops, mut threads) = (Vec::new(), Vec::new());
        for (options, access) in keepers.into_iter().zip(&stores) {
            let (stop, stopped) = mpsc::channel();
            stops.push(stop);
            let must_own = args.must_own;
            let (failed_stores, on_open) = (&failed_stores, &on_open);
            let keeper = Keeper { context, options, must_own, access, failed_stores, on_open };
            let sender = sender.clone();
            threads.push(scope.spawn(move || {
                let _end = StoreEnd(sender);
                keeper.run(&stopped)
            }));
        }
        // A failed receive ends the command as well.
        let first = if failed_max > 1 {
            happened.recv_timeout(OPENING_TIMEOUT)
        } else {
            happened.recv().map_err(RecvTimeoutError::from)
        };
        if matches!(first, Err(RecvTimeoutError::Timeout)) {
            readiness.tell();
            let _ = happened.recv();
        }
        ending.begin();
        readiness.ending();
        drop(stops);
        if let Some(service) = service {
            service.stop();
        }
        let ended = threads.into_iter().map(|thread| {
            let panicked = || Failure::failed("the thread of a store panicked", "again");
            thread.join().unwrap_or_else(|_| Err(panicked()))
        });
        // All threads are joined before the first failure is returned.
        ended.collect::<Vec<_>>().into_iter().collect::<Result<(), _>>()
    })?;
    Ok(Status::Fine)
}

/// Reports [`Happening::StoreEnded`] when it is dropped: at the end of a thread that owns a store
/// or waits to own it, also if the thread panics.
struct StoreEnd(mpsc::Sender<Happening>);

impl Drop for StoreEnd {
    fn drop(&mut self) {
        // Ignore an error: without a receiver the command has already ended.
        let _ = self.0.send(Happening::StoreEnded);
    }
}

fn start_service(
    context: &Context,
    args: &ServeArgs,
    address: SocketAddr,
    stores: &[Arc<StoreAccess>],
) -> Result<Service, Failure> {
    let (host_names, stores) = (args.http_host.clone(), stores.to_vec());
    let tokens = args.tokens.as_deref().map(Tokens::read).transpose()?;
    let files = args.tls_certificate.as_deref().zip(args.tls_key.as_deref());
    let certificate = files.map(|(chain, key)| Certificate::read(chain, key)).transpose()?;
    let tls = certificate.is_some();
    let settings = Settings { address, host_names, tokens, certificate, stores };
    let service = Service::start(settings)?;
    emit(context, &Event::listening(service.address(), tls));
    Ok(service)
}

/// Returns the options of each store.
fn options(args: &ServeArgs) -> Result<Vec<Options>, Failure> {
    for (name, is_given) in
        [("--capacity", args.capacity.is_some()), ("--index", args.index.is_some())]
    {
        if is_given && args.dirs.len() > 1 {
            return Err(Failure::unusable(
                format!("{name} is for one directory, and {} are named", args.dirs.len()),
                format!("`ritornello serve DIR {name} ...` once per directory, or without {name}"),
            ));
        }
    }
    args.dirs.iter().map(|dir| store_options(args, dir)).collect()
}

fn store_options(args: &ServeArgs, dir: &Path) -> Result<Options, Failure> {
    let mut options = Options::new(dir);
    options.capacity = args.capacity;
    options.durability = Durability::parse(&args.durability)?;
    options.codec = args.codec;
    if let Some(index) = &args.index {
        let (kind, memory) = parse_index(index)?;
        (options.index, options.index_memory) = (Some(kind), memory);
    }
    Ok(options)
}
