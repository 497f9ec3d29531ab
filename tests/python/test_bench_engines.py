"""The ratios and the table of `benches/engines.py`, which compares Ritornello with the engines' own
storage.
"""

from typing import Any

import pytest

from benches.engines import ENGINES, ROOT, table, with_ratios

OWN, OURS = "files", "ritornello"
SMALL, LARGE = 256 << 10, 8 << 20


def row(system: str, op: str, mb_s: float | None, **others: Any) -> dict[str, Any]:
    return {"system": system, "object_bytes": SMALL, "op": op, "mb_s": mb_s, **others}


def ratios(rows: list[dict[str, Any]], system: str, op: str) -> list[tuple[Any, Any]]:
    return [
        (row["to_own"], row["to_disk"])
        for row in with_ratios(rows, OWN)
        if (row["system"], row["op"]) == (system, op)
    ]


def test_rates_are_compared_with_own_storage_and_disk() -> None:
    rows = [row(OWN, "put", 400), row(OURS, "put", 1000), row("disk", "put", 1250)]
    assert ratios(rows, OURS, "put") == [(2.5, 0.8)]
    assert with_ratios(rows, OWN)[1] == {**rows[1], "to_own": 2.5, "to_disk": 0.8}


def test_own_storage_and_disk_have_no_ratios() -> None:
    rows = [row(OWN, "put", 400), row("disk, new space", "put", 800), row("disk", "put", 1250)]
    for system in (OWN, "disk, new space", "disk"):
        assert ratios(rows, system, "put") == [(None, None)]


def test_lookups_have_no_ratios() -> None:
    rows = [row(OWN, "lookup", None), row(OURS, "lookup", None, p50_us=30), row("disk", "put", 9)]
    assert ratios(rows, OURS, "lookup") == [(None, None)]


def test_rows_without_counterpart_have_no_ratios() -> None:
    rows = [row(OURS, "put", 1000), row(OURS, "load", 900), row("disk", "load", 1000)]
    assert ratios(rows, OURS, "put") == [(None, None)]
    assert ratios(rows, OURS, "load") == [(None, 0.9)]


def test_ratio_uses_fastest_disk_rate_of_same_memory() -> None:
    rows = [
        row(OURS, "load", 900, memory="L1"),
        row(OWN, "load", 450, memory="L1"),
        row("disk, in place", "load", 1000, memory="L1"),
        row("disk, new space", "load", 600, memory="L1"),
        row("disk, huge pages", "load", 3000, memory="huge pages"),
    ]
    assert ratios(rows, OURS, "load") == [(2.0, 0.9)]


def test_sizes_are_compared_separately() -> None:
    rows = [
        row(name, "put", rate, object_bytes=nbytes)
        for nbytes, rates in ((SMALL, (400, 800, 1600)), (LARGE, (1000, 3000, 4000)))
        for name, rate in zip((OWN, OURS, "disk"), rates, strict=True)
    ]
    assert ratios(rows, OURS, "put") == [(2.0, 0.5), (3.0, 0.75)]


def test_table_has_rows_of_compared_systems_together() -> None:
    rows = [
        row(OWN, "put", 400.0, engine="b"),
        row(OURS, "put", 1000.0, engine="b"),
        row(OWN, "load", 450.0, engine="b"),
        row(OURS, "lookup", None, engine="a", p50_us=30.5),
    ]
    assert table(with_ratios(rows, OWN)).splitlines() == [
        "| engine | object_bytes | op | system | mb_s | to_own | to_disk | p50_us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| a | {SMALL} | lookup | {OURS} |  |  |  | 30.5 |",
        f"| b | {SMALL} | load | {OWN} | 450.0 |  |  |  |",
        f"| b | {SMALL} | put | {OWN} | 400.0 |  |  |  |",
        f"| b | {SMALL} | put | {OURS} | 1000.0 | 2.5 |  |  |",
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_benchmark_of_each_engine_exists(engine: str) -> None:
    program, own = ENGINES[engine]
    assert f'"{own}"' in (ROOT / "benches" / program).read_text()
