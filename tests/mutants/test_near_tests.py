"""Tests that can notice a change of a file are found by name, and by who imports it."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.near_tests import near_tests

ROOT = Path(__file__).parents[2]


def test_nearest_first() -> None:
    """The file's own examples, where it has some, its mirror, then what imports it."""
    _, second, _ = near_tests(ROOT, "passes/solver/search_control.py")
    assert second[0].startswith("tests/passes/solver/")
    assert near_tests(ROOT, "autoshard/ir/mesh.py")[0][0] == "autoshard/ir/mesh.py"
    assert near_tests(ROOT, "autoshard/ir/mesh.py")[0][1] == "tests/ir/test_mesh.py"
    assert near_tests(ROOT, "cost_models/hardware.py")[0][1] == "tests/cost_models/test_hardware.py"


def test_what_nothing_imports_directly_is_met_by_way_of_its_users() -> None:
    """A file without a test of its own name has those of the files that import it."""
    first, second, third = near_tests(ROOT, "autoshard/rules/hub.py")
    assert "tests/rules/test_hub.py" in first
    assert len({*first, *second, *third}) == len(first) + len(second) + len(third)
    assert third
    assert any(near_tests(ROOT, "passes/search/recipe_bounds.py"))


def test_of_many_those_that_share_a_word_come_first() -> None:
    """A file that half of the package imports indirectly is met by tests of its subject."""
    _, _, third = near_tests(ROOT, "passes/memory/pipeline_memory.py")
    assert all("pipeline" in test or "memory" in test for test in third[:4])


def test_every_file_has_tests() -> None:
    """All files but a few are near some test, except packages' faces."""
    files = [path for name in ("autoshard", "passes", "cost_models") for path in (ROOT / name).rglob("*.py")]
    files = [path for path in files if path.name != "__init__.py"]
    alone = [
        path
        for path in files
        if not any(test.startswith("tests/") for step in near_tests(ROOT, str(path.relative_to(ROOT))) for test in step)
    ]
    assert len(alone) < 0.05 * len(files), alone
