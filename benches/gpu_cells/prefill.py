"""Measures the time to the logits of the first token, with a part of the prompt in a store. The
model has random weights, and the shape of Llama-3-8B with a vocabulary of 32,000 tokens; on an
emulated device it has two small layers.
"""

from dataclasses import dataclass

import torch

from benches.gpu_cells.model import BLOCK, LLAMA_8B, SMALL, Model
from benches.gpu_cells.rig import GIB, Memory, Rig, Row, Rows, timed
from benches.gpu_cells.stored import PLACES, StoredPages, opened
from ritornello import Store

HITS = (0.5, 0.9, 0.98)
ROUNDS = 3
# Maximum relative difference of logits: two prefills that divide a prompt differently into chunks
# round differently in bfloat16.
TOLERANCE = 0.05


@dataclass
class Prompt:
    """A prompt whose keys and values are computed, and the result and time of this computation."""

    model: Model
    tokens: torch.Tensor
    blocks: torch.Tensor
    pages: StoredPages
    logits: torch.Tensor
    seconds: float

    @classmethod
    def compute(cls, rig: Rig) -> "Prompt":
        dims = SMALL if rig.emulated else LLAMA_8B
        model = Model(dims, rig.torch_device)
        views = [kv.view(torch.uint8).view(len(kv), -1) for kv in model.kv]
        pages = StoredPages.of(rig, Memory(views, views), "prefill")
        blocks = torch.tensor(pages.blocks, device=rig.torch_device)
        tokens = torch.randint(0, dims.vocabulary, (dims.prompt,), device=rig.torch_device)
        prompt = cls(model, tokens, blocks, pages, torch.empty(0), 0.0)
        prompt.computed(0)
        runs = [prompt.computed(0) for _ in range(ROUNDS)]
        prompt.logits, prompt.seconds = min(runs, key=lambda run: run[1])
        pages.content = [view.clone() for view in views]
        return prompt

    def computed(self, cached: int) -> tuple[torch.Tensor, float]:
        """Computes all tokens after the leading `cached` tokens. Returns the logits and seconds."""
        with timed() as times:
            logits = self.model.prefill(self.tokens, self.blocks, cached)
            self.pages.rig.finish()
        return logits, times.wall


def times(rig: Rig) -> Rows:
    """Returns the times to the first token of a recomputed prompt, and of the same prompt with its
    beginning in a store in memory or on a disk.
    """
    prompt = Prompt.compute(rig)
    rows: Rows = [{"hit": 0.0, "place": "recompute", "ttft_s": prompt.seconds}]
    for place in PLACES:
        with opened(rig, place, 2 * prompt.pages.nbytes + GIB) as store:
            prompt.pages.put(store)
            for hit in HITS:
                count = int(len(prompt.pages.keys) * hit)
                runs = [_loaded(prompt, store, count) for _ in range(ROUNDS)]
                fastest = min(runs, key=lambda run: run["ttft_s"])
                rows.append({"hit": hit, "place": place, **fastest})
    return rows


def _loaded(prompt: Prompt, store: Store, count: int) -> Row:
    """Loads `count` pages, computes the rest of the prompt, and checks its logits."""
    load = prompt.pages.get(store, count).wall
    logits, compute = prompt.computed(count * BLOCK)
    error = ((logits - prompt.logits).norm() / prompt.logits.norm()).item()
    if not error <= TOLERANCE:
        raise AssertionError(f"logits differ by {error} after a load of {count} pages")
    return {
        "ttft_s": load + compute,
        "load_s": load,
        "compute_s": compute,
        "of_recompute": (load + compute) / prompt.seconds,
        "load_gb_s": count * prompt.pages.pool.page_bytes / load / 1e9,
        "logits_error": error,
    }
