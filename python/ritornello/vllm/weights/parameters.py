"""What tells that the parameters of a model changed, without reading all of them.

`moved` compares the identity, version counter and address of every parameter: it sees parameters
that were replaced and in-place operations of PyTorch, in inference mode too. Writes through
`.data`, by another process or by a kernel of its own leave no such trace: `sampled` reads `SAMPLES`
bytes of every parameter and sees them where they hit one of these bytes.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger("vllm.ritornello")

# Bytes of a parameter that are compared, about.
SAMPLES = 64

Owner = tuple[dict[str, Any], str]


class Parameters:
    """Of `modules`, as (name, module); `skips` leaves modules out. `sample`: bytes of parameters.
    What is compared is the state of the last call that found a change, or of the construction.
    """

    def __init__(
        self,
        modules: Callable[[], Iterable[tuple[str, Any]]],
        sample: Callable[[list[Any]], bytes],
        skips: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._modules = modules
        self._sample = sample
        self._skips = skips
        self._tracked: list[Owner] = []
        self._untracked: list[Owner] = []
        self._seen: Any = None
        # None: not read yet, or not readable.
        self._bytes: bytes | None = None
        self.remember()

    def __len__(self) -> int:
        return len(self._tracked) + len(self._untracked)

    def remember(self, *, sampled: bool = True) -> None:
        """Takes the parameters to be as they should be. Where memory cannot be read now
        (`sampled` is false) the next sample is the one to compare with.
        """
        self._enumerate()
        self._seen = self._state()
        self._bytes = self._sampled() if sampled else None

    def moved(self) -> bool:
        return bool(self._state() != self._seen)

    def sampled(self) -> bool:
        """Whether bytes differ from those that were remembered."""
        found = self._sampled()
        if self._bytes is None or found is None:
            self._bytes = found
        return found != self._bytes

    def _enumerate(self) -> None:
        """Owners and names, not parameters: those that were replaced must not be kept alive."""
        self._tracked, self._untracked = [], []
        known: set[int] = set()
        for name, module in self._modules():
            for own, parameter in module._parameters.items():
                if parameter is None or id(parameter) in known or self._skips(name):
                    continue
                known.add(id(parameter))
                # A tensor that was made in inference mode has no version counter.
                inference = parameter.is_inference()
                (self._untracked if inference else self._tracked).append((module._parameters, own))

    def _state(self) -> Any:
        """None where a parameter is gone, or has become another kind of tensor."""
        try:
            tracked = [owner[name] for owner, name in self._tracked]
            others = [owner[name] for owner, name in self._untracked]
            return (
                [*map(id, tracked), *map(id, others)],
                [parameter._version for parameter in tracked],
                [parameter.data_ptr() for parameter in (*tracked, *others)],
            )
        except (AttributeError, KeyError, RuntimeError):
            return None

    def _sampled(self) -> bytes | None:
        found = [owner.get(name) for owner, name in (*self._tracked, *self._untracked)]
        try:
            return self._sample([parameter for parameter in found if parameter is not None])
        except Exception as error:  # tensors of kinds that were never tried
            logger.warning("ritornello: the parameters' bytes cannot be compared (%s)", error)
            return None


def sample_tensors(tensors: list[Any]) -> bytes:
    """About `SAMPLES` bytes of each tensor, evenly spaced over its memory (all of a small one); one
    copy from each device, which waits for the work that was given to it.
    """
    import torch

    pieces: dict[Any, list[Any]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            size = tensor.element_size()
            first = tensor.storage_offset() * size
            dense = tensor.is_contiguous()
            end = first + tensor.numel() * size if dense else storage.nbytes()
            # An odd step reads low and high bytes of an element in turn.
            step = max((end - first) // SAMPLES, 1) | 1
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pieces.setdefault(tensor.device, []).append(flat[first:end:step])
        return b"".join(torch.cat(found).cpu().numpy().tobytes() for found in pieces.values())
