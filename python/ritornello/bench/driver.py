"""Sends the requests of a workload to one server or several, and keeps what came of each."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

from ritornello.bench.client import Prompt, Reply, Server, ServingError

ANSWER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a session. `history_tokens`: how many tokens of the prompt, from its first on,
    an earlier request of the session had or was answered. It goes to server `turn`, counted round.
    """

    session: int
    round: int
    turn: int
    prompt: Prompt
    history_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """What came of a request. `sent_s` counts from the start of the run, `ttft_s` and `total_s`
    from sending; `gaps_s` lie between the chunks of the answer. `error` where there was no answer.
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
        """History of the session's next request."""
        return self.prompt_tokens + self.answer_tokens


class Workload(Protocol):
    """A pattern of requests; the same seed and the same answers make the same ones."""

    @property
    def requests(self) -> int | None:
        """How many there will be; None where that depends on time."""

    async def run(self, driver: "Driver") -> None:
        """Asks until all is asked and answered."""


@dataclass
class Driver:
    """`extra` goes into every request, as `kv_transfer_params` would."""

    servers: Sequence[Server]
    model: str
    deadline_s: float = ANSWER_SECONDS
    extra: Mapping[str, Any] = field(default_factory=dict)
    on_record: Callable[[Record], None] = lambda _: None
    records: list[Record] = field(default_factory=list)
    began: float = field(default_factory=perf_counter)

    def now(self) -> float:
        """Seconds since the run began."""
        return perf_counter() - self.began

    async def until(self, moment: float) -> None:
        """Waits for a moment of the run; not at all where it has passed."""
        await asyncio.sleep(max(moment - self.now(), 0.0))

    async def ask(self, ask: Ask) -> Record:
        """Sends one request and waits for its answer. A failure is a record, too."""
        place = ask.turn % len(self.servers)
        sent = self.now()
        body = {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({} if isinstance(ask.prompt, str) else {"return_token_ids": True}),
            **self.extra,
        }
        try:
            reply = await self.servers[place].complete(body, self.deadline_s)
            if not reply.arrivals:
                raise ServingError(f"{self.servers[place].base_url}: an answer without tokens")
        except ServingError as error:
            record = Record(
                ask.session, ask.round, place, ask.history_tokens, sent, error=str(error)
            )
        else:
            record = _record(ask, place, sent, reply)
        self.records.append(record)
        self.on_record(record)
        return record

    async def run(self, workload: Workload) -> list[Record]:
        """All of a workload, from now on."""
        self.began, self.records = perf_counter(), []
        await workload.run(self)
        return self.records


def _record(ask: Ask, place: int, sent: float, reply: Reply) -> Record:
    arrivals = reply.arrivals
    prompt_tokens = reply.prompt_tokens or len(ask.prompt)
    return Record(
        session=ask.session,
        round=ask.round,
        server=place,
        history_tokens=ask.history_tokens,
        sent_s=sent,
        prompt_tokens=prompt_tokens,
        answer_tokens=reply.answer_tokens,
        cached_tokens=reply.cached_tokens,
        ttft_s=arrivals[0],
        gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
        total_s=reply.total_s,
        answer=reply.answer,
    )
