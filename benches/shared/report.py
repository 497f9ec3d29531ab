"""Results of the set-ups: rows, ratios with their intervals, checks, the table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benches.shared.fleet import Answers, Measured, Speed, equal_answer_share
from benches.shared.setups import (
    ALONE,
    EXPECTED,
    HOST,
    HOST_OF,
    LOWER,
    Scale,
    Setup,
    fixed_gate_setups,
)
from ritornello.bench.confidence import Groups, Interval, mean, quantile, ratio, regret
from ritornello.bench.driver import Record
from ritornello.bench.show import percent, seconds
from ritornello.bench.summary import sessions, total, ttfts

# Aims. If the lowest tier has `ENOUGH_X` times the break-even rate or more, TTFT is at most `CUT`
# of the TTFT with only the host tier; at `LITTLE_X` times break-even, at most `WORSE` of the TTFT
# of the engine alone. The gate's regret is at most `REGRET`. The regret is the share by which TTFT
# with the gate exceeds the shorter TTFT of always loading and of never loading. At the break-even
# rate, loading a prompt takes as long as computing it.
ENOUGH_X, CUT, LITTLE_X, WORSE, REGRET = 2.0, 0.6, 0.5, 1.05, 0.10


@dataclass(frozen=True)
class Row:
    """One set-up at one length of history. TTFT is measured on questions with a history (all
    rounds except round 0), except for `ttft_first_mean_s`, the mean of round 0. Intervals are at
    95 %, over users. `tier_rate_x`: the rate of the lowest tier divided by the break-even rate;
    None without a limit. `gap_mean_s`: mean seconds between the tokens of an answer. `hit_rate`:
    prompt tokens from any cache divided by all prompt tokens, first questions included.
    `over_alone` and `over_host`: mean TTFT divided by the mean TTFT of the engine alone, and of the
    set-up without lower tiers. `gate_regret`: the regret that the comment of `REGRET` defines; None
    if it was not measured. `answers_as_alone`: the share of answers that equal the answers of
    the engine alone. `counters`: the growth of the connector's counters.
    """

    setup: str
    history_tokens: int
    tier_rate_x: float | None
    gate: str
    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_first_mean_s: float
    gap_mean_s: float
    prompt_tokens_s: float
    answer_tokens_s: float
    hit_rate: float | None
    hit_rate_by_tier: dict[str, float]
    over_alone: Interval | None
    over_host: Interval | None
    gate_regret: Interval | None
    answers_as_alone: float | None
    counters: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """Measurements of one set-up, by length of history, and its answers to requests that were sent
    one at a time. `took_s`: seconds that the set-up took, the engines' start included.
    """

    setup: Setup
    measured: dict[int, Measured] = field(default_factory=dict)
    answers: Answers = field(default_factory=dict)
    took_s: float = 0.0


@dataclass
class Report:
    """All results so far. `speeds`: by length of history. `left_out`: set-ups that were not
    measured, with reasons. `broken`: a message for each fact that does not hold (see `check`), and
    for each set-up that failed.
    """

    scale: Scale
    bytes_per_token: int = 0
    speeds: dict[int, Speed] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def prefill_tokens_s(self, history: int) -> float:
        """Returns how many prompt tokens the engine alone computes per second until the first token
        of an answer: the median over its answered questions with a history of this length; 0 if it
        answered no such question.
        """
        seen = self._records(self.reference(ALONE), history)
        computed = [(r.prompt_tokens - (r.cached_tokens or 0)) / r.ttft_s for r in _returning(seen)]
        return quantile(computed, 0.5) if computed else 0.0

    def break_even(self, history: int) -> float:
        """Returns the bytes per second at which loading a prompt with a history of this length
        takes as long as computing it.
        """
        return self.prefill_tokens_s(history) * self.bytes_per_token

    def reference(self, name: str) -> Run | None:
        return next((run for run in self.runs if run.setup.name == name), None)

    def rows(self) -> list[Row]:
        return [
            self._row(run, history, measured)
            for run in self.runs
            for history, measured in run.measured.items()
            if _returning(measured.records)
        ]

    def _row(self, run: Run, history: int, measured: Measured) -> Row:
        back, first = _returning(measured.records), _first(measured.records)
        times = [record.ttft_s for record in back]
        gaps = [gap for record in back for gap in record.gaps_s] or [0.0]
        whole = total(measured.records, measured.metrics)
        tokens = measured.metrics.prompt_tokens() if measured.metrics else 0
        by_tier = {tier: hit / tokens for tier, hit in (whole.hit_tokens or {}).items() if tokens}
        alone = self._records(self.reference(ALONE), history)
        host = HOST_OF.get(run.setup.name, HOST)
        return Row(
            setup=run.setup.name,
            history_tokens=round(mean([record.history_tokens for record in back])),
            tier_rate_x=run.setup.rate_x,
            gate=run.setup.gate,
            requests=whole.requests,
            failed=whole.failed,
            ttft_mean_s=mean(times),
            ttft_p50_s=quantile(times, 0.5),
            ttft_p90_s=quantile(times, 0.9),
            ttft_p99_s=quantile(times, 0.99),
            ttft_first_mean_s=mean([record.ttft_s for record in first]),
            gap_mean_s=mean(gaps),
            prompt_tokens_s=whole.prompt_tokens_s,
            answer_tokens_s=whole.answer_tokens_s,
            hit_rate=whole.hit_rate,
            hit_rate_by_tier=by_tier,
            over_alone=self._over(back, self.reference(ALONE), history, run),
            over_host=self._over(back, self.reference(host), history, run),
            gate_regret=self._regret(run, back, history),
            answers_as_alone=equal_answer_share(measured.records, alone) if alone else None,
            counters=whole.counters or {},
        )

    @staticmethod
    def _records(run: Run | None, history: int) -> Sequence[Record]:
        return run.measured[history].records if run and history in run.measured else ()

    def _over(
        self, back: Sequence[Record], other: Run | None, history: int, run: Run
    ) -> Interval | None:
        """Returns the mean TTFT of `back`, the answered questions of `run` with a history, divided
        by the mean TTFT of such questions in `other`. Counts only sessions with such questions in
        both runs. None if `other` has no such questions, or is `run`.
        """
        theirs = _returning(self._records(other, history))
        if not theirs or other is run:
            return None
        mine, ours = paired(back, theirs)
        return ratio(mine, ours)

    def _regret(self, run: Run, back: Sequence[Record], history: int) -> Interval | None:
        if run.setup.gate != "auto" or run.setup.rate_x is None:
            return None
        names = fixed_gate_setups(run.setup, (other.setup for other in self.runs))
        others = [
            _returning(self._records(other, history))
            for name in names
            for other in self.runs
            if other.setup == name
        ]
        if not others or not all(others):
            return None
        chosen, *rest = paired(back, *others)
        return regret(chosen, rest)

    def check(self) -> None:
        """Adds a message to `broken` for each violation of a fact that holds at any speed: no
        request fails, answers equal the answers of the engine alone, and the tested tier has hits.
        """
        alone = self.reference(ALONE)
        for run in self.runs:
            title = run.setup.title
            failed = [
                record.error
                for measured in run.measured.values()
                for record in measured.records
                if record.error
            ]
            if failed:
                self.broken.append(f"{title}: {len(failed)} requests failed: {failed[0]}")
            if alone and run is not alone:
                self.broken += answer_differences(title, run, alone.answers)
            self.broken += [f"{title}: {told}" for told in _without_hits(run)]

    def compared(self) -> dict[str, list[int]]:
        """Returns, by set-up, the numbers of cached tokens of the answers that were compared with
        answers of the engine alone, in ascending order.
        """
        alone = self.reference(ALONE)
        return {
            run.setup.title: sorted(cached for _, cached in run.answers.keys() & alone.answers)
            for run in self.runs
            if alone and run is not alone
        }

    def aims(self) -> list[str]:
        """Returns a line for each aim that applies to a row: value, limit, and whether it was
        reached. Aims apply to set-ups with a rate-limited lowest tier and the gate "auto".
        """
        told = []
        for row in self.rows():
            if row.setup not in LOWER or row.gate != "auto" or row.tier_rate_x is None:
                continue
            at = f"{row.setup} at {row.tier_rate_x:g}x, {row.history_tokens:,} tokens"
            if row.tier_rate_x >= ENOUGH_X and row.over_host:
                told.append(_aim(f"{at}: TTFT over host only", row.over_host, CUT))
            if row.tier_rate_x == LITTLE_X and row.over_alone:
                told.append(_aim(f"{at}: TTFT over the engine alone", row.over_alone, WORSE))
            if row.gate_regret:
                told.append(_aim(f"{at}: gate regret", row.gate_regret, REGRET))
        return told

    def write(self, path: Path, **more: Any) -> None:
        scale = self.scale
        kib = self.bytes_per_token / 1024
        working = {h: scale.working_set(h) * self.bytes_per_token for h in scale.histories}
        told = {
            "scale": asdict(scale),
            "bytes_per_token": self.bytes_per_token,
            "working_set_bytes": working,
            "device_bytes": round(scale.device * kib * 1024),
            "prefill_tokens_s": {at: self.prefill_tokens_s(at) for at in self.speeds},
            "break_even_bytes_s": {at: self.break_even(at) for at in self.speeds},
            "qps": {at: speed.qps(scale, at) for at, speed in self.speeds.items()},
            **more,
            "rows": [asdict(row) for row in self.rows()],
            "answers_compared": self.compared(),
            "aims": self.aims(),
            "left_out": [{"setup": title, "reason": why} for title, why in self.left_out],
            "broken": self.broken,
        }
        path.write_text(json.dumps(told, indent=2) + "\n")


def answer_differences(
    title: str, run: Run, alone: Mapping[tuple[int, int], tuple[int, ...]]
) -> list[str]:
    """Returns a message for each answer that differs from the answer of the engine alone to the
    same prompt with the same number of cached tokens. A message also says that no answer to a
    prompt with cached tokens could be compared, if the set-up has answers to compare
    (`Setup.has_answers`), and loads every hit or has no rate limit.
    """
    both = run.answers.keys() & alone.keys()
    told = [
        f"{title}: the answer to prompt {number}, with {cached} tokens cached, differs from the "
        "answer of the engine alone"
        for number, cached in sorted(both)
        if run.answers[number, cached] != alone[number, cached]
    ]
    if run.setup.has_answers and not any(cached for _, cached in both):
        seen = sorted(cached for _, cached in run.answers)
        if run.setup.gate == "always" or run.setup.rate_x is None:
            told.append(
                f"{title}: no answer with cached tokens could be compared with the answers of "
                f"the engine alone; cached tokens of these answers: {seen}"
            )
    return told


def paired(*runs: Sequence[Record]) -> list[Groups]:
    """Returns the TTFTs of each run by session, in the same order of sessions for all runs. Leaves
    out a session that has no answer in some run.
    """
    of = [{session[0].session: session for session in sessions(run)} for run in runs]
    both = sorted(set.intersection(*(set(one) for one in of)))
    return [ttfts([record for name in both for record in one[name]]) for one in of]


def _returning(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record.error and record.history_tokens]


def _first(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record.error and not record.history_tokens]


def _without_hits(run: Run) -> list[str]:
    """Returns a message if no hit came from the tier that a set-up tests (`EXPECTED`). Returns no
    message if the set-up tests no tier, if it never loads, or if its gate decides and the rate of
    its lowest tier is limited.
    """
    tier = EXPECTED.get(run.setup.name)
    free = run.setup.gate == "always" or run.setup.rate_x is None
    if tier is None or not free or run.setup.gate == "never":
        return []
    found = [m.metrics.hit_tokens() for m in run.measured.values() if m.metrics]
    if any(hits.get(tier) for hits in found):
        return []
    return [f"no hit came from the tier {tier}; hit tokens by tier, for each length: {found}"]


def _aim(what: str, found: Interval, most: float) -> str:
    reached = "reached" if found.value <= most else "not reached"
    return f"{what} {found}, at most {most:g}: {reached}"


def table(rows: Sequence[Row]) -> Table:
    made = Table(title="Multi-round QA on two engines: questions with a history")
    for name in ("set-up", "history\ntokens", "rate", "gate", "TTFT\nmean", "p50", "p90", "p99"):
        made.add_column(name, justify="left" if name == "set-up" else "right", no_wrap=True)
    for name in ("first\nTTFT", "over\nalone", "over\nhost", "regret", "prompt\ntokens/s", "hits"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("by tier")
    for r in rows:
        made.add_row(
            r.setup,
            f"{r.history_tokens:,}",
            f"{r.tier_rate_x:g}x" if r.tier_rate_x else "",
            r.gate,
            *(seconds(v) for v in (r.ttft_mean_s, r.ttft_p50_s, r.ttft_p90_s, r.ttft_p99_s)),
            seconds(r.ttft_first_mean_s),
            f"{r.over_alone.value:.2f}" if r.over_alone else "",
            f"{r.over_host.value:.2f}" if r.over_host else "",
            f"{r.gate_regret.value:+.0%}" if r.gate_regret else "",
            f"{r.prompt_tokens_s:,.0f}",
            percent(r.hit_rate),
            ", ".join(f"{tier} {share:.0%}" for tier, share in r.hit_rate_by_tier.items()),
        )
    return made
