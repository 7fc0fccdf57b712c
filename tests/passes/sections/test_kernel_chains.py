"""Sections with our own kernels cost, and keep, what these do."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from torch import fx, nn

from autoshard.ir.execution import Execution
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from passes.driver.kernels_on_one_device import cheap_kernels, on_one_device
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.price_kernels import price_kernels
from passes.lowering.split_phases import SplitPhases
from passes.sections.count_sections import FUSED, Section, SectionKernel, Sized, count_sections
from passes.sections.price_model import PricedModel, RecipeKind
from passes.sections.propagate_axis import AXIS, AxisLayout, AxisMove, MoveKind
from passes.sections.trace_values import readers_of
from tests.passes.decoders import Decoder, Experts, Layer, folded
from tests.passes.executions import under

CLUSTER = Cluster("h100_sxm", 1, 8)
ONE = {"tensor": 1, "context": 1, "expert": 1}
NAMES = ["dense", "rms", "gated", "sparse"]


class Gated(nn.Module):
    """A gated feed-forward block, whose kernel's backward makes the activation again; a name is in upper case."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.A_log = nn.RMSNorm(64), nn.Parameter(torch.zeros(64))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((64, 128), (64, 128), (128, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x - self.A_log.exp() * self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@cache
def _one_block(name: str) -> PricedModel:
    """A decoder whose only block is of some kind, so that no block stands for others.

    In float32, in which kernels keep the statistics of norms.
    """
    with torch.device("meta"):
        block = {"dense": Layer, "rms": lambda: Layer(norm=nn.RMSNorm), "gated": Gated, "sparse": Experts}[name]()
        return PricedModel(folded(Decoder([block])))


def _sections(priced: PricedModel, kernels: str = "triton") -> Iterable[Section]:
    return priced.sections(RecipeKind.of(under(Execution(), kernels=kernels))).values()


def _chains(sections: Iterable[Section]) -> list[SectionKernel]:
    phases = (phase for section in sections for phase in (section.forward, section.backward))
    return [kernel for phase in phases for kernel in phase.kernels if kernel.operator == FUSED]


def _bytes(items: Iterable[Sized]) -> int:
    return sum(item.local_bytes(1, ONE) for item in items)


def _moved(chains: Iterable[SectionKernel]) -> int:
    return sum(_bytes((*item.inputs, *item.outputs)) + item.later_bytes for item in chains)


@pytest.mark.parametrize("name", NAMES)
def test_chains_launch_and_move_what_the_kernels_do(name: str) -> None:
    """With every value whole: the launches and bytes of the program that is lowered and fused, for one sequence."""
    priced = _one_block(name)
    chains = _chains(_sections(priced))
    members = {member for kernel in priced.kernels for member in kernel.members}
    uses = price_kernels(on_one_device(priced.space), CLUSTER.device, fused=cheap_kernels()).uses
    uses = tuple(use for use in uses if members.issuperset(use.stands_for))
    assert len(uses) >= 3
    assert sum(item.launches for item in chains) == sum(use.launches for use in uses)
    assert _moved(chains) == sum(use.memory_bytes for use in uses)


@pytest.mark.parametrize("name", ["gated", "sparse"])
def test_a_block_keeps_what_backwards_kernels_read(name: str) -> None:
    """What the fused program hands from its forward to its backward, but for what never varies."""
    priced = _one_block(name)
    phased = SplitPhases()(FuseKernels(cheap_kernels())(on_one_device(priced.space)))
    assert phased.backward is not None
    passed = [node for node in phased.backward.graph.nodes if node.op == "placeholder" and node.users]
    forward = {node.name for node in phased.forward.graph.nodes if node.op == "call_function"}
    kept = [node.meta["val"] for node in passed if node.name in forward and node.meta["global"] != "arange"]
    saved = [item.value for section in _sections(priced) for item in section.saved]
    assert _bytes(saved) == sum(value.numel() * value.itemsize for value in kept)


def _whole_layout(priced: PricedModel, moves: tuple[AxisMove, ...]) -> AxisLayout:
    """A layout that splits nothing, with some collectives all the same."""
    sites = priced.space.sites.items()
    operands = {name: tuple(PartitionSpec() for _ in site.strategies[0].inputs) for name, site in sites}
    return AxisLayout(operands, {name: tuple(PartitionSpec() for _ in site.results) for name, site in sites}, moves)


def _inner_links(priced: PricedModel) -> list[tuple[fx.Node, fx.Node]]:
    """Calls of a kernel that hand a value on to another one, without a view between."""
    nodes, links = priced.folded.single.nodes_by_name(), []
    for kernel in priced.kernels:
        for name in kernel.members:
            links += [(nodes[name], user) for user in nodes[name].users if user.name in kernel.members]
    return [(one, two) for one, two in links if two.target is not operator.getitem and two in readers_of(one)]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_parted_where_a_value_moves(name: str) -> None:
    """Wherever a collective comes between two calls, one more is launched, and the value is read, and written."""
    priced = _one_block(name)
    before = _chains(_sections(priced))
    links = _inner_links(priced)
    assert links
    for tail, head in links:
        move = AxisMove((tail.name, 0), head.name, MoveKind.REDUCE, PartitionSpec(AXIS), PartitionSpec())
        layouts = {"tensor": _whole_layout(priced, (move,))}
        parted = _chains(count_sections(priced.folded, layouts, fused=True, kernels=priced.kernels).values())
        assert sum(item.launches for item in parted) >= 1 + sum(item.launches for item in before)
        value = tail.meta["val"]
        assert _moved(parted) >= _moved(before) + value.numel() * value.itemsize
