"""The lint of comments, `words.py`, marks sentences that are not in plain technical English, and
marks neither plain sentences nor code. ARCHITECTURE.md names files that exist.
"""

import re
from collections.abc import Callable

import pytest
from words import ROOT, check

MARKED = [
    "Nobody waits for it.",
    "Cancels the leases of whoever died.",
    "The owner answers, and the client likewise.",
    "At most so many leases.",
    "Nothing is there, and nothing ever was.",
    "Stops it. That of pages comes later.",
    "One that cannot be had is one less.",
    "What a client holds.",
    "Who asks is told.",
    "How long a lookup may wait.",
    "Cancels what is\nthere.",
    "Drops the older one first.",
    "Compares the length with that of the file.",
    "Withholds the pages from `end` on.",
    "Returns the most pages of a call.",
    "Fails if the segment lies elsewhere.",
    "Drops the scope; reads fail meanwhile.",
    "The volume is gone.",
    "Writes at most 64 pages a second.",
    "An empty file is no journal.",
    "The errors of `open`.",
]
PLAIN = [
    "Returns the pages that the owner leased.",
    "The owner evicts that page. That page was cold.",
    "Why does a probe wait? What does it read?",
    "At most 64 leases, as many as a client may have.",
    "Raises `Nobody` if `who` is empty.",
    "One of the tiers fails.",
    "A whole and someones name: whopper.",
]


def as_rust(text: str) -> str:
    return "fn f() {\n" + "".join(f"    /// {line}\n" for line in text.split("\n")) + "}\n"


def as_python(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.split("\n")) + "x = 1\n"


def as_docstring(text: str) -> str:
    return f'def f() -> None:\n    """{text}"""\n'


FORMS = [
    pytest.param(as_rust, ".rs", id="rust"),
    pytest.param(as_python, ".py", id="python"),
    pytest.param(as_docstring, ".py", id="docstring"),
    pytest.param(str, ".md", id="markdown"),
    pytest.param("| cell | {} |\n".format, ".md", id="table"),
]


@pytest.mark.parametrize(("form", "suffix"), FORMS)
@pytest.mark.parametrize("text", MARKED)
def test_marked_sentences_are_found(form: Callable[[str], str], suffix: str, text: str) -> None:
    # A cell of a table is one line, so the lines of the text are joined.
    _, found = check(form(text.replace("\n", " ") if suffix == ".md" else text), suffix)
    assert len(found) == 1


@pytest.mark.parametrize(("form", "suffix"), FORMS)
@pytest.mark.parametrize("text", PLAIN)
def test_plain_sentences_are_not_found(form: Callable[[str], str], suffix: str, text: str) -> None:
    assert check(form(text), suffix) == (1, set())


@pytest.mark.parametrize("text", ["It is here.", "Where pages are.", "Nothing is left."])
def test_start_without_subject_is_marked_only_in_first_sentence_of_a_comment(text: str) -> None:
    assert check(as_rust(text), ".rs") == (1, {2})
    assert check(as_rust(f"Evicts a page. {text}"), ".rs") == (1, set())
    assert check(text, ".md") == (1, set())


def test_code_and_headings_are_not_checked() -> None:
    assert check("# What it promises\n\n```console\n$ nobody  # who\n```\n", ".md") == (0, set())
    assert check('name = "nobody"  # a user\nlet = """who"""\n', ".py") == (1, set())
    assert check('let user = "nobody"; // who\n', ".rs") == (0, set())


def test_mark_is_reported_at_its_line() -> None:
    assert check("A page is evicted.\nThe owner frees it, and\nnobody waits.\n", ".md") == (3, {3})


def test_architecture_names_existing_files() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([\w./-]+\.(?:rs|py|md))`", text))
    assert len(named) > 20
    missing = {
        name for name in named if not any((ROOT / at / name).exists() for at in ("", "crates"))
    }
    assert not missing
