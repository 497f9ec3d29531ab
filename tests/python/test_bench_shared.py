"""The benchmark `benches/shared`, without engines: its set-ups, results and failures."""

import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from benches.shared.__main__ import Bench, main
from benches.shared.chart import draw
from benches.shared.fleet import Fleet, Measured, Speed, equal_answer_share
from benches.shared.report import Report, Run, table
from benches.shared.setups import (
    ALONE,
    FULL,
    HOST,
    HOST_DISK,
    HOST_S3,
    OFFLOADING,
    OFFLOADING_DISK,
    RATES,
    SHORT,
    Place,
    Setup,
    bytes_per_token,
    extra_config,
    fixed_gate_setups,
    full_plan,
    offloading_plan,
    refusals,
    short_plan,
    transfer_config,
)
from ritornello.bench.driver import Record
from ritornello.bench.metrics import CACHED_BY_SOURCE, PROMPT_TOKENS, Metrics
from servers.process import ServerError
from servers.s3 import S3Server

LIMITED = Setup(HOST_DISK, ("{host}", "disk {folder}/disk {capacity}"), 2.0)
HISTORY = max(FULL.histories)


def place(tmp_path: Path) -> Place:
    return Place(
        tmp_path, Path("/memory"), "s3://bench/x?endpoint=http://127.0.0.1:1", 24, 10 * 1024.0
    )


def measured(ttft_s: float, failed: int = 0, **hits: int) -> Measured:
    """Returns the records of three users. Each user's first question has a TTFT of one second, and
    two further questions have a TTFT of `ttft_s`. The last question of the first `failed` users
    failed. `hits`: the numbers of cached tokens, by tier.
    """
    records = [
        Record(
            session=user,
            round=number,
            server=0,
            history_tokens=500 * number,
            sent_s=float(number),
            prompt_tokens=1000,
            answer_tokens=4,
            ttft_s=ttft_s if number else 1.0,
            gaps_s=(0.1,),
            total_s=1.0,
            answer=(user, number),
            error="gone" if number == 2 and user < failed else None,
        )
        for user in range(3)
        for number in range(3)
    ]
    samples: dict[Any, float] = {(PROMPT_TOKENS, ()): 9000.0}
    for tier, tokens in hits.items():
        samples[CACHED_BY_SOURCE, (("source", tier),)] = float(tokens)
    return Measured(records, Metrics(samples))


def report(*runs: tuple[Setup, Measured]) -> Report:
    made = Report(FULL, bytes_per_token=6144, speeds={HISTORY: Speed(2000.0, 0.01)})
    answers = {(0, 0): (1, 2), (0, 512): (3, 4)}
    made.runs = [Run(setup, {HISTORY: found}, dict(answers)) for setup, found in runs]
    return made


# ---- set-ups


def test_plan_has_each_setup_once_most_needed_first() -> None:
    plan = full_plan()
    assert len(set(plan)) == len(plan) == 22
    assert [setup.name for setup in plan[:2]] == [ALONE, HOST]
    for name in (HOST_DISK, HOST_S3):
        for gate in ("auto", "always"):
            of = [s.rate_x for s in plan if (s.name, s.gate, s.history) == (name, gate, None)]
            assert sorted(r for r in of if r) == [0.5, 1.0, 2.0, 10.0]
    gates = [setup.gate for setup in plan]
    limited = [i for i, setup in enumerate(plan) if setup.gate == "auto" and setup.rate_x]
    assert gates.index("never") > max(limited)
    # The set-ups with a fixed gate over a disk precede the set-ups with a fixed gate over S3, so
    # that the gate's regret, its loss against the better fixed gate, is known for the disk if time
    # runs out.
    assert {setup.name for setup in plan[gates.index("never") :][:5]} == {HOST_DISK}
    assert {setup.name for setup in short_plan()} == {ALONE, HOST_DISK, HOST_S3}


