"""The engines' own accounts of a run, read from `/metrics` before and after it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ritornello.bench.client import Server, ServingError
from ritornello.bench.metrics import Metrics

SETTLE_SECONDS = 10.0
# vLLM counts an answer after it has been sent, and publishes now and then.
LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Watch:
    """Counters of all servers at the begin of a run; None where a server has none."""

    servers: Sequence[Server]
    before: Metrics | None

    @classmethod
    async def begin(cls, servers: Sequence[Server]) -> "Watch":
        return cls(servers, await _read(servers))

    async def end(self, prompt_tokens: int) -> Metrics | None:
        """What the counters grew by, once they account for `prompt_tokens`, or all that they do
        within ten seconds.
        """
        if self.before is None:
            return None
        waited = 0.0
        while (now := await _read(self.servers)) is not None:
            grown = now.since(self.before)
            if grown.prompt_tokens() >= prompt_tokens or waited >= SETTLE_SECONDS:
                return grown
            await asyncio.sleep(LOOK_SECONDS)
            waited += LOOK_SECONDS
        return None


async def _read(servers: Sequence[Server]) -> Metrics | None:
    try:
        texts = await asyncio.gather(*(server.get("/metrics") for server in servers))
    except ServingError:
        return None
    return Metrics.together(Metrics.parse(text) for text in texts)
