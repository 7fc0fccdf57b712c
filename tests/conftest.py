"""Set-up of all tests: Hypothesis profiles, one thread per process, which files are collected, and
skipped GPU tests."""

import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.samples import leave_out

_slow_draws = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=_slow_draws)
settings.register_profile(
    "ci",
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_slow_draws,
)
settings.register_profile(
    "nightly",
    max_examples=10_000,
    deadline=None,
    phases=list(Phase),
    suppress_health_check=_slow_draws,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
if settings().derandomize:
    # Hypothesis also draws numbers of the modules imported so far. Workers share files out by time, so these numbers
    # depend on earlier tests. A test would draw other examples in each run.
    assert isinstance(providers._local_constants, Constants)
    providers._get_local_constants = Constants

os.environ["COLUMNS"] = "110"  # tables that are compared are as wide on any terminal

torch.set_num_threads(1)
gc.set_threshold(100_000, 50, 100)  # those of autoshard.ir.garbage, which is not to be imported yet
torch.manual_seed(0)  # what is drawn while tests are collected must be the same in every worker

if not torch.cuda.is_available():
    # Read where a Triton kernel is decorated, so before any test imports autoshard's kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Generated kernels are written to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharding rules that a test registers or infers are removed after the test."""
    from autoshard.rules import infer, registry

    for table, name in ((registry, "_rules"), (registry, "_inferred"), (infer, "_cases")):
        monkeypatch.setattr(table, name, dict(getattr(table, name)))


@pytest.fixture
def _poisoned_outputs() -> Iterator[None]:
    """Fill the results of `torch.empty` with NaN, so that an unwritten element is noticed."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(was_on)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip helpers and scripts without a doctest, because their imports take seconds in each worker."""
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_helper and ">>> " not in collection_path.read_text() else None


def pytest_sessionfinish() -> None:
    """Freeze Python's garbage collector, because pytest's five collections at the end take seconds after many tests."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries report what is never collected


@pytest.hookimpl(tryfirst=True)  # before pytest leaves the slow ones out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reduce tests to samples of their cases, and skip tests marked `gpu` if there is no CUDA device."""
    leave_out(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # keywords have the names of folders too
            item.add_marker(skip)
