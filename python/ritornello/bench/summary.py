"""Results of a run: rows by round and history, and totals with hits by tier."""

from collections.abc import Sequence
from dataclasses import dataclass

from ritornello.bench.confidence import Groups, interval, mean, quantile
from ritornello.bench.driver import Record
from ritornello.bench.metrics import Metrics


@dataclass(frozen=True)
class Row:
    """The answered requests with a history of one round, or its answered requests without one.
    `history_tokens`, `prompt_tokens`: mean tokens of the history, and of the prompt with its
    history. `requests`: number of these requests. `ttft_low_s` to `ttft_high_s`: 95 % interval of
    the mean TTFT, by resampling sessions. `gap_mean_s`, `gap_p99_s`: time between chunks of an
    answer. `prompt_tokens_s`: mean, over requests, of the prompt's tokens divided by the TTFT.
    `answer_tokens_s`: mean, over requests, of the answer's tokens after the first, divided by the
    time after the first token; an answer in a single chunk counts as 0. `hit_rate`: cached tokens
    as a share of the prompt tokens of the answers that report cached tokens; None if no answer
    does.
    """

    round: int
    history_tokens: int
    prompt_tokens: int
    requests: int
    ttft_mean_s: float
    ttft_low_s: float
    ttft_high_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    gap_mean_s: float
    gap_p99_s: float
    prompt_tokens_s: float
    answer_tokens_s: float
    hit_rate: float | None


@dataclass(frozen=True)
class Total:
    """Results of the whole run. `requests`: number of requests, of which `failed` failed.
    `duration_s`: from the sending of the first answered request to the end of the last answer.
    Answered requests per second (`requests_s`) and tokens per second are over this time; tokens
    are of answered requests, cached tokens included. From the engines' `/metrics`, None without it:
    `hit_tokens`, the cached prompt tokens by the tier that supplied them, and `counters`, the
    connector's counters. `hit_rate`: cached tokens as a share of the prompt tokens, from `/metrics`
    or, without it, from the answers that report cached tokens; None if none does.
    """

    requests: int
    failed: int
    duration_s: float
    requests_s: float
    prompt_tokens: int
    prompt_tokens_s: float
    answer_tokens_s: float
    hit_tokens: dict[str, int] | None
    hit_rate: float | None
    counters: dict[str, float] | None


def sessions(records: Sequence[Record]) -> list[list[Record]]:
    """Returns answered requests, one list for each session, sorted by session."""
    found: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda r: (r.session, r.round, r.sent_s)):
        if not record.error:
            found.setdefault(record.session, []).append(record)
    return list(found.values())


def ttfts(records: Sequence[Record]) -> Groups:
    """Returns the TTFTs of answered requests, by session."""
    return [[record.ttft_s for record in session] for session in sessions(records)]


def cached_share(records: Sequence[Record]) -> float | None:
    """Returns the share of prompt tokens that were cached, by the counts that the server sent with
    its answers.
    """
    counted = [r for r in records if not r.error and r.cached_tokens is not None]
    tokens = sum(r.prompt_tokens for r in counted)
    return sum(r.cached_tokens or 0 for r in counted) / tokens if tokens else None


def row(records: Sequence[Record]) -> Row:
    """Summarises answered requests; needs at least one."""
    times = [r.ttft_s for r in records]
    gaps = [gap for r in records for gap in r.gaps_s] or [0.0]
    ttft_interval = interval(ttfts(records))
    return Row(
        round=records[0].round,
        history_tokens=round(mean([r.history_tokens for r in records])),
        prompt_tokens=round(mean([r.prompt_tokens for r in records])),
        requests=len(records),
        ttft_mean_s=ttft_interval.value,
        ttft_low_s=ttft_interval.low,
        ttft_high_s=ttft_interval.high,
        ttft_p50_s=quantile(times, 0.5),
        ttft_p90_s=quantile(times, 0.9),
        ttft_p99_s=quantile(times, 0.99),
        gap_mean_s=mean(gaps),
        gap_p99_s=quantile(gaps, 0.99),
        prompt_tokens_s=mean([r.prompt_tokens / r.ttft_s for r in records]),
        answer_tokens_s=mean([_answer_speed(r) for r in records]),
        hit_rate=cached_share(records),
    )


def _answer_speed(record: Record) -> float:
    """Returns tokens per second after the first token; 0 if the answer came in a single chunk."""
    answer_seconds = sum(record.gaps_s)
    return (record.answer_tokens - 1) / answer_seconds if answer_seconds else 0.0


def rows(records: Sequence[Record]) -> list[Row]:
    """Returns the rows of answered requests, by round: one row for a round's requests with a
    history, one for its requests without a history.
    """
    groups: dict[tuple[int, bool], list[Record]] = {}
    for record in records:
        if not record.error:
            groups.setdefault((record.round, record.history_tokens > 0), []).append(record)
    return [row(groups[key]) for key in sorted(groups)]


def total(records: Sequence[Record], metrics: Metrics | None) -> Total:
    """Summarises the run. `metrics`: growth of the engines' counters."""
    answered = [r for r in records if not r.error]
    started = min((r.sent_s for r in answered), default=0.0)
    duration = max((r.sent_s + r.total_s for r in answered), default=started) - started
    prompt_tokens = sum(r.prompt_tokens for r in answered)

    def per_second(amount: float) -> float:
        return amount / duration if duration else 0.0

    hits = metrics.hit_tokens() if metrics else None
    if metrics and hits is not None and metrics.prompt_tokens():
        hit_rate: float | None = sum(hits.values()) / metrics.prompt_tokens()
    else:
        hit_rate = cached_share(answered)
    return Total(
        requests=len(records),
        failed=len(records) - len(answered),
        duration_s=duration,
        requests_s=per_second(len(answered)),
        prompt_tokens=prompt_tokens,
        prompt_tokens_s=per_second(prompt_tokens),
        answer_tokens_s=per_second(sum(r.answer_tokens for r in answered)),
        hit_tokens=hits,
        hit_rate=hit_rate,
        counters=metrics.connector_counters() if metrics else None,
    )
