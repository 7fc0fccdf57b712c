"""`GraphLoader` makes lowered graphs ready to run on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import fx

from autoshard.graphs.add_to_sums import add_to_sums
from autoshard.graphs.direct_calls import call_directly
from autoshard.graphs.fill_buckets import fill_buckets
from autoshard.graphs.fold_views import fold_views
from autoshard.graphs.join_squares import join_squares
from autoshard.graphs.name_ranges import name_ranges, phase_of
from autoshard.graphs.write_in_place import write_in_place
from autoshard.ir.local import running_at
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.agreement.lost_ranks import Doing, naming_lost_ranks
from autoshard.runtime.engine import NOTHING, Loaded
from autoshard.runtime.failed_collective import failed_collective
from autoshard.runtime.process_groups import ProcessGroups, bind, reduce_in_place, taking_from_a_list
from autoshard.runtime.profiling.ranges import Ranges

Bound = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Loading:
    """Functions that change or check graphs before they run.

    Args:
        wrap: a compiler of graphs, such as Inductor, which is applied to each graph that writes over no input.
        check_in_place: checks a graph that writes over inputs, or into the buffers of buckets. It takes the graph
            without writes, the graph with writes, and the argument `written` of `Engine.load`.
        finish_in_place: rewrites each graph that writes over inputs, before the check.
    """

    wrap: Callable[[fx.GraphModule], Callable] | None = None
    check_in_place: Callable[[fx.GraphModule, fx.GraphModule, Mapping[int, int]], None] | None = None
    finish_in_place: Callable[[fx.GraphModule], fx.GraphModule] | None = None


class GraphLoader:
    """Makes lowered graphs ready to run on this rank.

    Args:
        groups: the process groups that graphs name.
        control: the ranks that compare their programs.
        loading: changes and checks graphs.
    """

    def __init__(self, groups: ProcessGroups, control: ControlGroup, loading: Loading) -> None:
        self._groups, self._control, self._loading = groups, control, loading
        self.ranges = Ranges(marks_cuda=not groups.on_cpu)

    def load(self, graph_module: fx.GraphModule, written: Mapping[int, int] = NOTHING) -> Loaded:
        """Make a lowered graph ready to run on this rank.

        If `written` names results that replace inputs, the graph writes them over these inputs, and `wrap` does not
        compile it.
        """
        if self._loading.wrap is not None and not written:
            compiled = _spread(self._loading.wrap(bind(graph_module, self._groups)))
            return self._showing_life_once(self._at_rank(self._as_one_range(compiled, graph_module)))
        return self._load_plainly(self._writing(graph_module, written), folds_views=not written)

    def load_adding(self, graph_module: fx.GraphModule, owned: Sequence[bool]) -> Loaded | None:
        """Make a graph ready to run that adds its last results to sums.

        Return None if a compiler is used, because results of its graphs may share memory.
        """
        if self._loading.wrap is not None:
            return None
        return self._load_plainly(add_to_sums(self._writing(graph_module, NOTHING), owned), folds_views=True)

    def _load_plainly(self, writing: fx.GraphModule, *, folds_views: bool) -> Loaded:
        """Make a graph ready to run on this rank without a compiler. `folds_views` removes redundant views.

        The graph has a second form with named ranges, which is made when the ranges are first on.
        """
        taking = self._taking(writing, folds_views=folds_views, names=False)
        in_ranges = cache(partial(self._taking, writing, folds_views=folds_views, names=True))

        def run_bound(values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return in_ranges()(values) if self.ranges.are_on else taking(values)

        return self._at_rank(run_bound, partial(failed_collective, graph=taking.graph))

    def _taking(self, writing: fx.GraphModule, *, folds_views: bool, names: bool) -> fx.GraphModule:
        """Return the graph that runs: a graph that takes its inputs from a list. `names` puts its nodes in ranges."""
        bound = bind(writing, self._groups)
        reduce_in_place(bound)
        join_squares(bound)
        if folds_views:
            fold_views(bound)
        if names:
            name_ranges(bound, self.ranges.begin, self.ranges.end)
        call_directly(bound)
        return taking_from_a_list(bound)

    def _as_one_range(self, compiled: Bound, graph_module: fx.GraphModule) -> Bound:
        """Return a function that runs `compiled` within one range, named after the phase of `graph_module`."""
        name = f"{phase_of(graph_module)}: compiled"

        def run(values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            with self.ranges.around(name):
                return compiled(values)

        return run

    def _at_rank(self, run_bound: Bound, doing: Doing = "in a compiled program") -> Loaded:
        """Return a function that runs a graph with this rank's coordinates, and without gradients.

        The graph names this rank's process groups. `doing` describes its communication for errors.
        """
        coordinates, one_thread = self._groups.coordinates, self._control.one_thread

        @torch.no_grad()
        def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            values.reverse()
            with one_thread, running_at(coordinates), naming_lost_ranks(doing):
                return tuple(run_bound(values))

        return run

    def _showing_life_once(self, run: Loaded) -> Loaded:
        """Return `run` with signs of life during its first call. This call compiles, and other ranks wait for it."""
        has_run = [False]

        def run_showing_life(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            if has_run[0]:
                return run(values)
            with self._control.channel.showing_life("runs a program for the first time"):
                results = run(values)
            has_run[0] = True
            return results

        return run_showing_life

    def _writing(self, graph_module: fx.GraphModule, written: Mapping[int, int]) -> fx.GraphModule:
        """Return a graph that writes its `written` results over inputs, finished and checked.

        If `written` is empty, the graph instead computes values directly in the memory of their buckets.
        """
        writing = write_in_place(graph_module, written) if written else fill_buckets(graph_module)
        if self._loading.finish_in_place is not None and written:
            writing = self._loading.finish_in_place(writing)
        if self._loading.check_in_place is not None and writing is not graph_module:
            self._loading.check_in_place(graph_module, writing, written)
        return writing


def _spread(function: Callable) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Return a function that takes a list of tensors in reverse order, and calls `function(*tensors)`.

    The list is emptied.
    """

    def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        inputs = values[::-1]
        values.clear()
        return function(*inputs)

    return run
