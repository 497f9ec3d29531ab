//! `ritornello bench remote`: the remote tier, compared with the plain client of its object store.

use super::quantile::median;
use bytes::Bytes;
use clap::Args;
use ritornello_format::ScopeId;
use ritornello_remote::{BaselineClient, ConfiguredBackend};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{bytes, json, print_stdout, table};
use ritornello_terminal::value::size;
use ritornello_terminal::{Context, open, progress};
use ritornello_tiers::remote::{Backend, FaultyBackend, Prompt, RemoteAddress, RemoteTier};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Bytes per page. [`PAGES_PER_OBJECT`] pages make an object of 8 MiB.
const PAGE_BYTES: usize = 256 << 10;
const PAGES_PER_OBJECT: usize = 32;
/// Objects that the plain client transfers concurrently, as the tier does.
const CONCURRENCY: usize = 4;
/// Pages per probe.
const PROBE_PAGES: usize = 256;
/// Maximum duration of each call of the tier.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Arguments of `bench remote`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Each of --runs rounds writes --total bytes in objects of 8 MiB, four in parallel,
through the tier (packing, checksums, checks of existence) and through the plain client of the crate
object_store, in alternating order, and reads them back by range in the same way. The tier's probe
before its reads and the comparison of bytes are not timed. A ratio is taken per round; medians are
printed.

A cold probe asks for 256 pages, of which all, some or none are stored, in a tier that knows no
object yet. The objects whose existence it checks are counted.

All objects are under a separate prefix, and are removed.

Examples:
  ritornello bench remote 's3://bucket?endpoint=http://127.0.0.1:7070' --json")]
pub struct RemoteArgs {
    /// Address of an object store
    pub address: RemoteAddress,
    /// Bytes that the tier, and the plain client, write and read in each round, rounded down to
    /// whole objects of 8 MiB, at least 64 MiB
    #[arg(long, default_value = "128MiB", value_parser = size)]
    pub total: u64,
    /// Number of rounds; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
}

#[derive(Serialize)]
struct Comparison {
    /// Median rate of the tier, in bytes per second; `plain` is the rate of the plain client.
    tier: f64,
    plain: f64,
    /// Rate of the tier divided by the rate of the plain client, as the median of the rounds;
    /// `ratios` has the ratio of each round.
    ratio: f64,
    ratios: Vec<f64>,
}

#[derive(Serialize)]
struct Answer<'a> {
    address: &'a RemoteAddress,
    object_bytes: usize,
    objects: usize,
    runs: u32,
    put: Comparison,
    get: Comparison,
    /// Maximum number of existence checks, each of one object, of a cold probe of 256 pages.
    probe_requests: u64,
}

/// Measures and prints the report.
///
/// # Errors
/// If the address is invalid, the remote fails, pages are not found, or wrong bytes are read.
pub fn run(context: &Context, args: &RemoteArgs) -> Result<Status, Failure> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let given = args.address.expose();
    let (front, query) = given.split_once('?').unwrap_or((given, ""));
    let address = format!("{}/ritornello-bench-{nanos}?{query}", front.trim_end_matches('/'));
    let address = RemoteAddress::from(address.as_str());
    let plain = BaselineClient::open(address.expose()).map_err(Failure::from_remote)?;
    let remote = open::remote(&address)?;
    let measured = measure(args, &plain, &remote);
    remove_all(remote.backend.as_ref());
    let answer = measured?;
    if context.json {
        json(&answer);
    } else {
        let mut out = table(&["", "tier", "plain client", "ratio"]);
        for (what, compare) in [("put", &answer.put), ("ranged get", &answer.get)] {
            let rate = |rate: f64| format!("{}/s", bytes(rate as u64));
            out.add_row([
                what,
                &rate(compare.tier),
                &rate(compare.plain),
                &format!("{:.2}", compare.ratio),
            ]);
        }
        print_stdout(&format!(
            "{out}\na cold probe of {PROBE_PAGES} pages: {} objects checked at most",
            answer.probe_requests
        ));
    }
    Ok(Status::Fine)
}

