"""One vLLM whose weights change while it serves: `weights.py SCENARIO MODEL STORE`.

The scenario `change` changes the weights of an engine with one worker in several ways. `restart` is
a new engine with the weights of the files. `ranks` is an engine of two workers, one of which
changes its weights. The reply holds for each question the tokens of the answer, the number of pages
loaded from and saved to the store, and for a question of `compare` the tokens that vLLM computes
without the store (`expected`).
"""

import json
import shutil
import sys
from pathlib import Path
from time import sleep
from typing import Any

from ask import make_room_between_stages
from harness import Engine, prompt, reply, set_environment

SAMPLE_SECONDS = 0.5


def flip(worker: Any) -> None:
    """Reverses every tensor of the model along its first dimension. A second call restores the
    weights of the files.
    """
    import torch

    with torch.no_grad():
        for parameter in worker.model_runner.get_model().parameters():
            parameter.copy_(parameter.flip(0))


def flip_data(worker: Any) -> None:
    """Reverses every tensor without increasing PyTorch's version counters."""
    for parameter in worker.model_runner.get_model().parameters():
        parameter.data.copy_(parameter.data.flip(0))


def flip_soon(worker: Any) -> None:
    """Starts a thread that reverses the second worker's tensors half a second after this call,
    while the worker runs no call of vLLM.
    """
    from threading import Timer

    if worker.rank == 1:
        Timer(0.5, flip, (worker,)).start()


def make_adapter(folder: Path, seed: int) -> None:
    """Writes a LoRA adapter of the tiny model to `folder`, over the previous adapter if any."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 256, generator=numbers)
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, 8, generator=numbers)
    save_file(tensors, folder / "adapter_model.safetensors")


def make_other(model: str, folder: Path) -> str:
    """Makes a copy of the model with different weights. Returns its folder."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor.flip(-1).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return str(folder)


