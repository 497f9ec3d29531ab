"""Replaces methods of our secondary tier: records digests of rows of vLLM's host tier, one chunk in
each row, and makes loads fail.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
from tier_harness import TierEngine

from ritornello.vllm.tier import jobs
from ritornello.vllm.tier.tier import Tier


def rows_of(engine: TierEngine) -> Any:
    """Returns the host tier as an array of shape (rows, bytes)."""
    return engine.manager.primary_tier.get_kv_memoryview().obj


class Digests:
    """Digests of rows by key: `saved` when vLLM offers rows for storing, `loaded` after loads."""

    def __init__(self, engine: TierEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: dict[bytes, set[str]] = {}
        self.loaded: dict[bytes, str] = {}
        rows, save, load, landed = rows_of(engine), Tier.save, Tier.load, Tier.take_finished
        running: dict[int, Any] = {}

        def digest(row: int) -> str:
            return hashlib.sha256(rows[row].tobytes()).hexdigest()

        def watched_save(tier: Tier, transfer: Any) -> None:
            for key, row in zip(transfer.keys, transfer.chunk_ids.tolist(), strict=True):
                self.saved.setdefault(key, set()).add(digest(row))
            save(tier, transfer)

        def watched_load(tier: Tier, transfer: Any) -> None:
            running[transfer.job_id] = transfer
            load(tier, transfer)

        def watched_landed(tier: Tier) -> list[jobs.FinishedJob]:
            done = landed(tier)
            for job in done:
                if (transfer := running.pop(job.job.number, None)) is not None:
                    found = zip(transfer.keys, transfer.chunk_ids.tolist(), job.ok, strict=True)
                    self.loaded |= {key: digest(row) for key, row, ok in found if ok}
            return done

        monkeypatch.setattr(Tier, "save", watched_save)
        monkeypatch.setattr(Tier, "load", watched_load)
        monkeypatch.setattr(Tier, "take_finished", watched_landed)

    def all_came_back(self) -> bool:
        """Returns whether every loaded row equals a row that was saved under the same key."""
        return all(found in self.saved.get(key, ()) for key, found in self.loaded.items())


def fail_loads(
    engine: TierEngine, monkeypatch: pytest.MonkeyPatch, places: Sequence[int] | None
) -> None:
    """Makes every load report the chunks at the indices `places`, or all chunks if `places` is
    None, as failed, and overwrites their rows.
    """
    rows, load, account = rows_of(engine), Tier.load, jobs.account
    running: dict[int, Any] = {}

    def watched_load(tier: Tier, transfer: Any) -> None:
        running[transfer.job_id] = transfer
        load(tier, transfer)

    def failing(job: jobs.Job) -> jobs.FinishedJob:
        done = account(job)
        if job.load:
            chunks = running.pop(job.number).chunk_ids.tolist()
            for place in range(len(chunks)) if places is None else places:
                if place < len(chunks):
                    done.ok[place] = False
                    rows[chunks[place]] = 0x7F
            done.reasons = {"checksum": done.ok.count(False)}
        return done

    monkeypatch.setattr(Tier, "load", watched_load)
    monkeypatch.setattr(jobs, "account", failing)
