"""Generated documents, which are the same in every run."""

import random
from collections.abc import Callable
from dataclasses import dataclass

LENGTHS = (1024, 2048, 4096)

SUBJECTS = ("the committee", "a survey", "the northern office", "each report", "the archive")
VERBS = ("describes", "recommends", "questions", "repeats", "measures", "postpones")
OBJECTS = (
    "the price of copper in spring",
    "a bridge that was never built",
    "three letters about the harbour",
    "the rules for lending instruments",
    "an index of forgotten dances",
    "the weather of the second week",
)
QUESTION = "\nQuestion: what does the archive say?\nAnswer:"


@dataclass(frozen=True)
class Prompt:
    """The beginning of a document and a question, together exactly `length` tokens."""

    document: int
    length: int
    tokens: tuple[int, ...]


def text(seed: int, characters: int) -> str:
    """Returns a text of at least `characters` characters. Texts of different seeds differ in their
    second word.
    """
    chance = random.Random(seed)
    written = [f"Document {seed}."]
    size = 0
    while size < characters:
        sentence = (
            f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {chance.choice(OBJECTS)}"
            f" on page {chance.randrange(1, 1000)}."
        )
        written.append(sentence.capitalize())
        size += len(sentence) + 1
    return " ".join(written)


def prompts(tokenize: Callable[[str], list[int]], per_length: int) -> list[Prompt]:
    """Returns prompts about `per_length` documents of each length, the shortest first."""
    question = tokenize(QUESTION)
    made: list[Prompt] = []
    for length in LENGTHS:
        for _ in range(per_length):
            document = len(made) + 1
            room = length - len(question)
            # Three characters for each token suffice, because the tokenizer has few merges. The
            # next lines check this.
            tokens = tokenize(text(document, 3 * room))
            if len(tokens) < room:
                raise ValueError(
                    f"document {document} has {len(tokens)} tokens, and {room} are needed: "
                    "generate more characters for each token"
                )
            made.append(Prompt(document, length, (*tokens[:room], *question)))
    return made
