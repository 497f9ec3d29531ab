"""Ritornello as the storage of SGLang's hierarchical cache.

    python -m sglang.launch_server --model-path MODEL --page-size 64
        --enable-hierarchical-cache
        --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "ritornello",
            "module_path": "ritornello.sglang", "class_name": "RitornelloStorage",
            "interface_v1": 1, "path": "/nvme/kv", "capacity": "200GiB"}'

With `interface_v1` SGLang passes its host memory instead of copies of it. Settings in addition to
`path`: see `settings.Settings`.

SGLang calls `storage`, and the wrappers that `updates`, `prompts`, `prefills` and `transfers`
install around methods of SGLang. The modules that make decisions (`identity`, `pages`, `pools`,
`hits`, `settings`) do not import SGLang, so that they can be tested without an engine.
"""

from typing import TYPE_CHECKING

from ritornello.connector import deferred_imports

if TYPE_CHECKING:
    from ritornello.sglang.storage import RitornelloStorage

__all__ = ["RitornelloStorage"]


# Imported at first use, because `storage` imports SGLang.
__getattr__ = deferred_imports(__name__, RitornelloStorage="storage")
