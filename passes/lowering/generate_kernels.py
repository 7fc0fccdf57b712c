"""Replaces groups of calls by generated Triton kernels, in each phase of a lowered program.

Before → after: `rsqrt(add(mean(mul(x, x)), eps))` → `triton_mul_mean_add_rsqrt_1a2b3c4d5e6f(x)`. `choose_groups` picks
the groups among the calls that hand-written kernels (`fuse_kernels`) do not replace. `autoshard.kernels.generated`
writes the kernels, in one file for each program. Results keep the names of the replaced nodes. Other calls keep their
order, except views, which move to their first reader. `passes.verification.expand_kernels` inverts the rewrite.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.lowered import PhasedProgram
from autoshard.kernels.generated.define import GeneratedKernel, define_kernels
from autoshard.kernels.generated.group import Group
from cost_models.device import Device
from passes.lowering.choose_groups import ChosenGroup, choose_groups, is_view
from passes.verification.expand_kernels import STANDS_FOR


@dataclass(frozen=True, slots=True)
class GenerateKernels:
    """Replaces groups of calls by generated kernels.

    The groups are chosen by their time on `device`, or by bytes of memory traffic if `device` is None.
    """

    device: Device | None = None

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Return the program with generated kernels in its phases, and write the file with the kernels.

        Raises:
            KernelError: the file cannot be written.
        """
        title = f"Generated kernels of program {phased.lowered.traced.digest()} on {phased.lowered.mesh}."
        made: dict[str, Any] = generate_kernels(phased.phases, self.device, title)
        return replace(phased, **made)


def generate_kernels(
    phases: Mapping[str, fx.GraphModule], device: Device | None, title: str
) -> dict[str, fx.GraphModule]:
    """Return the graphs, by name, with groups of calls replaced by kernels, and write the file with the kernels.

    A graph without groups is returned as it is.

    Args:
        phases: graphs with fake values in `meta["val"]`, by name.
        device: the device, or None to choose groups by bytes.
        title: the first line of the kernels' file.

    Raises:
        KernelError: the file cannot be written.
    """
    chosen = {name: choose_groups(phase.graph, device) for name, phase in phases.items()}
    every = [item for groups in chosen.values() for item in groups]
    counts = Counter(item.group for item in every)
    first = {item.group: item for item in reversed(every)}
    kernels = define_kernels([first[group].named(count) for group, count in counts.items()], title)
    return {
        name: _KernelRewrite(phase, chosen[name], kernels).run() if chosen[name] else phase
        for name, phase in phases.items()
    }


@dataclass(slots=True)
class _KernelRewrite:
    """Builds the copy of a phase in which each group of calls is the call of its kernel.

    Other calls are copied in their order. The call of a kernel stands at the place of the group's last member, or
    earlier if a reader of its results comes earlier. `environment` has the copy's node for each node of the phase.
    """

    phase: fx.GraphModule
    chosen: Sequence[ChosenGroup]
    kernels: Mapping[Group, GeneratedKernel]
    graph: fx.Graph = field(default_factory=fx.Graph)
    environment: dict[fx.Node, fx.Node] = field(default_factory=dict)
    owners: dict[fx.Node, ChosenGroup] = field(default_factory=dict)

    def run(self) -> fx.GraphModule:
        self.owners = {node: item for item in self.chosen for node in item.members}
        places = {node: place for place, node in enumerate(self.phase.graph.nodes)}
        last = {max(item.members, key=places.__getitem__) for item in self.chosen}
        for node in self.phase.graph.nodes:
            if node in last or not (node in self.owners or is_view(node)):
                self._need(node)
        self.graph.eliminate_dead_code()
        return lazy_module(self.phase, self.graph)

    def _need(self, node: fx.Node) -> fx.Node | None:
        """Emit the copy of `node`, unless it exists already, and return it.

        None is returned for a member of a group that only members of the same group read.
        """
        owner = self.owners.get(node)
        if owner is not None and not any(item in self.environment for item in owner.results):
            self._call(owner)
        elif owner is None and node not in self.environment:
            for operand in node.all_input_nodes:
                self._need(operand)
            self._copy(node)
        return self.environment.get(node)

    def _copy(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.environment.__getitem__)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        copied.meta = dict(node.meta)
        self.environment[node] = copied

    def _call(self, chosen: ChosenGroup) -> None:
        kernel = self.kernels[chosen.group]
        operands = tuple(self._need(node) for node in chosen.operands)
        values: tuple[Any, ...] = tuple(node.meta["val"] for node in chosen.results)
        several = len(values) > 1
        name = f"{chosen.results[0].name}_group" if several else chosen.results[0].name
        call = self.graph.create_node("call_function", kernel.operator, operands, name=name)
        call.meta = {**chosen.results[0].meta, "val": values if several else chosen.results[0].meta["val"]}
        call.meta[STANDS_FOR] = tuple(node.name for node in chosen.members)
        for index, node in enumerate(chosen.results):
            made = call
            if several:
                made = self.graph.create_node("call_function", operator.getitem, (call, index), name=node.name)
                made.meta = dict(node.meta)
            self.environment[node] = made
