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
const GENERATION_NAMES: usize = 32 << 10;

#[derive(Debug, Default)]
pub(super) struct ExistenceCache(Mutex<[HashMap<String, Entry>; 2]>);

#[derive(Clone, Copy, Debug)]
struct Entry {
    there: bool,
    until: Instant,
    /// It was found, did not come, and has not been seen since.
    lost: bool,
    /// It came and was not believed. That it exists does not change this; that it was written here, or
    /// came and was believed, does.
    refused: bool,
}

impl ExistenceCache {
    /// Whether `name` is there, where that is known.
    pub(super) fn get(&self, name: &str, now: Instant) -> Option<bool> {
        self.find(name).filter(|entry| now < entry.until).map(|entry| entry.there)
    }

    /// Whether it is to be asked for before it is believed in.
    pub(super) fn is_lost(&self, name: &str) -> bool {
        self.find(name).is_some_and(|entry| entry.lost)
    }

    /// Whether what lies under `name` was read and not believed: a writer replaces it.
    pub(super) fn is_refused(&self, name: &str) -> bool {
        self.find(name).is_some_and(|entry| entry.refused)
    }

    pub(super) fn record(&self, name: &str, there: bool, now: Instant) {
        let long = if there { PRESENT_FOR } else { ABSENT_FOR };
        self.update(name, |before| Entry {
            there,
            until: now + long,
            lost: !there && before.is_some_and(|entry| entry.lost),
            refused: before.is_some_and(|entry| entry.refused),
        });
    }

    /// It was found and did not come.
    pub(super) fn mark_lost(&self, name: &str, now: Instant) {
        self.update(name, |before| Entry {
            there: false,
            until: now + ABSENT_FOR,
            lost: true,
            refused: before.is_some_and(|entry| entry.refused),
        });
    }

    /// It came and is not to be believed: damaged, or not authentic.
    pub(super) fn mark_refused(&self, name: &str, is_damaged: bool, now: Instant) {
        let long = if is_damaged { ABSENT_FOR } else { REFUSED_FOR };
        let until = now + long;
        self.update(name, |_| Entry { there: false, until, lost: true, refused: true });
    }

    /// It was written here, or came and was believed.
    pub(super) fn mark_verified(&self, name: &str, now: Instant) {
        let until = now + PRESENT_FOR;
        self.update(name, |_| Entry { there: true, until, lost: false, refused: false });
    }

    fn find(&self, name: &str) -> Option<Entry> {
        find(&self.0.lock(), name)
    }

    /// Writes what `change` makes of the note, under one lock: a refusal in between would be lost.
    fn update(&self, name: &str, change: impl FnOnce(Option<Entry>) -> Entry) {
        let mut generations = self.0.lock();
        let entry = change(find(&generations, name));
        if generations[0].len() >= GENERATION_NAMES {
            let [young, old] = &mut *generations;
            std::mem::swap(young, old);
            young.clear();
        }
        generations[0].insert(name.to_owned(), entry);
    }
}

fn find(generations: &[HashMap<String, Entry>; 2], name: &str) -> Option<Entry> {
    generations.iter().find_map(|generation| generation.get(name)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_is_forgotten_in_time_and_bounded() {
        let (cache, now) = (ExistenceCache::default(), Instant::now());
        cache.record("there", true, now);
        cache.record("gone", false, now);
        assert_eq!(cache.get("there", now + ABSENT_FOR), Some(true));
        assert_eq!(cache.get("gone", now), Some(false));
        assert_eq!(cache.get("gone", now + ABSENT_FOR), None);
        assert_eq!(cache.get("there", now + PRESENT_FOR), None);
        cache.record("gone", true, now);
        assert_eq!(cache.get("gone", now), Some(true));
        cache.mark_lost("gone", now);
        cache.record("gone", false, now);
        assert!(cache.is_lost("gone"));
        assert_eq!(cache.get("gone", now + ABSENT_FOR), None);
        cache.record("gone", true, now);
        assert!(!cache.is_lost("gone"));
        for number in 0..3 * GENERATION_NAMES {
            cache.record(&number.to_string(), true, now);
        }
        assert_eq!(cache.get("there", now), None);
        assert!(cache.0.lock().iter().map(HashMap::len).sum::<usize>() <= 2 * GENERATION_NAMES);
    }

    #[test]
    fn refused_object_stays_refused_until_it_is_written_or_believed() {
        let (cache, now) = (ExistenceCache::default(), Instant::now());
        cache.mark_refused("forged", false, now);
        assert_eq!(cache.get("forged", now + ABSENT_FOR), Some(false));
        assert_eq!(cache.get("forged", now + REFUSED_FOR), None);
        cache.record("forged", true, now);
        assert!(cache.is_refused("forged"), "it still exists");
        cache.mark_lost("forged", now);
        cache.record("forged", false, now);
        assert!(cache.is_refused("forged"));
        cache.mark_verified("forged", now);
        assert!(!cache.is_refused("forged") && !cache.is_lost("forged"));
        assert_eq!(cache.get("forged", now), Some(true));
        cache.mark_refused("damaged", true, now);
        assert_eq!(cache.get("damaged", now + ABSENT_FOR), None);
    }

    #[test]
    fn concurrent_note_does_not_undo_refusal() {
        let (cache, now) = (ExistenceCache::default(), Instant::now());
        let all = |change: &dyn Fn(&str)| (0..20_000).for_each(|name| change(&name.to_string()));
        std::thread::scope(|scope| {
            scope.spawn(|| all(&|name| cache.record(name, true, now)));
            scope.spawn(|| all(&|name| cache.mark_lost(name, now)));
            all(&|name| cache.mark_refused(name, false, now));
        });
        all(&|name| assert!(cache.is_refused(name), "{name}"));
    }
}
