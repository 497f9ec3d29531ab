"""Measures a serving engine through its OpenAI API: `python -m ritornello.bench WORKLOAD`.

Exit status 0 if all requests were answered, and an expected gain was reached; 1 if some requests
failed, or the expected gain was not reached; 2 if all requests failed or none was sent, if a file
could not be written, or if the run ended early: wrong arguments, a server that cannot be measured,
a missing package, or Ctrl-C. A run that ends early reports the requests that were answered until
then.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ritornello.bench.client import Server, ServingError
from ritornello.bench.confidence import mean
from ritornello.bench.driver import ANSWER_SECONDS, Driver, Record, Workload
from ritornello.bench.engines import MetricsWatch
from ritornello.bench.long_context import LongContext
from ritornello.bench.multi_round_qa import MultiRoundQA
from ritornello.bench.multi_turn import MultiTurn
from ritornello.bench.prompts import Source
from ritornello.bench.summary import Row, Total, rows, total

WORKLOADS: dict[str, type[MultiRoundQA] | type[LongContext] | type[MultiTurn]] = {
    "multi-round-qa": MultiRoundQA,
    "long-context": LongContext,
    "multi-turn": MultiTurn,
}
DEFAULT_URL = "http://127.0.0.1:8000"


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m ritornello.bench", description=__doc__.partition("\n")[0]
    )
    kinds = arguments.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    for name, kind in WORKLOADS.items():
        module = sys.modules[kind.__module__].__doc__ or ""
        help_text = " ".join(module.partition("\n\n")[0].split())
        subparser = kinds.add_parser(name, help=help_text, description=help_text)
        kind.flags(subparser)
        add = subparser.add_argument
        add(
            "--base-url",
            nargs="+",
            action="extend",
            metavar="URL",
            help=f"addresses of the servers, which get requests in turn ({DEFAULT_URL})",
        )
        add("--model", help="the name of the served model (default: the only served model)")
        add("--seed", type=int, default=1, help="seed of the prompts (1)")
        add(
            "--prompts",
            choices=("ids", "text"),
            default="ids",
            help="send prompts as token ids, of exact length, or as text, one word per token (ids)",
        )
        add(
            "--timeout",
            type=float,
            default=ANSWER_SECONDS,
            help="maximum seconds for an answer (600)",
        )
        add(
            "--tag",
            default="",
            help="name of this run in the JSON (default: none) and the chart (default: WORKLOAD)",
        )
        add("--chart", metavar="FILE.svg", help="write a chart of TTFT by history length")
        add(
            "--expected-ttft-gain",
            type=float,
            metavar="X",
            help="exit with status 1 if the mean TTFT of round 0 is less than X times the mean "
            "TTFT of prompts with a history",
        )
        add(
            "--json",
            nargs="?",
            const="-",
            metavar="FILE",
            help="print all results as JSON instead of tables; with FILE, write them to it, and "
            "print the tables",
        )
    return arguments


async def measure(given: argparse.Namespace, on_record: Callable[[Record], None]) -> Total:
    """Checks the servers, runs the workload, and reads the engines' counters."""
    servers = [Server(url) for url in given.base_url or [DEFAULT_URL]]
    model = await model_of(servers, given.model)
    driver = Driver(servers, model, given.timeout, on_record=on_record)
    watch = await MetricsWatch.begin(servers)
    records = await driver.run(workload_of(given))
    metrics = await watch.end(sum(r.prompt_tokens for r in records))
    return total(records, metrics)


def workload_of(given: argparse.Namespace) -> Workload:
    kind, values = WORKLOADS[given.workload], vars(given)
    values = {
        **values,
        "source": Source(given.seed, given.prompts == "text"),
        # The flags of these fields have the names that LMCache's `multi-round-qa.py` uses.
        "time_s": values.get("time"),
        "ramp_up": not values.get("disable_ramp_up"),
    }
    return kind(**{field.name: values[field.name] for field in fields(kind)})


