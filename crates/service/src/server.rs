//! The listener, its connections, and the end of the service.

use crate::answer::Shared;
use crate::arriving_body::ArrivingBody;
use crate::connections::{Connection, Connections};
use crate::guard::{HEALTH, LocalAddress};
use crate::limits::{
    CONNECTION_AGE, CONNECTION_GRACE, CONNECTIONS_MAX, FILES_INTERVAL, HANDSHAKE_TIMEOUT,
    HEADERS_BYTES_MAX, HEADERS_MAX, HEADERS_TIMEOUT, REQUEST_TIMEOUT,
};
use crate::reread::Reread;
use crate::routes;
use crate::settings::Settings;
use axum::Router;
use axum::http::header;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use ritornello_format::{Error, Result};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// Pause after a failed accept, for example for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A running service. Dropping it stops it.
#[derive(Debug)]
pub struct Service {
    address: SocketAddr,
    shared: Arc<Shared>,
    stopping: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    /// A drop of these senders ends the threads that check files. The threads are not joined,
    /// because the files' disk may hang.
    _checking: Vec<Sender<()>>,
}

impl Service {
    /// Listens on the address, and starts a thread that answers until the service is stopped.
    ///
    /// # Errors
    /// `Invalid` if the settings are unusable, or the address cannot be used; `Retry` if the
    /// process lacks threads or files.
    pub fn start(settings: Settings) -> Result<Self> {
        settings.check()?;
        let wanted = settings.address;
        let listener = std::net::TcpListener::bind(wanted).map_err(|error| {
            Error::invalid(
                "the service cannot listen on this address: name an address of this machine with a \
                 free port",
            )
            .with("address", wanted)
            .because(error)
        })?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let shared = Shared::new(settings, address);
        let checking = check_files(&shared)?;
        let server = Server { router: routes::router(&shared), shared: Arc::clone(&shared) };
        let (stopping, stopped) = watch::channel(false);
        let thread =
            std::thread::Builder::new().name("ritornello-http".to_owned()).spawn(move || {
                if let Err(error) = serve(&runtime, listener, &server, stopped) {
                    tracing::error!(%error, "the service ended: restart it");
                }
            })?;
        Ok(Self { address, shared, stopping, thread: Some(thread), _checking: checking })
    }

    /// The address on which the service listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no further connection, and waits until the answers to requests are sent, at most
    /// five seconds. Calls of stores that hang are left to their threads.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.stopping.send(true);
        self.shared.scrubs.stop();
        if let Some(thread) = self.thread.take() {
            // The thread fails only if it panics, which the panic's message reports.
            let _ = thread.join();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts one thread that checks the file of the tokens, and one that checks the files of the
/// certificate, until the returned values are dropped. Two threads are needed so that a hanging
/// disk with one of these files does not delay the check of the files on another disk.
fn check_files(shared: &Arc<Shared>) -> Result<Vec<Sender<()>>> {
    let mut checking = Vec::new();
    let mut start = |check: fn(&Shared)| -> Result<()> {
        let (sender, ended) = channel();
        let shared = Arc::clone(shared);
        std::thread::Builder::new().name("ritornello-file".to_owned()).spawn(move || {
            while ended.recv_timeout(FILES_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                check(&shared);
            }
        })?;
        checking.push(sender);
        Ok(())
    };
    if shared.tokens.is_some() {
        start(|shared| shared.tokens.iter().for_each(Reread::check))?;
    }
    if shared.certificate.is_some() {
        start(|shared| shared.certificate.iter().for_each(Reread::check))?;
    }
    Ok(checking)
}

/// The routes and the shared state, which each connection gets.
#[derive(Clone, Debug)]
struct Server {
    router: Router,
    shared: Arc<Shared>,
}

fn serve(
    runtime: &Runtime,
    listener: std::net::TcpListener,
    server: &Server,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    runtime.block_on(async {
        let listener = TcpListener::from_std(listener)?;
        accept_all(listener, server, stopped).await;
        Ok(())
    })
}

async fn accept_all(listener: TcpListener, server: &Server, stopped: watch::Receiver<bool>) {
    let connections = Connections::new(CONNECTIONS_MAX);
    let mut tasks = JoinSet::new();
    let mut stop = stopped.clone();
    for number in 0.. {
        let accepted = tokio::select! {
            _ = stop.wait_for(|stopped| *stopped) => break,
            accepted = accept(&listener, &connections, number) => accepted,
        };
        match accepted {
            Ok((stream, connection)) => {
                let (server, stopped) = (server.clone(), stopped.clone());
                tasks.spawn(serve_stream(stream, connection, server, stopped));
            }
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
        while tasks.try_join_next().is_some() {}
    }
    // Without the listener the kernel refuses further connections.
    drop(listener);
    let _ = timeout(CONNECTION_GRACE, async { while tasks.join_next().await.is_some() {} }).await;
}

/// Accepts a connection, and waits until `connections` has a place for it.
async fn accept(
    listener: &TcpListener,
    connections: &Connections,
    number: u64,
) -> Result<(TcpStream, Connection)> {
    let (stream, _) = listener.accept().await?;
    Ok((stream, connections.admit(number).await))
}

/// Answers the requests of a connection, after its TLS handshake if the service has a certificate.
async fn serve_stream(
    stream: TcpStream,
    place: Connection,
    server: Server,
    mut stopped: watch::Receiver<bool>,
) {
    let Ok(local) = stream.local_addr() else { return };
    let Server { router, shared } = server;
    let Some(certificate) = &shared.certificate else {
        return serve_connection(stream, local, place, router, stopped).await;
    };
    let handshake = TlsAcceptor::from(certificate.current().config()).accept(stream);
    let handshake = tokio::select! {
        handshake = timeout(HANDSHAKE_TIMEOUT, handshake) => handshake,
        () = place.displaced() => return,
        _ = stopped.wait_for(|stopped| *stopped) => return,
    };
    // A client that speaks no TLS, or refuses the certificate, loses its connection.
    match handshake {
        Ok(Ok(stream)) => serve_connection(stream, local, place, router, stopped).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

/// Answers the requests of a connection to the address `local`.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    local: SocketAddr,
    place: Connection,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let place = Arc::new(place);
    let (routes, answers) = (TowerToHyperService::new(router), Arc::clone(&place));
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (guard, arrival) = answers.begin_request();
        // The connection stays displaceable during probes of health without a token: otherwise
        // clients without a token could hold all places with pipelined probes.
        let is_anonymous_probe = HEALTH.contains(&request.uri().path())
            && !request.headers().contains_key(header::AUTHORIZATION);
        let arrival = (!is_anonymous_probe).then_some(arrival);
        let mut request = request.map(|body| ArrivingBody::new(body, arrival));
        request.extensions_mut().insert(LocalAddress(local));
        let answer = routes.call(request);
        async move {
            let answered = answer.await;
            drop(guard);
            answered
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_TIMEOUT)
        .max_buf_size(HEADERS_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let grace = tokio::select! {
        // A client that sends malformed requests or none loses its connection, and nothing else.
        _ = connection.as_mut() => return,
        () = place.displaced() => return,
        _ = stopped.wait_for(|stopped| *stopped) => CONNECTION_GRACE,
        // A request may begin just before this moment, so leave the time to answer it.
        () = sleep(CONNECTION_AGE) => REQUEST_TIMEOUT + CONNECTION_GRACE,
    };
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = timeout(grace, connection) => {}
        () = place.displaced() => {}
    }
}
