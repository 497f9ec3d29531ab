//! One random life of a store.

use crate::act::Act;
use crate::common::{MIB, Open, open_on, options, refs};
use crate::dice::Dice;
use crate::half::Half;
use crate::judge::{Bounds, in_shape, stats};
use crate::kinds::{
    KINDS, NAMES, Pages, SEQUENCES, deliver, keys_of, kinds, leading, present, put,
};
use crate::watch::Watched;
use ritornello_format::{ErrorKind, Result};
use ritornello_medium::SimDisk;
use ritornello_store::{Durability, LeaseNumber, Options, Reshape};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const HOUR: u64 = 3600;
/// Leases held at a time.
const LEASES: usize = 2;

thread_local! {
    /// A life has a thread, and its own time: seconds since 1970.
    static NOW: Cell<u64> = const { Cell::new(0) };
}

pub struct Life {
    dice: Dice,
    /// Nothing of the store's shape and settings ever changes.
    plain: bool,
    acts: u64,
    options: Options,
    watched: Watched,
    bounds: Bounds,
    /// Retained pages, flushed or not: sequence, pages, end.
    retained: Vec<(usize, Pages, u64)>,
    leased: Vec<(LeaseNumber, usize, Pages)>,
    /// Retentions that gave way before their time, as far as this owner counted.
    displaced: u64,
    tell: bool,
    /// What it is doing.
    pub now: String,
    /// Crash states looked at.
    pub states: u64,
}

impl Life {
    pub fn new(seed: u64, tell: bool) -> Self {
        NOW.set(1_000_000 * HOUR);
        let mut dice = Dice::new(seed);
        let plain = seed % 3 == 1;
        // Room on the disk for the store; sometimes not for all of it.
        let mib = 4 + dice.below(4);
        let roomy = !dice.one_in(8);
        let disk = SimDisk::new(if roomy { 32 * MIB } else { 4 * MIB });
        let durable = dice.one_in(8);
        let durability = if durable { Durability::Durable } else { Durability::Cache };
        let wall_clock = || NOW.get();
        let base = options(Path::new("/store"), mib);
        let mut options = Options { durability, upkeep: false, wall_clock, ..base };
        // A long life has checkpoints of the index.
        let acts = if dice.one_in(12) { 800 } else { 20 + dice.below(100) };
        if !plain && dice.one_in(2) {
            options.paths = vec!["/a".into(), "/b".into()];
        }
        let nothing = vec![0; SEQUENCES];
        let bounds = Bounds {
            least: nothing.clone(),
            most: nothing,
            limited: [false; KINDS],
            retained: Vec::new(),
            ceiling: mib * MIB,
            roomy: plain || roomy,
        };
        let watched = Watched::new(disk, seed, acts);
        Self {
            dice,
            plain,
            acts,
            options,
            watched,
            bounds,
            retained: Vec::new(),
            leased: Vec::new(),
            displaced: 0,
            tell,
            now: String::from("birth"),
            states: 0,
        }
    }

    pub fn deeds(&self) -> u64 {
        self.watched.deeds()
    }

    pub fn live(&mut self) {
        let mut open = self.open();
        self.look();
        // From now on the manifest says what the store is.
        self.options.paths.clear();
        self.options.capacity = self.options.capacity.filter(|_| self.plain);
        for number in 0..self.acts {
            let act = Act::pick(&mut self.dice, self.plain);
            self.now = format!("act {number}, {act:?}");
            if self.tell {
                println!("{}", self.now);
            }
            open = self.act(open, &act);
        }
        open.close();
    }

    fn open(&self) -> Open {
        open_on(Arc::new(self.watched.clone()), &self.options).unwrap()
    }

    fn act(&mut self, open: Open, act: &Act) -> Open {
        let before = self.bounds.clone();
        match act {
            Act::Reopen { capacity } => return self.reopen(open, *capacity, &before),
            Act::Kill { act, after } => return self.kill(open, act, *after, &before),
            Act::Crash { seed } => return self.crash(open, *seed, &before),
            Act::Get { at } => deliver(&open, *at, present(&open)[*at]),
            Act::Lease { at } => self.lease(&open, *at),
            Act::Release => {
                if !self.leased.is_empty() {
                    open.store.release(self.leased.remove(0).0).unwrap();
                }
            }
            Act::Scrub => {
                let there = present(&open);
                let found = open.engine.verify(false, &mut |_, _| {}).unwrap();
                assert!(found.findings.is_empty(), "{:?}", found.findings);
                assert_eq!(present(&open), there, "verified");
            }
            Act::Later { hours } => self.pass(*hours),
            Act::Beside { at, pages, tend, after } => {
                self.bounds.most[*at] |= leading(*pages);
                self.beside(&open, Half::write(&open, *at, *pages), *tend, *after, &before);
            }
            _ => {
                self.expect(act);
                let answer = self.attempt(&open, act);
                self.check_answer(act, &answer);
            }
        }
        self.look_within(&before, &open);
        self.forget_dropped(act);
        let there = present(&open);
        let durable = self.options.durability == Durability::Durable;
        let settled = match *act {
            Act::Put { at, pages, .. } => durable && leading(pages) & !there[at] == 0,
            Act::Flush | Act::Scrub => true,
            _ => false,
        };
        if let Act::Put { at, pages, hours } = *act
            && hours > 0
            && leading(pages) & !there[at] == 0
        {
            self.retained.push((at, leading(pages), NOW.get() + hours * HOUR));
        }
        self.check_what_stays(&open, &there);
        if settled {
            self.settle(there);
        }
        // What holds once the act is over.
        let seed = self.dice.next();
        self.judge(seed, self.watched.disk().crash(seed));
        open
    }

