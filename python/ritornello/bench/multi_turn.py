"""Clients that converse in rounds. Requests are sent at a given rate, each for a client in a queue
of ready clients: the pattern and flags of SGLang's `bench_multiturn.py`.
"""

import argparse
import asyncio
import random
from dataclasses import dataclass, field

from ritornello.bench.client import Prompt
from ritornello.bench.driver import Driver, Request
from ritornello.bench.prompts import Source, joined

DISTRIBUTIONS = ("poisson", "uniform")
POLICIES = ("random", "fifo")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A client that waits to ask question number `round`. `history`: the conversation so far, of
    `known` tokens.
    """

    client: int
    round: int
    history: Prompt
    known: int


@dataclass
class ReadyQueue:
    """Clients that have not asked yet, or whose last answer has arrived. The policy `random` takes
    a random client, `fifo` the client that waits longest.
    """

    policy: str
    rng: random.Random
    waiting: list[Waiting] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, client: Waiting) -> None:
        self.waiting.append(client)
        self.changed.set()

    def pop(self) -> Waiting:
        """Removes and returns the client that asks next. The queue must not be empty."""
        index = 0 if self.policy == "fifo" else self.rng.randrange(len(self.waiting))
        return self.waiting.pop(index)


@dataclass(frozen=True)
class MultiTurn:
    """The load: `num_clients` clients, each of which asks `num_rounds` questions. Lengths are in
    tokens. A client's rounds go to the servers round robin.
    """

    source: Source
    num_clients: int
    num_rounds: int
    request_length: int
    output_length: int
    request_rate: float
    max_parallel: int
    distribution: str = "poisson"
    ready_queue_policy: str = "random"
    sub_question_input_length: int = 0

    @classmethod
    def flags(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--num-clients", type=int, default=256, help="number of clients (256)")
        add("--num-rounds", type=int, default=5, help="questions per client (5)")
        add("--request-length", type=int, default=512, help="tokens of a first question (512)")
        add(
            "--sub-question-input-length",
            type=int,
            default=0,
            help="tokens of each later question (default: --request-length)",
        )
        add("--output-length", type=int, default=64, help="tokens of an answer (64)")
        add("--request-rate", type=float, default=1.0, help="requests per second, on average (1)")
        add(
            "--distribution",
            choices=DISTRIBUTIONS,
            default="poisson",
            help="arrivals of requests: a Poisson process, or uniform random pauses (poisson)",
        )
        add("--max-parallel", type=int, default=128, help="maximum concurrent requests (128)")
        add(
            "--ready-queue-policy",
            choices=POLICIES,
            default="random",
            help="order in which waiting clients ask (random)",
        )

    @property
    def requests(self) -> int:
        return self.num_clients * self.num_rounds

    def pause_s(self, rng: random.Random) -> float:
        """Returns the seconds until the next request may be sent."""
        if self.distribution == "poisson":
            return rng.expovariate(self.request_rate)
        return rng.uniform(0, 2 / self.request_rate)

    async def run(self, driver: Driver) -> None:
        rng = random.Random(f"{self.source.seed}/arrivals")
        ready = ReadyQueue(self.ready_queue_policy, rng)
        slots = asyncio.Semaphore(self.max_parallel)
        active_clients = self.num_clients
        nothing = self.source.piece("nothing", 0)
        for client in range(self.num_clients):
            ready.append(Waiting(client, 0, nothing, 0))

        async def answer(client: Waiting) -> None:
            nonlocal active_clients
            following = await self._turn(driver, client)
            slots.release()
            if following is None:
                active_clients -= 1
                ready.changed.set()
            else:
                ready.append(following)

        async with asyncio.TaskGroup() as group:
            while active_clients:
                await slots.acquire()
                while active_clients and not ready.waiting:
                    ready.changed.clear()
                    await ready.changed.wait()
                if active_clients:
                    group.create_task(answer(ready.pop()))
                    await asyncio.sleep(self.pause_s(rng))

    async def _turn(self, driver: Driver, client: Waiting) -> Waiting | None:
        """Asks one question; returns the client's next question, or None after the last question or
        an error.
        """
        length = self.request_length
        if client.round and self.sub_question_input_length:
            length = self.sub_question_input_length
        name = f"client {client.client} question {client.round}"
        prompt = joined(client.history, self.source.piece(name, length))
        turn = client.client + client.round
        record = await driver.send(
            Request(client.client, client.round, turn, prompt, client.known, self.output_length)
        )
        if record.error or client.round + 1 == self.num_rounds:
            return None
        history = joined(prompt, record.answer)
        return Waiting(client.client, client.round + 1, history, record.known_tokens)
