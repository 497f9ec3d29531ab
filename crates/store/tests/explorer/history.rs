//! One random history of a store: operations, ends of owners, and checks of the disks that power
//! losses would leave.

mod check;
mod clients;
mod expect;
mod owner_change;
mod scopes;
mod volumes;

use crate::checker::{Bounds, is_change_complete, stats};
use crate::client::{Client, Names};
use crate::common::{MIB, Open, open_beside, options, refs};
use crate::kinds::{
    KINDS, Pages, SEQUENCES, STRIPED_FROM, check_get, keys_of, kinds, leading, left_by_delete,
    present_pages, put, set_split_pages,
};
use crate::operation::Operation;
use crate::recording_medium::RecordingMedium;
use crate::rng::Rng;
use crate::unfinished_put::UnfinishedPut;
use crate::workload::Workload;
use ritornello_format::Result;
use ritornello_medium::SimDisk;
use ritornello_store::{CapacityChange, ClientId, Durability, IndexKind, LeaseNumber, Options};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const HOUR: u64 = 3600;
/// Maximum leases at a time.
const LEASES: usize = 2;
/// Directories of volumes outside the store's directory.
static DIRS: [&str; 4] = ["/a", "/b", "/c", "/d"];

thread_local! {
    /// The history's clock, in seconds since 1970; a history runs in one thread.
    static NOW: Cell<u64> = const { Cell::new(0) };
}

pub struct History {
    rng: Rng,
    /// Random numbers for choices that were added to the explorer after seeds had failed. If `rng`
    /// supplied these numbers, its further numbers would shift, and the failed seeds would have
    /// different histories.
    extra_rng: Rng,
    workload: Workload,
    operations: u64,
    options: Options,
    /// The volumes of a new store, if they are not in the store's directory.
    dirs: &'static [&'static str],
    recording: RecordingMedium,
    bounds: Bounds,
    /// Retained pages, flushed or not: the sequence, its pages, and the end in seconds since 1970.
    retained: Vec<(usize, Pages, u64)>,
    /// Leases in force: the lease, the sequence, and its leased pages.
    leased: Vec<(LeaseNumber, usize, Pages)>,
    /// Value of the owner's counter `retentions_displaced` when the history last read it.
    displaced: u64,
    clients: Vec<Client>,
    names: Names,
    /// Number of clients started so far.
    clients_started: u64,
    /// Dead clients whose locks the kernel holds until [`Self::drop_locks`] releases them.
    locked_dead_clients: Vec<String>,
    /// The owner's process, if it was a client before it became the owner.
    promoted_client: Option<Client>,
    /// Number of scopes that [`Self::make_scopes`] has created.
    salts: u64,
    /// The directory of the absent volume, if a volume is absent.
    absent: Option<&'static str>,
    verbose: bool,
    /// The current operation, for messages.
    pub current: String,
    /// Number of crash states checked.
    pub states: u64,
    /// Whether a page was in several pieces when the history ended.
    pub has_split_pages: bool,
}

impl History {
    pub fn new(seed: u64, verbose: bool) -> Self {
        NOW.set(1_000_000 * HOUR);
        let (mut rng, mut extra_rng) = (Rng::new(seed), Rng::new(seed ^ 0xfa7e));
        let workload = Workload::of(seed, &mut extra_rng);
        // Only a store that is never full may have split pages, because a few of them fill a store
        // of a few MiB. Few seeds have split pages, because they make the check of a state slow.
        let has_split_pages = workload.never_full && (3..6).contains(&(seed % 36));
        set_split_pages(has_split_pages);
        // The disk usually has space for the whole store.
        let mut mib = 4 + rng.below(4);
        let mut has_room = !rng.one_in(8);
        let mut disk_mib = if has_room { 32 } else { 4 };
        if workload.never_full {
            (mib, disk_mib, has_room) = (40, 128, true);
        }
        let durable = rng.one_in(8);
        let durability = if durable { Durability::Durable } else { Durability::Cache };
        let wall_clock = || NOW.get();
        let base = options(Path::new("/store"), mib);
        let mut options = Options { durability, background_threads: false, wall_clock, ..base };
        // In half of these histories, a store on several volumes divides large pages over all of
        // them.
        if has_split_pages && (seed / 36).is_multiple_of(2) {
            options.long_page_bytes = STRIPED_FROM;
        }
        let long = rng.one_in(12);
        let operations = if long { 800 } else { 20 + rng.below(100) };
        let operations = if workload.steady { 2000 } else { operations };
        let mut dirs = &DIRS[..0];
        if workload.volumes || (!workload.plain && rng.one_in(2)) {
            dirs = if rng.one_in(3) { &DIRS[..] } else { &DIRS[..2] };
            options.paths = dirs.iter().map(PathBuf::from).collect();
        }
        let nothing = vec![0; SEQUENCES];
        let bounds = Bounds {
            least: nothing.clone(),
            most: nothing.clone(),
            visible: vec![Pages::MAX; SEQUENCES],
            deleted: nothing,
            limited: [false; KINDS],
            retained: Vec::new(),
            ceiling: mib * MIB,
            has_room: workload.plain || has_room,
        };
        let recording = RecordingMedium::new(&SimDisk::new(disk_mib * MIB), seed, operations);
        Self {
            rng,
            extra_rng,
            workload,
            operations,
            options,
            dirs,
            recording,
            bounds,
            retained: Vec::new(),
            leased: Vec::new(),
            displaced: 0,
            clients: Vec::new(),
            names: Names::default(),
            clients_started: 0,
            locked_dead_clients: Vec::new(),
            promoted_client: None,
            salts: 0,
            absent: None,
            verbose,
            current: String::from("the creation"),
            states: 0,
            has_split_pages: false,
        }
    }

