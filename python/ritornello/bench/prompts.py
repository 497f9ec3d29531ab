"""Prompts that are generated from a seed."""

import random
from dataclasses import dataclass

from ritornello.bench.client import Prompt

# Ids from `FIRST_ID` to below `LAST_ID` are generated: ordinary tokens in the vocabularies of Llama
# and Qwen.
FIRST_ID, LAST_ID = 3, 290
WORDS = (
    *("river", "copper", "winter", "letter", "harbour", "method", "answer", "garden", "copy"),
    *("signal", "bridge", "paper", "station", "metal", "season", "table", "music", "window"),
    *("stone", "report", "engine", "island", "number", "forest", "morning", "reason"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """Generates pieces of prompts. A piece depends on seed, `text`, its name and its length only.
    Pieces of different names almost always differ within their first tokens. `text`: a piece is
    words, each counted as one token; otherwise a piece is token ids.
    """

    seed: int
    text: bool = False

    def piece(self, name: str, tokens: int) -> Prompt:
        rng = random.Random(f"{self.seed}/{name}")
        if self.text:
            return "".join(f"{rng.choice(WORDS)} " for _ in range(tokens))
        return tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(tokens))


def joined(*pieces: Prompt) -> Prompt:
    """Concatenates pieces that are all text or all token ids."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return "".join(texts)
    if texts:
        raise TypeError(
            "a prompt is either text or token ids: some pieces are text, some token ids"
        )
    return tuple(token for piece in pieces for token in piece if isinstance(token, int))
