"""The plans of `tests.benchmarks.local_plans`: small models, and layouts whose times differ by a factor.

A layout is a planner's choice under constraints on parameters and inputs, for this machine or for other links. For much
slower links the planner copies and computes twice; for faster links it splits as much as possible. The layout is always
priced for the real machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import autoshard
from autoshard import DoesNotFitError, Mesh, P, PartitionSpec
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from cost_models.topology import Link
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.constraints import allowed_options
from passes.planning.search import Search
from passes.solver.assignment import Floats
from passes.solver.search_control import SearchControl
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices
from tests.models import build, words

Constraints = Mapping[str, PartitionSpec]
Model = Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]
SEARCH_S = 5.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The request for a plan.

    Args:
        mesh, constraints: mesh and constraints of the plan.
        link_speed: factor by which the planner's links are faster than the real links.
        memory: limit as a multiple of the least memory of any plan; None: no limit.
        drawn: seed of random changes of the planner's costs. A larger seed makes larger changes; 0 makes none.
    """

    name: str
    mesh: Mesh
    constraints: Constraints = field(default_factory=dict)
    link_speed: float = 1.0
    memory: float | None = None
    drawn: int = 0


_SIZES: dict[str, Any] = {"words": 1024, "length": 128, "width": 256, "heads": 4}


def gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 of 3 layers, width 256."""
    return build("gpt2", layers=3, dropout=0.0, **_SIZES), words(16, 128, 1024)


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama of 3 layers, width 256, with grouped queries."""
    return build("llama", layers=3, inner=640, key_heads=2, **_SIZES), words(16, 128, 1024)


MODELS: dict[str, Model] = {"gpt": gpt, "llama": llama}

_TENSOR: dict[str, Callable[[str], Constraints]] = {
    "gpt": lambda axis: {
        "transformer.h.*.attn.c_attn.weight": P(None, axis),
        "transformer.h.*.attn.c_proj.weight": P(axis),
        "transformer.h.*.mlp.c_fc.weight": P(None, axis),
        "transformer.h.*.mlp.c_proj.weight": P(axis),
    },
    "llama": lambda axis: {
        "model.layers.*.self_attn.[qkv]_proj.weight": P(axis),
        "model.layers.*.self_attn.o_proj.weight": P(None, axis),
        "model.layers.*.mlp.gate_proj.weight": P(axis),
        "model.layers.*.mlp.up_proj.weight": P(axis),
        "model.layers.*.mlp.down_proj.weight": P(None, axis),
    },
}
_TABLES = {"gpt": "transformer.wte.weight", "llama": "lm_head.weight"}
_WEIGHTS = {"gpt": "transformer.h.*.c_*.weight", "llama": "model.layers.*_proj.weight"}