    /// What an act that is begun may leave.
    fn expect(&mut self, act: &Act) {
        match *act {
            Act::Put { at, pages, .. } => self.bounds.most[at] |= leading(pages),
            Act::Resize { mib } => self.bounds.ceiling = self.bounds.ceiling.max(mib * MIB),
            Act::Configure { kind, settings: ref wanted } => {
                self.bounds.limited[kind] |= wanted.quota_bytes.is_some();
                // Less may be retained now.
                self.retained.retain(|(at, ..)| at / NAMES as usize != kind);
                self.bounds.retained.retain(|(at, _)| at / NAMES as usize != kind);
            }
            Act::Delete { at, .. } => {
                self.retained.retain(|retained| retained.0 != at);
                self.bounds.retained.retain(|retained| retained.0 != at);
                self.leased.retain(|leased| leased.1 != at);
            }
            Act::DropScope { .. } | Act::Clear => {
                self.retained.clear();
                self.bounds.retained.clear();
                self.leased.clear();
            }
            _ => {}
        }
    }

    /// Does what can fail.
    fn attempt(&self, open: &Open, act: &Act) -> Result<()> {
        // Without a thread of its own the store does what it can within the call.
        let reshape = |change| open.engine.reshape(&change, Duration::ZERO);
        match *act {
            Act::Put { at, pages, hours } => {
                let until = if hours > 0 { NOW.get() + hours * HOUR } else { 0 };
                put(open, at, pages, until).map(drop)
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
            Act::Resize { mib } => reshape(Reshape::Capacity(mib * MIB)),
            Act::AddPath { dir } => reshape(Reshape::AddPath(dir.to_owned())),
            Act::DrainPath { which } => {
                let paths = stats(open).paths;
                let path = &paths[(which % paths.len() as u64) as usize];
                reshape(Reshape::DrainPath(path.dir.clone()))
            }
            Act::Configure { kind, ref settings } => {
                open.store.configure(&kinds()[kind].scope, settings)
            }
            _ => {
                open.engine.tend();
                Ok(())
            }
        }
    }

    /// What changes the space may be refused, or may take longer; all else works.
    fn check_answer(&self, act: &Act, answer: &Result<()>) {
        let Err(error) = answer else { return };
        let said = error.to_string();
        let known = match act {
            Act::Resize { .. } | Act::AddPath { .. } | Act::DrainPath { .. } => {
                // What an earlier change left to be done is waited for as well.
                said.contains("still being emptied")
                    || said.contains("may not be evicted")
                    || said.contains("has this directory already")
                    || said.contains("last directory")
            }
            _ => false,
        };
        assert!(known, "{said}");
    }

    /// What was dropped is gone, from now on and after any crash.
    fn forget_dropped(&mut self, act: &Act) {
        match *act {
            Act::DropScope { kind } => {
                self.bounds.most[kind * NAMES as usize..][..NAMES as usize].fill(0);
            }
            Act::Clear => self.bounds.most.fill(0),
            _ => {}
        }
    }

    /// A flush, or upkeep, and after so many changes of the disk the other half of a put.
    fn beside(&mut self, open: &Open, half: Option<Half>, tend: bool, after: u64, before: &Bounds) {
        let there = present(open);
        self.check_what_stays(open, &there);
        // In durable mode it would wait for the sync that it is in.
        let within = self.options.durability == Durability::Cache;
        if let Some(half) = half {
            let after = if within { after } else { u64::MAX };
            self.watched.meanwhile(after, Box::new(|| half.commit()));
        }
        if tend {
            open.engine.tend();
        } else {
            open.store.flush().unwrap();
        }
        self.watched.end_meanwhile();
        self.look_within(before, open);
        if !tend {
            let now = present(open);
            let both = |join: fn((&u64, &u64)) -> u64| there.iter().zip(&now).map(join).collect();
            let (least, most) = (both(|(a, b)| a & b), both(|(a, b)| a | b));
            self.settle(now);
            self.bounds = Bounds { least, most, ..self.bounds.clone() };
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

    /// While the store is open, nothing that is held goes.
    fn check_what_stays(&mut self, open: &Open, there: &[Pages]) {
        let found = stats(open);
        let displaced = found.counters["retentions_displaced"];
        if displaced != self.displaced {
            self.displaced = displaced;
            self.retained.clear();
            self.bounds.retained.clear();
        }
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
    }

    fn settle(&mut self, there: Vec<Pages>) {
        self.bounds.settle(there);
        self.bounds.retained = self.retained.iter().map(|&(at, pages, _)| (at, pages)).collect();
    }

    /// Another owner: leases are over, and what was retained is what was durably so.
    fn succeed(&mut self, open: &Open) {
        self.leased.clear();
        let durable = std::mem::take(&mut self.bounds.retained);
        self.retained.retain(|&(at, pages, _)| durable.contains(&(at, pages)));
        self.bounds.retained = durable;
        self.displaced = 0;
        let there = present(open);
        self.check_what_stays(open, &there);
    }

    fn reopen(&mut self, open: Open, capacity: Option<u64>, before: &Bounds) -> Open {
        let there = present(&open);
        open.close();
        let open = match capacity {
            None => self.open(),
            Some(mib) => {
                self.bounds.ceiling = self.bounds.ceiling.max(mib * MIB);
                let options = Options { capacity: Some(mib * MIB), ..self.options.clone() };
                open_on(Arc::new(self.watched.clone()), &options).unwrap_or_else(|error| {
                    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
                    self.open()
                })
            }
        };
        if capacity.is_none() {
            self.check_same(&open, &there, "closed and opened again");
        }
        self.look_within(before, &open);
        self.settle(there);
        self.bounds.least = present(&open);
        self.succeed(&open);
        open
    }

    fn kill(&mut self, open: Open, act: &Act, after: u64, before: &Bounds) -> Open {
        self.expect(act);
        self.watched.kill(after);
        let mut flushed = None;
        if let Act::Reopen { .. } = act {
            open.store.close();
            let _ = open.engine.close();
            drop(open);
            let _ = open_on(Arc::new(self.watched.clone()), &self.options);
        } else {
            let done = self.attempt(&open, act).is_ok();
            let durable = open.store.flush().is_ok();
            let there = present(&open);
            drop(open);
            flushed = durable.then_some(there.clone());
            if done {
                self.forget_dropped(act);
            }
            // What was flushed, and was not evicted, is there.
            self.bounds.least.iter_mut().zip(there).for_each(|(least, there)| *least &= there);
        }
        self.watched.revive();
        let must = self.bounds.least.clone();
        let open = self.open();
        let there = present(&open);
        if let Some(flushed) = flushed {
            self.check_same(&open, &flushed, "flushed, killed and opened again");
        }
        let evicted = stats(&open).counters["pages_evicted"] > 0;
        for (at, must) in must.iter().enumerate() {
            let spared = evicted && self.bounds.limited[at / NAMES as usize];
            assert!(must & !there[at] == 0 || spared, "a kill cost flushed pages of {at}");
        }
        self.look_within(before, &open);
        self.succeed(&open);
        open
    }

    fn crash(&mut self, open: Open, seed: u64, before: &Bounds) -> Open {
        let disk = self.watched.disk().crash(seed);
        drop(open);
        self.watched = self.watched.over(disk);
        let open = self.open();
        let there = present(&open);
        self.bounds.judge(&open, seed);
        self.look_within(before, &open);
        self.bounds.settle(there);
        self.bounds.least = present(&open);
        self.succeed(&open);
        open
    }

    /// Nothing came and nothing went, but what a quota may cost.
    fn check_same(&self, open: &Open, expected: &[Pages], what: &str) {
        let evicted = stats(open).counters["pages_evicted"] > 0;
        for (at, (there, expected)) in present(open).iter().zip(expected).enumerate() {
            let fewer = evicted && self.bounds.limited[at / NAMES as usize];
            let same = there == expected || (fewer && there & !expected == 0);
            assert!(same, "{what}: pages of {at} were {expected:b} and are {there:b}");
        }
    }

    /// Judges what was noted during an act. What the act removed need not be there any more.
    fn look_within(&mut self, before: &Bounds, open: &Open) {
        for (least, there) in self.bounds.least.iter_mut().zip(present(open)) {
            *least &= there;
        }
        let most = before.most.iter().zip(&self.bounds.most).map(|(a, b)| a | b).collect();
        let after = std::mem::replace(&mut self.bounds.most, most);
        self.look();
        self.bounds.most = after;
    }

    fn look(&mut self) {
        for (seed, disk) in self.watched.taken() {
            self.judge(seed, disk);
        }
    }

    fn judge(&mut self, seed: u64, disk: SimDisk) {
        let open = open_on(Arc::new(disk), &self.options).unwrap();
        self.bounds.judge(&open, seed);
        open.store.close();
        self.states += 1;
    }
}
