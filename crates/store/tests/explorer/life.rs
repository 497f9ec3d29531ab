//! One random life of a store.

mod clients;
mod ends;
mod expect;
mod look;
mod salts;
mod volumes;

use crate::act::Act;
use crate::client::{Client, Names};
use crate::common::{MIB, Open, open_beside, options, refs};
use crate::dice::Dice;
use crate::family::Family;
use crate::half::Half;
use crate::judge::{Bounds, in_shape, stats};
use crate::kinds::{
    KINDS, Pages, SEQUENCES, deliver, keys_of, kinds, leading, left_by_delete, present, put,
};
use crate::watch::Watched;
use ritornello_format::Result;
use ritornello_medium::SimDisk;
use ritornello_store::{CapacityChange, ClientId, Durability, IndexKind, LeaseNumber, Options};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const HOUR: u64 = 3600;
/// Maximum leases at a time.
const LEASES: usize = 2;

thread_local! {
    /// A life runs in one thread with its own clock: seconds since 1970.
    static NOW: Cell<u64> = const { Cell::new(0) };
}

pub struct Life {
    dice: Dice,
    /// Decides about acts that were added later, so that the seeds of older lives keep their
    /// meaning.
    fate: Dice,
    family: Family,
    acts: u64,
    options: Options,
    watched: Watched,
    bounds: Bounds,
    /// Retained pages, flushed or not: sequence, pages, end.
    retained: Vec<(usize, Pages, u64)>,
    leased: Vec<(LeaseNumber, usize, Pages)>,
    /// Retentions released early, as far as this owner counted.
    displaced: u64,
    clients: Vec<Client>,
    names: Names,
    /// Number of clients so far.
    born: u64,
    /// Dead clients whose locks the kernel has not released yet.
    lingering: Vec<String>,
    /// The owner, if it was a client before.
    successor: Option<Client>,
    /// Number of scopes that requests created so far.
    salts: u64,
    /// The volume that is away.
    absent: Option<&'static str>,
    tell: bool,
    /// The present act.
    pub now: String,
    /// Number of crash states judged.
    pub states: u64,
}

impl Life {
    pub fn new(seed: u64, tell: bool) -> Self {
        NOW.set(1_000_000 * HOUR);
        let (mut dice, mut fate) = (Dice::new(seed), Dice::new(seed ^ 0xfa7e));
        let family = Family::of(seed, &mut fate);
        // Disk space for the store; sometimes not for all of it.
        let mut mib = 4 + dice.below(4);
        let mut roomy = !dice.one_in(8);
        let mut disk_mib = if roomy { 32 } else { 4 };
        if family.never_full {
            (mib, disk_mib, roomy) = (40, 128, true);
        }
        let durable = dice.one_in(8);
        let durability = if durable { Durability::Durable } else { Durability::Cache };
        let wall_clock = || NOW.get();
        let base = options(Path::new("/store"), mib);
        let mut options = Options { durability, background_threads: false, wall_clock, ..base };
        let long = dice.one_in(12);
        let acts = if long { 800 } else { 20 + dice.below(100) };
        let acts = if family.steady { 2000 } else { acts };
        if family.volumes || (!family.plain && dice.one_in(2)) {
            options.paths = vec!["/a".into(), "/b".into()];
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
            roomy: family.plain || roomy,
        };
        let watched = Watched::new(&SimDisk::new(disk_mib * MIB), seed, acts);
        Self {
            dice,
            fate,
            family,
            acts,
            options,
            watched,
            bounds,
            retained: Vec::new(),
            leased: Vec::new(),
            displaced: 0,
            clients: Vec::new(),
            names: Names::default(),
            born: 0,
            lingering: Vec::new(),
            successor: None,
            salts: 0,
            absent: None,
            tell,
            now: String::from("birth"),
            states: 0,
        }
    }

    pub fn changes_digest(&self) -> u64 {
        self.watched.changes_digest()
    }

    pub fn live(&mut self) {
        if self.family.converted {
            self.convert();
        }
        let mut open = self.open();
        self.look();
        // From now on the manifest describes the store.
        self.options.paths.clear();
        self.options.index = None;
        self.options.capacity = self.options.capacity.filter(|_| self.family.plain);
        for number in 0..self.acts {
            let act = Act::pick_in(&mut self.dice, &self.family, self.absent.is_some());
            self.now = format!("act {number}, {act:?}");
            if self.tell {
                println!("{}", self.now);
            }
            open = self.act(open, &act);
        }
        open.close();
    }

    /// Opens the store in the owner's process, and connects the clients.
    fn open(&mut self) -> Open {
        let medium = Arc::new(self.watched.clone());
        let open = open_beside(medium, &self.options, self.names.alive()).unwrap();
        self.connect(&open);
        open
    }

