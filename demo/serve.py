"""Runs a vLLM under a chat load beside the node service of its store.

`ritornello serve` owns a store that is too small for all prompts, a vLLM on this machine's CPUs
uses the store, and conversations with growing histories are sent to vLLM. The address of the
service and commands to try are printed. The load continues slowly until Ctrl-C.

With `--check` the load is short, and the claims of `demo.serve_report.broken_claims` are checked.
Exit code 0 if every claim held or Ctrl-C ended the load, 1 if a claim did not, 2 if a server did
not run or the demonstration was interrupted before its first report.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

import ritornello
from demo.chat import CONVERSATIONS, MAX_TOKENS, PAGE_TOKENS, TURNS, ChatLoad
from demo.outcome import demonstrate, progress_bar
from demo.serve_report import broken_claims, counts, explanations, observe
from servers.environment import ROOT, fast_dtype, make_model, program
from servers.node_service import COMMAND, NodeService
from servers.process import ServerError
from servers.vllm import VLLMServer, connector

# Shared with `make demo`.
MODEL = ROOT / "build/demo/model"
FOLDER = ROOT / "build/serve-demo"
# The store has room for all conversations that continue and a few that have ended. vLLM's memory
# has too little room for all that continue, so that their pages are loaded from the store.
STORED_PAGES = 112
SEGMENT_BYTES = 4 << 20
KV_BLOCKS = MAX_TOKENS // PAGE_TOKENS + 2
# The first report follows as many turns as this number of sets of `CONVERSATIONS` whole
# conversations has. Some conversations are then still open.
GENERATIONS = 2
PAUSE_SECONDS = 3.0
METRICS = "^ritornello_(hit|missed|evicted)_pages_total"


def page_bytes(model: Path) -> int:
    """Returns the bytes of the keys and values of a page."""
    shape = json.loads((model / "config.json").read_text())
    values = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2
    return int(values) * PAGE_TOKENS * (2 if fast_dtype() == "bfloat16" else 4)


@contextmanager
def alone() -> Iterator[None]:
    """Locks the folder of the demonstration: a second demonstration would delete its store."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServerError(f"another serve-demo uses {FOLDER}: end it first") from error
        yield


def make_store(store: Path) -> None:
    shutil.rmtree(store, ignore_errors=True)
    capacity = STORED_PAGES * page_bytes(MODEL)
    ritornello.Store.open(store, capacity, segment_bytes=SEGMENT_BYTES).close()


def write_scrape_config(service: NodeService) -> Path:
    """Writes a configuration with which Prometheus scrapes the service, and evaluates the packaged
    alerts.
    """
    target = {"targets": [service.address.removeprefix("http://")]}
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(ROOT / "packaging/prometheus/alerts.yaml")],
        "scrape_configs": [{"job_name": "ritornello", "static_configs": [target]}],
    }
    path = FOLDER / "prometheus.yml"  # JSON is YAML
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path


def tell(console: Console, service: NodeService, engine: VLLMServer, request_id: str) -> None:
    """Prints the addresses of the servers, and commands that show the load."""
    command, store = os.path.relpath(COMMAND), os.path.relpath(service.store)
    scrape = os.path.relpath(write_scrape_config(service))
    folder = os.path.relpath(FOLDER / "prometheus")
    for line in (
        f"the node service: {service.address}   vLLM: http://127.0.0.1:{engine.port}",
        f"  curl -s {service.address}/metrics | grep -E '{METRICS}'",
        f"  curl -s '{service.address}/v1/decisions?limit=5'",
        f"  {command} explain {store} --request {request_id}",
        f"  {command} top {store}",
        f"  prometheus --config.file={scrape} --storage.tsdb.path={folder}",
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def report(console: Console, service: NodeService, load: ChatLoad) -> list[str]:
    """Prints the tables, and returns the broken claims."""
    observed = observe(service, load)
    console.print(counts(observed))
    console.print(explanations(observed))
    return broken_claims(observed)


def continue_until_interrupted(console: Console, load: ChatLoad) -> None:
    console.print(f"The load continues, with pauses of {PAUSE_SECONDS:.0f} s. Ctrl-C ends it.")
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("", total=None)
            while True:
                progress.update(task, description=f"   {len(load.asked):,} requests")
                time.sleep(PAUSE_SECONDS)
                load.next_turn()
    except KeyboardInterrupt:
        console.print("interrupted: the last report follows")


def main(console: Console, check: bool) -> list[str]:
    with alone():
        make_model("demo", MODEL, program("vllm", "python"))
        store = FOLDER / "store"
        make_store(store)
        service = NodeService(store, FOLDER / "serve.log")
        engine = VLLMServer(
            name="vLLM",
            program=program("vllm", "vllm"),
            model=MODEL,
            log=FOLDER / "vllm.log",
            max_tokens=MAX_TOKENS,
            connector=connector(path=str(store)),
            kv_blocks=KV_BLOCKS,
        )
        with service:
            for line, log in (
                (f"the node service: {service.address}", service.log),
                ("vLLM starts, in about a minute", engine.log),
            ):
                console.print(f"{line}  [dim]log: {os.path.relpath(log)}[/dim]", soft_wrap=True)
            with engine:
                load = ChatLoad(engine)
                with progress_bar(console) as progress:
                    requests = GENERATIONS * CONVERSATIONS * TURNS
                    task = progress.add_task("   conversations", total=requests)
                    load.begin()
                    for _ in range(requests):
                        load.next_turn()
                        progress.advance(task)
                broken = report(console, service, load)
                tell(console, service, engine, load.alone)
                if check:
                    return broken
                continue_until_interrupted(console, load)
                report(console, service, load)
    return []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m demo.serve", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="a short load, whose claims must hold")
    options = parser.parse_args()
    sys.exit(demonstrate(lambda console: main(console, options.check)))
