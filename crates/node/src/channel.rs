//! Framed messages over a stream socket: a `u32` length, then a message in postcard. One peer sends
//! requests, and may send several before it receives a response. The other peer responds in the
//! order of the requests.

use crate::memory_budget::Grant;
use crate::owner_lost::owner_lost;
use ritornello_format::{Error, Result};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum message length in both directions. A put of 65,535 pages with 64-byte keys takes 4 MiB.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Maximum length of the first message that an owner receives on a connection. The initial buffer
/// is longer, so an unauthenticated peer takes no further memory.
const HELLO_BYTES_MAX: usize = 1 << 10;
/// Length to which a connection shrinks its output buffer after a message was sent, and its input
/// buffer when it receives the next message; small, because an owner may have a thousand
/// connections.
const BUFFER_KEPT: usize = 64 << 10;
/// Initial length of the receive buffer: twice the bytes of 256 keys of 32 bytes.
const BUFFER_START: usize = 16 << 10;
/// Bytes of the length field.
const PREFIX: usize = 4;

/// A function that a channel calls once per time slice while a message is incomplete, whether bytes
/// arrive or not. An error ends the wait. The argument says whether part of the message has
/// arrived; it is always true while a message is sent.
pub(crate) type WaitCheck<'a> = &'a mut dyn FnMut(bool) -> Result<()>;

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: Arc<UnixStream>,
    slice: Duration,
    input: Vec<u8>,
    /// Bytes received into `input`.
    filled: usize,
    /// Bytes of `input`, from its beginning, that the message last returned by
    /// [`Channel::receive`] takes with its length field.
    consumed: usize,
    /// Maximum length of a received message.
    bytes_max: usize,
    /// Memory that `input` takes beyond `BUFFER_KEPT`; every connection may have `BUFFER_KEPT`
    /// without a grant.
    grant: Grant,
    output: Vec<u8>,
}

