"""Runs the demonstration for LMCache: one store, two LMCache servers in succession.

1. a server with Ritornello on an empty store: nothing is found, everything is stored;
2. a *new* server on the same store, its memory empty: the same requests are hits, and every chunk
   has the same checksum as before.

`lmcache bench server` sends the requests that an engine would send, without a GPU. Exit code 0
if every claim held, 1 if a claim did not, 2 if LMCache did not run or the user interrupted the
demonstration.
"""

import argparse
import shutil
import sys

from rich.console import Console
from rich.table import Table

from demo.outcome import demonstrate
from servers.environment import ROOT
from servers.lmcache import Asked, LMCacheServer, adapter_of, broken_claims


def table(cold: dict[int, Asked], warm: dict[int, Asked]) -> Table:
    made = Table("request", "chunks", "found, empty store", "found after the restart", "bytes")
    for number, first in cold.items():
        again = warm[number]
        same = "the same" if len(first.checksums | again.checksums) == 1 else "different"
        made.add_row(str(number), str(first.chunks), str(first.hits), str(again.hits), same)
    return made


def main(console: Console, requests: int) -> list[str]:
    folder = ROOT / "build/demo-lmcache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rounds: list[dict[int, Asked]] = []
    titles = ("1. an LMCache server, empty store", "2. a new LMCache server, same store")
    for name, title in zip(("cold", "warm"), titles, strict=True):
        console.print(f"[bold]{title}[/bold]  [dim]log: {folder}/{name}.log[/dim]")
        with LMCacheServer(adapter_of(folder / "store"), folder / f"{name}.log") as server:
            rounds.append(server.ask(requests))
    cold, warm = rounds
    console.print(table(cold, warm))
    return broken_claims(cold, warm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m demo.lmcache", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=4, help="number of requests (default: 4)")
    options = parser.parse_args()
    sys.exit(demonstrate(lambda console: main(console, options.requests)))
