#!/usr/bin/env python3
"""Breaks the store on purpose and prints which breakages the crash explorer detects.

Each mutation replaces one text in a temporary copy of the workspace, then builds and runs the
explorer in that copy. A text that is not found exactly once is an error: the code has changed, and
the mutation must be rewritten.

    python3 crates/store/tests/explorer/mutations.py --states 30000
    python3 crates/store/tests/explorer/mutations.py --only "journal not synced" --keep
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[4]
INDEX = "crates/index/src/run"
CORE = "crates/store/src/core"
DIRECTORY = "crates/store/src/directory.rs"
REGISTRY = "crates/store/src/registry_file.rs"


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation(
        "freed space reused before the record that frees it is durable",
        f"{CORE}/space/mod.rs",
        "        self.limbo.add(extents);\n",
        "        self.free(&extents);\n",
    ),
    Mutation(
        "segments not synced",
        "crates/volume/src/segments.rs",
        "                file.sync_data().map_err(|error| failed_sync(name(), error))?;\n",
        "                drop(file);\n",
    ),
    Mutation(
        "index synced before the data",
        f"{INDEX}/journal.rs",
        "        sync_data()?;\n"
        "        self.pending.lock().allow_write_through(last);\n"
        "        let mut journal = self.journal.lock();\n"
        "        self.flush(&mut journal, last)\n",
        "        self.pending.lock().allow_write_through(last);\n"
        "        let mut journal = self.journal.lock();\n"
        "        self.flush(&mut journal, last)?;\n"
        "        drop(journal);\n"
        "        sync_data()\n",
    ),
    Mutation(
        "records written that were added after the data sync began",
        f"{INDEX}/journal.rs",
        "        sync_data()?;\n        self.pending.lock().allow_write_through(last);\n",
        "        sync_data()?;\n"
        "        let last = self.pending.lock().seal().max(last);\n"
        "        self.pending.lock().allow_write_through(last);\n",
    ),
    Mutation(
        "a checkpoint ended before the data that it names is synced",
        f"{INDEX}/checkpoint.rs",
        "        self.commit(end.last, sync_data)?;\n",
        "        let _ = sync_data;\n        self.commit(end.last, &|| Ok(()))?;\n",
    ),
    Mutation(
        "journal not synced",
        f"{INDEX}/journal.rs",
        "        self.or_poison(journal.file.sync_data())?;\n",
        "",
    ),
    Mutation(
        "a segment's name not synced",
        "crates/volume/src/segments/names.rs",
        "        self.medium.sync_dir(&self.dir(volume).map_err(io::Error::other)?)?;\n",
        "",
    ),
    Mutation(
        "a new journal file's name not synced",
        f"{INDEX}/journal.rs",
        "    file.sync_data()?;\n    medium.sync_dir(dir)\n",
        "    let _ = (medium, dir);\n    file.sync_data()\n",
    ),
    Mutation(
        "small files (manifest, scopes) renamed before their bytes are synced",
        DIRECTORY,
        "        file.sync_data()?;\n        self.medium.rename(&new, &dir.join(name))?;\n",
        "        self.medium.rename(&new, &dir.join(name))?;\n",
    ),
    Mutation(
        "small files renamed without syncing the directory",
        DIRECTORY,
        "        self.medium\n"
        "            .sync_dir(&self.path)\n"
        "            .map_err(|error| self.uncertain_error(name).because(error))?;\n",
        "",
    ),
    Mutation(
        "a checkpoint not synced",
        f"{INDEX}/checkpoint.rs",
        "out.file.sync_data().and_then(|()| self.medium.sync_dir(&self.dir))",
        "self.medium.sync_dir(&self.dir)",
    ),
    Mutation(
        "a torn journal tail not cut off",
        f"{INDEX}/recovery.rs",
        "                file.set_len(position)?;\n",
        "",
    ),
    Mutation(
        "a client's reservation not logged",
        f"{CORE}/reserve.rs",
        "        self.reservation_log.lock().reserved(id, &name, runs)\n",
        "        let _ = (id, name, runs);\n        Ok(())\n",
    ),
    Mutation(
        "space that a living client reserved not withheld by the next owner",
        f"{CORE}/recovery/open.rs",
        "        let lives = alive(&held.client);\n",
        "        let lives = alive(&held.client) && held.client.is_empty();\n",
    ),
    Mutation(
        "space of a client that left reused while its process lives",
        f"{CORE}/maintenance/periodic.rs",
        "            if !(self.maintenance.alive)(&name) {\n",
        "            if !(self.maintenance.alive)(&name) || !name.is_empty() {\n",
    ),
    Mutation(
        "a failed sync does not poison the store",
        "crates/store/src/rounds.rs",
        "        round().inspect_err(|error| self.poison(error))?;\n",
        "        round()?;\n",
    ),
    Mutation(
        "a dropped scope removed from memory only",
        f"{CORE}/scopes/mod.rs",
        "        self.drop_durably(&mut registry, &slots)?;\n",
        "",
    ),
    Mutation(
        "a scope's registration not synced",
        REGISTRY,
        "        file.sync_data().map_err(|error| self.directory.refused(error)"
        '.with("file", SCOPES))?;\n',
        "",
    ),
    Mutation(
        "records appended to the file that a new registry replaced",
        REGISTRY,
        "        self.file = None;\n"
        "        self.file = Some(self.directory.write_registry(&bytes)?);\n",
        "        let file = self.directory.write_registry(&bytes)?;\n"
        "        self.file.get_or_insert(file);\n",
    ),
    Mutation(
        "a durable put acknowledged before its round",
        f"{CORE}/commit.rs",
        "        self.await_durable_put(flushed_later)?;\n",
        "        let _ = flushed_later;\n",
    ),
    Mutation(
        "a deletion not recorded",
        f"{CORE}/removal.rs",
        "        let removed = self.index.remove(scope.slot, &scoped);\n",
        "        let removed = Vec::new();\n        drop(scoped);\n",
    ),
    Mutation(
        "space of a dead owner reused before it is drained",
        f"{CORE}/recovery/open.rs",
        "        if !clean {\n            // The log",
        "        if clean && !clean {\n            // The log",
    ),
    Mutation(
        "space of a dead client reused before it is drained",
        f"{CORE}/reservations.rs",
        "            Abandoned::ByDeath => space.withhold(extents),\n",
        "            Abandoned::ByDeath => space.free(&extents),\n",
    ),
    Mutation(
        "the index not rewritten after an unclean end",
        "crates/store/src/conversion.rs",
        "                clean,\n",
        "                clean: clean || !clean,\n",
    ),
    Mutation(
        "runs of an absent volume dropped",
        f"{CORE}/recovery/validate.rs",
        "            let here = extents.iter().copied().filter(|e| !absence.covers(e.segment));\n",
        "            let here = extents.iter().copied();\n",
    ),
    Mutation(
        "runs of a segment that cannot be opened dropped",
        f"{CORE}/recovery/validate.rs",
        "                    absence.add_segment(id, error.to_string());\n",
        "                    drop(error);\n",
    ),
    Mutation(
        "a mount point taken for a volume",
        "crates/store/src/volumes.rs",
        "            None if needs_marker => VolumeState::Absent(\n",
        "            None if needs_marker && dir.is_absolute() => VolumeState::Unmarked(dir),\n"
        "            None if needs_marker => VolumeState::Absent(\n",
    ),
    Mutation(
        "hidden runs found by lookups",
        f"{CORE}/absence/hidden.rs",
        "            steps.truncate(end);\n",
        "            let _ = end;\n",
    ),
]


def copy_workspace(to: pathlib.Path) -> None:
    """Copies the files of the working tree that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def check(mutations: list[Mutation]) -> None:
    """Ends the program if the text of a mutation is not in its file exactly once."""
    wrong = []
    for mutation in mutations:
        found = (ROOT / mutation.file).read_text().count(mutation.old)
        if found != 1:
            wrong.append(
                f"{mutation.name}: {mutation.file} has its text {found} times, not once: "
                "rewrite the mutation"
            )
    if wrong:
        sys.exit("\n".join(wrong))


