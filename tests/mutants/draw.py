"""Changes of the source, drawn by a seed: Cosmic Ray's operators at places of any file of the packages.

Every possible change has a rank: an exponential number of its own, from a hash of the seed and of the text around it,
over the change's weight (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir"). The first in rank
are drawn, so that a commit changes the draw only where it changes the source. A file weighs as many as it has lines,
and each kind of operator in it the same.

Left out: what changes no meaning (annotations, which are never evaluated; whether a zip is strict, and a dataclass
frozen or in slots, which assert what holds), identity for equality (the same for small numbers and enumerations), and
whole decorators and types of exceptions, which fail at import or are about speed.
Cosmic Ray is imported where it is used: only `make mutants` installs it.
"""

from __future__ import annotations

import ast
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("autoshard", "passes", "cost_models")
_LEFT_OUT = ("ExceptionReplacer", "RemoveDecorator", "Variable", "_Is", "_IsNot")
_CHANGED = {"assert_stmt", "comparison", "factor", "for_stmt", "if_stmt", "keyword", "not_test", "number", "operator"}
_CHANGED |= {"test", "while_stmt"}
"""Kinds of nodes that operators change."""
_PUNCTUATION = frozenset(["(", ")", "[", "]", "{", "}", ",", ".", ":", "=", ";", "->"])


Key = tuple[str, str, str]
"""A change's file, operator and place."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change.

    Args:
        path: of the file, from the repository's root.
        operator: Cosmic Ray's name.
        place: the function, the text of the line, and which of the changes that these two and the operator have.
        line: the first line that differs; before, after: what stands there.
    """

    path: str
    operator: str
    place: str
    line: int
    before: str
    after: str

    @property
    def key(self) -> Key:
        """Name the change by fields that stay the same while the source around it changes."""
        return self.path, self.operator, self.place


@dataclass(frozen=True, slots=True)
class _Change:
    """A place where an operator applies: `occurrence` counts the places of the file that it has."""

    path: str
    operator: str
    place: str
    occurrence: int


def draw(root: Path, count: int, seed: int) -> Iterator[tuple[Mutant, str]]:
    """Different mutants, by rank, with the text of their files; the same for a seed and a source."""
    ranked: list[tuple[float, _Change]] = []
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        kinds = _changes(str(path.relative_to(root)), source)
        for changes in kinds.values():
            weight = (source.count("\n") + 1) / len(kinds) / len(changes)
            ranked += [(_exponential(seed, change) / weight, change) for change in changes]
    left = count
    for _, change in sorted(ranked, key=lambda pair: pair[0]):
        source = (root / change.path).read_text(encoding="utf-8")
        text = _mutated(source, change.operator, change.occurrence) if left else None
        if text is not None:
            left -= 1
            yield Mutant(change.path, change.operator, change.place, *_difference(source, text)), text


def _exponential(seed: int, change: _Change) -> float:
    words = "\n".join((str(seed), change.path, change.operator, change.place))
    drawn = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8])
    return -math.log((drawn + 0.5) / 2**64)


@cache
def _operators() -> Sequence[tuple[str, Any]]:
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in sorted(operator_names()) if not any(part in name for part in _LEFT_OUT)]
    return [(name, get_operator(name)()) for name in names]


def _changes(path: str, source: str) -> dict[str, list[_Change]]:
    """By kind of operator, the changes of a file."""
    from cosmic_ray.ast import get_ast

    lines = source.splitlines()
    nodes = [node for node in _walk(get_ast(source)) if _is_changed(node)]
    found: dict[str, list[_Change]] = defaultdict(list)
    for name, operator in _operators():
        alike: Counter[str] = Counter()
        places = [(node, start) for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (node, (line, _)) in enumerate(places):
            text = f"{_function(node)}: {lines[line - 1].strip()}"
            alike[text] += 1
            change = _Change(path, name, f"{text} #{alike[text]}", occurrence)
            found[name.split("_")[0]].append(change)
    return found


def _is_changed(node: Any) -> bool:
    """Whether operators may change a node; asked first, as there are many of them."""
    return node.type in _CHANGED and not (node.type == "operator" and node.value in _PUNCTUATION)


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def _function(node: Any) -> str:
    """The names of the classes and functions around a node."""
    names: list[str] = []
    while node := node.parent:
        if node.type in ("funcdef", "classdef"):
            names.insert(0, node.name.value)
    return ".".join(names)


def _mutated(source: str, name: str, occurrence: int) -> str | None:
    """The changed text; None where it means the same, or is no Python."""
    from cosmic_ray.mutating import mutate_code

    text = mutate_code(source, dict(_operators())[name], occurrence)
    if text is None:
        return None
    try:
        return None if _meaning(text) == _meaning(source) else text
    except SyntaxError:
        return None


class _Bare(ast.NodeTransformer):
    """Takes out annotations, which `from __future__ import annotations` leaves as text, and what asserts what holds.

    A zip that is strict and a dataclass that is frozen or in slots only refuse what right code never does.
    """

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg in ("strict", "frozen", "slots"):
            node.value = ast.Constant(True)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(0)
        return self.generic_visit(node)


def _meaning(text: str) -> str:
    return ast.dump(_Bare().visit(ast.parse(text)))


def _difference(before: str, after: str) -> tuple[int, str, str]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((number, old.strip(), new.strip()) for number, (old, new) in enumerate(pairs, 1) if old != new)
