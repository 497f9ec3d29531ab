"""Results of the serving benchmark, `ritornello.bench`: statistics, the servers' counters, the rows
of its report, and its command.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_openai import FakeOpenAI, with_servers

from ritornello.bench import __main__ as command
from ritornello.bench.client import Server, ServingError
from ritornello.bench.confidence import interval, mean, quantile, ratio, regret
from ritornello.bench.driver import Record
from ritornello.bench.engines import MetricsWatch
from ritornello.bench.metrics import Metrics
from ritornello.bench.summary import rows, total, ttfts

FLAGS = (
    *("--num-users", "4", "--num-rounds", "3", "--qps", "400", "--shared-system-prompt", "32"),
    *("--user-history-prompt", "64", "--answer-len", "4", "--question-len", "16"),
)


def record(session: int, number: int = 0, ttft_s: float = 1.0, **changes: object) -> Record:
    values: dict[str, object] = {
        "server": 0,
        "history_tokens": 100 * number,
        "sent_s": float(number),
        "prompt_tokens": 100,
        "answer_tokens": 10,
        "gaps_s": (0.25, 0.25),
        "total_s": 2.0,
    }
    return Record(session, number, ttft_s=ttft_s, **{**values, **changes})  # type: ignore[arg-type]


# ---- statistics


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (0.99, 3.97), (1.0, 4.0)]
)
def test_quantiles_interpolate_between_values(share: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(value)


def test_interval_covers_mean_in_most_samples() -> None:
    chance = random.Random(3)
    held = 0
    for _ in range(60):
        groups = [[chance.gauss(5, 1)] for _ in range(30)]
        found = interval(groups)
        held += found.low <= 5 <= found.high
    assert 48 <= held <= 60


def test_bootstrap_draws_whole_sessions() -> None:
    """If all values of a session are equal, the interval is as wide as with one value for each
    session, because the bootstrap draws sessions and not values.
    """
    chance = random.Random(4)
    once = [[chance.random()] for _ in range(12)]
    often = [session * 50 for session in once]
    loose = [[value] for session in often for value in session]
    assert _width(interval(often)) == pytest.approx(_width(interval(once)))
    assert _width(interval(loose)) < _width(interval(often)) / 3


def _width(found: object) -> float:
    return float(found.high - found.low)  # type: ignore[attr-defined]


def test_ratio_pairs_sessions() -> None:
    chance = random.Random(5)
    below = [[chance.uniform(1, 100)] for _ in range(20)]
    above = [[2 * value for value in session] for session in below]
    found = ratio(above, below)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="cannot be paired"):
        ratio(above, below[:3])


def test_regret_compares_with_better_choice() -> None:
    always, never = [[2.0], [2.0]], [[4.0], [4.0]]
    assert regret([[3.0], [3.0]], [always, never]).value == pytest.approx(0.5)
    assert regret([[2.0], [2.0]], [always, never]).value == pytest.approx(0.0)
    assert regret([[1.0], [1.0]], [always, never]).value == pytest.approx(-0.5)


def test_same_seed_draws_same_samples() -> None:
    groups = [[value**0.5] for value in range(30)]
    assert interval(groups, seed=1) == interval(groups, seed=1) != interval(groups, seed=2)
    with pytest.raises(ValueError, match="at least one value"):
        interval([[]])


# ---- counters


def test_counters_are_parsed_summed_and_subtracted() -> None:
    text = (
        "# TYPE a counter\n"
        'a_total{engine="0",source="disk"} 3.0\n'
        'a_total{engine="1",source="disk"} 1e2\n'
        'a_total{engine="0",source="ho\\"st"} 4\n'
        "plain 7.5\n"
        "not a sample\n"
    )
    found = Metrics.parse(text)
    assert found.by("a_total", "source") == {"disk": 103.0, 'ho\\"st': 4.0}
    assert found.total("a_total", engine="0") == 7.0
    assert found.total("plain") == 7.5
    twice = Metrics.sum_of([found, found])
    assert twice.total("a_total") == 214.0
    assert twice.since(found).samples == found.samples


def test_hits_are_reported_by_tier() -> None:
    name = "vllm:prompt_tokens_cached_by_source_total"
    found = Metrics.parse(
        f'{name}{{source="device"}} 5\n{name}{{source="disk"}} 0\n'
        f'{name}{{source="external_unspecified"}} 7\n'
    )
    assert found.hit_tokens() == {"device": 5, "remote": 7}


def test_metrics_before_the_run_are_not_counted() -> None:
    server = FakeOpenAI()

    async def test(urls: list[str]) -> Metrics | None:
        servers = [Server(url) for url in urls]
        body = {"model": "fake", "prompt": [1] * 40, "max_tokens": 2, "return_token_ids": True}
        await servers[0].complete(body, 10)
        watch = await MetricsWatch.begin(servers)
        await servers[0].complete(body, 10)
        return await watch.end(40)

    found = with_servers([server], test)
    assert found is not None
    assert (found.prompt_tokens(), found.hit_tokens()) == (40, {"disk": 32})
    assert found.connector_counters() == {"hit_pages": 2.0}


# ---- rows


def test_rows_are_grouped_by_round_and_history() -> None:
    records = [record(user, number, ttft_s=number + 1.0) for user in range(3) for number in (0, 1)]
    records.append(record(9, 1, ttft_s=8.0, history_tokens=0))
    records.append(record(10, 1, error="gone"))
    found = rows(records)
    assert [(r.round, r.history_tokens, r.requests) for r in found] == [
        (0, 0, 3),
        (1, 0, 1),
        (1, 100, 3),
    ]
    assert [r.ttft_mean_s for r in found] == [1.0, 8.0, 2.0]
    assert all(r.hit_rate is None for r in found)
    assert [r.prompt_tokens_s for r in found] == [100.0, 12.5, 50.0]
    assert [r.answer_tokens_s for r in found] == [18.0, 18.0, 18.0]
    assert command.gain(found) == pytest.approx(0.5)


def test_totals_span_first_request_to_last_answer() -> None:
    records = [record(0, 0), record(0, 1), record(1, 2, error="gone")]
    whole = total(records, None)
    assert (whole.requests, whole.failed, whole.duration_s) == (3, 1, 3.0)
    assert whole.prompt_tokens_s == pytest.approx(200 / 3)
    assert whole.answer_tokens_s == pytest.approx(20 / 3)
    assert whole.hit_tokens is None
    said = [record(0, cached_tokens=25), record(1, cached_tokens=75)]
    assert total(said, None).hit_rate == pytest.approx(0.5)


def test_ttfts_are_grouped_by_session() -> None:
    records = [record(1, 1, 4.0), record(0, 0, 1.0), record(1, 0, 3.0), record(2, error="gone")]
    assert ttfts(records) == [[1.0], [3.0, 4.0]]
    assert mean([1.0, 3.0]) == 2.0


# ---- the command


def told(servers: Sequence[FakeOpenAI], *arguments: str) -> int:
    """Runs the benchmark's command in a thread of the servers' process. Returns its exit status."""
    import asyncio

    async def test(urls: list[str]) -> int:
        given = [arguments[0], "--base-url", *urls, *arguments[1:]]
        return await asyncio.to_thread(command.main, given)

    return with_servers(list(servers), test)


def test_command_writes_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    servers = [FakeOpenAI(), FakeOpenAI()]
    assert told(servers, "multi-round-qa", *FLAGS, "--json", str(target), "--tag", "mine") == 0
    found = json.loads(target.read_text())
    assert found["tag"] == "mine"
    assert [row["history_tokens"] for row in found["rows"]] == [0, 116, 136]
    assert [row["requests"] for row in found["rows"]] == [4, 4, 4]
    assert len(found["requests"]) == found["total"]["requests"] == 12
    assert found["total"]["hit_tokens"]["disk"] > 0
    assert found["total"]["hit_rate"] == pytest.approx(
        sum(s.cached_tokens for s in servers) / sum(s.prompt_tokens for s in servers)
    )
    table = capsys.readouterr().out
    assert "hits" in table
    assert "12 answers" in table


def test_json_to_stdout_prints_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-clients", "3", "--num-rounds", "2", "--request-rate", "500", "--json")
    assert told([FakeOpenAI(metrics=False)], "multi-turn", *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["hit_tokens"] is None
    assert found["total"]["hit_rate"] > 0


def test_chart_is_svg(tmp_path: Path) -> None:
    target = tmp_path / "ttft.svg"
    flags = ("--num-documents", "3", "--document-length", "64", "--output-len", "2")
    assert told([FakeOpenAI()], "long-context", *flags, "--chart", str(target)) == 0
    assert "<svg" in target.read_text()


def test_failures_and_missed_gains_set_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert told([FakeOpenAI(fails=500)], "multi-round-qa", *FLAGS) == 2
    assert "4 of 4 requests failed" in capsys.readouterr().err
    gain = ("--expected-ttft-gain", "1e9")
    assert told([FakeOpenAI()], "multi-round-qa", *FLAGS, *gain) == 1
    assert "TTFT gain is below" in capsys.readouterr().err


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ServingError("the server is gone")])
def test_run_that_ends_early_reports_its_answers(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(watch: MetricsWatch, prompt_tokens: int) -> None:
        raise failure

    monkeypatch.setattr(MetricsWatch, "end", fail)
    assert told([FakeOpenAI()], "multi-round-qa", *FLAGS, "--json") == 2
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["stopped"] == (str(failure) or "stopped")
    assert f"error: {found['stopped']}" in output.err
    assert found["total"]["requests"] == len(found["requests"]) == 12


def test_results_are_shown_although_files_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    files = ("--json", str(missing / "report.json"), "--chart", str(missing / "ttft.svg"))
    assert told([FakeOpenAI()], "multi-round-qa", *FLAGS, *files) == 2
    output = capsys.readouterr()
    assert "12 answers" in output.out
    assert "change --json" in output.err and "change --chart" in output.err


def test_run_without_requests_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert told([FakeOpenAI()], "multi-round-qa", *FLAGS, "--num-users", "0") == 2
    assert "no request was sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--model", "other"), "add --model fake"),
        (("--base-url", "http://127.0.0.1:9"), "start a server (vllm serve MODEL --port 9)"),
        (("--base-url", "https://x"), "write it like http://127.0.0.1:8000"),
    ],
)
def test_unmeasurable_server_says_what_to_type(
    flags: tuple[str, str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told([FakeOpenAI()], "multi-round-qa", *FLAGS, *flags) == 2
    assert advice in capsys.readouterr().err


def test_invalid_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["long-context", "--hit-miss-ratio", "3"], ["multi-turn", "--num-rounds", "x"]):
        with pytest.raises(SystemExit, match="2"):
            command.main(flags)
    assert 'like "3:1"' in capsys.readouterr().err
