"""Whether the files of a model identify the weights that vLLM loaded."""

from typing import TYPE_CHECKING

from ritornello.connector import weight_fingerprint
from ritornello.connector.weight_fingerprint import format_name, has_further_folders

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

# Load formats with which vLLM reads the weights of most models from the files at the model's path.
# Other formats take weights from elsewhere (another server, another process, a URL, a copy that an
# earlier start made), or a plugin defines them.
FILE_FORMATS = frozenset(
    {
        "auto",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)


def fingerprint_of(model: "ModelConfig", load: "LoadConfig") -> bytes | None:
    """Returns the fingerprint of a model's weights if vLLM loaded them from files on this machine;
    None for other weights.
    """
    # If `model_weights` is set, vLLM streams weights from there instead of from the model's path.
    # The `pattern` of formats with a file for each rank may name any files.
    streamed = getattr(model, "model_weights", "")
    has_pattern = "pattern" in (getattr(load, "model_loader_extra_config", None) or ())
    if streamed or has_pattern or format_name(load.load_format) not in FILE_FORMATS:
        return None
    if has_further_folders(getattr(model, "hf_config", None)):
        return None
    return weight_fingerprint.fingerprint_of(model.model, model.revision, load.download_dir)