fn measure<'a>(
    args: &'a RemoteArgs,
    plain: &BaselineClient,
    remote: &ConfiguredBackend,
) -> Result<Answer<'a>, Failure> {
    let object_bytes = PAGE_BYTES * PAGES_PER_OBJECT;
    let objects = (args.total as usize / object_bytes).max(PROBE_PAGES / PAGES_PER_OBJECT);
    let steps = progress::steps(2 * u64::from(args.runs) + 1);
    let (mut puts, mut gets) = (Vec::new(), Vec::new());
    let deadline = || Instant::now() + TIMEOUT;
    for round in 0..args.runs {
        let side = Round::new(round, objects);
        let refs: Vec<&[u8]> = side.keys.iter().map(Vec::as_slice).collect();
        let prompt = Prompt {
            scope: &side.scope,
            page_bytes: PAGE_BYTES as u64,
            chained: true,
            keys: &refs,
        };
        let names: Vec<String> = (0..objects).map(|at| format!("plain/{round}/{at}")).collect();
        let values: Vec<(String, Bytes)> =
            names.iter().enumerate().map(|(at, name)| (name.clone(), side.object(at))).collect();
        let tier = remote.clone().tier();
        steps.set_message("writing");
        puts.push(measure_both(
            round,
            || plain.put(&values, CONCURRENCY).map_err(Failure::from_remote),
            || match tier
                .put(&prompt, 0..refs.len(), |at| side.page(at), deadline())
                .map_err(Failure::from_remote)?
            {
                came if came == refs.len() => Ok(()),
                came => Err(incomplete("written", came, refs.len())),
            },
        )?);
        steps.inc(1);
        steps.set_message("reading");
        let reader = remote.clone().tier();
        match reader.probe(&prompt, deadline()).map_err(Failure::from_remote)? {
            found if found == refs.len() => {}
            found => return Err(incomplete("found", found, refs.len())),
        }
        // The tier reads into memory that was written before, so its reads cause no page faults. An
        // engine's memory was written before too.
        let mut out = vec![1; objects * object_bytes];
        let range = 0..object_bytes as u64;
        gets.push(measure_both(
            round,
            || plain.get(&names, &range, CONCURRENCY).map(drop).map_err(Failure::from_remote),
            || match reader
                .get(&prompt, 0..refs.len(), &mut out, deadline())
                .map_err(Failure::from_remote)?
            {
                came if came == refs.len() => Ok(()),
                came => Err(incomplete("read", came, refs.len())),
            },
        )?);
        if (0..refs.len()).zip(out.chunks(PAGE_BYTES)).any(|(at, out)| side.page(at) != out) {
            return Err(Failure::failed(
                "WRONG BYTES: the remote tier returned bytes that differ from the bytes written",
                "report this, with the object store",
            ));
        }
        steps.inc(1);
    }
    let probe_requests = probe(remote)?;
    steps.finish_and_clear();
    let total = (objects * object_bytes) as f64;
    Ok(Answer {
        address: &args.address,
        object_bytes,
        objects,
        runs: args.runs,
        put: compare(total, &puts),
        get: compare(total, &gets),
        probe_requests,
    })
}

fn incomplete(what: &str, came: usize, of: usize) -> Failure {
    Failure::failed(
        format!("the remote tier has {what} {came} of {of} pages"),
        "`ritornello doctor --backend ADDRESS`",
    )
}

/// Returns the seconds of the plain client and of the tier. The order alternates by round.
fn measure_both(
    round: u32,
    plain: impl FnOnce() -> Result<(), Failure>,
    tier: impl FnOnce() -> Result<(), Failure>,
) -> Result<(f64, f64), Failure> {
    fn timed(run: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
        let began = Instant::now();
        run()?;
        Ok(began.elapsed().as_secs_f64())
    }
    if round.is_multiple_of(2) {
        let plain = timed(plain)?;
        Ok((plain, timed(tier)?))
    } else {
        let tier = timed(tier)?;
        Ok((timed(plain)?, tier))
    }
}

