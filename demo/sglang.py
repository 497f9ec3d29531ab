"""Runs the demonstration for SGLang: two processes in succession answer the same long prompts.

1. a cold process with Ritornello under its hierarchical cache, on an empty store: every prompt is
   prefilled and stored; then every prompt is asked again, and served from SGLang's own memory;
2. a *new* process on the same store: SGLang's memory is empty, the store is not empty. Its
   answers must equal the answers from SGLang's own memory.

Exit code 0 if every claim held, 1 if a claim did not, 2 if the engine did not run or the user
interrupted the demonstration.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from demo.documents import LENGTHS, Prompt, prompts, text
from demo.outcome import demonstrate, progress_bar
from servers.environment import ROOT, make_model, program
from servers.sglang import PAGE, SGLangServer, Told, storage, wait_until_stored

PYTHON = program("sglang", "python")
ANSWER_TOKENS = 16
CAPACITY = "4GiB"


@dataclass(frozen=True)
class Row:
    """Medians over the documents of one length, in the first process (cold) and in the second
    (warm). `storage_tokens_warm`: tokens whose KV was loaded from the store. `answers_identical`:
    whether, for each document, the answer of the second process equals the answer that the first
    process gave from SGLang's own memory.
    """

    prompt_tokens: int
    ttft_cold_s: float
    ttft_warm_s: float
    prefilled_tokens_warm: int
    storage_tokens_warm: int
    answers_identical: bool


def rows(
    asked: Sequence[Prompt], cold: list[Told], local: list[Told], warm: list[Told]
) -> list[Row]:
    found = []
    for length in LENGTHS:
        these = [i for i, prompt in enumerate(asked) if prompt.length == length]
        found.append(
            Row(
                prompt_tokens=length,
                ttft_cold_s=round(median(cold[i].answer.ttft_s for i in these), 4),
                ttft_warm_s=round(median(warm[i].answer.ttft_s for i in these), 4),
                prefilled_tokens_warm=int(median(warm[i].tokens["computed"] for i in these)),
                storage_tokens_warm=int(median(warm[i].tokens["storage"] for i in these)),
                answers_identical=all(
                    warm[i].answer.tokens == local[i].answer.tokens for i in these
                ),
            )
        )
    return found


def broken_claims(found: Sequence[Row]) -> list[str]:
    """Returns the claims of the demonstration that did not hold."""
    broken = []
    for row in found:
        where = f"{row.prompt_tokens} tokens"
        whole = (row.prompt_tokens - 1) // PAGE * PAGE
        if row.storage_tokens_warm != whole:
            came = f"{row.storage_tokens_warm} tokens came from storage instead of {whole}"
            broken.append(f"{where}: {came}")
        if not row.answers_identical:
            broken.append(f"{where}: answers differ from the answers from SGLang's own memory")
    return broken


def table(found: Sequence[Row]) -> Table:
    made = Table(title="First question of a long document: median time to first token")
    made.add_column("prompt\ntokens", justify="right")
    made.add_column("cold,\nstoring", justify="right")
    made.add_column("new\nprocess", justify="right", style="bold green")
    made.add_column("warm\n/cold", justify="right")
    made.add_column("pre-\nfilled", justify="right")
    made.add_column("from\nstorage", justify="right")
    made.add_column("same\nanswer", justify="center")
    for row in found:
        made.add_row(
            f"{row.prompt_tokens:,}",
            f"{row.ttft_cold_s:.3f} s",
            f"{row.ttft_warm_s:.3f} s",
            f"{row.ttft_warm_s / row.ttft_cold_s:.3f}",
            f"{row.prefilled_tokens_warm:,}",
            f"{row.storage_tokens_warm:,}",
            "yes" if row.answers_identical else "NO",
        )
    return made


def ask_all(
    server: SGLangServer, asked: Sequence[Prompt], progress: Progress, title: str
) -> list[Told]:
    task = progress.add_task(title, total=len(asked))
    told = []
    for prompt in asked:
        told.append(server.generate(list(prompt.tokens), ANSWER_TOKENS))
        progress.advance(task)
    return told


def run(progress: Progress, folder: Path, per_length: int) -> list[Row]:
    store = folder / "store"
    shutil.rmtree(store, ignore_errors=True)

    def server(name: str, title: str) -> SGLangServer:
        progress.console.print(f"[bold]{title}[/bold]  [dim]log: {folder}/{name}.log[/dim]")
        return SGLangServer(
            name=name,
            program=PYTHON,
            model=folder / "model",
            log=folder / f"{name}.log",
            max_tokens=2 * LENGTHS[-1],
            connector=storage(path=str(store), capacity=CAPACITY),
        )

    with server("cold", "1. SGLang with Ritornello, empty store") as engine:
        asked = prompts(engine.tokenize, per_length)
        engine.generate(engine.tokenize(text(0, 4 * PAGE))[:PAGE], 4)
        cold = ask_all(engine, asked, progress, "   first question of every document")
        local = ask_all(engine, asked, progress, "   again, from SGLang's own memory")
        wait_until_stored(store, sum((prompt.length - 1) // PAGE for prompt in asked))
    with server("warm", "2. a new SGLang process, same store") as engine:
        engine.generate(engine.tokenize(text(0, 4 * PAGE))[:PAGE], 4)
        warm = ask_all(engine, asked, progress, "   the same questions")
    return rows(asked, cold, local, warm)


def main(console: Console, per_length: int) -> list[str]:
    folder = ROOT / "build/demo-sglang"
    folder.mkdir(parents=True, exist_ok=True)
    with progress_bar(console) as progress:
        make_model("demo", folder / "model", PYTHON)
        found = run(progress, folder, per_length)
    report = folder / "report.json"
    report.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")
    console.print(table(found))
    console.print(f"report: {report}")
    return broken_claims(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m demo.sglang", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--documents", type=int, default=2, help="number of documents per length (default: 2)"
    )
    options = parser.parse_args()
    sys.exit(demonstrate(lambda console: main(console, options.documents)))
