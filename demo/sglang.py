"""Two SGLang processes in succession, the same long prompts: `python -m demo.sglang`.

1. a cold process with Ritornello under its hierarchical cache, on an empty store: every prompt is
   prefilled and stored; then asked again, served from SGLang's own memory;
2. a *new* process on the same store: SGLang's memory is empty, the store is not empty. Its
   answers must equal the answers from SGLang's own memory.

Exit code 0 where every claim held, 1 where one did not, 2 where the engine did not run.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import ritornello
from demo.documents import Prompt, prompts, text
from demo.process import DemoError
from demo.sglang_server import PAGE, SGLangServer, Told, storage

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build/env/sglang/bin/python"
LENGTHS = (1024, 2048, 4096)
ANSWER_TOKENS = 16
CAPACITY = "4GiB"
STORED_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """Medians over the documents of one length."""

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
            broken.append(f"{where}: {row.storage_tokens_warm} came from storage, not {whole}")
        if not row.answers_identical:
            broken.append(f"{where}: answers differ from those out of SGLang's own memory")
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


def wait_until_stored(store: Path, pages: int) -> None:
    """Waits until SGLang, which stores after its answers, has stored `pages` pages."""
    deadline = time.monotonic() + STORED_SECONDS
    with ritornello.Store.open(store) as opened:
        while opened.stats()["pages"] < pages:
            if time.monotonic() > deadline:
                raise DemoError(f"not all pages were stored within {STORED_SECONDS:.0f} s")
            time.sleep(0.2)


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
            connector=storage(str(store), CAPACITY),
        )

    with server("cold", "1. SGLang with Ritornello, empty store") as engine:
        asked = prompts(engine.tokenize, per_length, LENGTHS)
        engine.generate(engine.tokenize(text(0, 4 * PAGE))[:PAGE], 4)
        cold = ask_all(engine, asked, progress, "   first question of every document")
        local = ask_all(engine, asked, progress, "   again, from SGLang's own memory")
        wait_until_stored(store, sum((prompt.length - 1) // PAGE for prompt in asked))
    with server("warm", "2. a new SGLang process, same store") as engine:
        engine.generate(engine.tokenize(text(0, 4 * PAGE))[:PAGE], 4)
        warm = ask_all(engine, asked, progress, "   the same questions")
    return rows(asked, cold, local, warm)


def make_model(folder: Path) -> None:
    command = [str(PYTHON), str(ROOT / "engines/vllm/make_model.py"), "demo", str(folder / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise DemoError(f"the model could not be made: {done.stderr[-500:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo.sglang", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--documents", type=int, default=2, help="per length (default: 2)")
    options = parser.parse_args()
    console = Console()
    folder = ROOT / "build/demo-sglang"
    folder.mkdir(parents=True, exist_ok=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            make_model(folder)
            found = run(progress, folder, options.documents)
    except DemoError as error:
        console.print(f"[bold red]The demonstration did not run:[/bold red] {error}")
        return 2
    except KeyboardInterrupt:
        console.print("stopped")
        return 2
    report = folder / "report.json"
    report.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")
    console.print(table(found))
    console.print(f"report: {report}")
    broken = broken_claims(found)
    for claim in broken:
        console.print(f"[bold red]not shown:[/bold red] {claim}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
