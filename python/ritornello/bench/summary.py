"""What a run came to: rows by round and history, and totals with hits by tier."""

from collections.abc import Sequence
from dataclasses import dataclass

from ritornello.bench.confidence import Groups, interval, mean, quantile
from ritornello.bench.driver import Record
from ritornello.bench.metrics import Metrics


@dataclass(frozen=True)
class Row:
    """Requests of one round that had as much history, in the mean. `ttft_low_s` to `ttft_high_s`
    holds the mean at 95 %, sessions drawn. `gap`: time between chunks of an answer.
    `prompt_tokens_s` and `answer_tokens_s`: tokens a second of one request, to its first token and
    from there on, in the mean. `hit_rate`: cached prompt tokens over all, where the server says so
    with each answer; else None.
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
    """Of the whole run. Tokens a second are over its duration, hits included. `hit_tokens` by the
    tier that supplied them and `counters` of our connector are the engines' own accounts; None
    where an engine has no `/metrics`.
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
    """Answered requests, one list a session, in the order of sessions."""
    found: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda r: (r.session, r.round, r.sent_s)):
        if not record.error:
            found.setdefault(record.session, []).append(record)
    return list(found.values())


def ttfts(records: Sequence[Record]) -> Groups:
    """Of answered requests, grouped by session."""
    return [[record.ttft_s for record in session] for session in sessions(records)]


def cached_share(records: Sequence[Record]) -> float | None:
    """Cached prompt tokens over prompt tokens, as said with the answers."""
    said = [r for r in records if not r.error and r.cached_tokens is not None]
    tokens = sum(r.prompt_tokens for r in said)
    return sum(r.cached_tokens or 0 for r in said) / tokens if tokens else None


def row(records: Sequence[Record]) -> Row:
    """Of answered requests that belong together; needs at least one."""
    times = [r.ttft_s for r in records]
    gaps = [gap for r in records for gap in r.gaps_s] or [0.0]
    trusted = interval(ttfts(records))
    return Row(
        round=records[0].round,
        history_tokens=round(mean([r.history_tokens for r in records])),
        prompt_tokens=round(mean([r.prompt_tokens for r in records])),
        requests=len(records),
        ttft_mean_s=trusted.value,
        ttft_low_s=trusted.low,
        ttft_high_s=trusted.high,
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
    """Tokens a second after the first; 0 where there is one token only."""
    spoken = sum(record.gaps_s)
    return (record.answer_tokens - 1) / spoken if spoken else 0.0


def rows(records: Sequence[Record]) -> list[Row]:
    """One a round; requests without any history apart from those with."""
    groups: dict[tuple[int, bool], list[Record]] = {}
    for record in records:
        if not record.error:
            groups.setdefault((record.round, record.history_tokens > 0), []).append(record)
    return [row(groups[key]) for key in sorted(groups)]


def total(records: Sequence[Record], metrics: Metrics | None) -> Total:
    """`metrics`: what the engines' counters grew by in the run."""
    answered = [r for r in records if not r.error]
    begun = min((r.sent_s for r in answered), default=0.0)
    duration = max((r.sent_s + r.total_s for r in answered), default=begun) - begun
    prompt_tokens = sum(r.prompt_tokens for r in answered)

    def a_second(amount: float) -> float:
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
        requests_s=a_second(len(answered)),
        prompt_tokens=prompt_tokens,
        prompt_tokens_s=a_second(prompt_tokens),
        answer_tokens_s=a_second(sum(r.answer_tokens for r in answered)),
        hit_tokens=hits,
        hit_rate=hit_rate,
        counters=metrics.ours() if metrics else None,
    )
