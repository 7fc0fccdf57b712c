"""Cut a traced training step into the programs of a pipeline's stages.

Before → after: forward and backward of all layers → for each stage, forward and backward of its own calls. The stage of
each call comes from `assign_stages`. If another stage reads a value, the value becomes a result of the stage that makes
the value. The result is an output of the forward, or a sent gradient of the backward. In the stage that reads the
value, it is an input of the forward or a tangent of the backward, with the same name. The optimizer's update is
appended later, to each stage for its own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.errors import NotAvailableError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.program import InputKind, InputSlot, OutputKind, OutputSlot, Program
from autoshard.ir.staged import Crossing, CutProgram, crossing_name
from passes.preparation.assign_stages import NodeSeconds, StageAssignment, assign_stages


@dataclass(frozen=True, slots=True)
class SplitStages:
    """Cut a training step into stages.

    Args:
        stages: number of stages, at least 2.
        seconds: time of a node of the traced program, by which stages are balanced.
        cuts, homes, blocks: arguments of `assign_stages`: the first calls of stages, the stages of parameters, and the
            number of blocks of each stage.
    """

    stages: int
    seconds: NodeSeconds
    cuts: tuple[str, ...] = ()
    homes: Mapping[str, int] = field(default_factory=dict)
    blocks: Sequence[int] | None = None

    def __call__(self, program: Program) -> CutProgram:
        """Cut a program into stages, and return their programs and the values that cross stages.

        Raises:
            NotAvailableError: the program cannot be cut, for example because a tuple would cross stages.
                `assign_stages` lists further reasons.
        """
        assignment = assign_stages(program, self.stages, self.seconds, self.cuts, self.homes, self.blocks)
        building = [_StageCut(program, assignment, number) for number in range(self.stages)]
        for stage in building:
            stage.find()
        crossings = _crossings(assignment, building)
        stages = tuple(stage.build(crossings) for stage in building)
        return CutProgram(stages, tuple(crossings.values()), assignment.cuts)


_Key = tuple[fx.Node, int]


def _crossings(assignment: StageAssignment, building: list[_StageCut]) -> dict[_Key, Crossing]:
    """Return the values that cross stages.

    A key has the node that makes the value, and the number of the reading stage.

    Raises:
        NotAvailableError: a value is no tensor, or a value of the backward would go to a later stage.
    """
    found: dict[_Key, Crossing] = {}
    for stage in building:
        for node in stage.received:
            maker = assignment.stage[node]
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise NotAvailableError(
                    f"The result of {node.target}, from {node.meta.get('source') or 'an unknown line'}, is no tensor, "
                    f"and stages {maker} and {stage.number} would have to share it. Use a smaller axis 'pipeline'."
                )
            if maker < stage.number and node.meta.get("phase") == "backward":
                raise NotAvailableError(
                    f"The result of {node.target}, from {node.meta.get('source') or 'an unknown line'}, of the "
                    f"backward, in stage {maker}, would have to go up the pipeline to stage {stage.number}. "
                    "Use a smaller axis 'pipeline'."
                )
            name = crossing_name(node.name, is_of_weights=node in assignment.derived)
            found[node, stage.number] = Crossing(name, maker, stage.number, maker < stage.number)
    return found


@dataclass(slots=True)
class _StageCut:
    """The program of stage `number`, which is being built.

    `members` are the stage's own nodes. `received` are nodes of other stages whose values the stage reads.
    """

    program: Program
    assignment: StageAssignment
    number: int
    members: set[fx.Node] = field(default_factory=set)
    received: dict[fx.Node, None] = field(default_factory=dict)

    def find(self) -> None:
        """Fill `members` and `received`, by a walk from the stage's own calls and results to their operands."""
        kinds = {slot.node: slot.kind for slot in self.program.inputs}
        names = self.program.nodes_by_name()
        waiting = [node for node, stage in self.assignment.stage.items() if stage == self.number and node.op[0] == "c"]
        waiting += [names[slot.node] for slot in self._results()]
        while waiting:
            node = waiting.pop()
            if node in self.members or node in self.received:
                continue
            stage = self.assignment.stage.get(node, self.number)
            if stage != self.number:
                self.received[node] = None
                continue
            self.members.add(node)
            if node.op == "placeholder" and kinds[node.name] is InputKind.TANGENT:
                continue
            waiting += node.all_input_nodes

    def _results(self) -> list[OutputSlot]:
        """Return the output slots of the whole program that this stage returns.

        They are outputs, and gradients of the stage's parameters.
        """
        names = self.program.nodes_by_name()
        parameters = {slot.name: names[slot.node] for slot in self.program.inputs_of(InputKind.PARAMETER)}
        found = []
        for slot in self.program.outputs:
            if slot.kind is OutputKind.GRADIENT:
                stage = self.assignment.stage[parameters[slot.name]]
            else:
                stage = self.assignment.stage.get(names[slot.node], self.assignment.stages - 1)
            if stage == self.number and slot.kind in (OutputKind.GRADIENT, OutputKind.OUTPUT):
                found.append(slot)
        return found

    def build(self, crossings: dict[_Key, Crossing]) -> Program:
        graph, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[InputSlot]()
        order = {node: index for index, node in enumerate(self.program.graph.nodes)}
        names = self.program.nodes_by_name()
        for slot in self.program.inputs:
            node = names[slot.node]
            if node in self.members:
                copies[node] = _copy(graph, node, copies)
                inputs.append(InputSlot(copies[node].name, slot.kind, slot.name, slot.aliases))
        for node in sorted(self.received, key=order.__getitem__):
            crossing = crossings[node, self.number]
            copies[node] = graph.placeholder(f"received_{node.name}")
            phase = "forward" if crossing.is_forward else "backward"
            copies[node].meta = {"val": node.meta["val"], "phase": phase, "module": "", "source": node.meta["source"]}
            kind = InputKind.INPUT if crossing.is_forward else InputKind.TANGENT
            inputs.append(InputSlot(copies[node].name, kind, crossing.name))
        for node in self.program.graph.nodes:
            if node in self.members and node.op not in ("placeholder", "output"):
                copies[node] = _copy(graph, node, copies)
        outputs = [
            OutputSlot(copies[names[slot.node]].name, slot.kind, slot.name, slot.detached) for slot in self._results()
        ]
        values = [copies[names[slot.node]] for slot in self._results()]
        for (node, _), crossing in crossings.items():
            kind = OutputKind.OUTPUT if crossing.is_forward else OutputKind.SENT_GRADIENT
            slot = OutputSlot(copies[node].name if node in copies else "", kind, crossing.name)
            if crossing.maker == self.number and slot not in outputs:
                outputs.append(slot)
                values.append(copies[node])
        graph.output(tuple(values))
        return Program(lazy_module(self.program.graph_module, graph), tuple(inputs), tuple(outputs))


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    return copy_node(graph, node, copies.__getitem__)
