"""Sends the requests of a workload to servers, and records the results."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

from ritornello.bench.client import Prompt, Server, ServingError

ANSWER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a session. `history_tokens`: leading tokens of the prompt that were in an
    earlier request or answer of the session. The request goes to server `turn` modulo the number
    of servers.
    """

    session: int
    round: int
    turn: int
    prompt: Prompt
    history_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """Result of a request. `sent_s` counts from the start of the run, `ttft_s` and `total_s` from
    sending. `gaps_s`: times between chunks of the answer. `error`: why the request failed, None if
    it was answered.
    """

    session: int
    round: int
    server: int
    history_tokens: int
    sent_s: float
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int | None = None
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    total_s: float = 0.0
    answer: Prompt = ()
    error: str | None = None

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and the answer: the history of the session's next request."""
        return self.prompt_tokens + self.answer_tokens


class Workload(Protocol):
    """A pattern of requests. The same seed and the same answers generate the same prompts. If a
    workload is limited by time, the number of its requests depends on the speed of the servers.
    """

    @property
    def requests(self) -> int | None:
        """Number of requests if none fails; None if it depends on time."""

    async def run(self, driver: "Driver") -> None:
        """Sends all requests and waits for the answers."""


@dataclass
class Driver:
    """Runs workloads. A request that takes longer than `deadline_s` seconds fails. `extra` is added
    to the body of every request, for example `kv_transfer_params`. `on_record` is called with each
    record.
    """

    servers: Sequence[Server]
    model: str
    deadline_s: float = ANSWER_SECONDS
    extra: Mapping[str, Any] = field(default_factory=dict)
    on_record: Callable[[Record], None] = lambda _: None
    records: list[Record] = field(default_factory=list)
    began: float = field(default_factory=perf_counter)

    def now(self) -> float:
        """Returns the seconds since the run began."""
        return perf_counter() - self.began

    async def until(self, moment: float) -> None:
        """Waits until `moment` seconds after the run began; returns immediately if this time has
        passed.
        """
        await asyncio.sleep(max(moment - self.now(), 0.0))

    async def send(self, request: Request) -> Record:
        """Sends one request and waits for its answer. The record of a failed request has an
        `error`.
        """
        server = request.turn % len(self.servers)
        sent = self.now()
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({} if isinstance(request.prompt, str) else {"return_token_ids": True}),
            **self.extra,
        }
        record = Record(request.session, request.round, server, request.history_tokens, sent)
        try:
            reply = await self.servers[server].complete(body, self.deadline_s)
            if not reply.arrivals:
                raise ServingError(
                    f"{self.servers[server].base_url}: the answer has no tokens: look into the "
                    "server's log"
                )
        except ServingError as error:
            record = replace(record, error=str(error))
        else:
            record = replace(
                record,
                prompt_tokens=reply.prompt_tokens or len(request.prompt),
                answer_tokens=reply.answer_tokens,
                cached_tokens=reply.cached_tokens,
                ttft_s=reply.arrivals[0],
                gaps_s=tuple(b - a for a, b in pairwise(reply.arrivals)),
                total_s=reply.total_s,
                answer=reply.answer,
            )
        self.records.append(record)
        self.on_record(record)
        return record

    async def run(self, workload: Workload) -> list[Record]:
        """Runs the workload to its end and returns its records."""
        self.began, self.records = perf_counter(), []
        await workload.run(self)
        return self.records
