//! What is known of objects without asking: that one is there, or was not a moment ago.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long an object that was not there is not asked for again; somebody may have written it.
const ABSENT_FOR: Duration = Duration::from_secs(5);
/// And one that was there; somebody may have removed it, which a read finds out.
const PRESENT_FOR: Duration = Duration::from_secs(600);
/// Names of one generation; two are kept.
const GENERATION: usize = 32 << 10;

#[derive(Debug, Default)]
pub(super) struct Known(Mutex<[HashMap<String, Note>; 2]>);

#[derive(Clone, Copy, Debug)]
struct Note {
    there: bool,
    until: Instant,
    /// It was found, did not come, and has not been seen since.
    lost: bool,
}

impl Known {
    /// Whether `name` is there, where that is known.
    pub(super) fn get(&self, name: &str, now: Instant) -> Option<bool> {
        self.find(name).filter(|note| now < note.until).map(|note| note.there)
    }

    /// Whether it is to be asked for before it is believed in.
    pub(super) fn is_lost(&self, name: &str) -> bool {
        self.find(name).is_some_and(|note| note.lost)
    }

    pub(super) fn note(&self, name: &str, there: bool, now: Instant) {
        let long = if there { PRESENT_FOR } else { ABSENT_FOR };
        let lost = !there && self.is_lost(name);
        self.write(name, Note { there, until: now + long, lost });
    }

    /// It was found and did not come.
    pub(super) fn lose(&self, name: &str, now: Instant) {
        self.write(name, Note { there: false, until: now + ABSENT_FOR, lost: true });
    }

    fn find(&self, name: &str) -> Option<Note> {
        self.0.lock().iter().find_map(|generation| generation.get(name)).copied()
    }

    fn write(&self, name: &str, note: Note) {
        let mut generations = self.0.lock();
        if generations[0].len() >= GENERATION {
            let [young, old] = &mut *generations;
            std::mem::swap(young, old);
            young.clear();
        }
        generations[0].insert(name.to_owned(), note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_is_forgotten_in_time_and_bounded() {
        let (known, now) = (Known::default(), Instant::now());
        known.note("there", true, now);
        known.note("gone", false, now);
        assert_eq!(known.get("there", now + ABSENT_FOR), Some(true));
        assert_eq!(known.get("gone", now), Some(false));
        assert_eq!(known.get("gone", now + ABSENT_FOR), None);
        assert_eq!(known.get("there", now + PRESENT_FOR), None);
        known.note("gone", true, now);
        assert_eq!(known.get("gone", now), Some(true));
        known.lose("gone", now);
        known.note("gone", false, now);
        assert!(known.is_lost("gone"));
        assert_eq!(known.get("gone", now + ABSENT_FOR), None);
        known.note("gone", true, now);
        assert!(!known.is_lost("gone"));
        for number in 0..3 * GENERATION {
            known.note(&number.to_string(), true, now);
        }
        assert_eq!(known.get("there", now), None);
        assert!(known.0.lock().iter().map(HashMap::len).sum::<usize>() <= 2 * GENERATION);
    }
}
