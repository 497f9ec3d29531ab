"""The outcome of a demonstration: its exit code, and the claims that did not hold."""

import signal
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from servers.process import ServerError, StartError

LOG_LINES = 25


def demonstrate(run: Callable[[Console], Sequence[str]]) -> int:
    """Runs a demonstration, which returns its broken claims. Returns the exit code: 0 if every
    claim held, 1 if a claim did not, 2 if a server or a request to it failed, or the demonstration
    was interrupted. SIGTERM and SIGHUP interrupt as SIGINT does, so that started servers are
    stopped.
    """
    console = Console()
    signs = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(sign, signal.default_int_handler) for sign in signs]
    try:
        broken = run(console)
    except ServerError as error:
        if isinstance(error, StartError):
            console.print(error.tail(LOG_LINES), markup=False, highlight=False, soft_wrap=True)
        told = f"[bold red]The demonstration did not run:[/bold red] {escape(str(error))}"
        console.print(told, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted")
        return 2
    finally:
        for sign, handler in zip(signs, handlers, strict=True):
            signal.signal(sign, handler)
    for claim in broken:
        told = f"[bold red]a claim did not hold:[/bold red] {escape(claim)}"
        console.print(told, soft_wrap=True)
    return 1 if broken else 0


def progress_bar(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
