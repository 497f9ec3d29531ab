"""The growth of the engines' counters during a run, from reads of `/metrics` before and after the
run.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ritornello.bench.client import Server, ServingError
from ritornello.bench.metrics import Metrics

# After a run the counters are read every `POLL_SECONDS`, for at most `COUNTERS_SECONDS` of pauses,
# because vLLM updates the counters some time after an answer.
COUNTERS_SECONDS = 10.0
POLL_SECONDS = 0.25


@dataclass(frozen=True)
class MetricsWatch:
    """`before`: the counters at the start of a run, summed over all servers; None if a server does
    not serve `/metrics`.
    """

    servers: Sequence[Server]
    before: Metrics | None

    @classmethod
    async def begin(cls, servers: Sequence[Server]) -> "MetricsWatch":
        return cls(servers, await _read(servers))

    async def end(self, prompt_tokens: int) -> Metrics | None:
        """Returns the growth of the counters once the servers have counted at least `prompt_tokens`
        prompt tokens, or after ten seconds of pauses; None if a server does not serve `/metrics`.
        """
        if self.before is None:
            return None
        waited = 0.0
        while (now := await _read(self.servers)) is not None:
            grown = now.since(self.before)
            if grown.prompt_tokens() >= prompt_tokens or waited >= COUNTERS_SECONDS:
                return grown
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
        return None


async def _read(servers: Sequence[Server]) -> Metrics | None:
    try:
        texts = await asyncio.gather(*(server.get("/metrics") for server in servers))
    except ServingError:
        return None
    return Metrics.sum_of(Metrics.parse(text) for text in texts)
