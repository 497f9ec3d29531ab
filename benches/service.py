#!/usr/bin/env python3
"""Measures the node service: requests of `/metrics`, CPU time, and lookups beside such requests.

    python benches/service.py [--json] [--pages 1000000] [--rounds 6] [--dir FOLDER]

The stores are owned by `ritornello serve`; this process is a client of them. `metrics_*`: requests
of `/metrics`, one after another, over one connection. `idle_share`: CPU time of the owner's process
as a share of one core, without requests. `idle_share_empty`: this share for a store without pages,
which the owner does not scrub. `scraped_share`: this share with a request of `/metrics` every
second. `probe_us`: median time in µs of lookups of 256 stored pages by the client, in the store of
an owner with `--http` that is scraped every second; `probe_us_without`: the same in an equal store
of an owner without `--http`. The lookups alternate between both stores. `probe_ratio`: the first
time divided by the second, as geometric mean over the rounds. The text output names the project's
aims, which are upper limits.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import ritornello as rt

PAGE_BYTES = 4096
# Pages of a put, which is one sequence.
SEQUENCE = 2048
REQUESTS = 300
# Pause between two requests in seconds: the service refuses more than 100 requests per second.
PAUSE = 0.02
IDLE_SECONDS = 20
# Time after the start of an owner without pages until its CPU time is measured.
SETTLE_SECONDS = 3
PROBED = 256
# Lookups ask one owner for `BLOCK_SECONDS`, which is long enough for a request of `/metrics`, then
# the other owner, and so on, until each owner was asked `BLOCKS` times.
BLOCK_SECONDS = 2.2
BLOCKS = 6
AIMS = {"metrics_p99_ms": 10.0, "idle_share": 0.001, "idle_share_empty": 0.001, "probe_ratio": 1.02}


def scope() -> rt.Scope:
    return rt.Scope.opaque("bench", PAGE_BYTES, chained=True)


def keys(sequence: int, count: int) -> list[bytes]:
    return [f"{sequence:08}{page:08}".encode() for page in range(count)]


def fill(store: Path, pages: int) -> None:
    """Creates a store of `pages` pages."""
    memory = np.zeros((SEQUENCE, PAGE_BYTES), np.uint8)
    with rt.Store.open(store, capacity=pages * PAGE_BYTES * 3 // 2 + (1 << 30)) as opened:
        for sequence in range(-(-pages // SEQUENCE)):
            count = min(SEQUENCE, pages - sequence * SEQUENCE)
            put = opened.put_batch(scope(), keys(sequence, count), memory[:count])
            if put != count:
                sys.exit(f"only {put} of {count} pages were stored")


@contextmanager
def owner(store: Path, http_address: str | None) -> Iterator[tuple[int, str]]:
    """Runs `ritornello serve` on the store. Yields its process id, and the address of its service;
    "" without `--http`.
    """
    command = [str(Path(sys.executable).with_name("ritornello")), "serve", str(store), "--json"]
    command += ["--http", http_address] if http_address else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = ""
        for line in process.stdout:
            event = json.loads(line)
            address = event.get("address", address)
            if event["event"] == "ready":
                break
        try:
            yield process.pid, address
        finally:
            process.terminate()
            process.wait(60)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of the process, also of its threads that have ended."""
    # The clock of another process: clock_getcpuclockid(3). /proc/PID/stat counts in ticks of 10 ms,
    # too coarse for threads that run for microseconds.
    return time.clock_gettime((~pid << 3) | 2)


def scrape(connection: http.client.HTTPConnection) -> tuple[float, int]:
    """Returns the duration of a request of `/metrics` in seconds, and the length of the answer in
    bytes. Pauses for `PAUSE` seconds after the request.
    """
    began = time.perf_counter()
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    body = answer.read()
    spent = time.perf_counter() - began
    if answer.status != 200:
        sys.exit(f"/metrics answered {answer.status}")
    time.sleep(PAUSE)
    return spent, len(body)


