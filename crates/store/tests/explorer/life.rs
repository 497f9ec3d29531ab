//! One random life of a store.

use crate::common::{MIB, Open, open_on, options, refs, try_put};
use crate::dice::Dice;
use crate::half::Half;
use crate::judge::{Bounds, NAMES, SEQUENCES, deliver, keys_of, kinds, present, put_pages};
use crate::watch::Watched;
use ritornello_medium::SimDisk;
use ritornello_store::{Durability, Options};
use std::path::Path;
use std::sync::Arc;

#[derive(Debug)]
enum Act {
    Put {
        at: usize,
        pages: usize,
    },
    Get {
        at: usize,
    },
    Touch {
        at: usize,
    },
    Delete {
        at: usize,
        page: usize,
    },
    DropScope {
        kind: usize,
    },
    Clear,
    Flush,
    Tend,
    /// A flush, or upkeep, and within it a put that was written before is committed.
    Beside {
        at: usize,
        pages: usize,
        tend: bool,
        after: u64,
    },
    Reopen,
    /// The process is killed within a put and a flush; the disk keeps its power.
    Kill {
        at: usize,
        pages: usize,
        after: u64,
    },
    /// Power goes, and life goes on with what is left.
    Crash {
        seed: u64,
    },
}

pub struct Life {
    dice: Dice,
    acts: u64,
    options: Options,
    watched: Watched,
    bounds: Bounds,
    tell: bool,
    /// What it is doing.
    pub now: String,
    /// Crash states looked at.
    pub states: u64,
}

impl Life {
    pub fn new(seed: u64, tell: bool) -> Self {
        let mut dice = Dice::new(seed);
        // Room on the disk for the store; sometimes not for all of it.
        let mib = 4 + dice.below(4);
        let disk = SimDisk::new(if dice.one_in(8) { 4 * MIB } else { 32 * MIB });
        let durable = dice.one_in(8);
        let durability = if durable { Durability::Durable } else { Durability::Cache };
        let options = Options { durability, upkeep: false, ..options(Path::new("/store"), mib) };
        // A long life has checkpoints of the index.
        let acts = if dice.one_in(12) { 800 } else { 20 + dice.below(100) };
        let bounds = Bounds::exactly(vec![0; SEQUENCES]);
        let watched = Watched::new(disk, seed, acts);
        let now = String::from("birth");
        Self { dice, acts, options, watched, bounds, tell, now, states: 0 }
    }

    pub fn deeds(&self) -> u64 {
        self.watched.deeds()
    }

    pub fn live(&mut self) {
        let mut open = self.open();
        self.look();
        for number in 0..self.acts {
            let act = self.pick();
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

    fn pick(&mut self) -> Act {
        let at = self.dice.below(SEQUENCES as u64) as usize;
        let (kind, _) = keys_of(at);
        let page = self.dice.below(kind.pages as u64) as usize;
        match self.dice.below(64) {
            0..=31 => Act::Put { at, pages: page + 1 },
            32 | 33 => {
                let (tend, after) = (self.dice.one_in(2), self.dice.below(6));
                Act::Beside { at, pages: page + 1, tend, after }
            }
            34..=37 => Act::Get { at },
            38..=41 => Act::Touch { at },
            42..=45 => Act::Delete { at, page },
            46 => Act::DropScope { kind: at / NAMES as usize },
            47 => {
                if self.dice.one_in(4) {
                    Act::Clear
                } else {
                    Act::Flush
                }
            }
            48..=54 => Act::Flush,
            55..=57 => Act::Tend,
            58 | 59 => Act::Reopen,
            60 | 61 => Act::Kill { at, pages: page + 1, after: self.dice.below(40) },
            _ => Act::Crash { seed: self.dice.next() },
        }
    }

    fn act(&mut self, open: Open, act: &Act) -> Open {
        let before = self.bounds.clone();
        let mut settled = false;
        match *act {
            Act::Put { at, pages } => {
                let outcome = put_pages(&open, at, pages);
                self.bounds.most[at] |= (1 << pages) - 1;
                settled = self.options.durability == Durability::Durable && outcome.pages == pages;
            }
            Act::Get { at } => deliver(&open, at, present(&open)[at]),
            Act::Touch { at } => {
                let (kind, keys) = keys_of(at);
                open.store.touch(&kind.scope, &refs(keys)).unwrap();
            }
            Act::Delete { at, page } => {
                let (kind, keys) = keys_of(at);
                open.store.delete(&kind.scope, &[&keys[page]]).unwrap();
            }
            Act::DropScope { kind } => {
                open.store.drop_scope(&kinds()[kind].scope).unwrap();
                self.look_within(&before, &open);
                self.bounds.most[kind * NAMES as usize..][..NAMES as usize].fill(0);
            }
            Act::Clear => {
                open.store.clear().unwrap();
                self.look_within(&before, &open);
                self.bounds.most.fill(0);
            }
            Act::Flush => {
                open.store.flush().unwrap();
                settled = true;
            }
            Act::Tend => open.engine.tend(),
            Act::Beside { at, pages, tend, after } => {
                self.bounds.most[at] |= (1 << pages) - 1;
                let half = Half::write(&open, at, pages);
                let there = present(&open);
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
                self.look_within(&before, &open);
                if !tend {
                    let now = present(&open);
                    let both = |join: fn((&u64, &u64)) -> u64| there.iter().zip(&now).map(join);
                    self.bounds.least = both(|(a, b)| a & b).collect();
                    self.bounds.most = both(|(a, b)| a | b).collect();
                }
            }
            Act::Reopen => {
                let there = present(&open);
                open.close();
                let open = self.open();
                assert_eq!(present(&open), there, "closed and opened again");
                self.look_within(&before, &open);
                self.bounds = Bounds::exactly(there);
                return open;
            }
            Act::Kill { at, pages, after } => {
                let (kind, keys) = keys_of(at);
                self.bounds.most[at] |= (1 << pages) - 1;
                self.watched.kill(after);
                let _ = try_put(&open.store, &kind.scope, &keys[..pages], None);
                let flushed = open.store.flush();
                let there = present(&open);
                drop(open);
                self.watched.revive();
                let open = self.open();
                if flushed.is_ok() {
                    assert_eq!(present(&open), there, "flushed, killed and opened again");
                }
                self.look_within(&before, &open);
                return open;
            }
            Act::Crash { seed } => {
                let disk = self.watched.disk().crash(seed);
                drop(open);
                self.watched = self.watched.over(disk);
                let open = self.open();
                let there = present(&open);
                self.bounds.judge(&open, seed);
                self.look_within(&before, &open);
                self.bounds = Bounds::exactly(there);
                self.bounds.least = present(&open);
                return open;
            }
        }
        self.look_within(&before, &open);
        if settled {
            self.bounds = Bounds::exactly(present(&open));
        }
        // What holds once the act is over.
        let seed = self.dice.next();
        self.judge(seed, self.watched.disk().crash(seed));
        open
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