def layouts(model: str, ranks: int) -> list[Layout]:
    """Return the layouts to plan for a model ("gpt" or "llama") on `ranks` ranks."""
    tensor, table, weights = _TENSOR[model], _TABLES[model], _WEIGHTS[model]
    line, whole = Mesh({"x": ranks}), {"*.weight": P(), "*.bias": P()} if model == "gpt" else {"*.weight": P()}
    batch, sharded = {"input:*": P("x")}, {weights: P("x"), table: P("x")}
    copied = {"input:*": P()}
    found = [
        Layout("chosen", line),
        Layout("all on each rank", line, {**copied, **whole}, 1e-4),
        Layout("data", line, {**batch, **whole}, 0.3),
        Layout("data, all split", line, {**batch, **whole}, 100.0),
        Layout("fully sharded", line, {**batch, **sharded}, 0.3),
        Layout("fully sharded, all split", line, {**batch, **sharded}, 100.0),
        Layout("tensor", line, {**copied, **tensor("x")}, 0.3),
        Layout("tensor and sequence", line, {**copied, **tensor("x")}, 100.0),
        Layout("tensor and vocabulary", line, {**copied, **tensor("x"), table: P("x")}),
        Layout("all split", line, {}, 100.0),
        Layout("least memory", line, {}, 1.0, 1.02),
        Layout("little memory", line, {}, 1.0, 1.2),
        *(Layout(f"drawn {seed}", line, drawn=seed) for seed in (1, 2, 3, 4)),
    ]
    if ranks == 4:
        square = Mesh({"x": 2, "y": 2})
        found += [
            Layout("chosen", square),
            Layout("data and tensor", square, {**batch, **tensor("y")}, 0.3),
            Layout("data, tensor and vocabulary", square, {**batch, **tensor("y"), table: P("y")}),
            Layout("data on y, tensor on x", square, {"input:*": P("y"), **tensor("x")}),
            Layout("hybrid sharded", square, {"input:*": P(("x", "y")), weights: P("y"), table: P("y")}, 0.3),
            Layout("all split", square, {}, 100.0),
            *(Layout(f"drawn {seed}", square, drawn=seed) for seed in (1, 3)),
        ]
    return found


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The strategies that were chosen for a layout. `plan` prices them for any cluster."""

    planning: PlanningProblem
    choice: tuple[int, ...]
    options: PlanOptions

    def plan(self, cluster: autoshard.Cluster) -> Plan:
        """Return the plan with these strategies, priced for `cluster`."""
        planning = self.planning
        space, mesh = planning.space, planning.space.mesh
        priced = build_problem(space, Prices(cluster, mesh), planning.liveness, fold_blocks(space))
        return lowered_plan(
            priced, self.choice, priced.assignment.cost_of(self.choice), None, cluster, self.options
        ).plan


def choose_layout(program: Program, layout: Layout, cluster: autoshard.Cluster) -> ChosenLayout:
    """Choose the strategies of a program for a layout on `cluster`."""
    options = PlanOptions(constraints=layout.constraints, with_baselines=False)
    planning = planning_problem(program, layout.mesh, _with_links(cluster, layout.link_speed), options)
    allowed = allowed_options(planning, layout.constraints)
    limit = None if layout.memory is None else layout.memory * _least_bytes(planning, allowed)
    searched = _garbled(planning, layout.drawn) if layout.drawn else planning
    return ChosenLayout(planning, tuple(Search(limit, SEARCH_S)(searched, allowed).choice), options)


def _garbled(planning: PlanningProblem, seed: int) -> PlanningProblem:
    """Return `planning`, with each cost multiplied by a random factor.

    The factors are log-normal, and their spread grows with the seed.
    """
    draw = np.random.default_rng(seed)

    def garble(costs: Floats) -> Floats:
        return costs * np.exp(draw.normal(scale=0.25 + 0.25 * seed, size=costs.shape))

    problem = planning.assignment
    edges = tuple(replace(edge, cost=garble(edge.cost)) for edge in problem.edges)
    return replace(planning, assignment=replace(problem, costs=tuple(map(garble, problem.costs)), edges=edges))


def _least_bytes(planning: PlanningProblem, allowed: Mapping) -> float:
    """Return the smallest memory limit, in bytes, within which some plan fits."""
    try:
        Search(1.0, control=SearchControl.within(SEARCH_S))(planning, allowed)
    except DoesNotFitError as error:
        return float(error.smallest_bytes)
    raise AssertionError("no plan fits in one byte")


def _with_links(cluster: autoshard.Cluster, speed: float) -> autoshard.Cluster:
    """Return `cluster` with links in its nodes that are `speed` times as fast in bandwidth and latency."""
    link = cluster.node.intra
    measured = tuple(
        replace(
            each,
            start_s=each.start_s / speed,
            latency_s=each.latency_s / speed,
            bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * speed,
        )
        for each in link.measured
    )
    faster: Link = replace(
        link.scaled(speed), latency_s=link.latency_s / speed, start_s=link.start_s / speed, measured=measured
    )
    return autoshard.Cluster(replace(cluster.node, intra=faster), cluster.nodes, cluster.devices_per_node)