impl Channel {
    /// Creates a channel over `stream` that calls its wait check once per `slice`.
    pub(crate) fn new(stream: Arc<UnixStream>, slice: Duration) -> Result<Self> {
        for timeout in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&stream, timeout, Some(slice))
                .map_err(|error| owner_lost(error.into()))?;
        }
        let input = vec![0; BUFFER_START];
        let (bytes_max, grant, output) = (MESSAGE_BYTES_MAX, Grant::default(), Vec::new());
        Ok(Self { stream, slice, input, filled: 0, consumed: 0, bytes_max, grant, output })
    }

    /// Limits received messages to [`HELLO_BYTES_MAX`] until [`Channel::authenticate`] is called.
    pub(crate) fn unauthenticated(mut self) -> Self {
        self.bytes_max = HELLO_BYTES_MAX;
        self
    }

    /// Raises the limit of received messages to [`MESSAGE_BYTES_MAX`]. `grant` limits their memory.
    pub(crate) fn authenticate(&mut self, grant: Grant) {
        self.bytes_max = MESSAGE_BYTES_MAX;
        self.grant = grant;
    }

    /// Encodes the message that [`Channel::send`] sends.
    ///
    /// # Errors
    /// `Invalid` if the message is too long: the connection remains usable. `Fatal` if it cannot be
    /// encoded.
    pub(crate) fn stage(&mut self, message: &impl Serialize) -> Result<()> {
        let mut output = std::mem::take(&mut self.output);
        output.clear();
        output.extend_from_slice(&[0; PREFIX]);
        let mut output = postcard::to_extend(message, output).map_err(|error| {
            Error::fatal("a message cannot be encoded: report this").because(error)
        })?;
        let length = output.len() - PREFIX;
        if length > MESSAGE_BYTES_MAX {
            return Err(Error::invalid("too many keys for one call: pass fewer at a time")
                .with("bytes", length)
                .with("bytes_max", MESSAGE_BYTES_MAX));
        }
        output[..PREFIX].copy_from_slice(&(length as u32).to_le_bytes());
        self.output = output;
        Ok(())
    }

    /// Sends the staged message.
    ///
    /// # Errors
    /// [`OwnerLost`](crate::owner_lost::OwnerLost) if the connection fails; the error of `check`.
    pub(crate) fn send(&mut self, check: WaitCheck<'_>) -> Result<()> {
        self.send_all(&self.output, check)?;
        self.output.clear();
        self.output.shrink_to(BUFFER_KEPT);
        Ok(())
    }

    fn send_all(&self, mut bytes: &[u8], check: WaitCheck<'_>) -> Result<()> {
        let mut checked = Instant::now();
        while !bytes.is_empty() {
            // Send in pieces, so that `check` runs once per time slice even if the peer reads
            // slowly.
            let piece = bytes.get(..BUFFER_KEPT).unwrap_or(bytes);
            // If the peer has closed the connection, `write` would raise SIGPIPE, which kills a
            // process that does not ignore it.
            let stuck = match send(&self.stream, piece, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    bytes = bytes.get(sent..).unwrap_or_default();
                    false
                }
                Err(Errno::AGAIN) => true,
                Err(Errno::INTR) => false,
                Err(error) => return Err(owner_lost(error.into())),
            };
            if !bytes.is_empty() && (stuck || checked.elapsed() >= self.slice) {
                check(true)?;
                checked = Instant::now();
            }
        }
        Ok(())
    }

    /// Receives one message. Returns its bytes, or `None` if the peer has closed the connection
    /// before the message began.
    ///
    /// # Errors
    /// `Invalid` if the message is too long; `Retry` if the grant of memory is exhausted;
    /// [`OwnerLost`](crate::owner_lost::OwnerLost) if the connection fails; the error of `check`.
    pub(crate) fn receive(&mut self, check: WaitCheck<'_>) -> Result<Option<&[u8]>> {
        self.discard_consumed();
        let (mut checked, mut stuck) = (Instant::now(), false);
        loop {
            if let Some(whole) = self.whole_length()? {
                if whole <= self.filled {
                    self.consumed = whole;
                    return Ok(Some(&self.input[PREFIX..whole]));
                }
                if self.filled == self.input.len() {
                    // The buffer grows with the bytes received, not with the announced length.
                    let length = whole.min(2 * self.filled);
                    self.grant.resize(length.saturating_sub(BUFFER_KEPT))?;
                    self.input.resize(length, 0);
                }
            }
            if stuck || checked.elapsed() >= self.slice {
                check(self.filled > 0)?;
                checked = Instant::now();
            }
            stuck = false;
            match recv(&self.stream, &mut self.input[self.filled..], RecvFlags::empty()) {
                Ok((_, 0)) if self.filled == 0 => return Ok(None),
                Ok((_, 0)) => return Err(owner_lost(io::ErrorKind::UnexpectedEof.into())),
                Ok((_, count)) => self.filled += count,
                Err(Errno::AGAIN) => stuck = true,
                Err(Errno::INTR) => {}
                Err(error) => return Err(owner_lost(error.into())),
            }
        }
    }

    /// Whether bytes arrived after the message that [`Channel::receive`] returned last.
    pub(crate) fn has_more(&self) -> bool {
        self.filled > self.consumed
    }

    /// Shuts the connection down in both directions and returns the pending message. `None` if the
    /// message is incomplete, is too long, or exceeds the memory for messages. If the message is
    /// incomplete, the peer's send fails, so the peer knows that its message did not arrive.
    pub(crate) fn take_last_message(&mut self) -> Option<&[u8]> {
        shut_down(&self.stream, Shutdown::Both);
        // The bytes received before the shutdown can still be read.
        self.receive(&mut |_| Ok(())).ok().flatten()
    }

    fn discard_consumed(&mut self) {
        self.input.copy_within(self.consumed..self.filled, 0);
        self.filled -= self.consumed;
        self.consumed = 0;
        let kept = BUFFER_KEPT.max(self.filled);
        if self.input.len() > kept {
            self.input.truncate(kept);
            self.input.shrink_to_fit();
            // Shrinking a grant cannot fail.
            let _ = self.grant.resize(kept - BUFFER_KEPT);
        }
    }

    /// Returns the number of bytes of the next message with its length field; `None` before the
    /// length field has arrived. Fails with `Invalid` if the message is too long.
    fn whole_length(&self) -> Result<Option<usize>> {
        let Some(prefix) = self.input[..self.filled].first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > self.bytes_max {
            return Err(Error::invalid(
                "a message is too long, or the peer does not speak Ritornello's protocol",
            )
            .with("bytes", length)
            .with("bytes_max", self.bytes_max));
        }
        Ok(Some(PREFIX + length))
    }
}

/// Ends one or both directions of a connection, also for threads blocked on it.
pub(crate) fn shut_down(stream: &UnixStream, how: Shutdown) {
    // If the call fails, the connection has ended already.
    let _ = rustix::net::shutdown(stream, how);
}

