//! The table keeps causes, policies and times, and tells what it may have forgotten.

use super::*;

/// Returns a page whose hash selects bucket `bucket`; `number` is the high half of the hash.
fn page(bucket: u64, number: u64) -> PageHash {
    PageHash(((u128::from(number) << 64) | u128::from(bucket)).to_le_bytes())
}

const EVICTED: MissCause = MissCause::Evicted(EvictionCause::Quota);

/// The last miss cause of a page that no policy chose, and its time.
fn known(causes: &MissCauses, page: PageHash) -> Option<(MissCause, u64)> {
    let Remembered { cause, policy, time } = causes.of(page)?;
    assert_eq!(policy, None);
    Some((cause, time))
}

#[test]
fn every_cause_is_remembered() {
    let causes = MissCauses::new(u64::MAX);
    for (at, cause) in (1..).zip(MissCause::ALL) {
        causes.note_at([page(at, 7), page(at, 8)], cause, at);
    }
    for (at, cause) in (1..).zip(MissCause::ALL) {
        assert_eq!(known(&causes, page(at, 7)), Some((cause, at)));
        assert_eq!(known(&causes, page(at, 8)), Some((cause, at)));
        assert_eq!(known(&causes, page(at, 9)), None);
    }
    let words: Vec<_> = remembered_answers().collect();
    assert!((1..words.len()).all(|at| !words[..at].contains(&words[at])), "{words:?}");
}

#[test]
fn policy_is_remembered_with_cause_and_time() {
    let causes = MissCauses::new(u64::MAX);
    let latest = (1_u64 << (u64::BITS - CAUSE_BITS - POLICY_BITS)) - 1;
    for (at, cause) in (1..).zip(MissCause::ALL) {
        for (number, policy) in (0..).zip([None].into_iter().chain(PolicyKind::ALL.map(Some))) {
            let remembered = Remembered { cause, policy, time: latest - number };
            causes.remember([page(at, 7)], remembered);
            assert_eq!(causes.of(page(at, 7)), Some(remembered));
        }
    }
    let removed = Removed {
        run: ritornello_index::RunId(1),
        scope: ritornello_format::ScopeSlot(0),
        pages: 2,
        hashes: vec![page(1, 8), page(2, 8)],
        whole: true,
        extents: Vec::new(),
    };
    causes.note_evicted(&[removed], EvictionCause::Space, Some(PolicyKind::TwoQ));
    for at in [1, 2] {
        let (answer, detail) = causes.of(page(at, 8)).unwrap().answer();
        assert_eq!((answer, detail.as_ref()), (Answer::Evicted, "space by 2q"));
    }
}

#[test]
fn full_bucket_forgets_its_oldest_page() {
    let causes = MissCauses::new(u64::MAX);
    for number in 0..WAYS as u64 {
        causes.note_at([page(3, number)], EVICTED, 0);
    }
    // A page that is recorded again is as new as a new page, and takes no second entry.
    causes.note_at([page(3, 0)], MissCause::Deleted, 0);
    causes.note_at([page(3, 99)], EVICTED, 0);
    assert_eq!(known(&causes, page(3, 1)), None);
    assert_eq!(causes.explain(page(3, 1)), Err(Unremembered::Forgotten));
    assert_eq!(known(&causes, page(3, 0)), Some((MissCause::Deleted, 0)));
    for kept in [2, 3, 99] {
        assert_eq!(known(&causes, page(3, kept)), Some((EVICTED, 0)), "{kept}");
    }
}

#[test]
fn page_was_not_offered_if_its_bucket_has_an_unused_entry() {
    let causes = MissCauses::new(u64::MAX);
    for number in 0..WAYS as u64 {
        assert_eq!(causes.explain(page(3, 99)), Err(Unremembered::NotOffered), "{number}");
        // The second record of a page takes no unused entry.
        causes.note_at([page(3, number), page(3, number)], EVICTED, 0);
        assert!(causes.explain(page(3, number)).is_ok());
    }
    assert_eq!(causes.explain(page(3, 99)), Err(Unremembered::Forgotten));
    assert_eq!(causes.explain(page(4, 99)), Err(Unremembered::NotOffered));
}

#[test]
fn hole_is_not_recorded_and_unused_entry_matches_no_page() {
    let causes = MissCauses::new(u64::MAX);
    causes.note_at([PageHash::NONE], EVICTED, 0);
    assert_eq!((known(&causes, PageHash::NONE), known(&causes, page(0, 0))), (None, None));
    causes.note_at([page(5, 0)], EVICTED, 0);
    assert_eq!(known(&causes, page(5, 0)), Some((EVICTED, 0)), "a hash's high half may be zero");
}

#[test]
fn newer_cause_replaces_the_cause_and_its_time() {
    let mut causes = MissCauses::new(u64::MAX);
    causes.note_at([page(1, 1)], EVICTED, 10);
    causes.note_at([page(1, 1)], MissCause::Deleted, 30);
    assert_eq!(known(&causes, page(1, 1)), Some((MissCause::Deleted, 30)));
    let Some(opened) = Instant::now().checked_sub(std::time::Duration::from_secs(100)) else {
        return;
    };
    causes.opened = opened;
    causes.note([page(1, 2)], EVICTED);
    let (_, time) = known(&causes, page(1, 2)).unwrap();
    assert!((100_000_000..=causes.now()).contains(&time), "{time}");
}

#[test]
fn oldest_dropped_scope_is_forgotten() {
    let causes = MissCauses::new(u64::MAX);
    let id = |number: usize| ScopeId((number as u128).to_le_bytes());
    (0..SCOPES_MAX).for_each(|number| causes.note_dropped(id(number)));
    causes.note_dropped(id(0));
    assert_eq!(causes.explain(page(3, 1)), Err(Unremembered::NotOffered));
    causes.note_dropped(id(SCOPES_MAX));
    // The page may have been in the scope that was forgotten.
    assert_eq!(causes.explain(page(3, 1)), Err(Unremembered::Forgotten));
    let is_known = |number: usize| causes.dropped_at(id(number)).is_some();
    assert!(is_known(0) && !is_known(1) && is_known(2) && is_known(SCOPES_MAX));
}

#[test]
fn table_grows_with_the_store_up_to_its_maximum() {
    let bytes = |capacity| MissCauses::new(capacity).table.lock().len() * size_of::<Bucket>();
    assert_eq!((bytes(0), bytes(24 << 20)), (64, 24 << 10));
    assert_eq!((bytes(8 << 30), bytes(u64::MAX)), (TABLE_BYTES_MAX, TABLE_BYTES_MAX));
    let small = MissCauses::new(0);
    small.note_at([page(7, 1)], EVICTED, 0);
    assert_eq!(known(&small, page(7, 1)), Some((EVICTED, 0)));
}
