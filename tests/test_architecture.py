"""The architecture: imports run downward, files are small, and private torch interfaces stay in one folder."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

from tests.samples import spread

ROOT = Path(__file__).parents[1]
PACKAGES = ("autoshard", "cost_models", "passes")
MAX_LINES = 500
MAX_SHARED_NAMES = 11
"""Number of class names with two or more meanings; each rename lowers the number."""

_IR = ("autoshard.errors", "autoshard.ir")
_GRAPHS = (*_IR, "autoshard.graphs")
_LEAVES = (*_GRAPHS, "autoshard.tracing", "autoshard.rules", "autoshard.kernels", "cost_models")

_PROGRAMS = ("passes.preparation", "passes.solver", "passes.strategies", "passes.memory", "passes.planning")
_PROVEN = ("passes.preparation", "passes.strategies")
_LOWERED = (*_PROGRAMS, "passes.recomputation", "passes.lowering", "passes.prediction")
# The folders of `passes`, and modules of the driver that questions and recipes call, with their allowed imports.
# Verification imports nothing of lowering.
_PASSES: dict[str, tuple[str, ...]] = {
    "passes.preparation": (),
    "passes.solver": (),
    "passes.strategies": _PROGRAMS[:2],
    "passes.memory": _PROGRAMS[:3],
    "passes.planning": _PROGRAMS[:4],
    "passes.prediction": _PROGRAMS,
    "passes.recomputation": _PROGRAMS,
    "passes.verification": _PROVEN,
    "passes.lowering": (*_PROVEN, "passes.verification", "passes.memory", "passes.recomputation"),
    "passes.padding": (),
    "passes.driver.norm_of_plan": _LOWERED,
    "passes.driver.expand_plan": (*_LOWERED, "passes.driver.norm_of_plan"),
    "passes.driver.plan_options": _LOWERED,
    "passes.driver.plan_of_choice": (*(*_LOWERED, "passes.driver.plan_options"),),
    "passes.driver.fastest_choice": (*_LOWERED, "passes.driver.plan_options", "passes.driver.plan_of_choice"),
    "passes.driver.plan_and_lower": (
        *(*_LOWERED, "passes.driver.plan_options"),
        *("passes.driver.plan_of_choice", "passes.driver.fastest_choice"),
    ),
    "passes.search.layers": _PROVEN,
    "passes.search": ("passes.solver", "passes.search.layers"),
    "passes.questions": (
        *(*_LOWERED, "passes.driver.plan_options"),
        *("passes.driver.fastest_choice", "passes.driver.plan_and_lower", "passes.search", "passes.search.layers"),
    ),
}

# The packages that each part may import besides itself. In `passes` the driver alone imports the runtime. In
# `autoshard` only `api` (in one place), `cli` and `testing` import `passes`.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "autoshard.errors": (),
    "autoshard.ir": ("autoshard.errors", "cost_models"),  # recipes name its schedules
    "autoshard.graphs": _IR,
    "autoshard.report": _IR,
    "autoshard.kernels": ("autoshard.errors",),
    "autoshard.rules": (*_IR, "autoshard.kernels"),
    "autoshard.tracing": (*_GRAPHS, "autoshard.kernels", "autoshard.rules"),
    "autoshard.joined_optimizer": ("autoshard.errors",),
    "autoshard.runtime": (*_GRAPHS, "autoshard.kernels", "autoshard.joined_optimizer"),
    "cost_models": (),
    **{room: (*_LEAVES, *below) for room, below in _PASSES.items()},
    "passes": (),
    "passes.driver": (
        *(*_LEAVES, *_PASSES, "autoshard.runtime", "autoshard.arguments", "autoshard.call", "autoshard.cluster"),
    ),
    "autoshard.calibration": (*_IR, "autoshard.cluster", "autoshard.kernels", "autoshard.runtime", "cost_models"),
    "autoshard.checkpoints": (*_IR, "autoshard.joined_optimizer", "autoshard.runtime"),
    "autoshard.restarts": (*_IR, "autoshard.checkpoints", "autoshard.runtime"),
    "autoshard.arguments": (*_IR, "autoshard.joined_optimizer", "cost_models"),
    "autoshard.call": (*_IR, "autoshard.arguments", "autoshard.runtime", "cost_models"),
    "autoshard.cluster": (*_IR, "autoshard.runtime", "cost_models"),
    "autoshard.data": (*_IR, "autoshard.runtime"),
    "autoshard.integrations": (
        *(*_IR, "autoshard.api", "autoshard.call", "autoshard.checkpoints", "autoshard.data", "autoshard.runtime"),
        "cost_models",
    ),
    "autoshard.trackers": (*_IR, "autoshard.runtime"),
    "autoshard.api": (
        *(*_IR, "autoshard.arguments", "autoshard.call", "autoshard.runtime", "cost_models", "passes.driver"),
    ),
    "autoshard.cli": (
        *(*_LEAVES, *_PASSES, "passes.driver", "autoshard.api", "autoshard.calibration", "autoshard.cluster"),
        *("autoshard", "autoshard.runtime"),
    ),
    "autoshard.__main__": ("autoshard.cli",),
    "autoshard.testing": (
        *(*_LEAVES, *_PASSES, "passes.driver", "autoshard.api", "autoshard.arguments", "autoshard.cluster"),
        "autoshard.runtime",
    ),
    "autoshard": (
        *(*_LEAVES, "autoshard.api", "autoshard.call", "autoshard.calibration", "autoshard.checkpoints"),
        *("autoshard.cluster", "autoshard.data", "autoshard.report", "autoshard.restarts", "autoshard.runtime"),
        *("autoshard.testing", "autoshard.trackers", "autoshard.integrations", "autoshard.joined_optimizer"),
    ),
}

# Private torch modules without a public twin that hold still across releases: the type of an operator, trees, graph
# modules whose code is written late.
PRIVATE_ANYWHERE = ("torch._ops", "torch.utils._pytree", "torch.ops.", "torch.fx._lazy_graph_module")
PRIVATE_ONLY_IN = "autoshard.tracing"

# Folders whose tests are not about one module.
FREE_FOLDERS = ("tests/docs", "tests/end_to_end", "tests/prose", "tests/zoo", "tests/examples", "tests/benchmarks")
# Tests of a whole folder: what it does with other people's models.
FREE_FILES = ("tests/tracing/test_transformers.py",)


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


@cache
def _syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _part(module: str) -> str:
    """The part in MAY_IMPORT to which a module belongs."""
    fitting = [part for part in MAY_IMPORT if module == part or module.startswith(part + ".")]
    return max(fitting, key=len)


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports (the names of `from` imports included)."""
    for node in ast.walk(_syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else None
    return None


def _torch_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every use of torch: imported names and attribute chains."""
    yield from ((line, name) for line, name in _imports(path) if name.split(".")[0] == "torch")
    for node in ast.walk(_syntax(path)):
        name = _dotted(node) if isinstance(node, ast.Attribute) else None
        if name and name.startswith("torch."):
            yield node.lineno, name


def _is_private(name: str) -> bool:
    """Whether a dotted torch name goes through a `_private` part (dunders are public)."""
    if any(name == allowed.rstrip(".") or name.startswith(allowed) for allowed in PRIVATE_ANYWHERE):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", _sources(), ids=_identify)
def test_imports_run_downward(path: Path) -> None:
    """A module imports only its own part and the parts that MAY_IMPORT lists for it."""
    part = _part(_name(path))
    allowed = {part, *MAY_IMPORT[part]}
    upward = [
        f"{_identify(path)}:{line} imports {name}"
        for line, name in _imports(path)
        if name.split(".")[0] in PACKAGES and _part(name) not in allowed
    ]
    assert not upward, f"{part} may import only {sorted(allowed)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """No files import each other in a circle, where imports within functions and for types count too."""
    files = {_name(path): path for path in _sources()}
    graph = nx.DiGraph()
    for module, path in files.items():
        for _, name in _imports(path):
            found = next((part for part in (name, name.rpartition(".")[0]) if part in files), None)
            if found not in (None, module):
                graph.add_edge(module, found)
    assert not [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]


def test_autoshard_reaches_the_passes_in_one_place() -> None:
    """In the library, only `autoshard.api` imports the passes, besides the command line and the tools for tests."""
    above = ("autoshard.cli", "autoshard.testing")
    found = [
        f"{_name(path)}: {name}"
        for path in _sources()
        if _name(path).startswith("autoshard") and not _name(path).startswith(above)
        for _, name in _imports(path)
        if name.startswith("passes")
    ]
    assert found == ["autoshard.api: passes.driver.entry"]


@pytest.mark.parametrize("path", sorted((ROOT / "autoshard" / "ir").glob("*.py")), ids=_identify)
def test_modules_of_the_ir_import_each_other_at_their_top(path: Path) -> None:
    """No function of the intermediate representation has an import of autoshard."""
    functions = [node for node in ast.walk(_syntax(path)) if isinstance(node, ast.FunctionDef)]
    local = [item for node in functions for item in ast.walk(node) if isinstance(item, ast.Import | ast.ImportFrom)]
    assert not [ast.unparse(item) for item in local if "autoshard" in ast.unparse(item)]


@pytest.mark.parametrize("path", _sources(), ids=_identify)
def test_private_torch_stays_in_tracing(path: Path) -> None:
    """Private torch interfaces are used in `autoshard.tracing` alone."""
    if _part(_name(path)) == PRIVATE_ONLY_IN:
        return
    private = [f"{_identify(path)}:{line} {name}" for line, name in _torch_names(path) if _is_private(name)]
    assert not private


@pytest.mark.parametrize("path", _sources(), ids=_identify)
def test_files_are_short(path: Path) -> None:
    """A file of the packages has fewer than 500 lines."""
    assert len(path.read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("path", _sources(), ids=_identify)
def test_the_library_never_prints(path: Path) -> None:
    """The packages never call `print`."""
    calls = [node for node in ast.walk(_syntax(path)) if isinstance(node, ast.Call)]
    assert not [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


@pytest.mark.parametrize("path", _tests(), ids=_identify)
def test_test_files_mirror_modules(path: Path) -> None:
    """`tests/a/test_b.py` (or `test_b_aspect.py`) tests `autoshard/a/b.py`, or `b.py` of folder `a`."""
    relative = path.relative_to(ROOT)
    if str(relative).startswith((*FREE_FOLDERS, *FREE_FILES)) or path == Path(__file__):
        return
    folder = relative.parent.relative_to("tests")
    homes = [ROOT / folder, ROOT / "autoshard" / folder]
    words = path.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    mirrored = [home / name for home in homes for name in names]
    assert any(module.with_suffix(".py").exists() or module.is_dir() for module in mirrored), (
        f"{relative} tests no module: rename it after one, or put it in {FREE_FOLDERS}"
    )


def test_a_class_name_stands_for_one_thing() -> None:
    """At most `MAX_SHARED_NAMES` names of classes are defined in two files, leading underscores ignored."""
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for path in _sources():
        for node in ast.walk(_syntax(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].add(_identify(path))
    shared = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert len(shared) <= MAX_SHARED_NAMES, shared


def test_every_part_is_named() -> None:
    """Each folder and top-level module of the packages has an entry in MAY_IMPORT."""
    tops = [path for path in (ROOT / "autoshard").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    tops += [path.parent for path in (ROOT / "passes").glob("*/__init__.py")]
    tops += (ROOT / "passes").glob("*.py")
    unplaced = [_name(path) for path in tops if path.stem != "__init__" and _name(path) not in MAY_IMPORT]
    assert not unplaced


def test_a_sample_of_cases_is_spread_evenly() -> None:
    """A sample has the wanted size and is evenly spaced."""
    assert spread(7, 2) == {1, 5}
    assert spread(3, 1) == {1}
    assert spread(2, 5) == {0, 1}
    assert all(len(spread(cases, wanted)) == wanted for cases in range(1, 30) for wanted in range(1, cases + 1))
