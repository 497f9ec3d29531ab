"""Which weights, as SGLang loads them, may be identified by files on this machine."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import config
from sglang.srt import runtime_context
from sglang.srt.configs.load_config import LoadFormat

from ritornello.sglang.engine import FILE_FORMATS, engine_of, loaded_files

WEIGHTS = "model.bin"


class Server:
    """A server's options, and the model and the draft in its folder."""

    def __init__(self, folder: Path) -> None:
        self.weights, self.draft = folder / "target" / WEIGHTS, folder / "draft" / WEIGHTS
        self.scales = folder / "scales.json"
        for path in (self.weights, self.draft, self.scales):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"first")
        self.args = SimpleNamespace(
            device="cuda",
            download_dir=None,
            kv_cache_dtype="auto",
            load_format="auto",
            quantization=None,
            quantization_param_path=str(self.scales),
            revision=None,
            speculative_algorithm=None,
            speculative_draft_load_format=None,
            speculative_draft_model_path=str(self.draft.parent),
            speculative_draft_model_revision=None,
            weight_cache_mode="off",
            weight_version="default",
        )
        self.model = SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "tiny"}),
            dtype=torch.bfloat16,
            get_total_num_kv_heads=lambda: 2,
        )


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(tmp_path)
    path = SimpleNamespace(model_path=str(server.weights.parent))
    for name, value in {
        "get_server_args": server.args,
        "process_model_config": server.model,
        "get_model": path,
        "get_serving": SimpleNamespace(weight_version="default"),
        "attention_backends": ("a", "b"),
    }.items():
        monkeypatch.setattr(runtime_context, name, lambda value=value: value)
    loaded_files.cache_clear()
    yield server
    loaded_files.cache_clear()


def model_of() -> Any:
    return engine_of(config({})).model


def draft_of() -> str:
    return dict(model_of().options)["draft"]


def test_weights_of_further_folders_get_a_random_epoch(server: Server) -> None:
    assert not model_of().epoch
    server.model.hf_config.architectures = ["MiMoV2ForCausalLM"]
    assert not model_of().epoch
    server.model.hf_config.audio_config = {}
    assert model_of().epoch


@pytest.mark.parametrize("load_format", ["auto", "safetensors", LoadFormat.AUTO])
def test_weights_from_files_are_identified_by_files(server: Server, load_format: object) -> None:
    server.args.load_format = load_format
    first, draft = model_of(), draft_of()
    loaded_files.cache_clear()  # as in another process
    assert first.weights and not first.epoch
    assert (model_of(), draft_of()) == (first, draft)


@pytest.mark.parametrize(
    "option",
    [
        {"load_format": "dummy"},
        {"load_format": "remote_instance"},
        {"load_format": "npcache"},
        {"load_format": "sharded_state", "model_loader_extra_config": '{"pattern": "/x/{rank}"}'},
        {"load_format": LoadFormat.REMOTE_INSTANCE},
        {"load_format": "presharded"},
        {"load_format": "a later format"},
        {"weight_cache_mode": "client"},
        {"modelopt_checkpoint_restore_path": "/elsewhere"},
    ],
)
def test_weights_from_elsewhere_get_random_epoch(server: Server, option: dict[str, Any]) -> None:
    vars(server.args).update(option)
    draft = draft_of()
    assert model_of().epoch and not model_of().weights
    loaded_files.cache_clear()
    assert draft_of() != draft


def test_draft_from_elsewhere_is_random(server: Server) -> None:
    server.args.speculative_draft_load_format = "remote_instance"
    draft = draft_of()
    loaded_files.cache_clear()
    assert draft_of() != draft
    assert model_of().weights


def test_version_without_weight_cache_is_identified_by_files(server: Server) -> None:
    del server.args.weight_cache_mode
    assert model_of().weights


@pytest.mark.parametrize("changed", ["weights", "draft", "scales"])
def test_files_changed_after_start_keep_identity(server: Server, changed: str) -> None:
    """SGLang loaded the first contents, and attaches the storage again."""
    first = engine_of(config({}))
    getattr(server, changed).write_bytes(b"other")
    assert engine_of(config({})) == first
    loaded_files.cache_clear()
    assert engine_of(config({})) != first


def test_scope_contains_modules_of_adapters(server: Server) -> None:
    none = model_of()
    server.args.lora_target_modules = None
    assert model_of() == none
    options = []
    for targets in (["q_proj", "k_proj"], {"k_proj", "q_proj"}, {"all"}, []):
        server.args.lora_target_modules = targets
        options.append(dict(model_of().options)["lora_target_modules"])
    assert options == ["k_proj,q_proj", "k_proj,q_proj", "all", ""]


def test_updated_weights_get_random_epoch_at_second_attach(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_of().weights
    serving = SimpleNamespace(weight_version="2")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    assert model_of().epoch and not model_of().weights


def test_unreadable_scales_get_random_epoch(server: Server) -> None:
    server.scales.unlink()
    assert model_of().epoch and not model_of().weights


def test_sglang_has_load_formats_of_files() -> None:
    assert not FILE_FORMATS - {each.value for each in LoadFormat}