    pub fn changes_digest(&self) -> u64 {
        self.recording.changes_digest()
    }

    pub fn run(&mut self) {
        if self.workload.converted {
            self.convert();
        }
        let mut open = self.open();
        self.check_recorded();
        // Later openings take the directories and the index from the manifest, and the capacity as
        // well if operations may change it.
        self.options.paths.clear();
        self.options.index = None;
        self.options.capacity = self.options.capacity.filter(|_| self.workload.plain);
        for number in 0..self.operations {
            let absent = self.absent.is_some();
            let operation = Operation::choose_for(&mut self.rng, &self.workload, self.dirs, absent);
            self.current = format!("operation {number}, {operation:?}");
            if self.verbose {
                println!("{}", self.current);
            }
            open = self.apply(open, &operation);
        }
        self.has_split_pages = stats(&open).health.large_pages.max > 1;
        open.close();
    }

    /// Opens the store in the owner's process, and connects the clients.
    fn open(&mut self) -> Open {
        let medium = Arc::new(self.recording.medium());
        let open = open_beside(medium, &self.options, self.names.alive()).unwrap();
        self.connect(&open);
        open
    }

    /// Creates a store whose index is `memory`, and converts it to `run`. Checks the store after a
    /// power loss at recorded moments of the creation and of the conversion.
    fn convert(&mut self) {
        self.options.index = Some(IndexKind::Memory);
        let open = self.open();
        for at in [0, 11, 22] {
            put(&open.store, at, 2, 0).unwrap();
        }
        open.store.flush().unwrap();
        check_get(&open.store, 0, leading(2));
        open.close();
        // A recorded state is opened with the index that its manifest names.
        self.options.index = None;
        self.check_recorded();
        self.options.index = Some(IndexKind::Run);
        let open = self.open();
        assert_eq!(
            present_pages(&open.store),
            self.bounds.least,
            "the converted store must hold no pages"
        );
        assert_eq!(stats(&open).index, "run");
        open.close();
        self.check_recorded();
    }

