"""Change the source in one place at a time, and count the changes that the tests notice.

Run: python -m tests.mutants [--count 200] [--seed 13] [--seconds 180] [--folder build/mutants]

1. A seed draws places of all files of the packages: an operator, a comparison, a condition, a number, a branch.
2. Each change is made in a copy of the committed files. Tests near the file run, except for slow tests. First come
   doctests and mirror tests, then tests that import the file, then tests of the importing files.
3. A change is noticed if a test fails or hangs that passes without the change.
4. Outcomes of a commit are kept in the folder, and a run continues at its last place.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

ROOT = Path(__file__).parents[1]
PACKAGES = ("autoshard", "passes", "cost_models")
MOST_FILES = 8
"""Test files of each step."""

_OTHERS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.Mult,), ast.Pow: (ast.Mult,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt,), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.Continue: (ast.Break,), ast.Break: (ast.Continue,),
}  # fmt: skip
_ASSERTS = ("strict", "frozen", "slots")
"""Keywords of code that only refuses mistakes."""


def changes(tree: ast.Module) -> Iterator[tuple[Any, str, Any]]:
    """Nodes of a file, an attribute of each, and another value for it. Annotations and assertions are skipped."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Assert):
                continue
            values = value if isinstance(value, list) else [value]
            waiting += [item for item in values if isinstance(item, ast.AST)]
            for index, item in enumerate(values):
                for other in _others(node, name, item):
                    changed = [*values[:index], other, *values[index + 1 :]]
                    yield node, name, changed if isinstance(value, list) else other


def _others(node: ast.AST, name: str, item: Any) -> Iterator[Any]:
    yield from (kind() for kind in _OTHERS.get(type(item), ()))
    if name == "test" and isinstance(item, ast.expr):
        yield ast.UnaryOp(ast.Not(), item)
    if isinstance(item, ast.Constant) and not (isinstance(node, ast.keyword) and node.arg in _ASSERTS):
        if isinstance(item.value, bool):
            yield ast.Constant(not item.value)
        elif isinstance(item.value, (int, float)):
            yield from (ast.Constant(item.value + 1), ast.Constant(item.value - 1))


def draw(root: Path, count: int, seed: int) -> Iterator[tuple[str, int, str, str]]:
    """Changed files: path, line number, the line before and after the change, and the changed text. Larger files
    are drawn more often."""
    random = Random(seed)
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    weights = [len(path.read_bytes()) for path in paths]
    while count:
        (path,) = random.choices(paths, weights)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = list(changes(tree))
        if not found:
            continue
        node, name, other = random.choice(found)
        before = ast.unparse(tree)
        setattr(node, name, other)
        text = ast.unparse(ast.fix_missing_locations(tree))
        pairs = zip(before.splitlines(), text.splitlines(), strict=False)
        change = next((f"`{old.strip()}` → `{new.strip()}`" for old, new in pairs if old != new), "")
        if change:
            count -= 1
            yield str(path.relative_to(root)), getattr(node, "lineno", 1), change, text


def near_tests(root: Path, path: str) -> list[list[str]]:
    """Groups of test files for a source file, nearest first. A group runs only if the groups before noticed nothing."""
    importers = _importers(root)
    direct = importers.get(_module(path), [])
    sources = [name for name in direct if not name.startswith("tests/")]
    far = [test for source in sources for test in (*_mirrored(root, source), *importers.get(_module(source), ()))]
    own = [path] if ">>>" in (root / path).read_text(encoding="utf-8") else []
    steps, seen = [], set[str]()
    for step in ([*own, *_mirrored(root, path)], direct, far):
        tests = [name for name in dict.fromkeys(step) if name == path or Path(name).name.startswith("test_")]
        steps.append([name for name in tests if name not in seen][:MOST_FILES])
        seen.update(steps[-1])
    return [step for step in steps if step]


def _mirrored(root: Path, path: str) -> list[str]:
    parts = Path(path).with_suffix("").parts
    folder = Path("tests", *(parts[1:-1] if parts[0] == "autoshard" else parts[:-1]))
    found = [root / folder / f"test_{parts[-1]}.py", *sorted((root / folder).glob(f"test_{parts[-1]}_*.py"))]
    return [str(item.relative_to(root)) for item in found if item.is_file()]


def _module(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


@cache
def _importers(root: Path) -> dict[str, list[str]]:
    """The files that import each module, by the module's name."""
    found: dict[str, list[str]] = {}
    for path in (path for package in (*PACKAGES, "tests") for path in sorted((root / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for module in (node.module, *(f"{node.module}.{item.name}" for item in node.names)):
                    found.setdefault(module, []).append(str(path.relative_to(root)))
    return found


def passes(tree: Path, tests: Sequence[str], limit_s: float) -> bool:
    """Whether the tests pass within the time limit."""
    environment = {"PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "ci", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    try:
        ended = subprocess.run(
            words, cwd=tree, env=os.environ | environment, timeout=limit_s, check=False, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode in (0, 5)


def verdict_of(tree: Path, path: str, text: str, limit_s: float) -> str:
    """ "noticed", "survived", or "fails without the change too": the verdict of the tests near a changed file."""
    file = tree / path
    right = file.read_text(encoding="utf-8")
    for step in near_tests(tree, path):
        file.write_text(text, encoding="utf-8")
        try:
            is_noticed = not passes(tree, step, limit_s)
        finally:
            file.write_text(right, encoding="utf-8")
        if is_noticed:
            return "noticed" if passes(tree, step, limit_s) else "fails without the change too"
    return "survived"


def main(arguments: list[str]) -> int:
    """Run the changes, and return 0 if at least nine of ten were noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--seconds", type=float, default=180.0, help="for the tests of each step")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    options = parser.parse_args(arguments)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    tree, kept = options.folder / commit.stdout.strip(), options.folder / f"{commit.stdout.strip()}.json"
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    known: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    console = Console(soft_wrap=True, highlight=False)
    for path, line, change, text in draw(tree, options.count, options.seed):
        key = f"{path}:{line} {change}"
        if key not in known:
            known[key] = verdict_of(tree, path, text, options.seconds)
            kept.write_text(json.dumps(known, indent=1))
            console.print(f"{key}: {known[key]}", markup=False)
    noticed, survived = (list(known.values()).count(verdict) for verdict in ("noticed", "survived"))
    console.print(f"{noticed} of {noticed + survived} were noticed")
    return 0 if noticed >= 9 * survived else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
