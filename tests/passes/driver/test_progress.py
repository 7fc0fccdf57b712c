"""Ctrl-C ends a search with the best plan so far. The tests send real signals from another thread during a search."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

import autoshard
from autoshard import Cluster, Mesh, Plan, Recipe
from autoshard.testing import check_plan
from passes.driver import plan_and_lower as pipeline
from passes.driver.candidates import meshes_for
from passes.driver.progress import interruptible, search_bar
from passes.solver.search_control import SearchControl
from tests.passes.blocks import Blocks

MESH = Mesh({"data": 2})
MODEL = Blocks(16, 1)
INPUTS = (torch.ones(8, 4, 16),)


def press_ctrl_c() -> None:
    """Send SIGINT to the main thread from another thread."""
    ident = threading.main_thread().ident
    assert ident is not None
    thread = threading.Thread(target=signal.pthread_kill, args=(ident, signal.SIGINT))
    thread.start()
    thread.join()


def plan_pressing(
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    when: Callable[[str, float], bool],
    target: Mesh | Cluster = MESH,
    **given: Any,
) -> Plan:
    """Plan a small model, and press Ctrl-C `times` times at the first progress for which `when` is true."""
    pressed = []

    def show(what: str, best: float, lower_bound: float) -> None:
        if not pressed and when(what, best):
            pressed.append(lower_bound)
            for _ in range(times):
                press_ctrl_c()

    @contextmanager
    def bar(time_budget_s: float, progress: bool | None) -> Iterator:
        yield show

    monkeypatch.setattr("passes.driver.planner.search_bar", bar)
    found = autoshard.plan(MODEL, target, example_inputs=INPUTS, **given)
    assert pressed, "Ctrl-C was pressed in the search"
    return found


@pytest.fixture(autouse=True)
def _python_s_own_handler() -> Iterator[None]:
    """Set Python's own handler of SIGINT, because a shell ignores SIGINT for tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@cache
def uninterrupted() -> Plan:
    """The plan of a search that is not interrupted."""
    return autoshard.plan(MODEL, MESH, example_inputs=INPUTS)


def in_the_whole(what: str, best: float) -> bool:
    """Whether the search is past the known recipes, and searches all plans."""
    return what == "all plans"


def at_once(what: str, best: float) -> bool:
    """Always true, so Ctrl-C is pressed at the first progress, while the first known recipe is priced."""
    return True


@pytest.mark.parametrize("when", [at_once, in_the_whole])
def test_ctrl_c_gives_the_best_plan_so_far(monkeypatch, when) -> None:
    """A plan after Ctrl-C has a valid lower bound and is no slower than its known recipes.

    Print and file say that the search was interrupted.
    """
    found, whole = plan_pressing(monkeypatch, 1, when), uninterrupted()
    assert not whole.was_interrupted
    assert found.was_interrupted
    assert found.lower_bound is not None
    assert whole.lower_bound is not None
    assert found.lower_bound <= whole.objective * (1 + 1e-9)
    assert found.objective >= whole.lower_bound * (1 - 1e-9)
    assert all(seconds is None or seconds >= found.predicted.step_time_s for seconds in found.baselines.values())
    assert "interrupted: this is the best plan until then" in str(found)
    assert Plan.from_json(found.to_json()).was_interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_plan_of_an_interrupted_search_computes_what_one_device_does(monkeypatch) -> None:
    """A plan of an interrupted search computes the results of one device."""
    found = plan_pressing(monkeypatch, 1, at_once, precision=None)
    check_plan(MODEL, MESH, INPUTS, plan=found).raise_if_different()


@pytest.mark.parametrize("when", [at_once, in_the_whole])
def test_a_second_ctrl_c_raises(monkeypatch, when) -> None:
    """A second Ctrl-C raises KeyboardInterrupt, also inside the solver, and the old handler of SIGINT is restored."""
    with pytest.raises(KeyboardInterrupt):
        plan_pressing(monkeypatch, 2, when)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_leaves_out_the_meshes_that_are_left(monkeypatch) -> None:
    """Ctrl-C skips the remaining meshes, and returns the best plan of the current mesh."""
    cluster = Cluster("h100_sxm", 1, 4)
    meshes = meshes_for(Recipe(), cluster)
    assert len(meshes) > 1
    assert plan_pressing(monkeypatch, 1, at_once, cluster).mesh == meshes[0]


@pytest.mark.parametrize("built", [0, 1])
def test_ctrl_c_while_a_problem_is_built_ends_that_at_once(monkeypatch, built: int) -> None:
    """Ctrl-C while a mesh's planning problem is built gives the plan of an earlier mesh.

    On the first mesh it raises KeyboardInterrupt.
    """
    cluster, problems = Cluster("h100_sxm", 1, 4), []
    build = pipeline.planning_problem

    def pressed(program, mesh, *given):
        problems.append(mesh)
        if len(problems) > built:
            press_ctrl_c()
            pytest.fail("the problem was built on")
        return build(program, mesh, *given)

    monkeypatch.setattr(pipeline, "planning_problem", pressed)
    if built:
        found = autoshard.plan(MODEL, cluster, example_inputs=INPUTS)
        assert found.mesh == problems[0]
        assert found.was_interrupted
    else:
        with pytest.raises(KeyboardInterrupt):
            autoshard.plan(MODEL, cluster, example_inputs=INPUTS)
    assert len(problems) == built + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_that_fits_ends_as_ctrl_c_does(monkeypatch) -> None:
    """Ctrl-C before any plan that fits is found raises KeyboardInterrupt with a message."""
    with pytest.raises(KeyboardInterrupt, match="before anything that fits was found"):
        plan_pressing(monkeypatch, 1, at_once, memory_budget=10)


def test_ctrl_c_that_somebody_else_handles_is_theirs() -> None:
    """If the process has its own SIGINT handler, Ctrl-C calls this handler, and the search goes on."""
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("theirs"))
    try:
        control = SearchControl()
        with interruptible(control):
            press_ctrl_c()
        assert heard == ["theirs"]
        assert not control.is_stopped
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_search_as_they_are() -> None:
    """A search outside of the main thread leaves the handler of SIGINT as it is."""
    control, handlers = SearchControl(), []

    def work() -> None:
        with interruptible(control):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_the_bar_shows_incumbent_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """The progress bar shows the best step time and its lower bound on standard error.

    Without a terminal it needs `progress=True`.
    """
    with search_bar(10.0, None) as show:
        assert show is None
    with search_bar(10.0, progress=True) as show:
        assert show is not None
        show("all plans", float("inf"), 0.0)
        show("all plans", 0.25, 0.125)
    shown = capsys.readouterr()
    assert "all plans: best 250 ms, at least 125 ms" in " ".join(shown.err.split())
    assert not shown.out
