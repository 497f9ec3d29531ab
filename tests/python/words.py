#!/usr/bin/env python3
"""Counts lines of comments and documents that are not in plain technical English.

A marked line names a person instead of a role, begins a sentence without naming its subject, or has
an idiom or a vague reference that `ANYWHERE` lists. Code spans, code blocks and headings are not
checked. The share of marked lines must not exceed `LIMIT`.

    python3 tests/python/words.py           # the share of each part
    python3 tests/python/words.py --list    # each marked line as well
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    *("benches", "crates", "demo", "docs", "engines", "fuzz"),
    *("python", "servers", "tests", "traces"),
)
# Maximum share of marked lines, in percent of all lines of comments and documents. Lower the limit
# when the share has fallen.
LIMIT = 0.3

# Patterns that mark a line wherever they match.
ANYWHERE = {
    "person": r"who|whom|whoever|nobody|somebody|someone|anybody|anyone|everybody|he|him|his",
    "no subject": r"likewise|so many|whatever it|(?:what|which|that|nothing|something) "
    r"(?:is|are|was|were) there",
    "one": r"(?:the|this|another|each|other|older|newer|larger|smaller|first|last|next|previous|new"
    r"|only) ones?(?! (?:or more|of|at a time|by))|: one (?:that|which|for each)",
    "those": r"(?<!so )(?<!such )(?:that|those) (?:of|with|without|behind)"
    r"|those (?:that|which|present|given|still|left)|those(?=[.,;:])",
    "others": r"the (?:others?|rest|former|latter)(?=[.,;:)]| (?:is|are|was|must|may|can|have)\b)",
    "from on": r"from [^.;:,()]{1,45}? on(?=[.,;:)]|$| (?:is|are|and)\b)"
    r"|(?:now|then|here) on(?=[.,;:)])",
    "most": r"the (?:most|fewest|least) (?!of\b|recent|expensive|common|frequent)[a-z]+s",
    "lie": r"lies|lie|lay|lying",
    "time": r"meanwhile|by now|by then|at once|any more|for ever|for good|at the moment",
    "gone": r"(?:is|are|was|were) (?:gone|back|away)|(?:is|are|was) over(?=[.,;:)])"
    r"|(?:goes|go|went) on|gone",
    "own": r"of (?:its|their) own|(?:by|for) (?:itself|themselves)",
    "count": r"(?:this|that) (?:many|much|long)|as (?:many|much)(?! \w+ as\b| as\b)",
    "per": r"(?:bytes|tokens|pages|pieces|calls|times|one (?:page|object|key|file|process|line))"
    r" an? (?:second|day|page|key|request|step|worker|layer|process|object)(?! time)",
    "other": r"(?:another|other) (?:[a-z]+ )?than",
    "is no": r"(?<!there )(?:is|are|was|were) no (?!longer|more|such|need|way|[a-z]+er\b)[a-z]+",
    "shall": r"shall|need not|for want of|cannot be (?:had|told)",
    "present": r"the present (?=[a-z])",
}
WORDS = re.compile("|".join(rf"\b(?:{mark})\b" for mark in ANYWHERE.values()), re.IGNORECASE)
# Patterns that mark a line if a sentence begins with them and is not a question.
OPENINGS = re.compile(
    r"(?:What|How (?:long|many|much|often|far)|None on|The errors? of|As for|As there|Unusable if"
    r"|Of|Than|Nor|Until when|Behind|Beside|Also|So an?"
    r"|(?:That|Those) (?:of|that|which|is|are|was|were|can|may|must|has|have|costs?|takes?|holds?)"
    r"|One (?:that|which|whose|is|was|can|may|must|has))\b"
)
# Patterns that mark a line if a comment in code begins with them: no subject was named before.
STARTS = re.compile(r"(?:It|They|Its|Their|These|Those|Nothing|Where)\b")
SENTENCE_END = re.compile(r"[.!?:;][\"')*_]*\s+")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")
ITEM = re.compile(r"^(?:[*+-]|\d+\.)\s+")


class Line(NamedTuple):
    """A line of a comment or document: its number in the file, and its text without the comment's
    sign.
    """

    number: int
    text: str


Block = list[Line]


def paragraphs(lines: Iterable[Line]) -> Iterator[Block]:
    """Splits a document, or the text of comments, into paragraphs, list items and cells of tables,
    as Markdown; skips code and headings.
    """
    block: Block = []
    fenced = False
    for number, text in lines:
        stripped = text.strip()
        if stripped.startswith("```"):
            fenced = not fenced
        starts_anew = ITEM.match(stripped) or stripped.startswith("|")
        ends = fenced or not stripped or stripped.startswith(("```", "#"))
        if block and (starts_anew or ends or number != block[-1].number + 1):
            yield block
            block = []
        if ends:
            continue
        if stripped.startswith("|"):
            for cell in CODE.sub("`", stripped).strip("|").split("|"):
                yield [Line(number, cell)]
        else:
            block.append(Line(number, ITEM.sub("", stripped, count=1)))
    if block:
        yield block


def rust(source: str) -> Iterator[Line]:
    """Yields the comments that stand alone on a line."""
    for number, text in enumerate(source.splitlines(), 1):
        sign = re.match(r"\s*//[/!]?", text)
        if sign:
            yield Line(number, text[sign.end() :])


def python(source: str) -> Iterator[Line]:
    """Yields the lines of comments and docstrings."""
    found = [
        Line(token.start[0], token.string.lstrip("#!"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node.value.value, str):
            numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found += [Line(number, lines[number - 1].strip().strip('"')) for number in numbers]
    yield from sorted(found)


def markdown(source: str) -> Iterator[Line]:
    for number, text in enumerate(source.splitlines(), 1):
        yield Line(number, text)


READERS = {".rs": rust, ".py": python, ".pyi": python, ".md": markdown}


def marked(block: Block, in_code: bool) -> set[int]:
    """Returns the numbers of the marked lines of a block."""
    numbers: list[int] = []
    text = ""
    for number, line in block:
        text += line.strip() + " "
        numbers += [number] * (len(text) - len(numbers))
    # A code span may contain any word, so backquotes replace its characters: the positions of
    # the words after it stay correct.
    text = CODE.sub(lambda span: "`" * len(span[0]), text)
    found = {numbers[match.start()] for match in WORDS.finditer(text)}
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(text))]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        sentence = text[start:end].lstrip("*_\"'( ")
        nameless = OPENINGS.match(sentence) or (in_code and start == 0 and STARTS.match(sentence))
        if nameless and "?" not in sentence[-4:]:
            found.add(numbers[start])
    return found


def check(source: str, suffix: str) -> tuple[int, set[int]]:
    """Returns the number of comment lines of a file, and the numbers of its marked lines."""
    lines, found = set(), set()
    for block in paragraphs(READERS[suffix](source)):
        lines |= {line.number for line in block}
        found |= marked(block, in_code=suffix != ".md")
    return len(lines), found


def files() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for part in PARTS:
        yield from (p for p in sorted((ROOT / part).rglob("*")) if p.suffix in READERS)


def part_of(path: Path) -> str:
    """Returns the name of the part to which a file belongs: its crate, or its folder at the top
    level; `.` for a file at the top level.
    """
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("crates",) else 1]) or "."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each marked line")
    given = parser.parse_args()
    lines: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    for path in files():
        source = path.read_text()
        total, found = check(source, path.suffix)
        lines[part_of(path)] += total
        marks[part_of(path)] += len(found)
        if given.list:
            for number in sorted(found):
                text = source.splitlines()[number - 1].strip()
                print(f"{path.relative_to(ROOT)}:{number}: {text}")
    for part in lines:
        share = 100 * marks[part] / max(lines[part], 1)
        print(f"{part:18} {lines[part]:6} lines {marks[part]:5} marked {share:5.1f} %")
    share = 100 * marks.total() / lines.total()
    print(f"{'all':18} {lines.total():6} lines {marks.total():5} marked {share:5.1f} %")
    if share > LIMIT:
        sys.exit(f"more than {LIMIT} % of the lines are marked: rewrite lines that --list shows")


if __name__ == "__main__":
    main()