async def model_of(servers: Sequence[Server], wanted: str | None) -> str:
    """Returns the model to request; all servers serve it."""
    models: set[str] | None = None
    for server in servers:
        served = await server.models()
        models = set(served) if models is None else models & set(served)
        if wanted is not None and wanted not in served:
            raise ServingError(
                f"{server.base_url} serves {', '.join(served)}: add --model {served[0]}"
            )
    if wanted is not None:
        return wanted
    if not models:
        raise ServingError(
            "the servers serve different models: give --base-url servers of one model"
        )
    if len(models) > 1:
        raise ServingError(f"several models are served: add --model {min(models)}")
    return models.pop()


def gain(found: Sequence[Row]) -> float | None:
    """Returns the mean TTFT of round 0, divided by the mean TTFT of prompts with a history; None if
    there is no answer of one of these kinds.
    """
    fresh = [r for r in found if r.round == 0]
    known = [r for r in found if r.history_tokens]
    if not fresh or not known:
        return None

    def ttft(of: Sequence[Row]) -> float:
        return mean([r.ttft_mean_s for r in of for _ in range(r.requests)])

    return ttft(fresh) / ttft(known)


def report(
    given: argparse.Namespace, records: Sequence[Record], whole: Total, stopped: str | None
) -> dict[str, Any]:
    """Returns settings and results, for `--json`. `stopped`: why the run ended early, or None."""
    flags = {name: value for name, value in vars(given).items() if name not in ("json", "chart")}
    requests = [{k: v for k, v in asdict(r).items() if k != "answer"} for r in records]
    return {
        **flags,
        "stopped": stopped,
        "rows": [asdict(row) for row in rows(records)],
        "total": asdict(whole),
        "requests": requests,
    }


def run(given: argparse.Namespace) -> int:
    # Imported before measuring: a missing package is reported immediately.
    from ritornello.bench.show import progress_bar, table, totals, wide_console

    if given.chart:
        from ritornello.bench.chart import plot_by_history
    records: list[Record] = []
    problems: list[str] = []
    stopped: str | None = None
    with progress_bar(given.workload, sys.stderr) as show_progress:

        def on_record(record: Record) -> None:
            records.append(record)
            show_progress(record)

        try:
            whole = asyncio.run(measure(given, on_record))
        except (KeyboardInterrupt, ServingError) as error:
            if not records:
                raise
            stopped, whole = str(error) or "stopped", total(records, None)
            problems.append(stopped)
    if not records:
        problems.append("no request was sent: use larger counts, or a longer --time")
    found = rows(records)
    if given.json:
        text = json.dumps(report(given, records, whole, stopped), indent=2)
        if given.json == "-":
            print(text)
        else:
            try:
                Path(given.json).write_text(text + "\n")
            except OSError as error:
                problems.append(f"the results could not be written ({error}): change --json")
    if found and given.json != "-":
        console = wide_console()
        console.print(table(found))
        console.print(totals(whole))
    if given.chart and found:
        try:
            plot_by_history({given.tag or given.workload: found}, Path(given.chart))
        except (OSError, ValueError) as error:  # ValueError: an unknown kind of file
            problems.append(f"the chart could not be written ({error}): change --chart")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    failures = [record.error for record in records if record.error]
    if failures:
        print(f"{len(failures)} of {len(records)} requests failed: {failures[0]}", file=sys.stderr)
    if problems or not found:
        return 2
    if failures:
        return 1
    reached = gain(found)
    if given.expected_ttft_gain and (reached or 0.0) < given.expected_ttft_gain:
        if reached is None:
            outcome = "no prompt of round 0, or no prompt with a history, was answered"
        else:
            outcome = f"the gain is {reached:.2f}"
        print(f"TTFT gain is below {given.expected_ttft_gain}: {outcome}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        return run(given)
    except ServingError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(
            f"error: {error.name} is not installed: pip install 'ritornello[bench]'",
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    sys.exit(main())
