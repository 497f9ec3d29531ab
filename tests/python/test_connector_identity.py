"""`ritornello.connector.identity`: rules for scopes that all adapters share, without an engine."""

from dataclasses import replace

import pytest

from ritornello import Scope
from ritornello.connector.identity import (
    ModelIdentity,
    ambiguity,
    depends_on_maximum_length,
    draft_option,
    kv_scale_of,
)

MODEL = ModelIdentity.of("llama:0", b"w" * 32, {"device": "cpu"}, hash_algorithm="sha256")


def scope(model: ModelIdentity) -> Scope:
    return model.scope(
        "bfloat16",
        16,
        layers=(0, 4),
        kv_heads=(0, 8),
        head_dim=64,
        layout="test",
        chained=True,
        page_bytes=4096,
        options={"pool": "kv"},
    )


def test_scope_contains_model_and_options() -> None:
    described = scope(MODEL).describe()
    assert (described["model"], described["weights"]) == ("llama:0", b"w" * 32)
    assert (described["kv_scale"], described["hash_algorithm"]) == ("none", "sha256")
    assert described["extra"] == {"device": "cpu", "pool": "kv"}
    for other in (replace(MODEL, name="m"), replace(MODEL, kv_scale="checkpoint")):
        assert scope(other).id != scope(MODEL).id


def test_weights_without_fingerprint_get_random_epoch() -> None:
    one, two = (ModelIdentity.of("m", None, {}, hash_algorithm="") for _ in range(2))
    assert len(one.epoch) == 16
    assert one.epoch != two.epoch
    assert MODEL.epoch == b""
    assert MODEL.at(b"") is MODEL
    assert MODEL.at(b"e" * 16).epoch == b"e" * 16


def test_kv_with_longrope_depends_on_maximum_length() -> None:
    assert depends_on_maximum_length('{"rope_type":"longrope"}')
    assert not depends_on_maximum_length('{"rope_type":"yarn"}')


def test_draft_model_is_identified_by_its_weights() -> None:
    assert draft_option(b"d") == draft_option(b"d") == {"draft": b"d".hex()}
    assert draft_option(None) != draft_option(None)


def test_kv_is_scaled_if_its_dtype_is_not_the_models() -> None:
    assert kv_scale_of("auto", ["bfloat16"]) == kv_scale_of("bfloat16", ["bfloat16"]) == "none"
    assert kv_scale_of("fp8", ["bfloat16"]) == "checkpoint"


def why(*, scales: bool = False, hashes: str = "sha256") -> str:
    return ambiguity(scales_at_run_time=scales, hash_algorithm=hashes)


def test_keys_that_do_not_determine_pages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert why() == ""
    assert "run time" in why(scales=True)
    assert "xxhash_cbor block hashes start from a random seed" in why(hashes="xxhash_cbor")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert why(hashes="xxhash") == ""
