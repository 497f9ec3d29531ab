//! Tests of the lease table, and a comparison with a model that lists all leases.

use super::*;
use proptest::prelude::*;
use ritornello_format::{ErrorKind, SegmentId};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Debug, Default)]
struct FakeClock(Arc<AtomicU64>);

impl FakeClock {
    fn pass(&self, seconds: u64) {
        self.0.fetch_add(seconds, Ordering::Relaxed);
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

fn table() -> (LeaseTable, FakeClock) {
    let clock = FakeClock::default();
    (LeaseTable::with_clock(Box::new(clock.clone())), clock)
}

fn extent(start: u32) -> Extent {
    Extent { segment: SegmentId::new(0, 0), start, units: 2 }
}

const SECOND: Duration = Duration::from_secs(1);
const ME: ClientId = ClientId(1);

#[test]
fn last_lease_frees_deferred_extents() {
    let (mut table, _) = table();
    let (a, b) = (RunId(1), RunId(2));
    let first = table.grant(&[a, b], SECOND, ME).unwrap();
    let second = table.grant(&[a], SECOND, ClientId(2)).unwrap();
    assert_eq!(
        table.defer(RunId(3), vec![extent(9)]),
        [extent(9)],
        "extents of a run without a lease are returned"
    );
    assert!(table.defer(a, vec![extent(0)]).is_empty());
    assert!(table.defer(b, vec![extent(2)]).is_empty());
    assert!(table.defer(a, vec![extent(4)]).is_empty());
    assert_eq!((table.len(), table.leased_runs(), table.deferred_units()), (2, 2, 6));
    assert_eq!(table.release(first), [extent(2)]);
    assert!(table.release(first).is_empty() && table.release(0).is_empty());
    assert!(table.is_leased(a) && !table.is_leased(b));
    assert_eq!(table.holder(second), Some(ClientId(2)));
    assert_eq!(table.drop_client(ClientId(2)), [extent(0), extent(4)]);
    assert!(table.is_empty() && table.deferred_units() == 0 && table.leased_runs() == 0);
}

#[test]
fn release_unpins_a_run_named_twice() {
    let (mut table, _) = table();
    let lease = table.grant(&[RunId(1), RunId(1)], SECOND, ME).unwrap();
    table.defer(RunId(1), vec![extent(0)]);
    assert_eq!(table.release(lease), [extent(0)]);
    assert!(table.is_empty());
}

#[test]
fn leases_expire() {
    let (mut table, clock) = table();
    table.grant(&[RunId(1)], SECOND, ME).unwrap();
    table.grant(&[RunId(2)], 3 * SECOND, ME).unwrap();
    table.grant(&[RunId(3)], Duration::MAX, ME).unwrap();
    table.defer(RunId(1), vec![extent(0)]);
    assert_eq!(table.expire(), (vec![], 0));
    clock.pass(2);
    assert_eq!(table.expire(), (vec![extent(0)], 1));
    clock.pass(LEASE_TTL_MAX.as_secs());
    assert_eq!(table.expire().1, 2);
    assert!(table.is_empty());
}

#[test]
fn client_leases_at_most_its_share() {
    let (mut table, _) = table();
    let half = vec![RunId(7); PINS_MAX / 2];
    let all = table.grant(&half, SECOND, ME).unwrap();
    let refused = table.grant(&[RunId(1)], SECOND, ME).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Retry);
    assert!(!table.is_leased(RunId(1)));
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
fn counted_leases_are_within_the_share() {
    let (mut table, _) = table();
    let runs: Vec<RunId> = (0..10).map(RunId).collect();
    let (capacity, other) = (100, ClientId(8));
    let mut grant =
        |runs: &[RunId], client| table.grant_leading(runs, |_| 10, capacity, SECOND, client);
    let (all, taken) = grant(&runs, ME).unwrap();
    assert_eq!(taken, 5, "a client may lease half of the store");
    let refused = grant(&runs[5..], ME).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Retry);
    assert!(refused.to_string().contains("release unneeded leases"), "{refused}");
    assert_eq!(
        grant(&runs[..7], ME).unwrap().1,
        5,
        "runs that the client has leased already cost nothing"
    );
    assert_eq!(
        grant(&runs[..5], other).unwrap().1,
        5,
        "runs that another client has leased too take no further space"
    );
    assert!(grant(&runs[5..], other).is_err(), "shared runs count in full for each client");
    assert_eq!(
        grant(&runs[5..], ClientId(9)).unwrap().1,
        2,
        "a client may lease half of the space that is not leased"
    );
    assert_eq!(table.leased_units(), 70);
    table.release(all);
    assert_eq!(table.leased_units(), 70, "runs with another lease stay leased");
    table.drop_client(ME);
    table.drop_client(other);
    assert_eq!(table.leased_units(), 20);
    assert!(!table.is_leased(RunId(4)) && !table.is_leased(RunId(7)));
}

#[test]
fn uncounted_leases_pin_beyond_the_share() {
    let (mut table, _) = table();
    let runs: Vec<RunId> = (0..4).map(RunId).collect();
    let read = table.grant(&runs, SECOND, ME).unwrap();
    assert_eq!(table.leased_units(), 0);
    let (lease, taken) = table.grant_leading(&runs, |_| 1, 4, SECOND, ME).unwrap();
    assert_eq!((taken, table.leased_units()), (2, 2));
    assert!(table.defer(RunId(0), vec![extent(0)]).is_empty());
    assert!(table.release(lease).is_empty(), "the read's lease pins the run");
    assert_eq!((table.leased_units(), table.leased_runs()), (0, 4));
    assert_eq!(table.release(read), [extent(0)]);
}

#[test]
fn lease_numbers_start_at_the_boot_clock() {
    let table = LeaseTable::new();
    assert!(table.next > 1, "numbers start at the nanoseconds since boot, not at 1");
    let now = BootClock.now();
    assert!(now > Duration::ZERO && BootClock.now() >= now);
}

/// An action. `Release` has a number that selects one of the leases. `Forget` gives the table an
/// extent that the index has removed from a run. `Pass` advances the clock by a number of seconds.
#[derive(Clone, Debug)]
enum Action {
    Grant { runs: Vec<u64>, seconds: u64, client: u64, counted: bool },
    Release(usize),
    DropClient(u64),
    Forget(u64),
    Pass(u64),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let run = || 0..8u64;
    let action = prop_oneof![
        4 => (prop::collection::vec(run(), 0..5), 0..20u64, 0..3u64, any::<bool>()).prop_map(
            |(runs, seconds, client, counted)| Action::Grant { runs, seconds, client, counted }
        ),
        2 => any::<usize>().prop_map(Action::Release),
        1 => (0..3u64).prop_map(Action::DropClient),
        3 => run().prop_map(Action::Forget),
        2 => (0..10u64).prop_map(Action::Pass),
    ];
    prop::collection::vec(action, 1..100)
}

/// A lease in the model: its number, runs, deadline in seconds and client, and whether it counts
/// towards the client's share.
type Known = (u64, Vec<u64>, u64, u64, bool);

/// Units of the modelled store.
const CAPACITY: u64 = 40;

fn units_of(run: u64) -> u64 {
    1 + run % 8
}

/// Returns the units of the runs with counted leases, of one client or, for `None`, of all clients.
fn counted_units(leases: &[Known], client: Option<u64>) -> u64 {
    let counted = leases.iter().filter(|known| known.4 && client.is_none_or(|c| c == known.3));
    let runs: BTreeSet<u64> = counted.flat_map(|known| known.1.iter().copied()).collect();
    runs.into_iter().map(units_of).sum()
}

/// Returns the number of leading runs that a counted lease of `client` may cover.
fn within_share(leases: &[Known], runs: &[u64], client: u64) -> usize {
    let fits = |count: &usize| {
        let mut leases = leases.to_vec();
        let own = |leases: &[Known]| counted_units(leases, Some(client));
        let before = own(&leases);
        leases.push((0, runs[..*count].to_vec(), 0, client, true));
        own(&leases) == before
            || own(&leases) <= CAPACITY - counted_units(&leases, None).min(CAPACITY)
    };
    (1..=runs.len()).take_while(fits).count()
}

proptest! {
    #[test]
    fn leased_extents_are_deferred_and_others_freed(actions in actions()) {
        let (mut table, clock) = table();
        let mut leases: Vec<Known> = Vec::new();
        let mut held: Vec<(u64, Extent)> = Vec::new();
        let mut seconds = 0;
        for (step, action) in (0..).zip(actions) {
            let mut freed = Vec::new();
            match action {
                Action::Grant { mut runs, seconds: ttl, client, counted } => {
                    let names: Vec<RunId> = runs.iter().map(|run| RunId(*run)).collect();
                    let (long, name) = (Duration::from_secs(ttl), ClientId(client));
                    let lease = if counted {
                        let units = |run: RunId| units_of(run.0);
                        let granted = table.grant_leading(&names, units, CAPACITY, long, name);
                        let expected = within_share(&leases, &runs, client);
                        prop_assert_eq!(granted.is_err(), expected == 0 && !runs.is_empty());
                        prop_assert_eq!(granted.as_ref().map_or(0, |granted| granted.1), expected);
                        runs.truncate(expected);
                        granted.ok().map(|granted| granted.0)
                    } else {
                        Some(table.grant(&names, long, name).unwrap())
                    };
                    if let Some(lease) = lease {
                        prop_assert!(lease > 0 && leases.iter().all(|known| known.0 < lease));
                        leases.push((lease, runs, seconds + ttl, client, counted));
                    }
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
            prop_assert_eq!(table.leased_units(), counted_units(&leases, None));
            for client in 0..3 {
                let own = table.clients.get(&ClientId(client)).map_or(0, |own| own.units);
                prop_assert_eq!(own, counted_units(&leases, Some(client)));
            }
            prop_assert!((0..8).all(|run| table.is_leased(RunId(run)) == pinned(run)));
            prop_assert_eq!(table.leased_runs(), (0..8).filter(|run| pinned(*run)).count());
        }
    }
}
