"""Measures two real engines under the same requests, with and without the tiers that they share.

    make bench-shared                         all set-ups that fit into 30 minutes
    python -m benches.shared --offloading     vLLM's own offloading, with `RitornelloTier` below it
    python -m benches.shared --short          engine alone, disk, S3; a tiny model, no times

Every set-up gets two `vllm serve` processes and empty tiers. The rounds of each conversation go to
the two processes in turn. Three facts are checked: answers equal the answers of the engine alone,
hits come from the tier that a set-up tests, no request fails. The exit status is 0 if all facts
held, 1 if a fact did not hold or if a set-up other than the engine alone failed, 2 if the bench did
not run to its end.
"""

import argparse
import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benches.shared.chart import draw
from benches.shared.fleet import ENGINES, Fleet
from benches.shared.report import Report, Run, table
from benches.shared.setups import (
    ALONE,
    FULL,
    HOST,
    HOST_OF,
    HOST_S3,
    OFFLOADED,
    OFFLOADING,
    SHORT,
    Place,
    Scale,
    Setup,
    bytes_per_token,
    extra_config,
    full_plan,
    host_mib,
    offloading_plan,
    refusals,
    short_plan,
    transfer_config,
)
from ritornello.bench.show import wide_console
from servers.environment import ROOT, fast_dtype, make_model, program, vllm_versions
from servers.process import ServerError
from servers.s3 import KINDS, S3Server

MINUTES = 30.0
MEMORY = Path("/dev/shm")
COLUMNS = 160


@dataclass
class Bench:
    """One run of all set-ups into one report, until `deadline` (of time.monotonic)."""

    scale: Scale
    folder: Path
    s3: S3Server | None
    deadline: float
    report: Report
    progress: Progress
    # Maximum, over the set-ups so far, of the seconds per length of history that a set-up measured.
    # A history is the tokens of a conversation before the first question.
    longest_s: float = 0.0

    def run(self, plan: list[Setup]) -> None:
        task = self.progress.add_task("set-ups", total=len(plan))
        for setup in plan:
            self.progress.update(task, description=f"{setup.title}")
            self._one(setup)
            self.progress.advance(task)

    def _one(self, setup: Setup) -> None:
        left = self.deadline - time.monotonic()
        if left < self.longest_s:
            why = (
                f"{left:.0f} s were left, a set-up takes {self.longest_s:.0f} s for each length of "
                "history"
            )
            self.report.left_out.append((setup.title, why))
            return
        if setup.name == HOST_S3 and self.s3 is None:
            self.report.left_out.append((setup.title, "no S3 server: make s3"))
            return
        began = time.monotonic()
        try:
            run = self._measured(setup)
        except ServerError as error:
            if setup.name == ALONE:
                raise
            self.report.broken.append(f"{setup.title}: {error}")
            return
        run.took_s = time.monotonic() - began
        self.longest_s = max(self.longest_s, run.took_s / max(len(run.measured), 1))
        self.report.runs.append(run)
        self.progress.console.print(f"[dim]{setup.title}: {run.took_s:.0f} s[/dim]")

    def _measured(self, setup: Setup) -> Run:
        report, run = self.report, Run(setup)
        with ExitStack() as stack:
            place = self._place(setup)
            for folder in (place.folder, place.memory):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            fleet = stack.enter_context(
                Fleet.of(
                    setup.title,
                    self.scale,
                    [transfer_config(setup, place, engine) for engine in range(ENGINES)],
                    program=program("vllm", "vllm"),
                    folder=self.folder,
                    cores=len(os.sched_getaffinity(0)),
                    environment=S3Server.environment(),
                )
            )
            for history in setup.histories(self.scale):
                if history not in report.speeds:
                    report.speeds[history] = fleet.speed(history)
                qps = report.speeds[history].qps(self.scale, history)
                run.measured[history] = fleet.multi_round_qa(history, qps)
            if setup.has_answers:
                run.answers = fleet.answers(alone=setup.name in (ALONE, HOST, OFFLOADING))
        return run

    def _place(self, setup: Setup) -> Place:
        """Returns locations for the tiers of a set-up; in the bucket, a prefix for this set-up."""
        prefix = "".join(c if c.isalnum() else "-" for c in setup.title)
        s3 = self.s3.address(prefix) if self.s3 else ""
        memory = MEMORY / f"ritornello-bench-{os.getpid()}"
        history = setup.histories(self.scale)[-1]
        break_even = self.report.break_even(history)
        host = host_mib(self.scale, fast_dtype())
        return Place(self.folder / "tiers", memory, s3, host, break_even)


