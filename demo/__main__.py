"""Runs the demonstration: asks three vLLM processes, one after another, the same questions.

1. a cold process with Ritornello on an empty store: everything is prefilled, and saved;
2. a *new* process on the same store: vLLM's own prefix cache is empty, the store is not empty;
3. a new process without Ritornello: every prompt is prefilled, for comparison; then the same
   questions again, now served from vLLM's own prefix cache. The answers of the second process must
   equal these answers.

Exit code 0 if all claims that `demo.report.broken_claims` checks held, 1 if a claim did not, 2 if
the engine did not run or the user interrupted the demonstration.
"""

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from demo.chart import draw
from demo.documents import LENGTHS, Prompt, prompts, text
from demo.outcome import demonstrate, progress_bar
from demo.report import Sample, broken_claims, rows, table, write_report
from ritornello.bench.metrics import Metrics
from servers.engine import Answer
from servers.environment import ROOT, make_model, program, vllm_versions
from servers.vllm import VLLMServer, connector, tokens_by_source

ANSWER_TOKENS = 32
WARM_UP_TOKENS = 1024
CAPACITY = "4GiB"


@dataclass(frozen=True)
class Asked:
    """The answer to one prompt in one process, and the number of the prompt's tokens by the source
    of their KV: computed, or found in a cache.
    """

    answer: Answer
    tokens: dict[str, int]


@dataclass
class Round:
    """The answers of a process to all prompts, each asked once, and the process's metrics before
    and after.
    """

    asked: list[Asked]
    before: Metrics
    after: Metrics

    def share_in_hooks(self) -> float:
        """Returns the time in the connector's hooks, divided by the time of the engine's steps."""

        def spent(name: str) -> float:
            metric = f"vllm:ritornello_{name}_total"
            return self.after.total(metric) - self.before.total(metric)

        steps = spent("step_seconds")
        return spent("hook_seconds") / steps if steps else 0.0


def ask_all(server: VLLMServer, asked: list[Prompt], progress: Progress, title: str) -> Round:
    task = progress.add_task(title, total=len(asked))
    before = server.counters()
    last, made = before, []
    for prompt in asked:
        answer = server.ask(list(prompt.tokens), ANSWER_TOKENS)
        had = tokens_by_source(last)
        last = server.settled(sum(had.values()) + prompt.length)
        came = {name: tokens - had[name] for name, tokens in tokens_by_source(last).items()}
        made.append(Asked(answer, came))
        progress.advance(task)
    return Round(made, before, last)


def warm_up(server: VLLMServer) -> None:
    """Sends one request, which is not measured, because the first request of a process includes
    lazy initialization.
    """
    server.ask(server.tokenize(text(0, 3 * WARM_UP_TOKENS))[:WARM_UP_TOKENS], 4, remember=False)
    server.settled(WARM_UP_TOKENS)


def run(progress: Progress, folder: Path, per_length: int) -> tuple[list[Sample], float]:
    store = folder / "store"
    shutil.rmtree(store, ignore_errors=True)

    def server(name: str, title: str, saving: bool) -> VLLMServer:
        progress.console.print(f"[bold]{title}[/bold]  [dim]log: {folder}/{name}.log[/dim]")
        return VLLMServer(
            name=name,
            program=program("vllm", "vllm"),
            model=folder / "model",
            log=folder / f"{name}.log",
            max_tokens=LENGTHS[-1] + 2 * ANSWER_TOKENS,
            connector=connector(path=str(store), capacity=CAPACITY) if saving else None,
        )

    with server("cold", "1. vLLM with Ritornello, empty store", True) as engine:
        warm_up(engine)
        asked = prompts(engine.tokenize, per_length)
        cold = ask_all(engine, asked, progress, "   first question of every document")
    with server("warm", "2. a new vLLM process, same store", True) as engine:
        warm_up(engine)
        warm = ask_all(engine, asked, progress, "   the same questions")
    with server("off", "3. a new vLLM process without Ritornello", False) as engine:
        warm_up(engine)
        off = ask_all(engine, asked, progress, "   the same questions")
        local = ask_all(engine, asked, progress, "   again, from vLLM's own prefix cache")

    samples = [
        Sample(
            length=prompt.length,
            ttft_cold_s=c.answer.ttft_s,
            ttft_warm_s=w.answer.ttft_s,
            ttft_off_s=o.answer.ttft_s,
            cold=c.tokens,
            warm=w.tokens,
            local=again.tokens,
            same_split=w.tokens["computed"] == again.tokens["computed"],
            identical=w.answer.tokens == again.answer.tokens,
        )
        for prompt, c, w, o, again in zip(
            asked, cold.asked, warm.asked, off.asked, local.asked, strict=True
        )
    ]
    return samples, cold.share_in_hooks()


def main(console: Console, per_length: int) -> list[str]:
    folder = ROOT / "build/demo"
    folder.mkdir(parents=True, exist_ok=True)
    with progress_bar(console) as progress:
        make_model("demo", folder / "model", program("vllm", "python"))
        samples, hook_share = run(progress, folder, per_length)
    found = rows(samples)
    write_report(folder / "report.json", found, hook_share, vllm_versions())
    draw(found, [folder / "ttft.png", folder / "ttft.svg"])
    console.print(table(found))
    console.print(f"time in connector hooks, cold process, saving: {hook_share:.2%} of step time")
    console.print(f"report: {folder / 'report.json'}   chart: {folder / 'ttft.png'}, .svg")
    return broken_claims(samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--documents", type=int, default=2, help="number of documents per length (default: 2)"
    )
    options = parser.parse_args()
    sys.exit(demonstrate(lambda console: main(console, options.documents)))
