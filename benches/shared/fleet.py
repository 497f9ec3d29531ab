"""Two `vllm serve` processes with the same set-up: start, warm-up, measurement, comparison,
stop.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.shared.setups import Scale
from ritornello.bench.client import Server
from ritornello.bench.confidence import mean
from ritornello.bench.driver import Driver, Record, Workload
from ritornello.bench.engines import MetricsWatch
from ritornello.bench.long_context import LongContext
from ritornello.bench.metrics import Metrics
from ritornello.bench.multi_round_qa import MultiRoundQA
from ritornello.bench.prompts import Source
from servers.environment import ROOT
from servers.process import Started
from servers.vllm import VLLMServer

ENGINES = 2
ANSWER_SECONDS = 300.0
# Number of prompts that a set-up answers twice, if its answers are compared with the answers of the
# engine alone.
CHECKS = 3
# Seconds between the answers of the first and of the second engine to the same prompts, in which
# the pages of the first engine reach the tiers.
STORED_SECONDS = 4.0
# Answers by prompt and number of cached tokens: equal prompts with equally many cached tokens must
# get equal answers.
Answers = dict[tuple[int, int], tuple[int, ...]]


@dataclass
class Engine(VLLMServer):
    """One of two engines that share a machine's cores, with little KV memory."""

    scale: Scale = field(kw_only=True)
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def _command(self) -> list[str]:
        return [*super()._command(), "--enable-prompt-tokens-details"]

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            "OMP_NUM_THREADS": str(self.threads),
            # The engine's processes import `servers.cpu_offloading`.
            "PYTHONPATH": str(ROOT),
            **self.environment,
        }


@dataclass(frozen=True)
class Measured:
    """A workload's requests, and the growth of the engines' counters while they ran."""

    records: Sequence[Record]
    metrics: Metrics | None


