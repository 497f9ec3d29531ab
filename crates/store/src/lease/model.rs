use super::*;
use proptest::prelude::*;
use ritornello_format::{ErrorKind, SegmentId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Debug, Default)]
struct Fake(Arc<AtomicU64>);

impl Fake {
    fn pass(&self, seconds: u64) {
        self.0.fetch_add(seconds, Ordering::Relaxed);
    }
}

impl Clock for Fake {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

fn table() -> (LeaseTable, Fake) {
    let clock = Fake::default();
    (LeaseTable::with_clock(Box::new(clock.clone())), clock)
}

fn extent(start: u32) -> Extent {
    Extent { segment: SegmentId::new(0, 0), start, units: 2 }
}

const SECOND: Duration = Duration::from_secs(1);
const ME: ClientId = ClientId(1);

#[test]
fn extents_come_back_with_the_last_lease() {
    let (mut table, _) = table();
    let (a, b) = (RunId(1), RunId(2));
    let first = table.grant(&[a, b], SECOND, ME).unwrap();
    let second = table.grant(&[a], SECOND, ClientId(2)).unwrap();
    assert_eq!(table.defer(RunId(3), vec![extent(9)]), [extent(9)], "nobody leases it");
    assert!(table.defer(a, vec![extent(0)]).is_empty());
    assert!(table.defer(b, vec![extent(2)]).is_empty());
    assert!(table.defer(a, vec![extent(4)]).is_empty());
    assert_eq!((table.len(), table.pinned_runs(), table.deferred_units()), (2, 2, 6));
    assert_eq!(table.release(first), [extent(2)]);
    assert!(table.release(first).is_empty() && table.release(0).is_empty());
    assert!(table.pinned(a) && !table.pinned(b));
    assert_eq!(table.holder(second), Some(ClientId(2)));
    assert_eq!(table.drop_client(ClientId(2)), [extent(0), extent(4)]);
    assert!(table.is_empty() && table.deferred_units() == 0 && table.pinned_runs() == 0);
}

#[test]
fn a_run_that_is_named_twice_is_pinned_twice() {
    let (mut table, _) = table();
    let lease = table.grant(&[RunId(1), RunId(1)], SECOND, ME).unwrap();
    table.defer(RunId(1), vec![extent(0)]);
    assert_eq!(table.release(lease), [extent(0)]);
    assert!(table.is_empty());
}

#[test]
fn leases_end_when_their_time_is_over() {
    let (mut table, clock) = table();
    table.grant(&[RunId(1)], SECOND, ME).unwrap();
    table.grant(&[RunId(2)], 3 * SECOND, ME).unwrap();
    table.grant(&[RunId(3)], Duration::MAX, ME).unwrap();
    table.defer(RunId(1), vec![extent(0)]);
    assert_eq!(table.next_deadline(), Some(SECOND));
    assert_eq!(table.expire(), (vec![], 0));
    clock.pass(2);
    assert_eq!(table.expire(), (vec![extent(0)], 1));
    clock.pass(LEASE_TTL_MAX.as_secs());
    assert_eq!(table.expire().1, 2);
    assert!(table.is_empty());
}

#[test]
fn nobody_holds_more_than_is_left_for_the_others() {
    let (mut table, _) = table();
    let half = vec![RunId(7); PINS_MAX / 2];
    let all = table.grant(&half, SECOND, ME).unwrap();
    let refused = table.grant(&[RunId(1)], SECOND, ME).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Retry);
    assert!(!table.pinned(RunId(1)));
    table.grant(&half[..PINS_MAX / 4], SECOND, ClientId(8)).unwrap();
    assert!(table.grant(&half[..PINS_MAX / 4], SECOND, ClientId(9)).is_err());
    table.drop_client(ClientId(8));
    table.release(all);
    let mut grant = |client, count: usize| -> Vec<u64> {
        (0..count).map(|_| table.grant(&[], SECOND, client).unwrap()).collect()
    };
    let leases = grant(ME, LEASES_MAX / 2);
    grant(ClientId(8), LEASES_MAX / 4);
    assert!(
        table.grant(&[], SECOND, ME).is_err() && table.grant(&[], SECOND, ClientId(8)).is_err()
    );
    assert!(table.grant(&[], SECOND, ClientId(9)).is_ok());
    leases[..LEASES_MAX / 4].iter().for_each(|lease| drop(table.release(*lease)));
    assert!(table.grant(&[], SECOND, ME).is_ok());
}