def cargo(copy: pathlib.Path, environment: dict[str, str], *words: str) -> tuple[int, str]:
    command = ["cargo", "test", "-p", "ritornello-store", "--test", "explorer", *words]
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def run(copy: pathlib.Path, mutation: Mutation | None, states: int, start: int) -> str:
    """Returns "no", or "yes" and the history that detects the mutation.

    Without a mutation, runs the unchanged code.
    """
    environment = dict(os.environ)
    environment["CARGO_TARGET_DIR"] = str(copy / "target")
    environment["RUSTFLAGS"] = environment.get("RUSTFLAGS", "") + " --allow warnings"
    environment["RITORNELLO_CRASH_STATES"] = str(states)
    environment["RITORNELLO_CRASH_FROM"] = str(start)
    environment.pop("RITORNELLO_CRASH_SEED", None)
    path = copy / mutation.file if mutation else None
    before = path.read_text() if path else ""
    if path and mutation:
        path.write_text(before.replace(mutation.old, mutation.new))
    try:
        status, output = cargo(copy, environment, "--no-run")
        if status != 0:
            sys.exit(f"{mutation.name if mutation else 'unchanged'}: does not compile\n{output}")
        status, output = cargo(copy, environment, "no_moment", "--", "--nocapture")
    finally:
        if path:
            path.write_text(before)
    if status == 0:
        return "no"
    ended = re.search(r"history (\d+) failed at (.*)", output)
    if ended is None:
        name = mutation.name if mutation else "unchanged"
        sys.exit(f"{name}: the explorer failed without naming a history\n{output}")
    return f"yes: history {ended[1]}, {ended[2].removesuffix(': to repeat it, run')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--states",
        type=int,
        default=30_000,
        help="crash states per mutation (default: 30000)",
    )
    parser.add_argument(
        "--from", type=int, default=0, dest="start", help="the first seed (default: 0)"
    )
    parser.add_argument(
        "--only", action="append", help="name of a mutation to run; may be repeated"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that each mutation applies to the sources"
    )
    parser.add_argument("--keep", action="store_true", help="keep the copy of the sources")
    given = parser.parse_args()
    unknown = set(given.only or []) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        sys.exit(f"unknown mutation: {', '.join(sorted(unknown))}")
    mutations = [m for m in MUTATIONS if not given.only or m.name in given.only]
    check(mutations)
    if given.check:
        print(f"{len(mutations)} mutations fit the code")
        return
    copy = pathlib.Path(tempfile.mkdtemp(prefix="ritornello-mutations-"))
    try:
        copy_workspace(copy)
        unchanged = run(copy, None, given.states, given.start)
        if unchanged != "no":
            sys.exit(f"the explorer fails without a mutation: {unchanged}")
        print("| broken on purpose | detected |\n|---|---|", flush=True)
        for mutation in mutations:
            detected = run(copy, mutation, given.states, given.start)
            print(f"| {mutation.name} | {detected} |", flush=True)
    finally:
        if given.keep:
            print(f"the copy is {copy}", file=sys.stderr)
        else:
            shutil.rmtree(copy)


if __name__ == "__main__":
    main()
