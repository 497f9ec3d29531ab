"""Description of a model in the scopes of its pages, common to all connectors."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

EPOCH_BYTES = 16

# Fields that describe the origin of a configuration or how the model is run, not the computed
# values.
IGNORED_FIELDS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "use_cache"})


def new_epoch() -> bytes:
    return os.urandom(EPOCH_BYTES)


def canonical_config(config: Mapping[str, Any]) -> str:
    """Returns a model configuration as canonical JSON, without the fields in `IGNORED_FIELDS`."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): clean(v) for k, v in value.items() if str(k) not in IGNORED_FIELDS}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value

    return json.dumps(clean(config), sort_keys=True, separators=(",", ":"), default=str)


def model_name(config: Mapping[str, Any]) -> str:
    """Returns the model's type, for readers, and the digest of its configuration."""
    digest = hashlib.sha256(canonical_config(config).encode()).hexdigest()
    return f"{config.get('model_type') or 'model'}:{digest}"


def dtype_name(dtype: object) -> str:
    """Returns the name of a torch dtype, as in "bfloat16"."""
    return str(dtype).removeprefix("torch.")
