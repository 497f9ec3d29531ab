"""Terminal output of a run: the number of ended requests while it runs, then a table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ritornello.bench.driver import Record
from ritornello.bench.summary import Row, Total

# Width of the output if it is not a terminal: all columns of the table fit.
COLUMNS = 140


def wide_console(columns: int = COLUMNS) -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=columns)


@contextmanager
def progress_bar(title: str, stream: TextIO) -> Iterator[Callable[[Record], None]]:
    """Shows the number of requests that have ended, failed requests included. Yields the function
    to call for each of these requests. Silent if `stream` is not a terminal.
    """
    console = Console(file=stream)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    answered = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def advance(record: Record) -> None:
            nonlocal answered
            answered += 1
            status = f"last TTFT {seconds(record.ttft_s)}" if not record.error else record.error
            progress.update(task, description=f"{title}: {answered} requests ended, {status}")

        yield advance


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def table(found: Sequence[Row]) -> Table:
    result = Table(title="Time to first token (TTFT), and between chunks (token gap), by round")
    for name in ("round", "history\ntokens", "prompt\ntokens", "requests", "TTFT\nmean"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in ("TTFT mean\n95 %, s", "TTFT\np50", "TTFT\np90", "TTFT\np99"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in ("gap\nmean", "gap\np99"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in ("prompt\ntokens/s", "answer\ntokens/s", "hit\nrate"):
        result.add_column(name, justify="right", no_wrap=True)
    for r in found:
        result.add_row(
            str(r.round),
            f"{r.history_tokens:,}",
            f"{r.prompt_tokens:,}",
            str(r.requests),
            seconds(r.ttft_mean_s),
            f"{r.ttft_low_s:.3f}-{r.ttft_high_s:.3f}",
            *(seconds(v) for v in (r.ttft_p50_s, r.ttft_p90_s, r.ttft_p99_s)),
            *(seconds(v) for v in (r.gap_mean_s, r.gap_p99_s)),
            f"{r.prompt_tokens_s:,.0f}",
            f"{r.answer_tokens_s:,.0f}",
            percent(r.hit_rate),
        )
    return result


def totals(whole: Total) -> str:
    """Returns a line with the run's totals, and one with the tiers that supplied cached prompt
    tokens.
    """
    lines = [
        f"{whole.requests - whole.failed} answers in {whole.duration_s:.1f} s "
        f"({whole.requests_s:.2f}/s), prompts {whole.prompt_tokens_s:,.0f} tokens/s, "
        f"answers {whole.answer_tokens_s:,.0f} tokens/s"
    ]
    if whole.hit_tokens is None:
        lines.append("the sources of prompt tokens are unknown: no /metrics of vLLM were read")
    else:
        tiers = ", ".join(f"{tier} {tokens:,}" for tier, tokens in whole.hit_tokens.items())
        lines.append(f"hits {percent(whole.hit_rate)} of prompt tokens: {tiers or 'none'}")
    return "\n".join(lines)