fn compare(total: f64, rounds: &[(f64, f64)]) -> Comparison {
    let ratios: Vec<f64> = rounds.iter().map(|(plain, tier)| plain / tier).collect();
    Comparison {
        tier: total / median(&rounds.iter().map(|(_, tier)| *tier).collect::<Vec<_>>()),
        plain: total / median(&rounds.iter().map(|(plain, _)| *plain).collect::<Vec<_>>()),
        ratio: median(&ratios),
        ratios,
    }
}

/// Probes for eight prompts of 256 pages, which share 0 to 256 leading pages with the stored pages,
/// each in a tier that knows no object yet. Returns the maximum number of objects whose existence a
/// probe checks.
fn probe(remote: &ConfiguredBackend) -> Result<u64, Failure> {
    let there = Round::new(0, PROBE_PAGES / PAGES_PER_OBJECT);
    let other = Round::new(u32::MAX, PROBE_PAGES / PAGES_PER_OBJECT);
    let mut most = 0;
    for fork in [0, 1, 31, 100, 128, 200, 255, PROBE_PAGES] {
        let keys = there.keys[..fork].iter().chain(&other.keys[fork..PROBE_PAGES]);
        let keys: Vec<&[u8]> = keys.map(Vec::as_slice).collect();
        let prompt = Prompt {
            scope: &there.scope,
            page_bytes: PAGE_BYTES as u64,
            chained: true,
            keys: &keys,
        };
        let counting = Arc::new(FaultyBackend::new(Arc::clone(&remote.backend)));
        let backend = Arc::clone(&counting) as Arc<dyn Backend>;
        let tier = RemoteTier::with_options(backend, remote.options.clone());
        let found = tier.probe(&prompt, Instant::now() + TIMEOUT).map_err(Failure::from_remote)?;
        if found != fork / PAGES_PER_OBJECT * PAGES_PER_OBJECT {
            return Err(incomplete("found", found, fork));
        }
        most = most.max(counting.exists_calls());
    }
    Ok(most)
}

fn remove_all(backend: &dyn Backend) {
    let mut names = Vec::new();
    if backend.list("", &mut |found| names.push(found.name)).is_ok() {
        for name in names {
            let _ = backend.delete(&name);
        }
    }
}

/// The pages of one round, which differ from the pages of all other rounds.
struct Round {
    scope: ScopeId,
    keys: Vec<Vec<u8>>,
    /// Random bytes. Each page is a part of them, and the parts of neighbouring pages overlap.
    noise: Vec<u8>,
}

impl Round {
    fn new(round: u32, objects: usize) -> Self {
        let key = |at: usize| {
            [[round; 4].map(u32::to_le_bytes).concat(), (at as u128).to_le_bytes().to_vec()]
                .concat()
        };
        let mut state = u64::from(round) + 1;
        let mut word = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        let noise = (0..2 * PAGE_BYTES * PAGES_PER_OBJECT / 8).flat_map(|_| word()).collect();
        Self {
            scope: ScopeId([7; 16]),
            keys: (0..objects * PAGES_PER_OBJECT).map(key).collect(),
            noise,
        }
    }

    fn page(&self, at: usize) -> &[u8] {
        let from = at * 4096 % (self.noise.len() - PAGE_BYTES);
        &self.noise[from..from + PAGE_BYTES]
    }

    fn object(&self, at: usize) -> Bytes {
        (at * PAGES_PER_OBJECT..(at + 1) * PAGES_PER_OBJECT)
            .flat_map(|at| self.page(at))
            .copied()
            .collect::<Vec<u8>>()
            .into()
    }
}
