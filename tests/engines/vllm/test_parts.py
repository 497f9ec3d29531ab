"""Two kinds of models: some layers with sliding windows and some with full attention, or all layers
with latent attention.
"""

import pytest
from ask import LENGTH
from conftest import Ask
from harness import BLOCK

CLAIMED = (LENGTH - 1) // BLOCK * BLOCK

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


def test_windows_are_restored_with_full_attention(ask: Ask) -> None:
    cold = ask([1, 2], "windows", num_gpu_blocks_override=200)
    assert [answer["first_hits"] for answer in cold["answers"]] == [0, 0]
    assert [answer["stored_hits"] for answer in cold["answers"]] == [CLAIMED] * 2
    warm = ask([1, 2, 3], "windows", bad=[[0], [2]], num_gpu_blocks_override=200)
    assert [answer["first_hits"] for answer in warm["answers"]] == [CLAIMED] * 2 + [0]
    for before, after in zip(cold["answers"], warm["answers"], strict=False):
        assert after["first"] == after["stored"] == before["stored"]
    for after in warm["answers"]:
        # With several cache groups the connector cannot tell vLLM which blocks failed, so vLLM
        # computes the whole request again.
        for broken in ("broken 0", "broken 1"):
            assert after[f"{broken}_failed"] > 0
            assert after[broken] == after["stored"]


def test_two_workers_restore_windows(ask: Ask) -> None:
    options = {"tensor_parallel_size": 2, "block_size": 64, "num_gpu_blocks_override": 200}
    cold = ask([1], "windows", forks_workers=True, **options)
    warm = ask([1], "windows", forks_workers=True, **options)
    assert warm["answers"][0]["first_hits"] == (LENGTH - 1) // 64 * 64
    assert warm["answers"][0]["first"] == cold["answers"][0]["stored"]


def test_latent_attention_without_prefix_caching_is_refused(ask: Ask) -> None:
    found = ask([1], "latent", num_gpu_blocks_override=200)
    # Without AMX instructions vLLM's kernels for latent attention read no prefix, and vLLM turns
    # prefix caching off.
    if "prefix caching to be disabled" in found["log"]:
        assert found["log"].count("prefix caching is off: latent attention") == 1
        assert found["answers"][0]["stored_hits"] == 0
    else:
        assert found["answers"][0]["stored_hits"] == CLAIMED
    assert found["answers"][0]["first"] == found["answers"][0]["stored"]
