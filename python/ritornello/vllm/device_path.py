"""The data path of CUDA engines with our own copies between the GPU and the store, chosen by the
environment (`device_choice`).
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: allow-subclassing-any

from typing import TYPE_CHECKING, Any

from ritornello.vllm import kernels
from ritornello.vllm.cpu_path import CpuPath
from ritornello.vllm.device_choice import EMULATED, OWN, VARIABLE, chosen
from ritornello.vllm.kv_memory import DeviceMemory, KvMemory
from ritornello.vllm.prefill_times import PrefillTimes
from ritornello.vllm.settings import Settings
from ritornello.vllm.weights.engine import observe_steps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class DevicePath(CpuPath):
    """As `CpuPath`, for KV memory on a device. All loads are asynchronous: steps overlap, so the
    failure of a load that a step waits for would be known too late.
    """

    @classmethod
    def _parse_settings(cls, extra: dict[str, Any]) -> Settings:
        settings = Settings.parse(extra)
        if settings.tiers:
            raise ValueError(
                f'{VARIABLE}={OWN} serves "path", not "tiers": leave {VARIABLE} unset for tiers'
            )
        return settings

    def _memory_refusal(self, kv_cache_config: "KVCacheConfig") -> str:
        # vLLM clears the blocks that it gives to a request before the step is made to wait for
        # saves that still read these blocks.
        if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
            return f"KV memory that vLLM clears is not served with {VARIABLE}={OWN}"
        # Releases of vLLM before 0.33 do not ask `supports_sleep_mode`. Sleep unmaps KV memory that
        # saves in progress may still read.
        if getattr(self._vllm_config.model_config, "enable_sleep_mode", False):
            return f"sleep mode is not served with {VARIABLE}={OWN}"
        return ""

    def _make_kv_memory(self) -> KvMemory:
        parallel = self._vllm_config.parallel_config
        workers = parallel.world_size * parallel.data_parallel_size_local
        layers = self._vllm_config.compilation_config.static_forward_context
        return DeviceMemory(
            workers,
            lambda name: str(layers[name].get_attn_backend().get_name()),
            emulated=chosen() == EMULATED,
        )

    def _block_layout(self, vllm_config: "VllmConfig", spec: Any) -> str:
        if chosen() == EMULATED:
            return kernels.block_layout(vllm_config, spec)
        return kernels.device_block_layout(vllm_config, spec)

    def _workers_measure_prefills(self) -> bool:
        return False

    def _observe_prefills(self) -> None:
        self._prefill_times = PrefillTimes(self._store.record_prefill)
        observe_steps(self._prefill_times)

    def _loads_apart(self) -> bool:
        return True
