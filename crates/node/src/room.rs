//! Memory for long messages, of which there may be many at a time.

use ritornello_format::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that may be taken.
#[derive(Debug)]
pub(crate) struct Room(AtomicUsize);

impl Room {
    /// With so many bytes.
    pub(crate) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(bytes)))
    }

    fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// What one connection has taken, of every room that it must share.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    rooms: Vec<Arc<Room>>,
    bytes: usize,
}

impl Taken {
    /// Nothing yet.
    pub(crate) fn of(rooms: Vec<Arc<Room>>) -> Self {
        Self { rooms, bytes: 0 }
    }

    /// Takes or gives back what makes it so many bytes.
    ///
    /// # Errors
    /// `Retry` if others have it; nothing is changed.
    pub(crate) fn set(&mut self, bytes: usize) -> Result<()> {
        let more = bytes.saturating_sub(self.bytes);
        for at in 0..self.rooms.len() {
            if !self.rooms[at].take(more) {
                self.rooms[..at].iter().for_each(|room| room.give_back(more));
                return Err(Error::retry(
                    "the store's owner has too many long messages: pass fewer keys at a time",
                )
                .with("bytes", bytes));
            }
        }
        let less = self.bytes.saturating_sub(bytes);
        self.rooms.iter().for_each(|room| room.give_back(less));
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.rooms.iter().for_each(|room| room.give_back(self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_back_and_no_more_than_there_is() {
        let (all, own) = (Room::new(100), Room::new(60));
        let left = || (all.0.load(Ordering::Relaxed), own.0.load(Ordering::Relaxed));
        let mut one = Taken::of(vec![Arc::clone(&all), Arc::clone(&own)]);
        let mut two = Taken::of(vec![Arc::clone(&all), Room::new(60)]);
        one.set(50).unwrap();
        assert!(one.set(61).unwrap_err().to_string().contains("fewer keys"));
        two.set(50).unwrap();
        assert!(one.set(55).is_err(), "the house is full");
        assert_eq!(left(), (0, 10));
        one.set(20).unwrap();
        assert_eq!(left(), (30, 40));
        drop((one, two));
        assert_eq!(left(), (100, 60));
    }
}
