//! A cache of the existence of objects, to save queries.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time for which a missing, unreadable or damaged object is not queried again. The cache does not
/// see that another process writes the object within this time.
const NOT_FOUND_FOR: Duration = Duration::from_secs(5);
/// Time for which an existing object is not queried again. If the object is removed within this
/// time, a read fails and updates the cache.
const PRESENT_FOR: Duration = Duration::from_secs(600);
/// Time for which an object without a valid seal is not queried again. This time is longer than
/// [`NOT_FOUND_FOR`], because the object still exists: each query would find it, and a read would
/// then fetch it and reject it again.
const REJECTED_FOR: Duration = Duration::from_secs(60);
/// Names per map. The cache has two maps, and drops the older map when the younger is full.
const GENERATION_NAMES: usize = 32 << 10;

#[derive(Debug, Default)]
pub(super) struct ExistenceCache(Mutex<[HashMap<String, Entry>; 2]>);

#[derive(Clone, Copy, Debug)]
struct Entry {
    exists: bool,
    until: Instant,
    /// Whether the object was found, then could not be read or was rejected, and has not been found
    /// since.
    lost: bool,
    /// Whether the object was fetched and rejected. A write by this process or a successful read of
    /// the whole object clears the flag; an existence query does not.
    rejected: bool,
}

impl ExistenceCache {
    pub(super) fn get(&self, name: &str, now: Instant) -> Option<bool> {
        self.find(name).filter(|entry| now < entry.until).map(|entry| entry.exists)
    }

    /// Whether the object `name` was found, then could not be read or was rejected, and has not
    /// been found since. Such an object must be queried again before it counts as existing.
    pub(super) fn is_lost(&self, name: &str) -> bool {
        self.find(name).is_some_and(|entry| entry.lost)
    }

    /// Whether this process read and rejected the object `name`. If so, writers of this process
    /// write the object again, although the name exists.
    pub(super) fn is_rejected(&self, name: &str) -> bool {
        self.find(name).is_some_and(|entry| entry.rejected)
    }

    pub(super) fn record(&self, name: &str, exists: bool, now: Instant) {
        let long = if exists { PRESENT_FOR } else { NOT_FOUND_FOR };
        self.update(name, |before| Entry {
            exists,
            until: now + long,
            lost: !exists && before.is_some_and(|entry| entry.lost),
            rejected: before.is_some_and(|entry| entry.rejected),
        });
    }

    /// Records that the object was found and could not be read.
    pub(super) fn mark_lost(&self, name: &str, now: Instant) {
        self.update(name, |before| Entry {
            exists: false,
            until: now + NOT_FOUND_FOR,
            lost: true,
            rejected: before.is_some_and(|entry| entry.rejected),
        });
    }

    /// Records that the object was read and rejected: damaged, or not authentic.
    pub(super) fn mark_rejected(&self, name: &str, is_damaged: bool, now: Instant) {
        let long = if is_damaged { NOT_FOUND_FOR } else { REJECTED_FOR };
        let until = now + long;
        self.update(name, |_| Entry { exists: false, until, lost: true, rejected: true });
    }

    /// Records that the object was written by this process, or read as a whole and verified.
    pub(super) fn mark_verified(&self, name: &str, now: Instant) {
        let until = now + PRESENT_FOR;
        self.update(name, |_| Entry { exists: true, until, lost: false, rejected: false });
    }

    fn find(&self, name: &str) -> Option<Entry> {
        find(&self.0.lock(), name)
    }

    /// Replaces an entry under one lock, so that no concurrent rejection is lost.
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
    fn entries_expire_and_are_bounded() {
        let (cache, now) = (ExistenceCache::default(), Instant::now());
        cache.record("present", true, now);
        cache.record("missing", false, now);
        assert_eq!(cache.get("present", now + NOT_FOUND_FOR), Some(true));
        assert_eq!(cache.get("missing", now), Some(false));
        assert_eq!(cache.get("missing", now + NOT_FOUND_FOR), None);
        assert_eq!(cache.get("present", now + PRESENT_FOR), None);
        cache.record("missing", true, now);
        assert_eq!(cache.get("missing", now), Some(true));
        cache.mark_lost("missing", now);
        cache.record("missing", false, now);
        assert!(cache.is_lost("missing"));
        assert_eq!(cache.get("missing", now + NOT_FOUND_FOR), None);
        cache.record("missing", true, now);
        assert!(!cache.is_lost("missing"));
        for number in 0..3 * GENERATION_NAMES {
            cache.record(&number.to_string(), true, now);
        }
        assert_eq!(cache.get("present", now), None);
        assert!(cache.0.lock().iter().map(HashMap::len).sum::<usize>() <= 2 * GENERATION_NAMES);
    }

    #[test]
    fn rejected_object_stays_rejected_until_verified() {
        let (cache, now) = (ExistenceCache::default(), Instant::now());
        cache.mark_rejected("forged", false, now);
        assert_eq!(cache.get("forged", now + NOT_FOUND_FOR), Some(false));
        assert_eq!(cache.get("forged", now + REJECTED_FOR), None);
        cache.record("forged", true, now);
        assert!(cache.is_rejected("forged"), "a query must not clear the rejection");
        cache.mark_lost("forged", now);
        cache.record("forged", false, now);
        assert!(cache.is_rejected("forged"));
        cache.mark_verified("forged", now);
        assert!(!cache.is_rejected("forged") && !cache.is_lost("forged"));
        assert_eq!(cache.get("forged", now), Some(true));
        cache.mark_rejected("damaged", true, now);
        assert_eq!(cache.get("damaged", now + NOT_FOUND_FOR), None);
    }

    #[test]
    fn concurrent_record_keeps_rejection() {
        let (cache, now) = (ExistenceCache::default(), Instant::now());
        let all = |change: &dyn Fn(&str)| (0..20_000).for_each(|name| change(&name.to_string()));
        std::thread::scope(|scope| {
            scope.spawn(|| all(&|name| cache.record(name, true, now)));
            scope.spawn(|| all(&|name| cache.mark_lost(name, now)));
            all(&|name| cache.mark_rejected(name, false, now));
        });
        all(&|name| assert!(cache.is_rejected(name), "{name}"));
    }
}