def test_gate_is_compared_with_both_fixed_choices() -> None:
    plan = full_plan()
    for setup in plan:
        if setup.gate != "auto" or setup.rate_x is None or setup.history is not None:
            continue
        always, never = fixed_gate_setups(setup, plan)
        assert (always.name, always.gate, always.rate_x) == (setup.name, "always", setup.rate_x)
        assert (never.name, never.gate, never.rate_x) == (setup.name, "never", None)
        longest = (max(FULL.histories),)
        assert setup.histories(FULL) == always.histories(FULL) == never.histories(FULL) == longest
    assert fixed_gate_setups(LIMITED, [s for s in plan if s.gate != "never"]) == []
    assert plan[0].histories(FULL) == plan[1].histories(FULL) == FULL.histories
    shorter = [setup for setup in plan if setup.history is not None]
    assert [setup.histories(FULL) for setup in shorter] == [FULL.histories[:1]] * 2
    assert not any(fixed_gate_setups(setup, plan) for setup in shorter)


def test_answers_are_compared_for_every_tier() -> None:
    for plan in (full_plan(), short_plan()):
        for name in (HOST_DISK, HOST_S3):
            told = [s for s in plan if s.name == name and s.gate == "always" and s.has_answers]
            assert len(told) == 1
        assert not any(setup.has_answers for setup in plan if setup.gate == "never")


def test_setup_becomes_connector_configuration(tmp_path: Path) -> None:
    where = place(tmp_path)
    assert extra_config(Setup(ALONE), where) is None
    assert extra_config(LIMITED, where) == {
        "tiers": ["host 24MiB /memory/host-0", f"disk {tmp_path}/disk 2GiB rate=20KiB"],
        "gate": "auto",
    }
    second = extra_config(LIMITED, where, 1)
    assert second is not None
    assert second["tiers"][0] == "host 24MiB /memory/host-1"
    remote = next(s for s in full_plan() if s.name == HOST_S3 and s.gate == "never")
    assert extra_config(remote, where) == {
        "tiers": ["host 24MiB /memory/host-0", where.s3],
        "gate": "never",
    }


def test_connector_reports_unsupported_setups(tmp_path: Path) -> None:
    settings = extra_config(LIMITED, place(tmp_path))
    assert settings is not None
    asked = [(False, settings), (False, {**settings, "no_such_key": 1}), (True, settings)]
    known, unknown, tier = refusals(asked, Path(sys.executable))
    assert known is None
    assert unknown is not None
    assert "no_such_key" in unknown
    # `RitornelloTier` has no host tier.
    assert tier is not None
    assert "cpu_bytes_to_use" in tier


def test_flags_short_and_offloading_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shared", "--short", "--offloading"])
    with pytest.raises(SystemExit):
        main()
    assert "not allowed with" in capsys.readouterr().err


def test_missing_connector_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named ritornello' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(OSError, match="No module named ritornello"):
        refusals([(False, {})], python)


@pytest.mark.parametrize("scale", [FULL, SHORT])
def test_working_set_exceeds_device(scale: Any) -> None:
    """The working set of a full run exceeds the device's and the host's cache together."""
    sizes = {"demo": 12, "tiny": 4}
    token = 2 * 2 * sizes[scale.model] * 2 * 64
    host = (scale.host_mib << 20) // token
    assert scale.working_set(min(scale.histories)) > scale.device + (host if scale is FULL else 0)
    assert scale.longest < scale.device