    /// Converts a store whose index persists nothing. Power may fail at any moment of it.
    fn convert(&mut self) {
        self.options.index = Some(IndexKind::Memory);
        let open = self.open();
        for at in [0, 11, 22] {
            put(&open.store, at, 3, 0).unwrap();
        }
        open.store.flush().unwrap();
        deliver(&open.store, 0, leading(3));
        open.close();
        // Recorded states are opened with their own index.
        self.options.index = None;
        self.look();
        self.options.index = Some(IndexKind::Run);
        let open = self.open();
        assert_eq!(present(&open.store), self.bounds.least, "converted from nothing");
        assert_eq!(stats(&open).index, "run");
        open.close();
        self.look();
    }

    fn act(&mut self, open: Open, act: &Act) -> Open {
        let before = self.bounds.clone();
        self.watched.pass_time(3);
        self.drop_locks();
        if self.family.salted {
            self.make_scopes(&open);
        }
        match act {
            Act::FailSync { part, at, pages, end } => {
                return self.fail_sync(open, part, (*at, *pages), *end, &before);
            }
            Act::Leave { dir, end } => return self.leave(open, dir, *end, &before),
            Act::FailOpen { nth, reopen } => return self.fail_open(open, *nth, *reopen, &before),
            Act::Return { reopen } => return self.come_back(open, *reopen, &before),
            Act::Takeover { who, at, pages, after } => {
                let put = Act::Put { at: *at, pages: *pages, hours: 0 };
                return self.kill(open, &put, *after, Some(*who), &before);
            }
            Act::Reopen { capacity } => return self.reopen(open, *capacity, &before),
            Act::Kill { act, after } => return self.kill(open, act, *after, None, &before),
            Act::Crash { seed } => return self.crash(open, *seed, &before),
            Act::Get { at } => deliver(&open.store, *at, present(&open.store)[*at]),
            Act::Lease { at } => self.lease(&open, *at),
            Act::Release => {
                if !self.leased.is_empty() {
                    open.store.release(self.leased.remove(0).0).unwrap();
                }
            }
            Act::Scrub => {
                let there = present(&open.store);
                let found = open.core.verify(false, &mut |_, _| {}).unwrap();
                assert!(found.findings.is_empty(), "{:?}", found.findings);
                assert_eq!(present(&open.store), there, "verified");
            }
            Act::Later { hours } => self.pass(*hours),
            Act::Beside { at, pages, maintain, after } => {
                self.expect_put(*at, *pages);
                let catalog = Arc::new(open.core.catalog_for(ClientId::LOCAL, ""));
                let half = Half::reserve(catalog, open.core.segments(), *at, *pages);
                self.beside(&open, half.map(Half::write), *maintain, *after, &before);
            }
            Act::ClientPut { .. }
            | Act::ClientGet { .. }
            | Act::ClientFlush { .. }
            | Act::ClientReserve { .. }
            | Act::ClientEnd { .. }
            | Act::ClientKill { .. } => self.act_of_client(&open, act),
            _ => {
                self.expect(act);
                let answer = self.attempt(&open, act);
                self.check_answer(act, &answer);
            }
        }
        let displaced = self.note_displaced(&open);
        self.look_within(&before, &open);
        self.forget_dropped(act);
        let there = present(&open.store);
        let durable = self.options.durability == Durability::Durable;
        let is_durable = match *act {
            Act::Put { at, pages, .. } | Act::ClientPut { at, pages, .. } => {
                let stored = leading(pages) & !there[at] == 0;
                assert!(stored || !self.family.never_full || self.absent.is_some(), "not stored");
                durable && stored
            }
            Act::Delete { at, page } => {
                assert_eq!(there[at] & !left_by_delete(at, page), 0, "deleted and still present");
                false
            }
            Act::Flush | Act::Scrub | Act::ClientFlush { .. } => true,
            _ => false,
        };
        if let Act::Put { at, pages, hours } = *act
            && hours > 0
            && !displaced
            && leading(pages) & !there[at] == 0
        {
            self.retained.push((at, leading(pages), NOW.get() + hours * HOUR));
        }
        self.check_what_stays(&open, &there);
        if is_durable {
            self.mark_durable(there);
        }
        // The state at the end of the act.
        let seed = self.dice.next();
        let disk = self.watched.disk().crash(seed);
        self.judge(seed, disk);
        open
    }

