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
pub(super) struct Known(Mutex<[HashMap<String, (bool, Instant)>; 2]>);

impl Known {
    /// Whether `name` is there, where that is known.
    pub(super) fn get(&self, name: &str, now: Instant) -> Option<bool> {
        let generations = self.0.lock();
        let found = generations.iter().find_map(|generation| generation.get(name));
        found.filter(|(_, until)| now < *until).map(|(there, _)| *there)
    }

    pub(super) fn note(&self, name: &str, there: bool, now: Instant) {
        let until = now + if there { PRESENT_FOR } else { ABSENT_FOR };
        let mut generations = self.0.lock();
        if generations[0].len() >= GENERATION {
            let [young, old] = &mut *generations;
            std::mem::swap(young, old);
            young.clear();
        }
        generations[0].insert(name.to_owned(), (there, until));
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
        for number in 0..3 * GENERATION {
            known.note(&number.to_string(), true, now);
        }
        assert_eq!(known.get("there", now), None);
        assert!(known.0.lock().iter().map(HashMap::len).sum::<usize>() <= 2 * GENERATION);
    }
}