def test_offloading_plan_compares_gate_with_fixed_gates(tmp_path: Path) -> None:
    plan = offloading_plan()
    assert Setup(OFFLOADING).histories(FULL) == FULL.histories
    for setup in plan:
        if setup.gate == "auto" and setup.rate_x is not None:
            assert len(fixed_gate_setups(setup, plan)) == 2, setup.title
    limited = next(setup for setup in plan if setup.rate_x == 2.0)
    told = transfer_config(limited, place(tmp_path))
    assert told is not None
    extra = told["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 24 << 20
    (tier,) = extra["secondary_tiers"]
    assert tier["tiers"] == [f"disk {tmp_path}/disk 2GiB rate=20KiB"]
    host = next(setup for setup in plan if setup.name == OFFLOADING)
    told = transfer_config(host, place(tmp_path))
    assert told is not None
    assert told["kv_connector_extra_config"]["secondary_tiers"] == []


def test_token_bytes_cover_all_layers(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 64}')
    assert bytes_per_token(config, "bfloat16") == 6144
    assert bytes_per_token(config, "float32") == 12288


def test_question_rate_reaches_wanted_load() -> None:
    speed = Speed(prefill_tokens_s=2000.0, gap_s=0.01)
    busy = speed.qps(FULL, HISTORY) * (
        (FULL.system + HISTORY + FULL.rounds / 2 * (FULL.question + FULL.answer)) / 2000
        + FULL.answer * 0.01
    )
    assert busy / 2 == pytest.approx(FULL.load)


def test_engines_get_connector_and_little_memory(tmp_path: Path) -> None:
    def command(config: dict[str, Any] | None) -> list[str]:
        fleet = Fleet.of(
            "host + disk",
            FULL,
            [config, config],
            program=tmp_path / "vllm",
            folder=tmp_path,
            cores=2,
            environment={"AWS_REGION": "x"},
        )
        assert len({engine.port for engine in fleet.engines}) == len(fleet.engines) == 2
        assert fleet.engines[0]._environment()["OMP_NUM_THREADS"] == "1"
        assert fleet.engines[0]._environment()["AWS_REGION"] == "x"
        return fleet.engines[1]._command()

    with_tiers = command({"kv_connector": "X"})
    told = json.loads(with_tiers[with_tiers.index("--kv-transfer-config") + 1])
    assert told == {"kv_connector": "X"}
    assert with_tiers[with_tiers.index("--num-gpu-blocks-override") + 1] == str(
        FULL.device // FULL.block
    )
    assert "--kv-transfer-config" not in command(None)


# ---- results


def test_rows_pair_users_with_and_without_tiers(tmp_path: Path) -> None:
    always, never = fixed_gate_setups(LIMITED, full_plan())
    made = report(
        (Setup(ALONE), measured(4.0)),
        (Setup(HOST, ("{host}",)), measured(3.0, device=300)),
        (LIMITED, measured(1.0, host=900, disk=1800)),
        (always, measured(0.8, disk=1800)),
        (never, measured(4.0)),
    )
    alone, host, limited, *_ = made.rows()
    assert alone.over_alone is None
    assert alone.over_host is not None
    assert alone.over_host.value == pytest.approx(4 / 3)
    assert host.hit_rate_by_tier == {"device": pytest.approx(1 / 30)}
    assert (limited.ttft_mean_s, limited.ttft_first_mean_s) == (1.0, 1.0)
    assert limited.history_tokens == 750
    assert limited.over_alone is not None
    assert limited.over_alone.value == pytest.approx(0.25)
    assert limited.over_host is not None
    assert limited.over_host.value == pytest.approx(1 / 3)
    assert limited.gate_regret is not None
    assert limited.gate_regret.value == pytest.approx(0.25)
    assert limited.hit_rate == pytest.approx(0.3)
    assert limited.hit_rate_by_tier == {"host": pytest.approx(0.1), "disk": pytest.approx(0.2)}
    assert limited.answers_as_alone == 1.0
    aims = made.aims()
    assert len(aims) == 2
    assert aims[0].endswith("at most 0.6: reached")
    assert aims[1].endswith("at most 0.1: not reached")
    made.check()
    assert made.broken == []
    made.write(tmp_path / "report.json", versions="x")
    told = json.loads((tmp_path / "report.json").read_text())
    # Without a store the engine computes 1,000 tokens in four seconds, so the break-even rate of a
    # tier is the bytes of 250 tokens per second.
    assert told["break_even_bytes_s"] == {str(HISTORY): 250 * 6144}
    assert told["answers_compared"][LIMITED.title] == [0, 512]
    assert set(told["rows"][2]) >= {
        *("setup", "history_tokens", "tier_rate_x", "ttft_mean_s", "ttft_p99_s"),
        *("prompt_tokens_s", "hit_rate", "hit_rate_by_tier", "gate_regret"),
    }
    assert table(made.rows()).row_count == 5


def test_charts_are_drawn_for_every_history(tmp_path: Path) -> None:
    lines = [(Setup(HOST_DISK, LIMITED.tiers, rate), measured(2.0 / rate)) for rate in RATES]
    made = report((Setup(ALONE), measured(4.0)), *lines)
    (target,) = draw(made.rows(), tmp_path)
    assert "<svg" in target.read_text()


def test_row_without_runs_to_compare_has_no_ratios() -> None:
    (row,) = report((LIMITED, measured(1.0, disk=5))).rows()
    assert row.over_alone is None
    assert row.over_host is None
    assert row.gate_regret is None
    assert row.answers_as_alone is None


def test_failed_requests_are_counted_and_break_report() -> None:
    made = report(
        (Setup(ALONE), measured(4.0)), (Setup(OFFLOADING_DISK), measured(1.0, failed=2, disk=9))
    )
    _, store = made.rows()
    assert (store.requests, store.failed) == (9, 2)
    made.check()
    assert made.broken == [f"{OFFLOADING_DISK}: 2 requests failed: gone"]


def test_tier_without_hits_breaks_report() -> None:
    always = Setup(HOST_DISK, LIMITED.tiers, 0.5, "always")
    made = report(
        (Setup(ALONE), measured(4.0)),
        (Setup(OFFLOADING_DISK), measured(1.0, device=9)),
        (always, measured(1.0, host=9)),
        # The gate may decide to load nothing from a slow tier.
        (LIMITED, measured(1.0)),
    )
    made.check()
    assert len(made.broken) == 2
    assert made.broken[0].startswith(f"{OFFLOADING_DISK}: no hit came from the tier disk")
    assert made.broken[1].startswith("host + disk at 0.5x, always load: no hit came")


def test_different_answers_break_report() -> None:
    made = report((Setup(ALONE), measured(4.0)), (Setup(OFFLOADING_DISK), measured(1.0, disk=9)))
    made.runs[1].answers = {(0, 0): (1, 2), (0, 512): (3, 5)}
    made.check()
    (told,) = made.broken
    assert told.startswith(
        f"{OFFLOADING_DISK}: the answer to prompt 0, with 512 tokens cached, differs from the"
    )
    made.broken.clear()
    made.runs[1].answers = {(0, 0): (1, 2), (0, 448): (3, 4)}
    made.check()
    (told,) = made.broken
    assert "no answer with cached tokens could be compared" in told


def test_answers_are_compared_while_prompts_are_equal() -> None:
    def said(*answers: Sequence[int]) -> list[Record]:
        return [Record(0, n, 0, 0, 0.0, answer=tuple(a)) for n, a in enumerate(answers)]

    reference = said([1], [2], [3])
    assert equal_answer_share(said([1], [2], [3]), reference) == 1.0
    assert equal_answer_share(said([1], [9], [3]), reference) == 0.5
    assert equal_answer_share(said([9], [2], [3]), reference) == 0.0
    assert equal_answer_share([], reference) is None


# ---- failures


def bench(tmp_path: Path, deadline: float) -> Bench:
    progress = Progress(console=Console(file=io.StringIO()))
    return Bench(FULL, tmp_path, None, deadline, Report(FULL), progress)


def test_setups_beyond_deadline_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = bench(tmp_path, time.monotonic() + 100)
    remote = next(setup for setup in full_plan() if setup.name == HOST_S3)

    def slow(_: Bench, setup: Setup) -> Run:
        running.longest_s = 1000.0
        return Run(setup)

    monkeypatch.setattr(Bench, "_measured", slow)
    running.run([remote, Setup(ALONE), Setup(OFFLOADING_DISK)])
    assert [run.setup.name for run in running.report.runs] == [ALONE]
    (no_server, no_time) = running.report.left_out
    assert no_server == ("host + s3 at 2x", "no S3 server: make s3")
    assert no_time[0] == OFFLOADING_DISK
    assert "a set-up takes 1000 s" in no_time[1]


def test_failed_setup_is_reported_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Bench, setup: Setup) -> Run:
        if setup.name == OFFLOADING_DISK:
            raise ServerError("not up")
        return Run(setup)

    monkeypatch.setattr(Bench, "_measured", broken)
    running = bench(tmp_path, time.monotonic() + 100)
    running.run([Setup(ALONE), Setup(OFFLOADING_DISK), LIMITED])
    assert [run.setup.name for run in running.report.runs] == [ALONE, HOST_DISK]
    assert running.report.broken == [f"{OFFLOADING_DISK}: not up"]


def test_failed_s3_server_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "versitygw"
    with (
        pytest.raises(ServerError, match="make s3"),
        S3Server(program, tmp_path / "objects", tmp_path / "log"),
    ):
        pass
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with (
        pytest.raises(ServerError, match="did not start"),
        S3Server(program, tmp_path / "objects", tmp_path / "log"),
    ):
        pass