def supported_setups(plan: list[Setup], folder: Path, report: Report) -> list[Setup]:
    """Returns the set-ups that the engines' connector or `RitornelloTier` accepts, and the set-ups
    that use neither; records why each other set-up is refused.
    """
    somewhere = Place(folder, MEMORY, "s3://bucket/prefix?endpoint=http://127.0.0.1:9000", 1, 1e6)
    configs = [extra_config(setup, somewhere) for setup in plan]
    asked = [
        (setup.name in HOST_OF, config)
        for setup, config in zip(plan, configs, strict=True)
        if config is not None
    ]
    against = iter(refusals(asked, program("vllm", "python")))
    taken = []
    for setup, config in zip(plan, configs, strict=True):
        why = None if config is None else next(against)
        if why is None:
            taken.append(setup)
        else:
            report.left_out.append((setup.title, f"refused: {why}"))
    return taken


def run(given: argparse.Namespace, console: Console) -> Report:
    scale = SHORT if given.short else OFFLOADED if given.offloading else FULL
    deadline = time.monotonic() + 60 * given.minutes
    kind = "-short" if given.short else "-offloading" if given.offloading else ""
    folder = ROOT / "build" / f"bench-shared{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    make_model(scale.model, folder / "model", program("vllm", "python"))
    per_token = bytes_per_token(folder / "model/config.json", fast_dtype())
    report = Report(scale, bytes_per_token=per_token)
    plan = short_plan() if given.short else offloading_plan() if given.offloading else full_plan()
    plan = supported_setups(plan, folder, report)
    plan = [setup for setup in plan if setup.name == ALONE or chosen(setup, given.setups)]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        s3 = None
        if any(setup.name == HOST_S3 for setup in plan):
            objects = folder / "objects"
            shutil.rmtree(objects, ignore_errors=True)
            stack.callback(shutil.rmtree, objects, ignore_errors=True)
            server = ROOT / "build/s3" / given.s3
            if server.exists():
                s3 = stack.enter_context(S3Server(server, objects, folder / "s3.log"))
        progress = stack.enter_context(Progress(*columns, console=console))
        Bench(scale, folder, s3, deadline, report, progress).run(plan)
    report.check()
    report.write(
        folder / "report.json",
        s3_server=given.s3,
        dtype=fast_dtype(),
        host_bytes=host_mib(scale, fast_dtype()) << 20,
        versions=vllm_versions(),
    )
    console.print(table(report.rows()))
    for path in draw(report.rows(), folder):
        console.print(f"chart: {path.relative_to(ROOT)}")
    console.print(f"report: {(folder / 'report.json').relative_to(ROOT)}")
    return report


def chosen(setup: Setup, wanted: list[str] | None) -> bool:
    return not wanted or any(name in setup.title for name in wanted)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benches.shared", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    kind = parser.add_mutually_exclusive_group().add_argument
    kind(
        "--short",
        action="store_true",
        help="check hits and answers only, with a tiny model",
    )
    kind(
        "--offloading",
        action="store_true",
        help="measure vLLM's own offloading, alone and with RitornelloTier below it",
    )
    add(
        "--minutes",
        type=float,
        default=MINUTES,
        help="time limit in minutes; further set-ups are skipped (default 30)",
    )
    add("--s3", choices=KINDS, default=KINDS[0], help=f"S3 server to start (default {KINDS[0]})")
    add(
        "--setups",
        nargs="+",
        metavar="NAME",
        help="measure only the engine alone, and set-ups whose title contains a NAME, such as "
        '"host + disk" (default: all set-ups)',
    )
    given = parser.parse_args()
    console = wide_console(COLUMNS)
    try:
        report = run(given, console)
    except (ServerError, OSError) as error:
        console.print(f"[bold red]not measured to the end:[/bold red] {error}")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted: no report was written")
        return 2
    for why in dict.fromkeys(why for _, why in report.left_out):
        titles = [title for title, of in report.left_out if of == why]
        console.print(f"[yellow]left out:[/yellow] {'; '.join(titles)}: {why}")
    for aim in [] if given.short else report.aims():
        console.print(aim)
    for fact in report.broken:
        console.print(f"[bold red]does not hold:[/bold red] {fact}")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
