//! The conformance suite for backends, also for backends that users supply.

use super::backend::{Backend, Listed};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The property that must hold.
    pub what: &'static str,
    /// How the backend violates the property; `None` if no violation was found. The check of
    /// listing and deletion ends without a violation if `list`, or the first `delete`, fails: a
    /// backend may lack both.
    pub failure: Option<String>,
}

type Outcome = Result<(), String>;

/// Runs all checks on `backend`, under names that begin with `prefix`, which no other writer may
/// use. Deletes the written values, if the backend can list and delete.
#[must_use]
pub fn conformance(backend: &dyn Backend, prefix: &str) -> Vec<Check> {
    let subject = Subject { backend, prefix };
    let checks: [(&'static str, &dyn Fn() -> Outcome); 8] = [
        ("a name that was never written is not found", &|| subject.not_found()),
        ("values of 1 byte, 4 KiB and 8 MiB are read back", &|| subject.values()),
        ("ranges are read exactly, cut at the end of the value", &|| subject.ranges()),
        ("a name can be overwritten", &|| subject.overwrite()),
        ("names with a common prefix are distinct", &|| subject.names()),
        ("batches answer as single calls do", &|| subject.batches()),
        ("readers see a value whole or not at all", &|| subject.atomicity()),
        ("values are listed, and not found after deletion", &|| subject.removal()),
    ];
    let run = |(what, check): (&'static str, &dyn Fn() -> Outcome)| Check {
        what,
        failure: check().err(),
    };
    let done = checks.map(run).to_vec();
    subject.clean_up();
    done
}

struct Subject<'a> {
    backend: &'a dyn Backend,
    prefix: &'a str,
}

fn same<T: PartialEq + Debug>(what: &str, is: &T, should: &T) -> Outcome {
    if is == should { Ok(()) } else { Err(format!("{what}: {is:?} instead of {should:?}")) }
}

/// Bytes that depend on their position.
fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}

