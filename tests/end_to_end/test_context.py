"""Transformers whose attention is split over the sequence train as on one device, for each kind of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import init_device_mesh

import autoshard
import autoshard.kernels as kernels
from autoshard import Cluster, Mesh, P, Plan
from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from autoshard.rules.enumeration import Strategy
from autoshard.testing import check_plan
from autoshard.testing.decided_plans import greedy_plan
from autoshard.tracing import trace
from passes.lowering.lower_program import lower_program
from passes.strategies.enumerate_strategies import Site
from passes.verification.verify_program import verify_program
from tests.end_to_end.training import assert_equal, train
from tests.models import Attention
from tests.runtime.processes import on_processes
from tests.zoo.table import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's models

PAIR, SQUARE = Mesh({"context": 2}), Mesh({"data": 2, "context": 2})
ATTENTION = (kernels.attention, kernels.attention_backward)

Splits = Mapping[str, tuple[str, ...]]
GATHERED: Splits = {"s": ("context",)}
HEADS: Splits = {"h": ("context",)}
RING: Splits = {"s": ("context",), "t": ("context",)}
"""Factors of attention that axis "context" splits: h are heads, s are queries, t are keys."""


def built(name: str, *, is_packed: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of one layer and its batch without padding; if packed, each row holds two sequences."""
    architecture = ARCHITECTURES[name]
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    config = {**architecture.config, layers: 1, "use_cache": not is_packed}
    model, inputs = replace(architecture, config=config).build()
    inputs.pop("attention_mask", None)
    if is_packed:
        rows, length = inputs["input_ids"].shape
        places, begins = torch.arange(length), 2 + torch.arange(rows).unsqueeze(1)
        inputs["position_ids"] = torch.where(places < begins, places, places - begins)
    return model, inputs


def plan_with(splits: Splits, model: nn.Module, inputs: dict[str, Any], mesh: Mesh) -> Plan:
    """Plan with tokens split where possible, attention split as `splits` says, and the batch split on "data"."""
    batch = {"b": ("data",)} if "data" in mesh.axis_names else {}
    wanted = {**batch, **splits}

    def score(site: Site, strategy: Strategy) -> float:
        if site.node is not None and site.node.target in ATTENTION:
            return float(strategy.splits(mesh) == wanted)
        along = sum(
            "context" in spec.axes_of(1) for spec in (*strategy.inputs, *strategy.outputs) if len(spec.dims) > 1
        )
        return along - 10.0 * sum(bool(spec.partial) for spec in strategy.outputs)

    program = trace(model, (), inputs)
    plan = greedy_plan(program, mesh, score)
    layers = [plan.nodes[node.name].inputs for node in program.graph.nodes if node.target is kernels.attention]
    assert layers
    for q, k, *_ in layers:
        found = {"h": q.axes_of(1), "s": q.axes_of(2), "t": k.axes_of(2)}
        assert {factor: axes for factor, axes in found.items() if axes} == dict(splits)
    return plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("splits", [GATHERED, HEADS, RING])
def test_sequences_that_are_split_equal_one_device(splits: Splits) -> None:
    """Three training steps of Llama, which has grouped heads, equal one device for each split of attention."""
    model, inputs = built("llama")
    plan = plan_with(splits, model, inputs, SQUARE)
    check_plan(model, SQUARE, inputs, plan=plan, steps=3, precise=torch.float64).raise_if_different()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "splits", "is_packed"),
    [
        ("mistral", RING, True),
        ("llama-odd", RING, True),
        *(pytest.param("mistral", splits, True, marks=pytest.mark.slow) for splits in (GATHERED, HEADS)),
        *(pytest.param("mistral", splits, False, marks=pytest.mark.slow) for splits in (GATHERED, HEADS, RING)),
    ],
)
def test_windows_and_packed_sequences_equal_one_device(name: str, splits: Splits, is_packed: bool) -> None:
    """Attention windows and packed sequences that span several ranks equal one device, also with uneven lengths."""
    model, inputs = built(name, is_packed=is_packed)
    plan = plan_with(splits, model, inputs, PAIR)
    check_plan(model, PAIR, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


@pytest.mark.parametrize(
    ("heads", "tokens", "split"),
    [(1, 512, P()), (1, 65536, P(None, None, "context")), (4, 65536, P(None, "context"))],
)
def test_the_way_is_chosen_by_its_price(heads: int, tokens: int, split: P) -> None:
    """Short sequences gather keys, long sequences of one head use a ring, and several heads are split.

    A single head cannot be split. No computation hides the gathering of keys, and the last rank attends to all keys.
    """
    with torch.device("meta"):
        model, x = Attention(heads, 64), torch.empty(1, tokens, 64 * heads)
    mesh, cluster = Mesh({"context": 4}), Cluster("h100_sxm", nodes=1, devices_per_node=4)
    plan = autoshard.plan(model, cluster.mesh(mesh), example_inputs=(x,), constraints={"input:0": P(None, "context")})
    layers = [node for name, node in plan.nodes.items() if name.startswith("attention")]
    assert len(layers) == 2
    assert {spec for node in layers for spec in (*node.inputs, *node.outputs)} == {split}


DAMAGES: Mapping[str, Callable[[list[Any]], None]] = {
    "another rank's place in the ring": lambda args: args.__setitem__(-5, 0),
    "keys that begin elsewhere": lambda args: args.__setitem__(-4, [0, 0]),
    "a key less": lambda args: args.__setitem__(-3, [args[-3][0], args[-3][1] - 1]),
    "contiguous pieces taken as pairs": lambda args: args.__setitem__(-2, not args[-2]),
    "another axis": lambda args: args.__setitem__(-1, "data"),
    "queries that begin elsewhere": lambda args: args.__setitem__(-7, [0] * 4),
}


@cache
def ring_program() -> PhasedProgram:
    """Return a lowered program whose attention passes keys round a ring."""
    model, x = Attention(2, 64), torch.randn(2, 9, 128)
    program = trace(model, (x,))
    plan = plan_with(RING, model, {"x": x}, SQUARE)
    return lower_program(program, plan, Cluster("cpu_laptop", nodes=1, devices_per_node=4))


@pytest.mark.parametrize("operator", [kernels.ring_attention, kernels.ring_attention_backward])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_ring_is_not_proven(damage: str, operator: OpOverload) -> None:
    """A program with one wrong argument of ring attention is not verified; the undamaged program is."""
    lowered = ring_program().lowered
    verify_program(lowered.traced, lowered)
    (node,) = (node for node in lowered.graph_module.graph.nodes if node.target is operator)
    sound = node.args
    args = list(sound)
    DAMAGES[damage](args)
    node.args = tuple(args)
    try:
        with pytest.raises(VerificationError):
            verify_program(lowered.traced, lowered)
    finally:
        node.args = sound


# On processes.


def check_ring() -> None:
    """With ring attention, loss, gradients and parameters after three steps of AdamW equal one device."""
    model, inputs = built("gpt2")
    plan = plan_with(RING, model, inputs, PAIR)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    sharded: Any = autoshard.compile(model, mesh, plan=plan)
    assert_equal(train(sharded, inputs), train(built("gpt2")[0], inputs))


CHECKS = {"ring": check_ring}

test_on_two_processes = on_processes(CHECKS, ranks=2)
