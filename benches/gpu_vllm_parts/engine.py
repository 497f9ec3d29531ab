"""Runs one engine of vLLM, and sends it prompts.

    python3 -P engine.py SPEC

`SPEC` is a JSON file of `benches/gpu_vllm.py`: the arguments of vLLM's `LLM`, prompts, and passes.
Each event is appended as a line of JSON to the file that `SPEC` names as `events`; standard output
and error are the engine's log. The engine starts when the file that `SPEC` names as `go` exists:
until then this process imports vLLM while another engine uses the GPU.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import vllm
import vllm.v1.worker.gpu_worker  # Imports what an engine imports when it starts.
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

ANSWER_TOKENS = 16
# Tokens of an answer to a prompt that is sent together with others. An answer of this length needs
# further blocks, and vLLM preempts a request when no block is free.
TOGETHER_TOKENS = 64
# Saves of KV count as ended when the connector has written no bytes for this time.
QUIET_SECONDS = 2.5
SETTLE_SECONDS = 60.0
RESET_SECONDS = 10.0
# Factor of the digests of earlier layers, so that a digest depends on the order of layers. A prime.
LAYER_FACTOR = 1000003
# Number of blocks whose digests are computed together, which limits the memory on the GPU.
GROUP = 256


class Engine:
    """An engine in this process, whose KV memory can be read and overwritten."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.llm = LLM(**arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.last_blocks: list[int] = []
        # Requests that ended while `digest_at_end` was set, by name: the digests of the blocks that
        # the prompt fills without its last token, and how often the request was preempted.
        self.ended: dict[str, tuple[list[int], int]] = {}
        self.digest_at_end = False
        self._record_blocks()

    def _record_blocks(self) -> None:
        """Keeps the block ids of the request that ended last. With `digest_at_end`, also adds the
        request to `ended`, before other requests use its blocks.
        """
        manager, free = self.scheduler.kv_cache_manager, self.scheduler._free_request

        def recording(request: Any, *args: Any, **kwargs: Any) -> Any:
            (ids,) = manager.get_block_ids(request.request_id)
            self.last_blocks = list(ids)
            # A request that is aborted early has no blocks.
            if self.digest_at_end and ids:
                digests = self.prompt_digests(request.num_prompt_tokens)
                self.ended[request.request_id.split("-")[0]] = (digests, request.num_preemptions)
            return free(request, *args, **kwargs)

        self.scheduler._free_request = recording

    def describe(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        groups = getattr(self.runner, "attn_groups", None)
        return {
            "vllm": vllm.__version__,
            "device": torch.cuda.get_device_name(),
            "runner": type(self.runner).__module__,
            "attention": groups[0][0].backend.get_name() if groups else "unknown",
            "connector": type(getattr(self.scheduler, "connector", None)).__name__,
            "cudagraph": str(config.compilation_config.cudagraph_mode),
            "cache_stride": list(self.caches()[0].stride()),
        }

    def caches(self) -> list[torch.Tensor]:
        """Returns the KV memory of each layer."""
        found = self.runner.kv_caches
        found = list(found.values()) if isinstance(found, dict) else list(found)
        if not found:
            layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
            for layer in layers.values():
                cache = getattr(layer, "kv_cache", None)
                found += cache if isinstance(cache, list) else [] if cache is None else [cache]
        return found

    def digests(self, count: int) -> list[int]:
        """Returns a digest for each of the leading `count` blocks of the request that ended last:
        of the block's bytes in all layers.
        """
        torch.cuda.synchronize()
        ids = self.last_blocks[:count]
        blocks = self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        weights = total = None
        for cache in self.caches():
            dim = list(cache.shape).index(blocks)
            index = torch.tensor(ids, device=cache.device)
            part = cache.index_select(dim, index).movedim(dim, 0).reshape(len(ids), -1)
            words = part.contiguous().view(torch.int32)
            if weights is None:
                generator = torch.Generator(device="cpu").manual_seed(7)
                drawn = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator)
                weights = drawn.to(cache.device) | 1
            summed = torch.zeros(len(ids), dtype=torch.int64, device=cache.device)
            for at in range(0, len(ids), GROUP):
                summed[at : at + GROUP] = (words[at : at + GROUP].long() * weights).sum(1)
            total = summed if total is None else total * LAYER_FACTOR + summed
        return [] if total is None else total.tolist()

    def forget(self) -> None:
        """Empties the GPU's prefix cache, and overwrites its KV memory with zeros, so that only
        bytes that are computed or loaded after this call are right.
        """
        deadline = monotonic() + RESET_SECONDS
        # Blocks stay in use until their saves have ended, which vLLM notices in a step.
        while not self.llm.reset_prefix_cache():
            if monotonic() > deadline:
                raise TimeoutError(f"blocks are still in use after {RESET_SECONDS:.0f} s")
            self.step()
        for cache in self.caches():
            cache.zero_()
        torch.cuda.synchronize()

    def ask(self, prompts: list[list[int]], tokens: int) -> list[Any]:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=2
        )
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return list(self.llm.generate(asked, sampling, use_tqdm=False))

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        (output,) = self.ask([prompt], ANSWER_TOKENS)
        return _answer(output, self.prompt_digests(len(prompt)))

    def together(self, prompts: list[list[int]], seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Sends all prompts together, in an order that `seed` determines, after copies of half of
        the prompts. The copies are aborted after one to three steps. Yields the number of each
        prompt, and its answer.
        """
        engine, draw = self.llm.llm_engine, random.Random(seed)
        order = draw.sample(range(len(prompts)), len(prompts))
        aborted = [f"aborted/{number}" for number in order[::2]]
        sampling = SamplingParams(
            max_tokens=TOGETHER_TOKENS, temperature=0, ignore_eos=True, detokenize=False
        )
        for name in [*aborted, *map(str, order)]:
            prompt = TokensPrompt(prompt_token_ids=prompts[int(name.split("/")[-1])])
            engine.add_request(name, prompt, sampling)
        outputs, self.ended, self.digest_at_end = [], {}, True
        for _ in range(draw.randint(1, 3)):
            outputs += engine.step()
        engine.abort_request(aborted)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        self.digest_at_end = False
        for output in outputs:
            if output.finished and output.request_id not in aborted:
                digests, preemptions = self.ended[output.request_id]
                answer = {**_answer(output, digests), "preemptions": preemptions}
                yield int(output.request_id), answer

    def prompt_digests(self, tokens: int) -> list[int]:
        """Returns digests of blocks of the request that ended last, with a prompt of `tokens`
        tokens: of all blocks before the block that holds the prompt's last token.
        """
        block = self.llm.llm_engine.vllm_config.cache_config.block_size
        # Leave out the block of the last token. vLLM computes this token even if all others were
        # loaded, and the step is then shorter than in a cold pass, so it rounds differently.
        return self.digests((tokens - 1) // block)

    def written(self) -> float:
        """Returns the bytes of KV that the connector has saved so far, by vLLM's metrics."""
        return sum(
            getattr(metric, "value", 0)
            for metric in self.llm.get_metrics()
            if "write_bytes" in metric.name
            or "saved_bytes" in metric.name
            or ("kv_offload_total_bytes" in metric.name and "GPU_to_CPU" in str(metric.labels))
        )

    def step(self) -> None:
        """Lets vLLM begin saves, and notice their ends: both happen in steps only."""
        self.ask([[11, 12, 13]], tokens=2)
        sleep(0.1)

    def settle(self) -> None:
        """Waits until no bytes were saved for `QUIET_SECONDS`, at most `SETTLE_SECONDS`."""
        began = changed = monotonic()
        last = -1.0
        while monotonic() - began < SETTLE_SECONDS and monotonic() - changed < QUIET_SECONDS:
            self.step()
            now = self.written()
            if now != last:
                last, changed = now, monotonic()


def _answer(output: Any, blocks: list[int]) -> dict[str, Any]:
    return {
        "tokens": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "ttft": output.metrics.first_token_latency,
        "output": list(output.outputs[0].token_ids),
        "blocks": blocks,
    }


def run(spec: dict[str, Any]) -> None:
    def emit(event: str, **what: Any) -> None:
        with Path(spec["events"]).open("a") as file:
            file.write(json.dumps({"event": event, **what}) + "\n")

    def prompt(seed: int, tokens: int) -> list[int]:
        return random.Random(seed).choices(range(10, spec["vocabulary"]), k=tokens)

    parent = os.getppid()
    while not Path(spec["go"]).exists():
        if os.getppid() != parent:
            return
        sleep(0.05)
    began = monotonic()
    engine = Engine(spec["llm"])
    emit("started", seconds=monotonic() - began, **engine.describe())
    # Let vLLM compile kernels for parts of a prompt, for one token, and for a prefix that is found.
    for _ in range(2):
        engine.ask([prompt(999, spec["warm"])], tokens=4)
    engine.ask([prompt(998, 100), prompt(997, 200)], tokens=4)
    prompts = [prompt(seed, tokens) for seed, (_, tokens) in enumerate(spec["prompts"])]
    for round_number, label in enumerate(spec["passes"]):
        engine.forget()
        if label == "together":
            for number, asked in engine.together(prompts, round_number):
                name = spec["prompts"][number][0]
                emit("answer", **{"pass": label, "prompt": name}, **asked)
            continue
        for number, (name, _) in enumerate(spec["prompts"]):
            for repeat in ["", "repeated"][: 2 if spec["repeat"] and label == "cold" else 1]:
                asked = engine.answer(prompts[number])
                emit("answer", **{"pass": repeat or label, "prompt": name}, **asked)
        if spec["stores"]:
            engine.settle()
    engine.core.shutdown()
    emit("end")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    # Exit without waiting for the threads of the engine, which may never end.
    os._exit(0)
