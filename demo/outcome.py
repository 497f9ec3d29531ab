"""The outcome of a demonstration: its exit code, and the claims that did not hold."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from servers.process import ServerError


def demonstrate(run: Callable[[Console], Sequence[str]]) -> int:
    """Runs a demonstration, which returns its broken claims. Returns the exit code: 0 if every
    claim held, 1 if a claim did not, 2 if a server did not run or the user interrupted the
    demonstration.
    """
    console = Console()
    try:
        broken = run(console)
    except ServerError as error:
        console.print(f"[bold red]The demonstration did not run:[/bold red] {error}")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted")
        return 2
    for claim in broken:
        console.print(f"[bold red]a claim did not hold:[/bold red] {claim}")
    return 1 if broken else 0


def progress_bar(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