class WeightScenario:
    def __init__(self, model: str, store: str, **options: Any) -> None:
        self.engine = Engine(Path(model), Path(store), **options)
        self.said: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, seed: int, adapter: Any = None) -> None:
        self._wait_for_saves()
        before = self._counts()
        tokens = self._answer(seed, adapter)
        self.engine.tokens([1, 2, 3], answer=2)
        moved = {key: now - before[key] for key, now in self._counts().items()}
        self.said[name] = {"tokens": tokens, **moved}

    def compare(self, name: str, seed: int, adapter: Any = None) -> None:
        """Asks a question, resets vLLM's cache, and lets vLLM compute the same answer without the
        store.
        """
        self.ask(name, seed, adapter)
        self.reset()
        self.said[name]["expected"] = self._answer(seed, adapter, alone=True)
        self.reset()

    def forget(self) -> None:
        """Removes the prompts' blocks from vLLM's cache. Then computes a short prompt, so that the
        next change of weights needs a reset: a change directly after a reset needs none.
        """
        self.engine.forget()
        self.engine.tokens([1, 2, 3], answer=2)

    def reset(self) -> None:
        """Empties vLLM's cache without resetting its connector."""
        assert self.engine.llm.reset_prefix_cache()

    def call(self, method: Any, **named: Any) -> None:
        self.engine.llm.collective_rpc(method, kwargs=named)

    def unseen(self, change: Any) -> None:
        """Makes a change that no call of vLLM announces."""
        core = self.engine.llm.llm_engine.engine_core
        change(core.engine_core.model_executor.driver_worker)

    def _answer(self, seed: int, adapter: Any, *, alone: bool = False) -> list[int]:
        from vllm import SamplingParams

        params = {"ritornello.no_load": alone, "ritornello.no_store": alone}
        sampling = SamplingParams(
            max_tokens=24,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        )
        asked = {"prompt_token_ids": prompt(seed)}
        (output,) = self.engine.llm.generate(
            [asked], sampling, use_tqdm=False, lora_request=adapter
        )
        return list(output.outputs[0].token_ids)

    def _wait_for_saves(self) -> None:
        """Waits until saves of earlier questions are counted: a save is counted in a step after its
        end.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        while has_kv_transfer_group() and get_kv_transfer_group().data_path._worker._pending_saves:
            sleep(0.05)
            self.engine.tokens([1, 2, 3], answer=2)

    def _counts(self) -> dict[str, float]:
        names = ("loaded_pages", "saved_pages")
        return {name: self.engine.count(f"vllm:ritornello_{name}") for name in names}


def change(model: str, store: str) -> WeightScenario:
    from vllm.lora.request import LoRARequest

    engine = WeightScenario(model, store, enable_lora=True, max_lora_rank=8)
    folder = Path(store).parent / "adapter"
    make_adapter(folder, 1)
    adapter = LoRARequest("adapter", 1, str(folder))
    engine.ask("files 1", 1)
    engine.ask("adapter 1", 1, adapter)
    engine.forget()
    # A call changes the weights. The reset that follows empties vLLM's prefix cache, and does not
    # reset vLLM's connector.
    engine.call(flip)
    engine.reset()
    engine.compare("after a call", 1)
    engine.ask("new epoch", 3)
    engine.engine.forget()
    engine.compare("again in the new epoch", 3)
    engine.forget()
    # Restore the weights of the files without a reset: pages computed after this are not saved.
    engine.call(flip_data)
    engine.ask("no reset", 4)
    engine.reset()
    engine.ask("no reset, again", 4)
    engine.forget()
    # vLLM reloads weights by its own method.
    engine.call("reload_weights", weights_path=make_other(model, Path(store).parent / "other"))
    engine.reset()
    engine.compare("after a reload", 4)
    engine.ask("reloaded", 5)
    engine.ask("reloaded, adapter", 5, adapter)
    engine.forget()
    # An adapter is replaced in place.
    make_adapter(folder, 2)
    engine.engine.llm.llm_engine.add_lora(LoRARequest("adapter", 1, str(folder), load_inplace=True))
    engine.reset()
    engine.compare("adapter replaced", 5, adapter)
    engine.ask("adapter replaced, base", 5)
    engine.engine.forget()
    # The worker detects changes that no call announces by PyTorch's version counters of the
    # parameters, and by a sample of their bytes.
    engine.unseen(flip)
    engine.compare("unannounced", 5)
    engine.ask("unannounced, new epoch", 5)
    engine.engine.forget()
    engine.unseen(flip_data)
    sleep(2 * SAMPLE_SECONDS)
    engine.compare("unannounced data", 5)
    # A pause empties vLLM's cache, so no further reset is needed.
    core = engine.engine.llm.llm_engine.engine_core.engine_core
    engine.engine.tokens([1, 2, 3], answer=2)
    core.pause_scheduler("abort")
    engine.call(flip)
    core.resume_scheduler()
    engine.ask("empty", 6)
    engine.engine.forget()
    engine.compare("empty, again", 6)
    return engine


def restart(model: str, store: str) -> WeightScenario:
    engine = WeightScenario(model, store)
    for seed in (1, 3, 4, 5):
        engine.compare(f"files {seed}", seed)
    return engine


def ranks(model: str, store: str) -> WeightScenario:
    engine = WeightScenario(model, store, tensor_parallel_size=2, dtype="float32", block_size=64)
    engine.call(make_room_between_stages)
    engine.ask("files 1", 1)
    engine.engine.forget()
    engine.call(flip_soon)
    sleep(1)
    engine.ask("one rank", 1)
    engine.ask("one rank, fresh", 2)
    engine.reset()
    engine.compare("one rank, reset", 1)
    engine.ask("new epoch", 1)
    engine.engine.forget()
    engine.compare("again in the new epoch", 1)
    return engine


def main() -> None:
    scenario, model, store = sys.argv[1:]
    set_environment(
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1" if scenario == "ranks" else "0",
    )
    from ritornello.vllm.weights import watch

    watch.SAMPLE_SECONDS = SAMPLE_SECONDS
    engine = {"change": change, "restart": restart, "ranks": ranks}[scenario](model, store)
    reply(engine.said)
    engine.engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
