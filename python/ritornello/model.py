"""What connectors say of a model in the scopes of its pages."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

EPOCH_BYTES = 16

# Where a configuration came from and how it is run, not what the model computes.
VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "use_cache"})


def new_epoch() -> bytes:
    return os.urandom(EPOCH_BYTES)


def normalised(config: Mapping[str, Any]) -> str:
    """A model configuration as canonical JSON without what does not change the computation."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): clean(v) for k, v in value.items() if str(k) not in VOLATILE}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value

    return json.dumps(clean(config), sort_keys=True, separators=(",", ":"), default=str)


def model_name(config: Mapping[str, Any]) -> str:
    """The model's type, for a person, and the digest of its configuration."""
    digest = hashlib.sha256(normalised(config).encode()).hexdigest()
    return f"{config.get('model_type') or 'model'}:{digest}"


def plain(dtype: object) -> str:
    """Name of a torch dtype: bfloat16."""
    return str(dtype).removeprefix("torch.")
