"""Which tests can notice a change of a file: nearest first.

1. The file's own doctests, and the tests that mirror it (`tests/passes/test_a.py`, `test_a_more.py` of `passes/a.py`).
2. Tests that import its module.
3. Tests that mirror or import what imports its module, or, where these are few, what imports that, and so on.

If there are many, tests that share a word with the file's name come first.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

PACKAGES = ("autoshard", "passes", "cost_models")
MOST_FILES = 8
"""Files of each step. Behind those that share a word come those of fewest imports: they are about little else."""


def near_tests(root: Path, path: str) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """The files of tests of each step, to run where those before notice nothing; none is in two."""
    mirrored, module = _mirrored(root, path), _module(path)
    importers = _importers(root)
    direct = [name for name in importers.get(module, ()) if name.startswith("tests/")]
    sources = [name for name in importers.get(module, ()) if not name.startswith("tests/")]
    far: list[str] = []
    known = {path}
    while sources and len(set(far)) < MOST_FILES:
        known.update(sources)
        far = [test for source in sources for test in _mirrored(root, source)]
        users = [user for source in sources for user in importers.get(_module(source), ())]
        far += [user for user in users if user.startswith("tests/")]
        sources = [user for user in dict.fromkeys(users) if not user.startswith("tests/") and user not in known]
    own = [path] if ">>>" in (root / path).read_text(encoding="utf-8") else []
    first = [*own, *mirrored]
    second = [test for test in _narrow(root, path, direct) if test not in first]
    third = [test for test in _narrow(root, path, far, 3 * MOST_FILES) if test not in (*first, *second)]
    return first, second, third[:MOST_FILES]


def _narrow(root: Path, path: str, tests: Sequence[str], most: int = MOST_FILES) -> list[str]:
    """Test files alone, the nearest to a file first."""
    unique, words = [test for test in dict.fromkeys(tests) if Path(test).name.startswith("test_")], _words(path)
    return sorted(unique, key=lambda test: (-len(words & _words(test)), len(_imports(root, test)), test))[:most]


def _words(path: str) -> frozenset[str]:
    """The words of a file's name, in the singular."""
    return frozenset(word.removesuffix("s") for word in Path(path).stem.split("_"))


def _mirrored(root: Path, path: str) -> list[str]:
    parts = Path(path).with_suffix("").parts
    folder = Path("tests", *(parts[1:-1] if parts[0] == "autoshard" else parts[:-1]))
    names = {f"test_{parts[-1]}.py", *(item.name for item in (root / folder).glob(f"test_{parts[-1]}_*.py"))}
    return sorted(str(folder / name) for name in names if (root / folder / name).is_file())


def _module(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


@cache
def _importers(root: Path) -> Mapping[str, Sequence[str]]:
    """Module to the files that import it."""
    found: dict[str, list[str]] = {}
    for package in (*PACKAGES, "tests"):
        for path in sorted((root / package).rglob("*.py")):
            name = str(path.relative_to(root))
            for module in _imports(root, name):
                found.setdefault(module, []).append(name)
    return found


@cache
def _imports(root: Path, name: str) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{item.name}" for item in node.names)
    return frozenset(found)