@contextmanager
def scraped(address: str) -> Iterator[None]:
    """Requests `/metrics`, with pauses of one second; does nothing without an address."""
    stop = threading.Event()

    def run() -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        while not stop.wait(1.0):
            scrape(connection)

    thread = threading.Thread(target=run)
    if address:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if address:
            thread.join()


def share_of_core(pid: int) -> float:
    before, began = cpu_seconds(pid), time.monotonic()
    time.sleep(IDLE_SECONDS)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)


def probe_us(client: rt.Store) -> list[float]:
    """Returns the durations of lookups in µs, repeated for `BLOCK_SECONDS`."""
    asked, spent = keys(0, PROBED), []
    until = time.monotonic() + BLOCK_SECONDS
    while time.monotonic() < until:
        began = time.perf_counter_ns()
        found = client.probe(scope(), asked)
        spent.append((time.perf_counter_ns() - began) / 1000)
        if found != PROBED:
            sys.exit(f"only {found} of {PROBED} pages were found")
    return spent


def probe_medians(served: Path, plain: Path) -> tuple[float, float]:
    """Returns the median durations of lookups in µs: in `served`, whose owner has a service that is
    scraped, and in `plain`, whose owner has none. The lookups alternate in blocks of time, so that
    both medians are of the same minute.
    """
    with_service, without = [], []
    with (
        owner(served, "127.0.0.1:0") as (_, address),
        owner(plain, None),
        rt.Store.open(served) as client,
        rt.Store.open(plain) as plain_client,
    ):
        for _ in range(BLOCKS):
            with scraped(address):
                with_service += probe_us(client)
            without += probe_us(plain_client)
    return statistics.median(with_service), statistics.median(without)


def measure(store: Path, pages: int, rounds: int) -> dict[str, Any]:
    empty = store.with_name("empty")
    rt.Store.open(empty, capacity=1 << 30).close()
    with owner(empty, "127.0.0.1:0") as (pid, _):
        time.sleep(SETTLE_SECONDS)
        idle_empty = share_of_core(pid)
    fill(store, pages)
    with owner(store, "127.0.0.1:0") as (pid, address):
        connection = http.client.HTTPConnection(address, timeout=60)
        answers = [scrape(connection) for _ in range(REQUESTS)]
        connection.close()
        spent = sorted(seconds * 1000 for seconds, _ in answers)
        idle = share_of_core(pid)
        with scraped(address):
            busy = share_of_core(pid)
    # The stores change their roles in every round: an owner's memory may be slower in one process
    # than in another.
    twin = store.with_name("twin")
    fill(twin, pages)
    roles = [(store, twin), (twin, store)]
    medians = [probe_medians(*roles[number % 2]) for number in range(rounds)]
    with_service, without = zip(*medians, strict=True)
    ratios = [ours / plain for ours, plain in medians]
    return {
        "pages": pages,
        "metrics_bytes": answers[-1][1],
        "metrics_p50_ms": statistics.median(spent),
        "metrics_p99_ms": spent[len(spent) * 99 // 100],
        "idle_share": idle,
        "idle_share_empty": idle_empty,
        "scraped_share": busy,
        "probe_us": statistics.median(with_service),
        "probe_us_without": statistics.median(without),
        "probe_ratio": statistics.geometric_mean(ratios),
        "probe_ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--pages", type=int, default=1_000_000, help="stored pages of 4 KiB (1000000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="rounds of probes, an even number (6)"
    )
    parser.add_argument("--dir", help="directory for the stores (default: $TMPDIR or /tmp)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = measure(Path(folder) / "kv", options.pages, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, list):
            print(f"{name:18} {' '.join(f'{one:.3f}' for one in value)}")
            continue
        aim = f"   (aim: at most {AIMS[name]:g})" if name in AIMS else ""
        print(f"{name:18} {value:.4g}{aim}")


if __name__ == "__main__":
    main()
