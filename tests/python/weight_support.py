"""Stand-ins for a model, its parameters and a worker of vLLM, for tests of changed weights."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ritornello.vllm.weights import watch


class Parameter:
    """Stand-in for a tensor of one byte. `write` changes the byte and increments the version, as
    PyTorch's operations do; `poke` changes the byte only.
    """

    def __init__(self, byte: int = 0, *, inference: bool = False) -> None:
        self.byte, self.inference, self.version, self.address = byte, inference, 0, 1000

    @property
    def _version(self) -> int:
        if self.inference:
            raise RuntimeError("Inference tensors do not track version counter.")
        return self.version

    def is_inference(self) -> bool:
        return self.inference

    def data_ptr(self) -> int:
        return self.address

    def write(self, byte: int) -> None:
        self.version += 1
        self.byte = byte

    def poke(self, byte: int) -> None:
        self.byte = byte


class Model:
    """Stand-in for a model with the modules "a" and "experts.b", each with one parameter."""

    def __init__(self) -> None:
        self.parts = {
            name: SimpleNamespace(_parameters={"weight": Parameter(), "bias": None})
            for name in ("a", "experts.b")
        }

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        yield from self.parts.items()

    def parameter(self, part: str = "a") -> Any:
        return self.parts[part]._parameters["weight"]

    def load_weights(self) -> None:
        pass


def sample(found: list[Any]) -> bytes:
    return bytes(parameter.byte for parameter in found)


class Runner:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.lora_manager = SimpleNamespace(_load_adapter=lambda request: request.lora_name)

    def get_model(self) -> Model:
        return self.model

    def load_model(self) -> None:
        pass

    def reload_weights(self) -> str:
        self.model.load_weights()
        return "reloaded"


class Worker:
    """Stand-in for vLLM's worker. `seen`: for each update, the number of changes of the weights
    that this process had counted while the update ran.
    """

    def __init__(self, model: Model) -> None:
        self.model_runner: Any = Runner(model)
        self.rank = 0
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
        self.seen: list[int] = []

    def _update(self) -> None:
        self.seen.append(change_count())

    start_weight_update = update_weights = finish_weight_update = reload_weights = _update

    def sleep(self, level: int = 1) -> None:
        pass

    def discard(self, tags: tuple[str, ...]) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def execute_model(self, step: Any) -> str:
        return "ran"


def change_count() -> int:
    """Returns the number of changes of the weights that this process has counted."""
    current = watch.current()
    assert current is not None
    return current.count
