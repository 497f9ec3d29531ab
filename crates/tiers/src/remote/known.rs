//! What is known of objects without asking: that one is there, or was not a moment ago.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long an object that was not there is not asked for again; somebody may have written it.
const ABSENT_FOR: Duration = Duration::from_secs(5);
/// And one that was there; somebody may have removed it, which a read finds out.
const PRESENT_FOR: Duration = Duration::from_secs(600);
/// And one that is not authentic: a reader that asked again sooner would fetch it again and again.
const REFUSED_FOR: Duration = Duration::from_secs(60);
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
    /// It came and was not believed. That it exists does not change this; that it was written here, or
    /// came and was believed, does.
    refused: bool,
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

    /// Whether what lies under `name` was read and not believed: a writer replaces it.
    pub(super) fn is_refused(&self, name: &str) -> bool {
        self.find(name).is_some_and(|note| note.refused)
    }

    pub(super) fn note(&self, name: &str, there: bool, now: Instant) {
        let long = if there { PRESENT_FOR } else { ABSENT_FOR };
        self.update(name, |before| Note {
            there,
            until: now + long,
            lost: !there && before.is_some_and(|note| note.lost),
            refused: before.is_some_and(|note| note.refused),
        });
    }

    /// It was found and did not come.
    pub(super) fn lose(&self, name: &str, now: Instant) {
        self.update(name, |before| Note {
            there: false,
            until: now + ABSENT_FOR,
            lost: true,
            refused: before.is_some_and(|note| note.refused),
        });
    }

    /// It came and is not to be believed: damaged, or not authentic.
    pub(super) fn refuse(&self, name: &str, is_damaged: bool, now: Instant) {
        let long = if is_damaged { ABSENT_FOR } else { REFUSED_FOR };
        let until = now + long;
        self.update(name, |_| Note { there: false, until, lost: true, refused: true });
    }

    /// It was written here, or came and was believed.
    pub(super) fn trust(&self, name: &str, now: Instant) {
        let until = now + PRESENT_FOR;
        self.update(name, |_| Note { there: true, until, lost: false, refused: false });
    }

    fn find(&self, name: &str) -> Option<Note> {
        find(&self.0.lock(), name)
    }

    /// Writes what `change` makes of the note, under one lock: a refusal in between would be lost.
    fn update(&self, name: &str, change: impl FnOnce(Option<Note>) -> Note) {
        let mut generations = self.0.lock();
        let note = change(find(&generations, name));
        if generations[0].len() >= GENERATION {
            let [young, old] = &mut *generations;
            std::mem::swap(young, old);
            young.clear();
        }
        generations[0].insert(name.to_owned(), note);
    }
}

fn find(generations: &[HashMap<String, Note>; 2], name: &str) -> Option<Note> {
    generations.iter().find_map(|generation| generation.get(name)).copied()
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

    #[test]
    fn refused_object_stays_refused_until_it_is_written_or_believed() {
        let (known, now) = (Known::default(), Instant::now());
        known.refuse("forged", false, now);
        assert_eq!(known.get("forged", now + ABSENT_FOR), Some(false));
        assert_eq!(known.get("forged", now + REFUSED_FOR), None);
        known.note("forged", true, now);
        assert!(known.is_refused("forged"), "it still exists");
        known.lose("forged", now);
        known.note("forged", false, now);
        assert!(known.is_refused("forged"));
        known.trust("forged", now);
        assert!(!known.is_refused("forged") && !known.is_lost("forged"));
        assert_eq!(known.get("forged", now), Some(true));
        known.refuse("damaged", true, now);
        assert_eq!(known.get("damaged", now + ABSENT_FOR), None);
    }

    #[test]
    fn concurrent_note_does_not_undo_refusal() {
        let (known, now) = (Known::default(), Instant::now());
        let all = |change: &dyn Fn(&str)| (0..20_000).for_each(|name| change(&name.to_string()));
        std::thread::scope(|scope| {
            scope.spawn(|| all(&|name| known.note(name, true, now)));
            scope.spawn(|| all(&|name| known.lose(name, now)));
            all(&|name| known.refuse(name, false, now));
        });
        all(&|name| assert!(known.is_refused(name), "{name}"));
    }
}
