"""Documents that are sent once and then asked about: the pattern and flags of the long document QA
benchmarks of vLLM and LMCache.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ritornello.bench.driver import Driver, Record, Request
from ritornello.bench.prompts import Source, joined

REPEAT_MODES = ("random", "tile", "interleave")


@dataclass(frozen=True)
class LongContext:
    """Round 0 sends every document once. Round 1 asks `repeat_count` questions about every
    document. `hit_miss_ratio` is (hit, miss): of every `hit + miss` consecutive questions of round
    1, the last `miss` are about new documents instead, each about a different document. Lengths are
    in tokens.
    """

    source: Source
    num_documents: int
    document_length: int
    output_len: int
    repeat_count: int
    repeat_mode: str
    max_inflight_requests: int
    question_len: int = 24
    hit_miss_ratio: tuple[int, int] = (1, 0)
    sleep_time_after_warmup: float = 0.0
    shuffle_seed: int = 0

    @classmethod
    def flags(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--num-documents", type=int, default=8, help="number of documents (8)")
        add("--document-length", type=int, default=20000, help="tokens of a document (20000)")
        add("--output-len", type=int, default=100, help="tokens of an answer (100)")
        add("--question-len", type=int, default=24, help="tokens of a question (24)")
        add("--repeat-count", type=int, default=2, help="questions about each document (2)")
        add(
            "--repeat-mode",
            choices=REPEAT_MODES,
            default="random",
            help="order of the questions: shuffled (random), each document in turn (tile), or all "
            "questions about a document together (interleave); default: random",
        )
        add("--shuffle-seed", type=int, default=0, help="seed of --repeat-mode random (0)")
        add("--max-inflight-requests", type=int, default=2, help="maximum concurrent requests (2)")
        add(
            "--sleep-time-after-warmup",
            type=float,
            default=0.0,
            help="seconds between the rounds (0)",
        )
        add(
            "--hit-miss-ratio",
            type=_hit_miss,
            default=(1, 0),
            help="ratio of questions about known documents to questions about new documents, "
            "such as 3:1 (default: no new documents)",
        )

    @property
    def requests(self) -> int:
        return self.num_documents * (1 + self.repeat_count)

    def order(self) -> list[int]:
        """Returns the numbers of the documents in the order of round 1's questions."""
        documents = range(self.num_documents)
        if self.repeat_mode == "interleave":
            return [document for document in documents for _ in range(self.repeat_count)]
        order = [*documents] * self.repeat_count
        if self.repeat_mode == "random":
            random.Random(self.shuffle_seed).shuffle(order)
        return order

    async def run(self, driver: Driver) -> None:
        history_tokens: dict[int, int] = {}
        warm_up = [
            self._request(document, 0, document, 0) for document in range(self.num_documents)
        ]
        for record in await self._send_all(driver, warm_up):
            if not record.error:
                history_tokens[record.session] = self.document_length
        await asyncio.sleep(self.sleep_time_after_warmup)
        hit, miss = self.hit_miss_ratio
        requests = []
        repeats = dict.fromkeys(range(self.num_documents), 0)
        for number, document in enumerate(self.order()):
            repeats[document] += 1
            if number % (hit + miss) >= hit:
                requests.append(self._request(self.num_documents + number, 1, number, 0))
            else:
                turn = document + repeats[document]
                requests.append(self._request(document, 1, turn, history_tokens.get(document, 0)))
        await self._send_all(driver, requests)

    async def _send_all(self, driver: Driver, requests: Sequence[Request]) -> list[Record]:
        slots = asyncio.Semaphore(self.max_inflight_requests)

        async def send(request: Request) -> Record:
            async with slots:
                return await driver.send(request)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(request)) for request in requests]
        return [task.result() for task in tasks]

    def _request(self, document: int, number: int, turn: int, history_tokens: int) -> Request:
        prompt = joined(
            self.source.piece(f"document {document}", self.document_length),
            self.source.piece(f"document {document} question {number} {turn}", self.question_len),
        )
        return Request(document, number, turn, prompt, history_tokens, self.output_len)


def _hit_miss(text: str) -> tuple[int, int]:
    hit, colon, miss = text.partition(":")
    if not (colon and hit.isdigit() and miss.isdigit() and int(hit)):
        raise argparse.ArgumentTypeError(f'{text!r}: write hits to misses, like "3:1"')
    return int(hit), int(miss)