/// Decodes the message in `bytes`, and rejects trailing bytes.
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(Error::invalid("a message has trailing bytes")),
        Err(error) => Err(Error::invalid("a message is malformed").because(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_budget::MemoryBudget;
    use crate::owner_lost::is_owner_lost;
    use std::io::{Read, Write};

    fn pair() -> (Channel, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        (Channel::new(Arc::new(near), Duration::from_millis(10)).unwrap(), far)
    }

    fn deny(_: bool) -> Result<()> {
        Err(Error::retry("timed out"))
    }

    #[test]
    fn short_and_long_messages_arrive_unchanged() {
        for length in [0usize, 1, 100, BUFFER_START, 3 * BUFFER_KEPT] {
            let (mut near, far) = pair();
            let message: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let sent = message.clone();
            let sender = std::thread::spawn(move || {
                let mut far = Channel::new(Arc::new(far), Duration::from_secs(1)).unwrap();
                far.stage(&sent).unwrap();
                far.send(&mut |_| Ok(())).unwrap();
            });
            let bytes = near.receive(&mut |_| Ok(())).unwrap().unwrap();
            assert_eq!(decode::<Vec<u8>>(bytes).unwrap(), message);
            sender.join().unwrap();
            assert!(
                near.receive(&mut |_| Ok(())).unwrap().is_none(),
                "`receive` must report the closed connection"
            );
        }
    }

    #[test]
    fn oversized_messages_are_refused() {
        let (mut near, mut far) = pair();
        far.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(near.receive(&mut deny).is_err());
        assert!(near.input.len() <= BUFFER_START);
        let (mut near, _far) = pair();
        let error = near.stage(&vec![0u8; MESSAGE_BYTES_MAX + 1]).unwrap_err();
        assert!(error.to_string().contains("fewer"), "{error}");
    }

    #[test]
    fn receive_of_incomplete_message_times_out_or_reports_lost_peer() {
        let (mut near, mut far) = pair();
        far.write_all(&[9, 0, 0, 0, 1]).unwrap();
        assert!(near.receive(&mut deny).unwrap_err().to_string().contains("timed out"));
        drop(far);
        let (mut near, mut far) = pair();
        far.write_all(&[9, 0, 0]).unwrap();
        drop(far);
        assert!(is_owner_lost(&near.receive(&mut deny).unwrap_err()));
    }

    #[test]
    fn receive_and_send_time_out_on_a_slow_peer() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut near = Channel::new(Arc::new(near), Duration::from_millis(100)).unwrap();
        let mut reader = far.try_clone().unwrap();
        let drip = std::thread::spawn(move || {
            let mut far = far;
            far.write_all(&(1u32 << 20).to_le_bytes()).unwrap();
            for _ in 0..2000 {
                std::thread::sleep(Duration::from_millis(1));
                if far.write_all(b"x").is_err() {
                    return;
                }
            }
            // Send the rest of the message, so that the test fails if no timeout ends the receive.
            let _ = far.write_all(&vec![0; 1 << 20]);
        });
        assert!(near.receive(&mut deny).unwrap_err().to_string().contains("timed out"));
        near.stage(&vec![0u8; 4 << 20]).unwrap();
        let sip = std::thread::spawn(move || {
            let mut some = vec![0; 64 << 10];
            while reader.read(&mut some).is_ok_and(|count| count > 0) {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        assert!(near.send(&mut deny).unwrap_err().to_string().contains("timed out"));
        drop(near);
        drip.join().unwrap();
        sip.join().unwrap();
    }

    #[test]
    fn pipelined_messages_are_split() {
        let (mut near, mut far) = pair();
        far.write_all(&[1, 0, 0, 0, 7, 2, 0, 0, 0, 8, 9, 1, 0, 0, 0]).unwrap();
        assert_eq!(near.receive(&mut deny).unwrap(), Some(&[7][..]));
        assert!(near.has_more());
        assert_eq!(near.receive(&mut deny).unwrap(), Some(&[8, 9][..]));
        assert!(near.receive(&mut deny).is_err(), "the third message is incomplete");
        far.write_all(&[5]).unwrap();
        assert_eq!(near.receive(&mut deny).unwrap(), Some(&[5][..]));
        assert!(!near.has_more());
    }

    #[test]
    fn last_message_is_taken_whole_or_its_send_fails() {
        let (mut near, mut far) = pair();
        far.write_all(&[2, 0, 0, 0, 1]).unwrap();
        assert!(near.receive(&mut deny).is_err());
        far.write_all(&[2]).unwrap();
        assert_eq!(near.take_last_message(), Some(&[1, 2][..]));
        let (mut near, mut far) = pair();
        far.write_all(&[2, 0, 0, 0, 1]).unwrap();
        assert_eq!(near.take_last_message(), None);
        assert!(far.write_all(&[2]).is_err());
    }

    #[test]
    fn length_of_the_first_message_is_limited() {
        let (near, mut far) = pair();
        let mut near = near.unauthenticated();
        far.write_all(&(HELLO_BYTES_MAX as u32 + 1).to_le_bytes()).unwrap();
        let error = near.receive(&mut deny).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
    }

    #[test]
    fn next_receive_gives_back_memory_of_a_long_message() {
        let (mut near, mut far) = pair();
        let budget = MemoryBudget::new(2 * BUFFER_KEPT);
        near.authenticate(Grant::of(vec![Arc::clone(&budget)]));
        let send = |length: usize| {
            let mut far = far.try_clone().unwrap();
            let bytes = [&(length as u32).to_le_bytes()[..], &vec![7; length]].concat();
            std::thread::spawn(move || far.write_all(&bytes).is_ok())
        };
        for length in [2 * BUFFER_KEPT, 5, 2 * BUFFER_KEPT] {
            let sender = send(length);
            assert_eq!(near.receive(&mut |_| Ok(())).unwrap().unwrap().len(), length);
            assert!(sender.join().unwrap());
            let mut other = Grant::of(vec![Arc::clone(&budget)]);
            assert_eq!(other.resize(2 * BUFFER_KEPT).is_ok(), length == 5);
        }
        let _sender = send(4 * BUFFER_KEPT);
        assert!(near.receive(&mut |_| Ok(())).unwrap_err().to_string().contains("fewer keys"));
        far.flush().unwrap();
    }
}