#[test]
fn the_clock_of_the_machine_goes_on() {
    let table = LeaseTable::new();
    assert!(table.next > 1, "numbers differ from those of an earlier owner");
    let now = BootClock.now();
    assert!(now > Duration::ZERO && BootClock.now() >= now);
}

#[derive(Clone, Debug)]
enum Action {
    Grant { runs: Vec<u64>, seconds: u64, client: u64 },
    Release(usize),
    DropClient(u64),
    Forget(u64),
    Pass(u64),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let run = || 0..8u64;
    let action = prop_oneof![
        4 => (prop::collection::vec(run(), 0..5), 0..20u64, 0..3u64)
            .prop_map(|(runs, seconds, client)| Action::Grant { runs, seconds, client }),
        2 => any::<usize>().prop_map(Action::Release),
        1 => (0..3u64).prop_map(Action::DropClient),
        3 => run().prop_map(Action::Forget),
        2 => (0..10u64).prop_map(Action::Pass),
    ];
    prop::collection::vec(action, 1..100)
}

/// A lease as the model knows it: number, runs, deadline in seconds, client.
type Known = (u64, Vec<u64>, u64, u64);

proptest! {
    #[test]
    fn nothing_leased_is_free_and_nothing_free_is_kept(actions in actions()) {
        let (mut table, clock) = table();
        let mut leases: Vec<Known> = Vec::new();
        let mut held: Vec<(u64, Extent)> = Vec::new();
        let mut seconds = 0;
        for (step, action) in (0..).zip(actions) {
            let mut freed = Vec::new();
            match action {
                Action::Grant { runs, seconds: ttl, client } => {
                    let names: Vec<RunId> = runs.iter().map(|run| RunId(*run)).collect();
                    let ttl_seconds = Duration::from_secs(ttl);
                    let lease = table.grant(&names, ttl_seconds, ClientId(client)).unwrap();
                    prop_assert!(lease > 0 && leases.iter().all(|known| known.0 < lease));
                    leases.push((lease, runs, seconds + ttl, client));
                }
                Action::Release(which) if !leases.is_empty() => {
                    let (lease, ..) = leases.remove(which % leases.len());
                    freed = table.release(lease);
                }
                Action::Release(_) => {}
                Action::DropClient(client) => {
                    leases.retain(|known| known.3 != client);
                    freed = table.drop_client(ClientId(client));
                }
                Action::Forget(run) => {
                    held.push((run, extent(step * 2)));
                    freed = table.defer(RunId(run), vec![extent(step * 2)]);
                }
                Action::Pass(more) => {
                    clock.pass(more);
                    seconds += more;
                    let before = leases.len();
                    leases.retain(|known| known.2 > seconds);
                    let (extents, count) = table.expire();
                    prop_assert_eq!(count as usize, before - leases.len());
                    freed = extents;
                }
            }
            let pinned = |run: u64| leases.iter().any(|known| known.1.contains(&run));
            let mut expected: Vec<Extent> = Vec::new();
            held.retain(|(run, extent)| {
                let keep = pinned(*run);
                if !keep {
                    expected.push(*extent);
                }
                keep
            });
            freed.sort_unstable();
            prop_assert_eq!(freed, expected);
            prop_assert_eq!(table.len(), leases.len());
            prop_assert_eq!(table.deferred_units(), held.len() as u64 * 2);
            prop_assert!((0..8).all(|run| table.pinned(RunId(run)) == pinned(run)));
            prop_assert_eq!(table.pinned_runs(), (0..8).filter(|run| pinned(*run)).count());
        }
    }
}
