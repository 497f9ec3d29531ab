"""The report of `make serve-demo`: what service and engine counted, explanations, broken claims."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from demo.chat import ChatLoad
from ritornello.bench.metrics import Metrics
from servers.node_service import NodeService

# Maximum wait for decisions, which usually arrive at the owner about two seconds after they are
# made.
DECISION_SECONDS = 20.0
HIT, EVICTED, NOT_STORED = "a prompt that hit", "an evicted prompt", "a prompt never stored"
# The answer that an explanation of each of these prompts must contain.
EXPECTED = {HIT: "hit", EVICTED: "evicted", NOT_STORED: "unknown"}
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Explained:
    """The explanation of a request. `text`: the output of `ritornello explain`. `by_command`,
    `by_service`: the entries of its output with `--json`, and of `POST /v1/explain`.
    """

    request_id: str
    text: str
    by_command: Sequence[Entry]
    by_service: Sequence[Entry]

    @classmethod
    def of(cls, service: NodeService, request_id: str) -> "Explained":
        return cls(
            request_id,
            service.explain_by_command(request_id),
            json.loads(service.explain_by_command(request_id, "--json"))["requests"],
            service.explain(request_id),
        )

    def lines(self) -> str:
        """Returns the lines about the newest decision and about the pages."""
        lines = self.text.splitlines()
        return "\n".join([*lines[1:2], *(line for line in lines if line.startswith("key"))])


@dataclass(frozen=True)
class Observed:
    """`ready`: the status of `/readyz`. `asked`: the ids that vLLM returned. `decided`: the
    entries of `/v1/decisions`. `service`, `engine`: metrics of the node service and of vLLM.
    """

    ready: int
    asked: Sequence[str]
    decided: Sequence[Entry]
    service: Metrics
    engine: Metrics
    explained: Mapping[str, Explained]


def is_of(engine_id: str, returned_id: str) -> bool:
    """Returns whether vLLM's internal id of a request belongs to the id that vLLM returned."""
    return engine_id.startswith(f"{returned_id}-")


def decided_requests(service: NodeService, last: str) -> list[dict[str, Any]]:
    """Returns the decisions once they include the request `last`, or after a time limit."""
    deadline = time.monotonic() + DECISION_SECONDS
    while True:
        decided = service.decisions()
        if any(is_of(entry["request_id"], last) for entry in decided):
            return decided
        if time.monotonic() > deadline:
            return decided
        time.sleep(0.2)


def observe(service: NodeService, load: ChatLoad) -> Observed:
    decided = decided_requests(service, load.asked[-1])
    loaded = [e["request_id"] for e in decided if e["outcome"] == "loaded"]
    hit = [a for name in loaded for a in load.asked if is_of(name, a)]
    prompts = {EVICTED: load.alone, NOT_STORED: load.not_stored}
    if hit:
        prompts = {HIT: hit[0], **prompts}
    return Observed(
        ready=service.ready(),
        asked=tuple(load.asked),
        decided=decided,
        service=service.metrics(),
        engine=load.server.counters(),
        explained={what: Explained.of(service, name) for what, name in prompts.items()},
    )


def broken_claims(observed: Observed) -> list[str]:
    """Returns the claims of the demonstration that did not hold."""
    broken = []
    if observed.ready != 200:
        broken.append(f"/readyz answers {observed.ready} instead of 200")
    for name in ("hit", "evicted"):
        metric = f"ritornello_{name}_pages_total"
        if not observed.service.total(metric) > 0:
            broken.append(f"/metrics has no {metric} above 0")
    engine_ids = [entry["request_id"] for entry in observed.decided]
    missing = [a for a in observed.asked if not any(is_of(name, a) for name in engine_ids)]
    if missing:
        broken.append(f"/v1/decisions lists no decision about {', '.join(missing)}")
    for what, answer in EXPECTED.items():
        explained = observed.explained.get(what)
        if explained is None:
            broken.append(f"no decision in /v1/decisions tells of {what}")
            continue
        ways = {
            "ritornello explain": explained.by_command,
            "POST /v1/explain": explained.by_service,
        }
        for way, entries in ways.items():
            if not any(_says(span, answer) for span in _spans(entries)):
                said = [(span["at"], span["answer"]) for span in _spans(entries)]
                broken.append(
                    f"{way} does not call {what} ({explained.request_id}) {answer}: {said}"
                )
    return broken


def _spans(entries: Sequence[Entry]) -> list[Entry]:
    return [span for entry in entries for span in entry["explanation"]["spans"]]


def _says(span: Entry, answer: str) -> bool:
    if answer == "evicted" and not (span["detail"] and span["seconds_ago"] is not None):
        return False  # an eviction has a cause and a time
    return bool(span["answer"] == answer)


def counts(observed: Observed) -> Table:
    """Returns a table of requests, hits, misses and evictions."""

    def by(metrics: Metrics, name: str, label: str) -> str:
        values = metrics.by(name, label).items()
        return ", ".join(f"{value:,.0f} {word}" for word, value in values if value) or "none"

    engine, service = observed.engine, observed.service
    made = Table(title="Since the start", show_header=False)
    made.add_row("requests", f"{len(observed.asked):,}")
    outcomes: dict[str, int] = {}
    for entry in observed.decided:
        outcomes[entry["outcome"]] = outcomes.get(entry["outcome"], 0) + 1
    made.add_row(
        "the engine's decisions", ", ".join(f"{n:,} {word}" for word, n in sorted(outcomes.items()))
    )
    hits = f"{engine.total('vllm:ritornello_hit_pages_total'):,.0f}"
    made.add_row("hit pages", hits)
    made.add_row(
        "missed pages, by reason", by(engine, "vllm:ritornello_missed_pages_total", "reason")
    )
    # vLLM's pages have two KV heads, and the store has a page for each.
    evicted = by(service, "ritornello_evicted_pages_total", "cause")
    made.add_row("evicted pages of one KV head, by cause", evicted)
    return made


def explanations(observed: Observed) -> Table:
    made = Table(title="What `ritornello explain` says", show_lines=True)
    made.add_column("prompt", width=30, overflow="fold")
    made.add_column("the engine's decision, and the pages now")
    for what, explained in observed.explained.items():
        made.add_row(f"{what}\n[dim]{explained.request_id}[/dim]", explained.lines())
    return made