    /// Performs the acts that can fail.
    fn attempt(&self, open: &Open, act: &Act) -> Result<()> {
        // Without background threads the store does what it can within the call.
        let change_capacity = |change| open.core.change_capacity(&change, Duration::ZERO);
        match *act {
            Act::Put { at, pages, hours } => {
                let until = if hours > 0 { NOW.get() + hours * HOUR } else { 0 };
                put(&open.store, at, pages, until).map(drop)
            }
            Act::Touch { at } => {
                let (kind, keys) = keys_of(at);
                open.store.touch(&kind.scope, &refs(keys)).map(drop)
            }
            Act::Delete { at, page } => {
                let (kind, keys) = keys_of(at);
                open.store.delete(&kind.scope, &[&keys[page]]).map(drop)
            }
            Act::DropScope { kind } => open.store.drop_scope(&kinds()[kind].scope),
            Act::Clear => open.store.clear(),
            Act::Flush => open.store.flush(),
            Act::Resize { mib } => change_capacity(CapacityChange::Capacity(mib * MIB)),
            Act::AddVolume { dir } => change_capacity(CapacityChange::AddVolume(dir.to_owned())),
            Act::DrainVolume { which } => {
                let paths = stats(open).paths;
                let path = &paths[(which % paths.len() as u64) as usize];
                change_capacity(CapacityChange::DrainVolume(path.dir.clone()))
            }
            Act::Configure { kind, ref settings } => {
                open.store.configure(&kinds()[kind].scope, settings)
            }
            _ => {
                open.core.run_once();
                Ok(())
            }
        }
    }

    /// Changes of the space may be refused, or may take longer; all other acts succeed.
    fn check_answer(&self, act: &Act, answer: &Result<()>) {
        let Err(error) = answer else { return };
        let said = error.to_string();
        let known = match act {
            Act::Resize { .. } | Act::AddVolume { .. } | Act::DrainVolume { .. } => {
                // Also waits for the rest of an earlier change.
                said.contains("still being emptied")
                    || said.contains("may not be evicted")
                    || said.contains("has this directory already")
                    || said.contains("last directory")
            }
            _ => false,
        };
        assert!(known, "{said}");
    }

    /// A flush or maintenance, and after `after` changes of the disk the other half of a put.
    fn beside(
        &mut self,
        open: &Open,
        half: Option<Half>,
        maintain: bool,
        after: u64,
        before: &Bounds,
    ) {
        let there = present(&open.store);
        self.check_what_stays(open, &there);
        // In durable mode the commit would wait for the sync it is called from.
        let within = self.options.durability == Durability::Cache;
        if let Some(half) = half {
            let after = if within { after } else { u64::MAX };
            self.watched.meanwhile(after, Box::new(move || half.commit().unwrap()));
        }
        if maintain {
            open.core.run_once();
        } else {
            open.store.flush().unwrap();
        }
        self.watched.end_meanwhile();
        self.look_within(before, open);
        if !maintain {
            let now = present(&open.store);
            let both = |join: fn((&u64, &u64)) -> u64| there.iter().zip(&now).map(join).collect();
            let (least, most) = (both(|(a, b)| a & b), both(|(a, b)| a | b));
            let visible = self.bounds.visible.clone();
            self.mark_durable(now);
            if self.absent.is_none() {
                self.bounds = Bounds { least, most, ..self.bounds.clone() };
            } else {
                // Commits made meanwhile may not be durable.
                for (at, committed) in most.iter().enumerate() {
                    let unsure = committed & !there[at];
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

    fn pass(&mut self, hours: u64) {
        NOW.set(NOW.get() + hours * HOUR);
        let ended: Vec<(usize, Pages)> = self
            .retained
            .iter()
            .filter(|(.., end)| *end <= NOW.get())
            .map(|&(at, pages, _)| (at, pages))
            .collect();
        self.retained.retain(|(.., end)| *end > NOW.get());
        // A sequence may have been retained more than once.
        self.bounds.retained.retain(|(at, _)| !ended.iter().any(|(gone, _)| gone == at));
    }

    /// A store too small for its retained pages releases some. Returns whether it has since the
    /// last call.
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

    /// While the store is open, pinned pages stay.
    fn check_what_stays(&mut self, open: &Open, there: &[Pages]) {
        self.note_displaced(open);
        let found = stats(open);
        let retained = self.retained.iter().map(|&(at, pages, _)| (at, pages));
        let leased = self.leased.iter().map(|&(_, at, pages)| (at, pages));
        for (at, pages) in retained.chain(leased) {
            assert_eq!(pages & !there[at], 0, "pages of {at} are gone that were held");
        }
        if in_shape(&found) {
            self.bounds.ceiling = found.capacity_bytes;
            assert!(found.segments <= found.segments_max, "{found:?}");
        }
        assert!(found.allocated_bytes <= self.bounds.ceiling, "{found:?}");
        let evicted = found.counters["evicted_pages"];
        assert!(evicted == 0 || !self.family.never_full, "{evicted} pages evicted for no need");
    }

    fn mark_durable(&mut self, there: Vec<Pages>) {
        self.bounds.mark_durable(there);
        self.bounds.retained = self.retained.iter().map(|&(at, pages, _)| (at, pages)).collect();
    }
}
