"""Calls of a scheduler to a cache over several tiers: a disk, and a remote below it.

No call waits for the remote. Lookups and their cancellation, releases, touches and statistics may
wait for the process that owns the disk tier, so they run on a background thread, in the order of
their submission.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ritornello.connector.cache_counts import CacheCounts
from ritornello.connector.meter import Meter
from ritornello.vllm.settings import Settings
from ritornello.vllm.tier.call_thread import Call
from ritornello.vllm.tier.store import LEASE_SECONDS, ChunkStore

if TYPE_CHECKING:
    from ritornello._core import Cache, Gate, Lookup, Scope, Store

# Interval at which the cache's counters are added to the tier's counters.
REPORT_SECONDS = 1.0


class Prompt(NamedTuple):
    """The chunks (pages of vLLM's host tier) of one prompt and KV cache group. `keys`: keys of the
    leading chunks of the prompt, or of a single chunk; if `scope` is not chained, of one window.
    `computed`: leading tokens that the engine has. `tokens`: tokens of all `keys`. `chunk_tokens`:
    tokens of a chunk. `chunk_bytes`: the sum of the bytes of a chunk and the bytes of the chunks
    that the other chained groups have for the same tokens. `computed`, `tokens`, `chunk_tokens` and
    `chunk_bytes` are 0 if the gate does not decide about the chunks. `is_local`: the lookup is
    about this machine only; false if `scope` is chained.
    """

    scope: "Scope"
    keys: Sequence[bytes]
    computed: int = 0
    tokens: int = 0
    chunk_tokens: int = 0
    chunk_bytes: int = 0
    is_local: bool = False


class Found(NamedTuple):
    """Answer to a lookup. `lookup`: the core's answer. `present`: for each key of a scope that is
    not chained, whether its chunk is on this machine; None for a chained scope, or if the lookup is
    pending.
    """

    lookup: "Lookup"
    present: Sequence[bool] | None = None


class TierCache(ChunkStore):
    """The store of our vLLM tier if the store is a cache over several tiers. `waits_for_remote`:
    lookups are pending while chunks are fetched; otherwise their answers are about this machine,
    and chunks are fetched for later lookups.
    """

    def __init__(self, settings: Settings, meter: Meter, hash_algorithm: str = "") -> None:
        self._gate: Gate = settings.gate
        # Used by the background thread only.
        self._counts = CacheCounts(REPORT_SECONDS)
        self._reported_at = monotonic()
        self.waits_for_remote = settings.prefetch != "best_effort"
        super().__init__(settings, meter, hash_algorithm)

    def submit_lookup(self, prompt: Prompt) -> Call | None:
        """Queues a lookup. The value of the returned call is `Found`, or None if the lookup failed.
        Returns None if the call could not be queued.
        """

        def action(cache: "Cache") -> Found:
            keys, gate = prompt.keys, self._gate
            if not prompt.chunk_tokens and gate != "never":
                gate = "always"
            if prompt.is_local:
                # `cache.lookup` fetches missing chunks, so pass it only chunks on this machine.
                present = cache.exists(prompt.scope, keys)
                keys = [key for key, is_present in zip(keys, present, strict=True) if is_present]
                if not keys:
                    keys, gate = prompt.keys, "never"
            lookup = cache.lookup(
                prompt.scope,
                keys,
                ttl=LEASE_SECONDS,
                gate=gate,
                page_tokens=prompt.chunk_tokens,
                page_bytes=prompt.chunk_bytes,
                computed=prompt.computed,
                tokens=prompt.tokens,
            )
            if prompt.scope.chained or lookup.state != "ready":
                return Found(lookup)
            if gate == "never":
                return Found(lookup, [False] * len(prompt.keys))
            # `lookup` has leased the chunks that the following `exists` reports, except chunks that
            # were stored after `keys` was chosen, and chunks beyond the limits on leases.
            try:
                return Found(lookup, cache.exists(prompt.scope, prompt.keys))
            except BaseException:
                for lease in lookup.leases:
                    cache.release(lease)
                raise

        return self._calls.submit(lambda: self._on_cache("lookup", action))

    def abandon(self, prompt: Prompt, call: Call | None) -> None:
        """Cancels the transfers of a lookup that is pending, and releases the leases of `call`, its
        last call.
        """

        def action(cache: "Cache") -> None:
            # The thread runs calls in order: `call`, which was queued before this call, is done.
            if call is not None and call.value is not None:
                for lease in call.value.lookup.leases:
                    cache.release(lease)
            cache.cancel(prompt.scope, prompt.keys)

        self.call_later("cancel", cast("Callable[[Store], object]", action))

    def release(self, lease: Any) -> None:
        self.call_later("release", lambda store: store.release(lease))

    def record_outcome(self, lookup: "Lookup", seconds: float) -> None:
        """Tells the gate that the load that it chose in `lookup` took `seconds`."""
        self._on_cache("gate", lambda cache: cache.record_outcome(lookup, seconds))

    def end_step(self) -> None:
        """Adds the growth of the cache's counters to the tier's counters, at intervals."""
        if monotonic() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = monotonic()

            def action(cache: "Cache") -> None:
                for name, amount in self._counts.growth(cache.stats()).items():
                    self._meter.add(name, amount)

            self.call_later("stats", cast("Callable[[Store], object]", action))

    def _put_options(
        self, before: Sequence[bytes], first: int, keys: Sequence[bytes]
    ) -> tuple[Sequence[bytes], dict[str, Any]]:
        if len(before) != first:
            return keys, {"parent": before[-1] if before else None, "copy": False}
        return [*before, *keys], {"first": first, "copy": False}

    def _on_cache(self, operation: str, action: "Callable[[Cache], Any]") -> Any:
        return self.call(operation, lambda store: action(cast("Cache", store)), None)
