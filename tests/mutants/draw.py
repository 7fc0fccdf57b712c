"""Changes of the source, drawn by a seed: Cosmic Ray's operators at lines of any file of the packages.

Left out: what changes no meaning (annotations, which are never evaluated; whether a zip is strict), identity for
equality (the same for small numbers and enumerations), and whole decorators and types of exceptions, which fail at
import or are about speed.
Cosmic Ray is imported where it is used: only `make mutants` installs it.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("autoshard", "passes", "cost_models")
_LEFT_OUT = ("ExceptionReplacer", "RemoveDecorator", "Variable", "_Is", "_IsNot")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change.

    Args:
        path: of the file, from the repository's root.
        operator: Cosmic Ray's name.
        occurrence: which of the places where the operator applies.
        line: the first line that differs; before, after: what stands there.
    """

    path: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str


def draw(root: Path, count: int, seed: int) -> Iterator[tuple[Mutant, str]]:
    """Different mutants with the text of their files; the same for a seed and a source."""
    chance = random.Random(seed)
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    drawn: set[tuple[str, str, int]] = set()
    while len(drawn) < count:
        (path,) = chance.choices(files, lines)
        source = path.read_text(encoding="utf-8")
        places = _places(source)
        if not places:
            continue
        family = chance.choice(sorted(places))
        name, occurrence = chance.choice(places[family])
        key = (str(path.relative_to(root)), name, occurrence)
        text = None if key in drawn else _mutated(source, name, occurrence)
        if text is not None:
            drawn.add(key)
            yield Mutant(*key, *_difference(source, text)), text


@cache
def _operators() -> Sequence[str]:
    from cosmic_ray.plugins import operator_names

    return [name for name in sorted(operator_names()) if not any(part in name for part in _LEFT_OUT)]


@cache
def _places(source: str) -> dict[str, list[tuple[str, int]]]:
    """By kind of operator, each operator with each of the places where it applies."""
    from cosmic_ray.ast import get_ast
    from cosmic_ray.plugins import get_operator

    tree = get_ast(source)
    nodes = list(_walk(tree))
    found: dict[str, list[tuple[str, int]]] = {}
    for name in _operators():
        operator = get_operator(name)()
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        family = "_".join(name.split("_")[:1])
        found.setdefault(family, []).extend((name, occurrence) for occurrence in range(count))
    return {family: places for family, places in found.items() if places}


def _walk(node: object) -> Iterator[object]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def _mutated(source: str, name: str, occurrence: int) -> str | None:
    """The changed text; None where it means the same, or is no Python."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = mutate_code(source, get_operator(name)(), occurrence)
    if text is None:
        return None
    try:
        return None if _meaning(text) == _meaning(source) else text
    except SyntaxError:
        return None


class _Bare(ast.NodeTransformer):
    """Takes out annotations, which `from __future__ import annotations` leaves as text, and whether a zip is strict.

    That it is strict asserts what holds: without, nothing changes.
    """

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "strict":
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
