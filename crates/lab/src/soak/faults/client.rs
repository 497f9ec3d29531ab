//! A client of the soak: it puts, gets, flushes and deletes, as an engine's process does, through
//! all faults.

use super::message::{Answer, InjectedError, Order, State, clock, receive, send};
use super::sequence::{PAGE_BYTES, PAGES, SALTED_BYTES, Sequence, salted, scope};
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_node::Node;
use ritornello_store::{Options, PutOptions, Store};
use ritornello_terminal::exit::Status;
use ritornello_volume::transfer::Control;
use ritornello_volume::{BorrowedPages, BorrowedPagesMut};
use std::collections::VecDeque;
use std::io::{BufReader, stdin, stdout};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Number of flushed sequences that a client keeps in the store.
const LIVE_SEQUENCES: usize = 32;
/// Assumed maximum number of sequences that a client puts between its last report and its end. The
/// numbers of the client's next process begin this far after the last reported number; the process
/// deletes the sequences in the gap.
pub const UNREPORTED_MAX: u64 = 2_000;
/// Rounds from one flush to the next. A round puts and gets one sequence.
const FLUSH_EVERY: u64 = 8;
/// Maximum number of unflushed sequences. At this number a round flushes before it puts.
const UNFLUSHED_MAX: usize = 16;
/// Retention of pages: a day, because an evicted page would count as lost. A client deletes its
/// sequences much earlier. [`LIVE_SEQUENCES`] and [`UNFLUSHED_MAX`] keep the retained pages below
/// the retention limit of a scope.
const RETAIN_SECONDS: u64 = 24 * 3600;
/// Pauses after a failed round, and after a failed opening.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));
/// Interval of state reports.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Works on the store until standard input ends. `number` distinguishes this client's sequences
/// from other clients' sequences; `from` is the number of its first sequence.
pub fn run(options: Options, number: u64, from: u64) -> Status {
    let schedule = Schedule::new();
    let state = Arc::new(Mutex::new(State::default()));
    let (orders, reports) = channel();
    std::thread::spawn(move || {
        for order in receive::<Order>(BufReader::new(stdin())) {
            if orders.send(order).is_err() {
                break;
            }
        }
    });
    let reported = Arc::clone(&state);
    std::thread::spawn(move || {
        loop {
            let now = {
                let state = reported.lock().unwrap_or_else(PoisonError::into_inner);
                let mut now = state.clone();
                now.present = if now.present == 0 { 0 } else { clock() - now.present };
                now
            };
            send(&mut stdout().lock(), &Answer::State(now));
            std::thread::sleep(REPORT_EVERY);
        }
    });
    let mut client = Client {
        options,
        schedule,
        state,
        number,
        next: from,
        node: None,
        soak_store: String::new(),
        is_soak_store: false,
        put: Vec::new(),
        orphans: Vec::new(),
        live: VecDeque::new(),
        pages: vec![Vec::new(); PAGES],
        expected: vec![Vec::new(); PAGES],
    };
    client.work(&reports);
    client.close();
    Status::Fine
}

struct Client {
    options: Options,
    schedule: Schedule,
    /// The state for the next report. Until the report is sent, `present` holds the start of the
    /// current call instead of its duration; zero between calls.
    state: Arc<Mutex<State>>,
    number: u64,
    next: u64,
    node: Option<Arc<Node>>,
    /// Identity of the store of the soak.
    soak_store: String,
    is_soak_store: bool,
    /// Numbers of the sequences that are put and not flushed yet.
    put: Vec<u64>,
    /// Numbers of sequences to delete at the next opportunity: sequences that the client will never
    /// report as flushed, for example after a failed put or a close, and the oldest sequences
    /// beyond [`LIVE_SEQUENCES`]. Their pages would otherwise fill the store, which would evict
    /// flushed pages.
    orphans: Vec<u64>,
    /// Numbers of the flushed sequences, which must be found.
    live: VecDeque<u64>,
    pages: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
}