    fn apply(&mut self, open: Open, operation: &Operation) -> Open {
        let before = self.bounds.clone();
        self.recording.land_writes(3);
        self.drop_locks();
        if self.workload.salted {
            self.make_scopes(&open);
        }
        match operation {
            Operation::FailSync { part, at, pages, end } => {
                return self.fail_sync(open, part, (*at, *pages), *end, &before);
            }
            Operation::LoseVolume { dir, end } => {
                return self.lose_volume(open, dir, *end, &before);
            }
            Operation::FailOpen { nth, reopen } => {
                return self.fail_open(open, *nth, *reopen, &before);
            }
            Operation::ReturnVolume { reopen } => {
                return self.return_volume(open, *reopen, &before);
            }
            Operation::Takeover { client_number, at, pages, after } => {
                let put = Operation::Put { at: *at, pages: *pages, hours: 0 };
                return self.kill(open, &put, *after, Some(*client_number), &before);
            }
            Operation::Reopen { capacity } => return self.reopen(open, *capacity, &before),
            Operation::Kill { operation, after } => {
                return self.kill(open, operation, *after, None, &before);
            }
            Operation::Crash { seed } => return self.crash(open, *seed, &before),
            Operation::Get { at } => check_get(&open.store, *at, present_pages(&open.store)[*at]),
            Operation::Lease { at } => self.lease(&open, *at),
            Operation::Release => {
                if !self.leased.is_empty() {
                    open.store.release(self.leased.remove(0).0).unwrap();
                }
            }
            Operation::Scrub => {
                let present = present_pages(&open.store);
                let found = open.core.verify(false, &mut |_, _| {}).unwrap();
                assert!(found.findings.is_empty(), "{:?}", found.findings);
                assert_eq!(present_pages(&open.store), present, "scrubbing changed the pages");
            }
            Operation::AdvanceClock { hours } => self.advance_clock(*hours),
            Operation::ConcurrentCommit { at, pages, maintain, after } => {
                self.expect_put(*at, *pages);
                let catalog = Arc::new(open.core.catalog_for(ClientId::LOCAL, ""));
                let unfinished = UnfinishedPut::reserve(catalog, open.core.segments(), *at, *pages);
                self.commit_concurrently(
                    &open,
                    unfinished.map(UnfinishedPut::write),
                    *maintain,
                    *after,
                    &before,
                );
            }
            Operation::ClientPut { .. }
            | Operation::ClientGet { .. }
            | Operation::ClientFlush { .. }
            | Operation::ClientReserve { .. }
            | Operation::ClientEnd { .. }
            | Operation::ClientKill { .. } => self.apply_client_operation(&open, operation),
            _ => {
                self.expect(operation);
                let result = self.attempt(&open, operation);
                self.check_result(operation, &result);
            }
        }
        let displaced = self.note_displaced(&open);
        self.check_recorded_within(&before, &open);
        self.expect_dropped(operation);
        let present = present_pages(&open.store);
        let durable = self.options.durability == Durability::Durable;
        let is_durable = match *operation {
            Operation::Put { at, pages, .. } | Operation::ClientPut { at, pages, .. } => {
                let stored = leading(pages) & !present[at] == 0;
                assert!(
                    stored || !self.workload.never_full || self.absent.is_some(),
                    "a page was not stored"
                );
                durable && stored
            }
            Operation::Delete { at, page } => {
                assert_eq!(present[at] & !left_by_delete(at, page), 0, "a deleted page is present");
                false
            }
            Operation::Flush | Operation::Scrub | Operation::ClientFlush { .. } => true,
            _ => false,
        };
        if let Operation::Put { at, pages, hours } = *operation
            && hours > 0
            && !displaced
            && leading(pages) & !present[at] == 0
        {
            self.retained.push((at, leading(pages), NOW.get() + hours * HOUR));
        }
        self.check_protected(&open, &present);
        if is_durable {
            self.mark_durable(present);
        }
        // Check as well the state that a power loss after the operation would leave.
        let seed = self.rng.next();
        let disk = self.recording.disk().crash(seed);
        self.check_state(seed, disk);
        open
    }

    /// Performs an operation that may fail.
    fn attempt(&self, open: &Open, operation: &Operation) -> Result<()> {
        // With a timeout of zero, the call makes at most one maintenance pass.
        let change_capacity = |change| open.core.change_capacity(&change, Duration::ZERO);
        match *operation {
            Operation::Put { at, pages, hours } => {
                let until = if hours > 0 { NOW.get() + hours * HOUR } else { 0 };
                put(&open.store, at, pages, until).map(drop)
            }
            Operation::Touch { at } => {
                let (kind, keys) = keys_of(at);
                open.store.touch(&kind.scope, &refs(keys)).map(drop)
            }
            Operation::Delete { at, page } => {
                let (kind, keys) = keys_of(at);
                open.store.delete(&kind.scope, &[&keys[page]]).map(drop)
            }
            Operation::DropScope { kind } => open.store.drop_scope(&kinds()[kind].scope),
            Operation::Clear => open.store.clear(),
            Operation::Flush => open.store.flush(),
            Operation::Resize { mib } => change_capacity(CapacityChange::Capacity(mib * MIB)),
            Operation::AddVolume { dir } => {
                change_capacity(CapacityChange::AddVolume(dir.to_owned()))
            }
            Operation::DrainVolume { which } => {
                let paths = stats(open).paths;
                let path = &paths[(which % paths.len() as u64) as usize];
                change_capacity(CapacityChange::DrainVolume(path.dir.clone()))
            }
            Operation::Configure { kind, ref settings } => {
                open.store.configure(&kinds()[kind].scope, settings)
            }
            _ => {
                open.core.run_once();
                Ok(())
            }
        }
    }

    /// Checks the result of an operation: changes of capacity may be refused or be incomplete, all
    /// other operations must succeed.
    fn check_result(&self, operation: &Operation, result: &Result<()>) {
        let Err(error) = result else { return };
        let message = error.to_string();
        let known = match operation {
            Operation::Resize { .. }
            | Operation::AddVolume { .. }
            | Operation::DrainVolume { .. } => {
                // The store refused the change, or recorded it but did not complete it or an
                // earlier change.
                message.contains("still being emptied")
                    || message.contains("may not be evicted")
                    || message.contains("has this directory already")
                    || message.contains("last directory")
            }
            _ => false,
        };
        assert!(known, "{message}");
    }