impl Subject<'_> {
    fn name(&self, rest: &str) -> String {
        format!("{}{rest}", self.prefix)
    }

    fn set(&self, rest: &str, value: &[u8]) -> Outcome {
        self.backend.set(&self.name(rest), value).map_err(|error| format!("set: {error}"))
    }

    fn get(
        &self,
        rest: &str,
        range: Option<std::ops::Range<u64>>,
    ) -> Result<Option<Vec<u8>>, String> {
        self.backend.get(&self.name(rest), range).map_err(|error| format!("get: {error}"))
    }

    fn exists(&self, rest: &str) -> Result<bool, String> {
        self.backend.exists(&self.name(rest)).map_err(|error| format!("exists: {error}"))
    }

    fn not_found(&self) -> Outcome {
        same("exists", &self.exists("never")?, &false)?;
        same("get", &self.get("never", None)?, &None)?;
        same("get of a part", &self.get("never/part", Some(0..10))?, &None)
    }

    fn values(&self) -> Outcome {
        for length in [1, 4096, 8 << 20] {
            let (rest, value) = (format!("value-{length}"), bytes(length, 1));
            self.set(&rest, &value)?;
            same("exists", &self.exists(&rest)?, &true)?;
            if self.get(&rest, None)?.as_ref() != Some(&value) {
                return Err(format!("a value of {length} bytes is read back with different bytes"));
            }
        }
        Ok(())
    }

    fn ranges(&self) -> Outcome {
        let value = bytes(10_000, 2);
        self.set("ranges", &value)?;
        for (from, to) in [(0, 1), (0, 10_000), (4_095, 4_097), (9_999, 10_000), (9_990, 20_000)] {
            let part = &value[from as usize..value.len().min(to as usize)];
            let got = self.get("ranges", Some(from..to))?;
            same(&format!("bytes {from} to {to}"), &got.as_deref(), &Some(part))?;
        }
        Ok(())
    }

    fn overwrite(&self) -> Outcome {
        for seed in [3, 3, 4] {
            self.set("again", &bytes(5_000, seed))?;
        }
        same("the last value", &self.get("again", None)?, &Some(bytes(5_000, 4)))
    }

    fn names(&self) -> Outcome {
        let names = ["names/a", "names/ab", "names/a.1", "names/a.16", "names/b/a", "names-a"];
        for (seed, name) in names.iter().enumerate() {
            self.set(name, &bytes(100, seed as u8))?;
        }
        for (seed, name) in names.iter().enumerate() {
            same(name, &self.get(name, None)?, &Some(bytes(100, seed as u8)))?;
        }
        same("exists of a prefix of names", &self.exists("names")?, &false)
    }

    fn batches(&self) -> Outcome {
        let all = ["batch-0", "batch-1", "batch-2", "batch-3"].map(|rest| self.name(rest));
        let values: Vec<_> = (0..3_u8).map(|seed| bytes(3_000, seed)).collect();
        let set: Vec<_> =
            all.iter().zip(&values).map(|(n, v)| (n.as_str(), v.as_slice())).collect();
        for outcome in self.backend.set_batch(&set) {
            outcome.map_err(|error| format!("set_batch: {error}"))?;
        }
        let names: Vec<&str> = all.iter().map(String::as_str).collect();
        let existing: Vec<_> =
            self.backend.exists_batch(&names).into_iter().map(Result::ok).collect();
        same("exists_batch", &existing, &[true, true, true, false].map(Some).to_vec())?;
        let requests: Vec<_> = names.iter().map(|name| (*name, Some(1..2_000))).collect();
        for (at, got) in self.backend.get_batch(&requests).into_iter().enumerate() {
            let got = got.map_err(|error| format!("get_batch: {error}"))?;
            same("get_batch", &got, &values.get(at).map(|value| value[1..2_000].to_vec()))?;
        }
        Ok(())
    }

    fn atomicity(&self) -> Outcome {
        let value = bytes(2 << 20, 9);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let writers: Vec<_> = (0..2)
                .map(|_| scope.spawn(|| (0..5).try_for_each(|_| self.set("whole", &value))))
                .collect();
            let reader = scope.spawn(|| {
                while !done.load(Relaxed) {
                    if self.get("whole", None)?.is_some_and(|seen| seen != value) {
                        return Err("a reader saw part of a value".to_owned());
                    }
                }
                Ok(())
            });
            let died = |_| Err("a call panicked".to_owned());
            let wrote: Vec<_> =
                writers.into_iter().map(|w| w.join().unwrap_or_else(died)).collect();
            done.store(true, Relaxed);
            let read = reader.join().unwrap_or_else(died);
            wrote.into_iter().collect::<Outcome>().and(read)
        })
    }

    fn removal(&self) -> Outcome {
        self.set("removal/one", b"1")?;
        self.set("removal/two", b"22")?;
        let prefix = self.name("removal/");
        let mut listed = Vec::new();
        if self.backend.list(&prefix, &mut |found| listed.push(found)).is_err() {
            return Ok(());
        }
        let names: BTreeSet<_> =
            listed.iter().map(|Listed { name, bytes, .. }| (name, *bytes)).collect();
        let (one, two) = (self.name("removal/one"), self.name("removal/two"));
        same("list", &names, &BTreeSet::from([(&one, 1), (&two, 2)]))?;
        if self.backend.delete(&one).is_err() {
            return Ok(());
        }
        same("exists after delete", &self.exists("removal/one")?, &false)?;
        same("get after delete", &self.get("removal/one", None)?, &None)?;
        same("exists of the remaining value", &self.exists("removal/two")?, &true)?;
        self.backend.delete(&one).map_err(|error| format!("delete of a missing name: {error}"))
    }

    fn clean_up(&self) {
        let mut names = Vec::new();
        if self.backend.list(self.prefix, &mut |found| names.push(found.name)).is_ok() {
            for name in names {
                let _ = self.backend.delete(&name);
            }
        }
    }
}