impl Client {
    fn work(&mut self, orders: &Receiver<Order>) {
        // The first order is `Order::Adopt`. The client executes this order before its first put,
        // whose pages the order would otherwise delete.
        let Ok(adopt) = orders.recv() else { return };
        self.execute(adopt);
        loop {
            loop {
                match orders.try_recv() {
                    Ok(order) => self.execute(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            let began = clock();
            let done = self.round();
            let (is_open, is_soak_store) = (self.node.is_some(), self.is_soak_store);
            self.change(|state| match &done {
                Ok(()) => {
                    (state.rounds, state.began) = (state.rounds + 1, began);
                    state.is_soak_store = is_soak_store;
                    state.trouble.clear();
                }
                Err(error) => state.trouble = error.to_string(),
            });
            if let Err(error) = done {
                if matches!(error.kind(), ErrorKind::Fatal | ErrorKind::Closed) {
                    self.close();
                }
                std::thread::sleep(if is_open { PAUSES.0 } else { PAUSES.1 });
            }
        }
    }

    fn execute(&mut self, order: Order) {
        match order {
            Order::Adopt { store, live } => self.adopt(store, live),
            Order::Break(trouble) => {
                let rule = |fault, op| self.schedule.add(Rule::always(fault).on(op));
                match trouble {
                    InjectedError::Sync => {
                        [Op::SyncData, Op::SyncDir].map(|op| rule(MediumFault::Io, op))
                    }
                    InjectedError::Space => {
                        [Op::Write, Op::Allocate].map(|op| rule(MediumFault::NoSpace, op))
                    }
                    InjectedError::Files => {
                        [Op::Open, Op::List].map(|op| rule(MediumFault::NoProcessFiles, op))
                    }
                };
            }
            Order::Heal => self.schedule.heal(),
            Order::RegisterScopes(count) => self.register(count),
            Order::Check { client, sequences } => self.check(client, &sequences),
        }
    }

    fn adopt(&mut self, store: String, live: Vec<u64>) {
        self.soak_store = store;
        let former = self.next.saturating_sub(UNREPORTED_MAX)..self.next;
        self.orphans = former.filter(|number| !live.contains(number)).collect();
        self.live = live.into();
    }

    /// Puts and gets one sequence. On the store of the soak, flushes every [`FLUSH_EVERY`] rounds
    /// and deletes the oldest sequences beyond [`LIVE_SEQUENCES`]. On the store that the clients
    /// create while the store of the soak is moved away, flushes in every round.
    fn round(&mut self) -> Result<()> {
        let store = Arc::clone(self.open()?.store());
        let role = self.node.as_ref().map_or("", |node| node.role().word());
        self.change(|state| role.clone_into(&mut state.role));
        if !self.is_soak_store {
            let number = self.take_number();
            self.put_and_get(&store, number)?;
            return self.timed(|| store.flush());
        }
        self.delete_orphans(&store)?;
        if self.put.len() >= UNFLUSHED_MAX {
            self.flush(&store)?;
        }
        let number = self.take_number();
        if let Err(error) = self.put_and_get(&store, number) {
            self.orphans.push(number);
            return Err(error);
        }
        self.put.push(number);
        if self.next.is_multiple_of(FLUSH_EVERY) {
            self.flush(&store)?;
        }
        while self.live.len() > LIVE_SEQUENCES
            && let Some(oldest) = self.live.pop_front()
        {
            send(&mut stdout().lock(), &Answer::Deleting(vec![oldest]));
            self.orphans.push(oldest);
        }
        self.delete_orphans(&store)
    }

    fn take_number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.change(|state| state.next = number + 1);
        number
    }

    fn delete_orphans(&mut self, store: &Store) -> Result<()> {
        let sequences: Vec<_> =
            self.orphans.iter().map(|&number| Sequence::new(self.number, number)).collect();
        let keys: Vec<&[u8]> = sequences.iter().flat_map(Sequence::keys).collect();
        if !keys.is_empty() {
            self.timed(|| store.delete(&scope(), &keys))?;
            self.orphans.clear();
        }
        Ok(())
    }

    fn put_and_get(&mut self, store: &Store, number: u64) -> Result<()> {
        let sequence = Sequence::new(self.number, number);
        sequence.fill(&mut self.pages);
        let pages: Vec<&[u8]> = self.pages.iter().map(Vec::as_slice).collect();
        let put = self.timed(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let retain_until = now.as_secs() + RETAIN_SECONDS;
            let (terms, control) = (PutOptions { parent: None, retain_until }, Control::default());
            let source = BorrowedPages::new(&pages);
            store.put_batch(&scope(), &sequence.keys(), &source, &terms, &control)
        })?;
        self.change(|state| state.bytes += put.bytes);
        if put.ok.iter().any(|ok| !ok) {
            return Err(Error::retry("a put stored a part of its pages"));
        }
        if self.get(store, self.number, number)? < PAGES {
            return Err(Error::retry("pages put just before are not found"));
        }
        Ok(())
    }

    /// Flushes, and reports the sequences put before. After `Miss`, which says that puts may be
    /// lost, these sequences become orphans; after any other error they wait for the next flush.
    fn flush(&mut self, store: &Store) -> Result<()> {
        let put = std::mem::take(&mut self.put);
        match self.timed(|| store.flush()) {
            Ok(()) => {
                self.live.extend(&put);
                send(&mut stdout().lock(), &Answer::Flushed(put));
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Miss => {
                self.orphans.extend(put);
                Ok(())
            }
            Err(error) => {
                self.put = put;
                Err(error)
            }
        }
    }

    /// Reads sequence `number` of the client with number `client`, and counts wrong bytes. Returns
    /// the number of leading pages read.
    fn get(&mut self, store: &Store, client: u64, number: u64) -> Result<usize> {
        let sequence = Sequence::new(client, number);
        let mut pages = std::mem::take(&mut self.pages);
        pages.iter_mut().for_each(|page| {
            page.clear();
            page.resize(PAGE_BYTES, 0);
        });
        let mut slices: Vec<&mut [u8]> = pages.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        let got = self
            .timed(|| store.get_batch(&scope(), &sequence.keys(), &target, &Control::default()));
        drop(target);
        self.pages = pages;
        let got = got?;
        sequence.fill(&mut self.expected);
        let came = self.pages.iter().zip(&self.expected).zip(&got.ok).filter(|(_, ok)| **ok);
        let wrong = |(page, want): (&Vec<u8>, &Vec<u8>)| {
            page.iter().zip(want).filter(|(got, want)| got != want).count() as u64
        };
        let wrong_bytes: u64 = came.map(|(pair, _)| wrong(pair)).sum();
        self.change(|state| {
            state.bytes += got.bytes;
            state.wrong_bytes += wrong_bytes;
        });
        Ok(got.ok.iter().take_while(|ok| **ok).count())
    }

    fn check(&mut self, client: u64, sequences: &[u64]) {
        let (mut lost, mut why) = (Vec::new(), String::new());
        for &number in sequences {
            let got = self.open().map(|node| Arc::clone(node.store()));
            match got.and_then(|store| self.get(&store, client, number)) {
                Ok(PAGES) => continue,
                Ok(came) => why = format!("{came} of {PAGES} pages were found"),
                Err(error) => why = error.to_string(),
            }
            lost.push(number);
        }
        if !lost.is_empty()
            && let Ok(stats) = self.open().and_then(|node| node.store().stats())
        {
            let evicted = stats.catalog.counters.get("evicted_pages").copied().unwrap_or_default();
            why.push_str(&format!(" ({evicted} pages evicted since the owner opened the store)"));
        }
        send(&mut stdout().lock(), &Answer::Checked { lost, why });
    }

    /// Registers `count` new scopes, by putting a page into each. Ignores puts that are refused,
    /// because the store may be full of scopes.
    fn register(&mut self, count: u64) {
        let page = vec![0; SALTED_BYTES];
        for salt in 0..count {
            let Ok(store) = self.open().map(|node| Arc::clone(node.store())) else { return };
            let key = [7; 24];
            let salt = (clock() << 20) | salt;
            let _ = self.timed(|| {
                let source_pages = [page.as_slice()];
                let source = BorrowedPages::new(&source_pages);
                let (terms, control) = (PutOptions::default(), Control::default());
                store.put_batch(&salted(salt), &[&key], &source, &terms, &control)
            });
        }
    }

    fn open(&mut self) -> Result<&Arc<Node>> {
        let node = match self.node.take() {
            Some(node) => node,
            None => {
                self.change(|state| state.role.clear());
                let medium = Faulty::new(Arc::new(Host), self.schedule.clone()).with_descriptors();
                let node = ritornello_node::open_on(Arc::new(medium), &self.options)?;
                self.is_soak_store = node.store().stats()?.catalog.uuid == self.soak_store;
                node
            }
        };
        Ok(self.node.insert(node))
    }

    /// Closes the store. Marks unflushed puts as orphans, because a flush after the next opening
    /// succeeds even if these puts were lost.
    fn close(&mut self) {
        self.orphans.append(&mut self.put);
        if let Some(node) = self.node.take()
            && let Err(error) = node.close()
        {
            tracing::warn!(%error, "the store was not closed cleanly");
        }
    }

    /// Runs `call` and records its duration.
    fn timed<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = Instant::now();
        self.change(|state| state.present = clock().max(1));
        let answer = call();
        let lasted = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.change(|state| {
            state.present = 0;
            state.slowest = state.slowest.max(lasted);
        });
        answer
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
