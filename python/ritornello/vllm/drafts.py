"""Speculative decoding: which drafts keep KV in vLLM's blocks, and what identifies this KV.

vLLM gives the layers of a draft model (EAGLE, MTP, or a separate model) the block table of the
target model, so a page also contains the draft's KV of its tokens. With the acceptance methods in
`EXACT_ACCEPTANCE` the target model verifies every draft: draft KV of other weights or other tokens
lowers the rate of accepted drafts, and does not change the distribution of answers. With other
acceptance methods no pages are stored. The identity contains the draft's weights, so that stored
draft KV is useful.
"""

from typing import TYPE_CHECKING, Any

from ritornello.connector.identity import dtype_name
from ritornello.vllm.loaded_files import fingerprint_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's names of methods of speculative decoding. `WITHOUT_KV`: methods that draft from tokens or
# hidden states, and keep no KV. `WITH_KV`: methods whose draft KV is stored with the pages.
WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
WITH_KV = ("eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark")
# Values of vLLM's `rejection_sample_method` with which drafts do not change the distribution of
# answers. With other values vLLM accepts drafts that the target model would not have chosen.
EXACT_ACCEPTANCE = ("standard", "block")


def keeps_kv(vllm_config: "VllmConfig") -> bool:
    """Returns whether blocks may contain KV of a draft model: true for unknown methods too."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method not in WITHOUT_KV


def refusal(vllm_config: "VllmConfig") -> str:
    """Returns why pages with the draft's KV are neither stored nor found; "" if they are stored and
    found, or if pages contain no such KV.
    """
    if not keeps_kv(vllm_config):
        return ""
    speculation = vllm_config.speculative_config
    method = str(speculation.method)
    if method not in WITH_KV or speculation.draft_model_config is None:
        return f"the contents of KV blocks with speculative decoding by {method} are unknown"
    acceptance = getattr(speculation, "rejection_sample_method", "standard")
    if acceptance not in EXACT_ACCEPTANCE:
        return (
            f'rejection_sample_method "{acceptance}" lets drafts change answers, '
            "and so would stored KV of the draft model"
        )
    if not _in_target_files(vllm_config) and _fingerprint(vllm_config) is None:
        return (
            f"the draft model {speculation.draft_model_config.model} was not loaded from files "
            "on this machine, so its weights have no fingerprint"
        )
    return ""


def options(vllm_config: "VllmConfig") -> dict[str, str]:
    """Returns the options of the model's identity (`ModelIdentity.options`) that identify the
    draft's KV; none without a draft model. The draft's configuration is not among them, because
    vLLM changes it while it builds the model, which may happen in another process.
    """
    if not keeps_kv(vllm_config):
        return {}
    draft = vllm_config.speculative_config.draft_model_config
    weights = b"" if _in_target_files(vllm_config) else _fingerprint(vllm_config) or b""
    return {
        "draft_weights": weights.hex() or "target",
        "draft_method": str(vllm_config.speculative_config.method),
        "draft_dtype": dtype_name(draft.dtype),
        "draft_quantization": str(draft.quantization or "none"),
    }


def _in_target_files(vllm_config: "VllmConfig") -> bool:
    """Returns whether the draft's weights are in the files of the target model, as with MTP. The
    target's fingerprint or epoch then identifies them.
    """
    draft, target = vllm_config.speculative_config.draft_model_config, vllm_config.model_config
    return bool((draft.model, draft.revision) == (target.model, target.revision))


def _fingerprint(vllm_config: "VllmConfig") -> bytes | None:
    speculation = vllm_config.speculative_config
    load: Any = getattr(speculation, "draft_load_config", None) or vllm_config.load_config
    return fingerprint_of(speculation.draft_model_config, load)
