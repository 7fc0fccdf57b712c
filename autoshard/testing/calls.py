"""`check_calls`: run a model's operators under given specs on the simulator, and compare with one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autoshard.errors import PlanMismatchError
from autoshard.ir.boundary import shard_all, unshard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Strategy
from autoshard.rules.fan_out import fan_out
from autoshard.runtime.simulator import simulate
from autoshard.testing.decided_plans import greedy_plan
from autoshard.testing.report import TOLERANCE, CheckReport, compare
from autoshard.testing.rounding import nudge
from autoshard.tracing import trace
from passes.lowering.lower_program import lower_program, prepare
from passes.strategies.enumerate_strategies import Site, resolve

CallSpecs = tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]]
"""The specs of an operator call's tensor operands, and the specs of its tensor results."""


def check_calls(
    model: nn.Module,
    mesh: Mesh,
    inputs: Sequence[Tensor],
    given: Sequence[PartitionSpec],
    calls: Sequence[CallSpecs],
    *,
    tolerance: float | None = None,
) -> CheckReport:
    """Run each operator of a model under given specs on simulated ranks, and compare its outputs with one device.

    If `check_plan` finds a difference, `report.small_failure` is a script that calls this function. The program that
    runs is not proven first.

    Args:
        model: calls operators, and returns a tuple of tensors; it has no parameters.
        mesh: the mesh to simulate.
        inputs: the model's positional arguments.
        given: the spec of each input.
        calls: for each operator call, in order, a pair: the specs of its tensor operands, and the specs of its tensor
            results.
        tolerance: largest difference relative to the largest element of each output. None: 1e-5, or the machine epsilon
            of the narrowest floating dtype of any value, if it is larger. If one device's outputs for nearly equal
            inputs differ by more, the mesh's outputs may differ by more too.

    Returns:
        A report; differing outputs raise no error (see `CheckReport.raise_if_different`).

    Raises:
        PlanMismatchError: `calls` has another length than the model's calls, or an operator cannot run with its specs.
    """
    with torch.no_grad():
        program = trace(model, tuple(inputs), grad=False)
    plan = _plan_of(program, mesh, given, calls)
    lowered = lower_program(program, plan).lowered
    values = dict(zip((f"input:{index}" for index in range(len(inputs))), inputs, strict=True))
    pieces = [shard_all(values[slot.slot.name], slot.spec, mesh) for slot in lowered.inputs]
    found = [
        unshard(ranks, slot.spec, mesh, slot.shape)
        for slot, ranks in zip(lowered.outputs, simulate(lowered.graph_module, mesh, pieces), strict=True)
    ]
    expected, eps = _by_name(model(*inputs)), _spacing(program)
    compared = tuple(compare(name, value, expected[name]) for name, value in _by_name(found).items())
    report = CheckReport(plan, compared, max(TOLERANCE, eps) if tolerance is None else tolerance)
    return report.sampled(lambda number: _by_name(model(*nudge(tuple(inputs), number, eps))), expected)


def _by_name(outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"output:{index}": output for index, output in enumerate(outputs)}


def _spacing(program: Program) -> float:
    """Return the machine epsilon of the narrowest floating dtype in the program; 0 if no value is floating."""
    values = [leaf for node in program.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    floating = [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return max((torch.finfo(dtype).eps for dtype in floating), default=0.0)


def _plan_of(program: Program, mesh: Mesh, given: Sequence[PartitionSpec], calls: Sequence[CallSpecs]) -> Plan:
    """Return a plan that gives the inputs the specs `given`, and each operator call its specs in `calls`.

    Each reader of a value reshards the value separately. Raises PlanMismatchError if `calls` has another length than
    the model's calls, or if no strategy of an operator has its specs.
    """
    nodes = list(prepare(program).graph.nodes)
    wanted: dict[str, CallSpecs] = {
        slot.node: ((), (given[int(slot.name.partition(":")[2])],)) for slot in program.inputs
    }
    made = [node for node in nodes if node.op == "call_function" and _is_own(node)]
    if len(made) != len(calls):
        raise PlanMismatchError(f"the model makes {len(made)} calls ({', '.join(map(str, made))}), not {len(calls)}.")
    wanted |= {node.name: specs for node, specs in zip(made, calls, strict=True)}
    for node in nodes:
        if node.target is fan_out:
            source, result = resolve(node.all_input_nodes[0])
            spec = wanted[source.name][1][result]
            wanted[node.name] = ((spec,), (spec,))
    plan = greedy_plan(program, mesh, lambda site, strategy: float(_is_wanted(wanted, site, strategy)))
    for name, (takes, gives) in wanted.items():
        if plan.nodes[name].outputs != tuple(gives) or plan.nodes[name].inputs != tuple(takes):
            raise PlanMismatchError(f"{name} has no strategy with inputs {takes} and outputs {gives} in its rule.")
    return plan


def _is_own(node: fx.Node) -> bool:
    return node.target is not fan_out and getattr(node.target, "__name__", "") != "getitem"


def _is_wanted(wanted: Mapping[str, CallSpecs], site: Site, strategy: Strategy) -> bool:
    specs: Any = wanted.get(site.name)
    return specs is not None and (strategy.inputs, strategy.outputs) == (tuple(specs[0]), tuple(specs[1]))
