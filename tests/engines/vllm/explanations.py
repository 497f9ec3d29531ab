"""Explanations of requests, as `ritornello explain --request` gives them, and other JSON output of
commands.
"""

import json
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any


def ask(*words: str) -> Any:
    """Returns the JSON output of a command of `ritornello`."""
    done = subprocess.run(
        [sys.executable, "-m", "ritornello", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def explain(path: Path, request: str) -> dict[str, Any]:
    """Returns the entry of the only request with this id. Waits at most 30 seconds until the store
    has a decision about the request.
    """
    deadline = monotonic() + 30
    while True:
        found = ask("explain", str(path), "--request", request)["requests"]
        if found:
            (entry,) = found
            assert entry["request_id"].startswith(request)
            return dict(entry)
        assert monotonic() < deadline, "the engine reported no decision within 30 s"
        sleep(0.2)


def decisions(entry: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """Returns, for each decision, the outcome and the numbers of pages: all, found and loaded."""
    names = ("outcome", "pages", "found", "loaded")
    return [tuple(made[name] for name in names) for made in entry["decisions"]]


def are_hits(entry: dict[str, Any], pages: int) -> bool:
    """Returns whether all pages of the entry, `pages` in number, are hits of a store on disk or in
    memory.
    """
    return answers(entry) in ([("hit", "disk", pages)], [("hit", "host", pages)])


def answers(entry: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [
        (span["answer"], span["detail"], span["pages"]) for span in entry["explanation"]["spans"]
    ]
