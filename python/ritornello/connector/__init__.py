"""Common parts of the adapters for vLLM, SGLang and LMCache. An adapter reads model, options and
memory from its engine's objects; the modules of this package apply the rules that are the same for
all engines.

    identity            the rules that decide whether the bytes of a page may be reused
    weight_fingerprint  the digest by which weights are recognised
    interface           checks that an installed engine has the interface that was tested
    settings            the user's settings of a store
    opening             opens a store by its settings
    fail_safe           the store whose failures are misses, and which reopens itself
    meter               counters
    cache_counts        the counters of a cache over tiers
    engine_tiers        checks a list of tiers against the memory that an engine manages
    strided_blocks      an engine's memory as pages
"""

from collections.abc import Callable
from importlib import import_module


def deferred_imports(package: str, **modules: str) -> Callable[[str], object]:
    """Returns a `__getattr__` of a package that imports names from its modules at first use."""

    def get(name: str) -> object:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
