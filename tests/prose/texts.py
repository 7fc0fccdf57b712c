"""Collect the sentences that a file says to its reader: docstrings, comments, error messages and pages.

Python files give docstrings, comments of two lines and more, and the text of errors. Markdown files give paragraphs,
list items and cells of tables, without code blocks and headings. Code in backquotes counts as one noun, and so does a
literal in braces.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CODE = "`code`"
_SECTION = re.compile(r"(Args|Arguments|Attributes|Example|Examples|Fields|Note|Raises|Returns|Yields|Parameters):$")
_BULLET = re.compile(r"\A([*+-]|\d+[.)]|\([a-z0-9]\)|:param \w+:|:returns?:)\s+")
_ITEM = re.compile(r"\A[\w*`\[\].]+(, [\w*`\[\].]+)*( \([^)]*\))?:\s+")
_VALUE = re.compile(r"\A((\"[^\"]*\"|None|Default|\w+\(\.\.\.\))(, | or )?)+( \([^)]*\))?:\s+")
_RULE = re.compile(r"[-=~^#+|:\s]+$")
_ENDS = re.compile(r"(?<=[.?!])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`]|[\"'][a-z]|autoshard\b)")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|al|Fig|Sec|Eq|No|resp|approx)\.$")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence, with `CODE` in place of code in backquotes, and its first line in the file."""

    path: Path
    line: int
    text: str


def sentences(path: Path) -> Iterator[Sentence]:
    """Return the sentences of a Python or Markdown file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    blocks = _python_blocks(text) if path.suffix == ".py" else [(1, text)]
    for start, block in blocks:
        for line, paragraph in _paragraphs(block):
            for sentence in _split(_cleaned(paragraph)):
                yield Sentence(path, start + line, sentence)


def _python_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Return the line and text of each docstring, message and comment of two lines and more."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, inspect.cleandoc(node.value.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Error", "Warning")):
            yield from _messages(node)
    yield from _comments(source)


def _messages(call: ast.Call) -> Iterator[tuple[int, str]]:
    """Return the literals of an error's arguments; a value put into one reads as a noun."""
    inner = {id(part) for node in ast.walk(call) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(call):
        if isinstance(node, ast.JoinedStr):
            pieces = [str(v.value) if isinstance(v, ast.Constant) else CODE for v in node.values]
            yield node.lineno, "".join(pieces)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Return comments that fill two lines or more."""
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            if lines and token.start[0] != lines[-1][0] + 1:
                yield from _long(lines)
                lines = []
            lines.append((token.start[0], token.string.lstrip("#").removeprefix(" ")))
    yield from _long(lines)


def _long(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    if len(lines) > 1:
        yield lines[0][0], "\n".join(text for _, text in lines)


def _paragraphs(block: str) -> Iterator[tuple[int, str]]:
    """Return the first line and text of each paragraph, list item and cell; skip code, headings and directives."""
    paragraph: list[str] = []
    start, start_indent, fenced, doctest, item, literal = 0, 0, False, False, False, -1
    for number, raw in enumerate([*block.splitlines(), ""]):
        line, indent = raw.strip(), len(raw) - len(raw.lstrip())
        if line.startswith(("```", "~~~")):
            fenced, line = not fenced, ""
        elif fenced:
            continue
        doctest = (doctest and bool(line)) or line.startswith((">>>", ":::"))
        if literal >= 0 and line:
            literal = literal if indent > literal else -1
        named = (item and indent <= start_indent) or not paragraph  # a wrapped line may look like "name: meaning" too
        begins = bool(_BULLET.match(line) or (named and _ITEM.match(line)))
        if not line or doctest or literal >= 0 or begins or _skipped(line) or line.startswith("|"):
            if paragraph:
                literal = start_indent + 3 if not item and paragraph[-1].endswith(":") else -1
                yield start, " ".join(paragraph)
            paragraph = []
        if not line or doctest or literal >= 0 or _skipped(line):
            continue
        if line.startswith("|"):
            yield from ((number, cell) for cell in line.strip("|").split("|"))
            continue
        if not paragraph:
            start, start_indent, item = number, indent, begins
            line = _ITEM.sub("", _BULLET.sub("", line), count=1) if begins else line
        paragraph.append(line)


def _skipped(line: str) -> bool:
    """Whether a line is a heading, a rule, a directive or a section's name."""
    return bool(_SECTION.match(line) or _RULE.match(line) or line.startswith(("#", "!!!", "..", "<", "::: ", "│", "▼")))


def _cleaned(text: str) -> str:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`|\{[^{}]*:[^{}]*\}|https?://\S+|\$[^$]*\$", CODE, text)
    return re.sub(r"\s+", " ", text).strip().replace("::", ":")


def _split(text: str) -> Iterator[str]:
    """Cut a paragraph behind full stops, but not behind abbreviations; '"auto": the default' loses its value."""
    pieces: list[str] = []
    for piece in _ENDS.split(text):
        pieces.append(piece)
        if not _ABBREVIATION.search(piece):
            yield _VALUE.sub("", " ".join(pieces))
            pieces = []
    if pieces:
        yield _VALUE.sub("", " ".join(pieces))
