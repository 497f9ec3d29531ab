//! Bodies of requests while they arrive.

use crate::connections::BodyArrival;
use axum::body::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

/// The body of a request, which tells the connection when all of the body has arrived, if the
/// connection must not be displaced during the answer.
#[derive(Debug)]
pub(crate) struct ArrivingBody {
    body: Incoming,
    arrival: Option<BodyArrival>,
}

impl ArrivingBody {
    /// Wraps the body. An empty body has arrived with the headers. Without an `arrival` the
    /// connection may be displaced during the answer.
    pub(crate) fn new(body: Incoming, arrival: Option<BodyArrival>) -> Self {
        let this = Self { body, arrival };
        if this.body.is_end_stream() {
            this.complete();
        }
        this
    }

    fn complete(&self) {
        if let Some(arrival) = &self.arrival {
            arrival.complete();
        }
    }
}

impl Drop for ArrivingBody {
    fn drop(&mut self) {
        // The service answers the request without the rest of the body, so the connection must not
        // be displaced.
        self.complete();
    }
}

impl Body for ArrivingBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None)) || this.body.is_end_stream() {
            this.complete();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
