"""Measures how long a probe takes from Python, in the process that owns the store.

Reads one JSON object from standard input: `dir`, `scope` (`name`, `page_bytes`, `chained`) and
`keys` (hexadecimal digits). Writes one JSON object to standard output: `p50_us` and `found`.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import ritornello as rt

PROBES = 5_000
# Number of probes before the measurement: they fill caches, and the interpreter specialises its
# bytecode.
WARM_UP = 500


def measure(question: Mapping[str, Any]) -> dict[str, float]:
    """Probes for all keys `PROBES` times. Returns the median time of a probe in microseconds, and
    the number of pages found.
    """
    scope = rt.Scope.opaque(**question["scope"])
    keys = [bytes.fromhex(key) for key in question["keys"]]
    times = []
    with rt.Store.open(question["dir"]) as store:
        found = store.probe(scope, keys)
        for _ in range(WARM_UP):
            store.probe(scope, keys)
        for _ in range(PROBES):
            started = time.perf_counter_ns()
            store.probe(scope, keys)
            times.append(time.perf_counter_ns() - started)
    return {"p50_us": statistics.median(times) / 1e3, "found": found}


def main() -> int:
    """Measures the probes that standard input describes, and prints the result."""
    print(json.dumps(measure(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
