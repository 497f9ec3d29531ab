"""Detects changes of a model's parameters without reading all their bytes.

`state_changed` compares the identity, version counter and address of every parameter. The
comparison detects replaced parameters and, in inference mode too, in-place operations of PyTorch on
tensors that have a version counter (tensors made in inference mode have none).
Writes through `.data`, by another process or by a custom kernel leave no trace: `sample_changed`
reads evenly spaced bytes of every parameter (`SAMPLE_BYTES`) and detects writes that change one of
these bytes.

A tensor subclass that wraps other tensors (torchao's quantized weights) has no memory: the tensors
that its `__tensor_flatten__` names are compared too, and are read in its place. A tensor without a
version counter, an address or memory does not keep other tensors from being compared.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

logger = logging.getLogger("vllm.ritornello")

# Bytes of a parameter that are compared: all bytes of a parameter shorter than twice this number,
# otherwise 2/3 to 4/3 of this number.
SAMPLE_BYTES = 64

# Raised when a tensor is asked for a version counter, an address or memory that it lacks.
LACKING = (AttributeError, RuntimeError)


class TensorRef(NamedTuple):
    """Location of a parameter or, with `path`, of a tensor inside it. `versioned`: it has a version
    counter. `wraps`: its bytes are in the tensors inside.
    """

    owner: dict[str, Any]
    name: str
    path: tuple[str, ...]
    versioned: bool
    wraps: bool


def within(tensor: Any, path: tuple[str, ...]) -> Any:
    """Returns the tensor at `path` inside `tensor`; None if an attribute on the path is missing."""
    for name in path:
        tensor = getattr(tensor, name, None)
    return tensor


class Parameters:
    """The parameters of `modules`, pairs of name and module, without the modules for whose name
    `skips` returns true. `sample` reads bytes of parameters (`sample_tensors`). The baseline, with
    which later states are compared, is the state at construction or at the last `take_baseline`.
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
        self._refs: list[TensorRef] = []
        self._seen: Any = None
        # The sampled bytes of the baseline; None if they are not read yet, or cannot be read.
        self._bytes: bytes | None = None
        self.take_baseline()

    def __len__(self) -> int:
        return sum(not ref.path for ref in self._refs)

    def take_baseline(self, *, sampled: bool = True) -> None:
        """Makes the current parameters the baseline. With `sampled` false the memory is not read:
        the next sample becomes part of the baseline.
        """
        self._enumerate()
        self._seen = self._state()
        self._bytes = self._sampled() if sampled else None

    def state_changed(self) -> bool:
        return bool(self._state() != self._seen)

    def sample_changed(self) -> bool:
        """Returns whether sampled bytes differ from the baseline."""
        found = self._sampled()
        if self._bytes is None or found is None:
            self._bytes = found
        return found != self._bytes

    def _enumerate(self) -> None:
        """Finds the parameters. Keeps owners and names only: replaced parameters must not be kept
        alive.
        """
        self._refs = []
        known: set[int] = set()
        for name, module in self._modules():
            for own, parameter in module._parameters.items():
                if parameter is None or id(parameter) in known or self._skips(name):
                    continue
                known.add(id(parameter))
                self._refs.extend(tensor_refs(parameter, module._parameters, own))

    def _state(self) -> Any:
        # The `id` of an inner tensor is omitted: a subclass may make a new tensor object for every
        # access.
        state: list[int | None] = []
        for owner, name, path, versioned, _ in self._refs:
            tensor = owner.get(name)
            if path:
                tensor = within(tensor, path)
            else:
                state.append(id(tensor))
            try:
                state.append(tensor._version if versioned else None)  # type: ignore[union-attr]
            except LACKING:
                state.append(None)
            try:
                state.append(tensor.data_ptr())  # type: ignore[union-attr]
            except LACKING:
                state.append(None)
        return state

    def _sampled(self) -> bytes | None:
        found = [within(ref.owner.get(ref.name), ref.path) for ref in self._refs if not ref.wraps]
        try:
            return self._sample([parameter for parameter in found if parameter is not None])
        except Exception as error:  # a tensor subclass may raise anything
            logger.warning(
                "ritornello: changes of the parameters' bytes cannot be detected (%s)", error
            )
            return None


def tensor_refs(
    tensor: Any, owner: dict[str, Any], name: str, path: tuple[str, ...] = ()
) -> Iterator[TensorRef]:
    """Yields the locations of a tensor and, at any depth, of the tensors it wraps."""
    try:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        inner = [] if flatten is None else list(flatten()[0])
    except Exception as error:  # a subclass may raise anything
        logger.warning(
            "ritornello: changes of the tensors inside %s cannot be detected (%s)", name, error
        )
        inner = []
    # Tensors made in inference mode have no version counter.
    yield TensorRef(owner, name, path, not tensor.is_inference(), bool(inner))
    for part in inner:
        found = getattr(tensor, part, None)
        if found is not None:
            yield from tensor_refs(found, owner, name, (*path, part))


def sample_tensors(tensors: list[Any]) -> bytes:
    """Returns evenly spaced bytes of each tensor, as many as the comment of `SAMPLE_BYTES` says.
    Makes one copy from each device, which waits for the device's queued work. Tensors without
    memory contribute nothing.
    """
    import torch

    pieces: dict[Any, list[Any]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            try:
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
            except LACKING:
                continue
            # The storage of a wrapper subclass has a size and no memory.
            if not address:
                continue
            size = tensor.element_size()
            first = tensor.storage_offset() * size
            dense = tensor.is_contiguous()
            end = first + tensor.numel() * size if dense else storage.nbytes()
            # With an odd step the sample alternates between low and high bytes of elements.
            step = max((end - first) // SAMPLE_BYTES, 1) | 1
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pieces.setdefault(tensor.device, []).append(flat[first:end:step])
        return b"".join(torch.cat(found).cpu().numpy().tobytes() for found in pieces.values())