@dataclass
class Fleet(Started):
    engines: Sequence[Engine]
    scale: Scale

    @classmethod
    def of(
        cls,
        title: str,
        scale: Scale,
        configs: Sequence[dict[str, Any] | None],
        *,
        program: Path,
        folder: Path,
        cores: int,
        environment: Mapping[str, str],
    ) -> "Fleet":
        """Returns a fleet that is not started yet. `configs`: `kv_transfer_config` of each
        engine; None for an engine without a connector.
        """
        name = "".join(c if c.isalnum() else "-" for c in title)
        engines = [
            Engine(
                name=f"{title}, engine {number}",
                program=program,
                model=folder / "model",
                log=folder / f"{name}-{number}.log",
                max_tokens=-(-(scale.longest + 1) // scale.block) * scale.block,
                connector=config,
                kv_blocks=scale.device // scale.block,
                scale=scale,
                threads=max(cores // ENGINES, 1),
                environment=environment,
            )
            for number, config in enumerate(configs)
        ]
        return cls(engines, scale)

    def start(self) -> None:
        with ThreadPoolExecutor(ENGINES) as pool:
            list(pool.map(Engine.__enter__, self.engines))
        self._warm_up()

    def stop(self) -> None:
        with ThreadPoolExecutor(ENGINES) as pool:
            list(pool.map(Engine.stop, self.engines))

    def _warm_up(self) -> None:
        """Sends requests that are not measured, because a process builds some parts at its first
        request.
        """
        source = Source(0)
        for number, engine in enumerate(self.engines):
            prompt = [int(t) for t in source.piece(f"warm-up {number}", 4 * self.scale.block)]
            engine.ask(prompt, 4, remember=False)

    def measure(self, workload: Workload) -> Measured:
        """Runs a workload against both engines, round robin."""

        async def run() -> Measured:
            servers = [Server(f"http://127.0.0.1:{engine.port}") for engine in self.engines]
            watch = await MetricsWatch.begin(servers)
            records = await Driver(servers, "demo", ANSWER_SECONDS).run(workload)
            told = await watch.end(sum(record.prompt_tokens for record in records))
            return Measured(records, told)

        return asyncio.run(run())

    def speed(self, history: int) -> "Speed":
        """Measures both engines while they compute new prompts of `history` tokens, two prompts at
        a time. The engines get the prompts in turn.
        """
        scale = self.scale
        documents = LongContext(
            source=Source(history + 1),
            num_documents=2 * ENGINES,
            document_length=history,
            output_len=scale.answer,
            repeat_count=0,
            repeat_mode="tile",
            max_inflight_requests=ENGINES,
        )
        answered = [r for r in self.measure(documents).records if not r.error]
        gaps = [gap for record in answered for gap in record.gaps_s]
        return Speed(mean([r.prompt_tokens / r.ttft_s for r in answered]), mean(gaps))

    def multi_round_qa(self, history: int, qps: float) -> Measured:
        """Runs multi-round QA with histories of `history` tokens, whose contents differ from the
        histories of other lengths.
        """
        scale = self.scale
        return self.measure(
            MultiRoundQA(
                source=Source(history),
                num_users=scale.users,
                num_rounds=scale.rounds,
                qps=qps,
                shared_system_prompt=scale.system,
                user_history_prompt=history,
                answer_len=scale.answer,
                question_len=scale.question,
            )
        )

    def answers(self, alone: bool) -> Answers:
        """Returns greedy answers to single requests. New prompts go to the first engine. Then the
        prompts go to the second engine or, if the engines share no tier (`alone`), again to the
        first, whose own cache has them.
        """
        first = self._greedy(0)
        if not alone:
            time.sleep(STORED_SECONDS)
        return first | self._greedy(0 if alone else 1)

    def _greedy(self, engine: int) -> Answers:
        told: Answers = {}
        for number in range(CHECKS):
            record = self._ask(number, engine)
            answer = tuple(token for token in record.answer if isinstance(token, int))
            told[number, record.cached_tokens or 0] = answer
        return told

    def _ask(self, number: int, engine: int) -> Record:
        document = LongContext(
            source=Source(1000 + number),
            num_documents=1,
            document_length=8 * self.scale.block,
            output_len=self.scale.answer,
            repeat_count=0,
            repeat_mode="tile",
            max_inflight_requests=1,
        )

        async def run() -> Record:
            server = Server(f"http://127.0.0.1:{self.engines[engine].port}")
            (record,) = await Driver([server], "demo", ANSWER_SECONDS).run(document)
            return record

        return asyncio.run(run())


@dataclass(frozen=True)
class Speed:
    """Speed of one engine while both engines have the same load: prefilled tokens per second, and
    seconds between the tokens of an answer.
    """

    prefill_tokens_s: float
    gap_s: float

    def qps(self, scale: Scale, history: int) -> float:
        """Returns the questions per second that would keep two engines without tiers busy for
        `scale.load` of the time, at most `scale.most_qps`.
        """
        said = scale.rounds / 2 * (scale.question + scale.answer)
        prompt = scale.system + history + said
        seconds = prompt / self.prefill_tokens_s + scale.answer * self.gap_s
        qps = scale.load * ENGINES / seconds
        return qps if scale.most_qps is None else min(qps, scale.most_qps)


def equal_answer_share(mine: Sequence[Record], reference: Sequence[Record]) -> float | None:
    """Returns the share of answers equal to the reference run's answers, among equal prompts. A
    session's prompts are equal as long as its earlier answers are equal. Answers may differ,
    because other requests in a batch change rounding. Returns None if no answers were compared.
    """
    told = {(r.session, r.round): r.answer for r in reference if not r.error}
    equal, compared = 0, 0
    by_session: dict[int, list[Record]] = {}
    for record in mine:
        by_session.setdefault(record.session, []).append(record)
    for session in by_session.values():
        for record in sorted(session, key=lambda r: r.round):
            theirs = told.get((record.session, record.round))
            if record.error or theirs is None:
                break
            compared += 1
            if record.answer != theirs:
                break
            equal += 1
    return equal / compared if compared else None
