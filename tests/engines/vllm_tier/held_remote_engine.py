"""One vLLM with `RitornelloTier` over a disk and a remote whose answers this process holds back. A
request is aborted, and another is preempted, while chunks are fetched. Arguments: the model, and
the folder of the disk. At its end the program replies with the answers that `main` collects.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "vllm"), str(HERE.parents[2])]
sys.path.append(str(HERE.parents[1] / "python"))

from harness import BLOCKS, prompt, reply, set_environment  # noqa: E402
from held_remote import Held  # noqa: E402
from tier_harness import TierEngine  # noqa: E402

# The `LONG` prompts fill vLLM's cache, so that it preempts one of them when their answers grow.
FETCHED, OTHER = prompt(41, 500), prompt(42, 300)
LONG, LONG_ANSWER = [prompt(43 + number, 386) for number in range(3)], 60
# Steps of a slow machine take seconds: a lookup with a time limit may end before the preemption.
PREFETCH = "wait_complete"
# If a lookup has returned the outcome of a prompt's last fetch, `ritornello.Cache` does not fetch
# the prompt again within this time after the end of that fetch.
OUTCOME_SECONDS = 5.0
WAIT_SECONDS = 120.0


def wait_until(reached: Callable[[], bool], what: str) -> None:
    until = monotonic() + WAIT_SECONDS
    while not reached():
        assert monotonic() < until, f"not reached within {WAIT_SECONDS:g} s: {what}"
        sleep(0.001)


class HeldEngine(TierEngine):
    """An engine that can move chunks to the remote: after `keep_on_remote` the chunks of this
    program's prompts are on the remote only.
    """

    def __init__(self, model: str, folder: str) -> None:
        self.disk = f"{folder}/disk"
        tier = {
            "type": "RitornelloTier",
            "module_path": "ritornello.vllm",
            "tiers": [f"disk {self.disk} 256MiB", "held_remote:Held"],
            "prefetch": PREFETCH,
            "gate": "always",
        }
        super().__init__(Path(model), [tier])

    @property
    def cache(self) -> Any:
        return self.tier._store._store

    def keep_on_remote(self) -> None:
        self.forget_all()
        self.cache.flush()
        for scope, _, _ in self.cache.scopes():
            self.cache.delete(scope, self.cache.keys(scope, limit=10_000)[0])
        sleep(OUTCOME_SECONDS)

    def add(self, name: str, asked: list[int], answer: int = 24) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": asked}, sampling)

    def step_until(self, reached: Callable[[], bool], what: str) -> dict[str, list[int]]:
        """Runs steps until `reached` returns true; `what` names this condition in the error after
        `WAIT_SECONDS`. Returns the tokens of the answers that ended in these steps, by request.
        """
        answers: dict[str, list[int]] = {}

        def step() -> bool:
            for output in self.llm.llm_engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
            return reached()

        wait_until(step, what)
        return answers

    def finish(self) -> dict[str, list[int]]:
        llm = self.llm.llm_engine
        return self.step_until(lambda: not llm.has_unfinished_requests(), "all requests end")

    def known(self, *names: str) -> list[Any]:
        """Returns the tier's state of the requests whose names begin with one of `names`: vLLM
        appends a suffix to the names.
        """
        return [state for name, state in self.tier._requests.items() if name.startswith(names)]

    def waits_for_remote(self, name: str) -> bool:
        lookups = [asked for state in self.known(name) for asked in state.prompts.values()]
        return any(asked.pending or asked.call is not None for asked in lookups)

    def left(self) -> dict[str, int]:
        """Waits until prefetches and leases have ended. Returns the numbers of jobs and requests
        that the tier still has, and of blocks that vLLM still has allocated.
        """
        import ritornello as rt

        wait_until(lambda: not self.cache.stats()["prefetch"]["running"], "prefetches end")
        self._unpin()
        with rt.Store.open(self.disk) as store:
            wait_until(lambda: not store.stats()["leases"], "leases are released")
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "jobs": len(self.tier._jobs),
            "requests": len(self.known("gone", "fetched", "long")),
            # One block is vLLM's null block.
            "blocks": BLOCKS - 1 - pool.get_num_free_blocks(),
        }


def abort(engine: HeldEngine) -> dict[str, Any]:
    """Aborts a request whose chunks are being fetched, and asks another prompt during the fetch."""
    engine.keep_on_remote()
    asked = Held.asked
    Held.released.clear()
    engine.add("gone", FETCHED)
    engine.step_until(
        lambda: Held.asked > asked and engine.waits_for_remote("gone"), "the fetch begins"
    )
    engine.llm.llm_engine.abort_request(["gone"])
    meanwhile = engine.answer(OTHER)
    Held.released.set()
    return {"meanwhile": meanwhile, "left": engine.left()}


def preempt(engine: HeldEngine) -> dict[str, Any]:
    """Preempts a request while the chunks of another request are being fetched."""
    engine.keep_on_remote()
    for number, asked in enumerate(LONG):
        engine.add(f"long-{number}", asked, LONG_ANSWER)
    scheduler = engine.scheduler
    answers = engine.step_until(lambda: len(scheduler.running) == len(LONG), "all prompts run")
    Held.released.clear()
    engine.add("fetched", FETCHED)
    answers |= engine.step_until(
        lambda: engine.waits_for_remote("fetched"), "the request `fetched` waits"
    )
    before = engine.count("vllm:num_preemptions")
    answers |= engine.step_until(
        lambda: engine.count("vllm:num_preemptions") > before, "a request is preempted"
    )
    waits = engine.waits_for_remote("fetched")
    Held.released.set()
    answers |= engine.finish()
    lengths = {name: len(tokens) for name, tokens in answers.items()}
    return {"waits": waits, "lengths": lengths, "left": engine.left()}


def main() -> None:
    set_environment()
    engine = HeldEngine(*sys.argv[1:])

    def alone() -> list[dict[str, Any]]:
        return [engine.answer(asked) for asked in (FETCHED, OTHER, *LONG)]

    said: dict[str, Any] = {"computed": alone()}
    said["aborted"] = abort(engine)
    engine.keep_on_remote()
    said["again"] = [engine.answer(FETCHED)]
    said["preempted"] = preempt(engine)
    engine.keep_on_remote()
    said["last"] = alone()
    engine.stop()
    reply(said)


if __name__ == "__main__":
    main()