    /// Runs a maintenance pass if `maintain`, otherwise a flush. Commits `unfinished` during the
    /// pass or flush, after `after` changes of the disk; afterwards in `durable` mode, or if the
    /// pass or flush makes fewer changes.
    fn commit_concurrently(
        &mut self,
        open: &Open,
        unfinished: Option<UnfinishedPut>,
        maintain: bool,
        after: u64,
        before: &Bounds,
    ) {
        let present = present_pages(&open.store);
        self.check_protected(open, &present);
        // In `durable` mode a commit within a sync would wait for this sync forever, so the commit
        // follows the flush or the maintenance pass.
        let within = self.options.durability == Durability::Cache;
        if let Some(unfinished) = unfinished {
            let after = if within { after } else { u64::MAX };
            self.recording.concurrent_action(after, Box::new(move || unfinished.commit().unwrap()));
        }
        if maintain {
            open.core.run_once();
        } else {
            open.store.flush().unwrap();
        }
        self.recording.end_concurrent_action();
        self.check_recorded_within(before, open);
        if !maintain {
            let now = present_pages(&open.store);
            let both = |join: fn((&u64, &u64)) -> u64| present.iter().zip(&now).map(join).collect();
            let (least, most) = (both(|(a, b)| a & b), both(|(a, b)| a | b));
            let visible = self.bounds.visible.clone();
            self.mark_durable(now);
            if self.absent.is_none() {
                self.bounds = Bounds { least, most, ..self.bounds.clone() };
            } else {
                // Pages that were committed during the flush may not be durable.
                for (at, committed) in most.iter().enumerate() {
                    let unsure = committed & !present[at];
                    self.bounds.least[at] &= !unsure | before.least[at];
                    self.bounds.visible[at] &= !unsure | visible[at];
                }
            }
        }
    }

    fn lease(&mut self, open: &Open, at: usize) {
        let (kind, keys) = keys_of(at);
        if self.leased.len() == LEASES {
            return;
        }
        let leased = open.store.lease(&kind.scope, &refs(keys), Duration::from_secs(HOUR)).unwrap();
        if leased.pages > 0 {
            self.leased.push((leased.lease, at, leading(leased.pages)));
        }
    }

    fn advance_clock(&mut self, hours: u64) {
        NOW.set(NOW.get() + hours * HOUR);
        let ended: Vec<(usize, Pages)> = self
            .retained
            .iter()
            .filter(|(.., end)| *end <= NOW.get())
            .map(|&(at, pages, _)| (at, pages))
            .collect();
        self.retained.retain(|(.., end)| *end > NOW.get());
        // A sequence may have several retentions. Once one of them has ended, expect none of the
        // sequence's retained pages after a crash.
        self.bounds.retained.retain(|(at, _)| !ended.iter().any(|(gone, _)| gone == at));
    }

    /// Clears the expected retentions if the store has refused some or released some early, because
    /// it was too small for them. Returns whether the store has done so since the last call.
    pub(super) fn note_displaced(&mut self, open: &Open) -> bool {
        let displaced = stats(open).counters["retentions_displaced"];
        let more = displaced != self.displaced;
        if more {
            self.displaced = displaced;
            self.retained.clear();
            self.bounds.retained.clear();
        }
        more
    }

    /// Checks that no protected page was evicted while the store is open, that the store keeps its
    /// capacity, and that a store that is never full evicts no page.
    fn check_protected(&mut self, open: &Open, present: &[Pages]) {
        self.note_displaced(open);
        let found = stats(open);
        let retained = self.retained.iter().map(|&(at, pages, _)| (at, pages));
        let leased = self.leased.iter().map(|&(_, at, pages)| (at, pages));
        for (at, pages) in retained.chain(leased) {
            assert_eq!(pages & !present[at], 0, "protected pages of sequence {at} were evicted");
        }
        if is_change_complete(&found) {
            self.bounds.ceiling = found.capacity_bytes;
            assert!(found.segments <= found.segments_max, "{found:?}");
        }
        assert!(found.allocated_bytes <= self.bounds.ceiling, "{found:?}");
        let evicted = found.counters["evicted_pages"];
        assert!(
            evicted == 0 || !self.workload.never_full,
            "a store that is never full evicted {evicted} pages"
        );
    }

    fn mark_durable(&mut self, present: Vec<Pages>) {
        self.bounds.mark_durable(present);
        self.bounds.retained = self.retained.iter().map(|&(at, pages, _)| (at, pages)).collect();
    }
}
