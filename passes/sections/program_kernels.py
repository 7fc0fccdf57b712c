"""Find the Triton kernels of a folded program with every value whole: what lowering puts in place of its calls.

They are chosen as for plans of specs (`passes.driver.kernels_on_one_device`), but that generated ones are chosen by
bytes alone, for any device: sections are counted once for all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import cast

from torch import fx
from torch._ops import OpOverload

from cost_models.operators import work
from passes.driver.kernels_on_one_device import cheap_kernels, on_one_device
from passes.lowering.choose_groups import choose_groups
from passes.lowering.count_launches import Traffic, is_launch, second_step
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.split_phases import SplitPhases
from passes.sections.kernel_chains import ProgramKernel
from passes.strategies.enumerate_strategies import SearchSpace
from passes.strategies.operator_names import operator_name
from passes.strategies.tensor_infos import tensor_infos
from passes.verification.expand_kernels import STANDS_FOR


def find_program_kernels(space: SearchSpace) -> tuple[ProgramKernel, ...]:
    """Those of a program that stand for several calls, or for one and what it reads, and for no product of matrices."""
    lowered = on_one_device(space)
    calls = {node.name: node for node in lowered.graph_module.graph.nodes}
    phased = SplitPhases()(FuseKernels(cheap_kernels())(lowered))
    found: list[ProgramKernel] = []

    def add(name: str, members: Iterable[str], operands: Iterable[fx.Node], phase: str, later: Traffic) -> None:
        launched = [calls[member] for member in members if is_launch(calls[member])]
        if not any(map(_is_product, launched)):
            names = tuple(dict.fromkeys(node.meta["global"] for node in launched))
            reads = tuple(_traced(calls[_lowered_name(operand)]) for operand in operands)
            found.append(ProgramKernel(name, names, reads, phase, later.launches, later.memory_bytes))

    for phase, module in (("forward", phased.forward), ("backward", phased.backward)):
        for chosen in () if module is None else choose_groups(module.graph, None):
            members = (node.name for node in chosen.members)
            add(chosen.group.name, members, chosen.operands, phase, chosen.later)
        for node in () if module is None else module.graph.nodes:
            if node.op == "call_function" and STANDS_FOR in node.meta:
                later, target = second_step(node.target, node.meta["val"]), cast(OpOverload, node.target)
                name = target._schema.name.removeprefix("autoshard::")
                add(name, node.meta[STANDS_FOR], node.all_input_nodes, phase, later)
    return tuple(found)


def _lowered_name(operand: fx.Node) -> str:
    """The lowered node that a phase's node is a copy of; torch.fx writes names of inputs in lower case."""
    return str(operand.target) if operand.op == "placeholder" else operand.name


def _traced(node: fx.Node) -> tuple[str, int]:
    """The node of the traced program whose result a lowered node has, and which one."""
    if node.target is operator.getitem:
        owner, index = cast(tuple[fx.Node, int], node.args)
        return owner.meta["global"], index
    return node.meta.get("global", node.name), 0


def _is_product(node: fx.Node) -> bool:
    """Whether a call is one of products of matrices, or attention."""
    done = work(operator_name(node), *tensor_infos(node), tuple(fx.map_arg(node.args, lambda argument: None)))
    return bool(done.products) or done.attention is not None
