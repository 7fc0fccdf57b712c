"""The parts of a step, and which of them are alike."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.tracing import trace
from passes.prediction.step_layout import step_layout
from tests.passes.blocks import blocks_program, problem_of


def test_inner_blocks_are_of_one_structure() -> None:
    """In the forward, and in the backward: deeper models have as many structures."""
    for count in (5, 9):
        layout = step_layout(problem_of(blocks_program(count=count), Mesh({"x": 2})))
        for phase in ("forward", "backward"):
            inner = [part for part in layout.parts if part.name in _inner(phase, count)]
            assert len(inner) == count - 2
            assert len({part.structure for part in inner}) == 1
        assert len({part.structure for part in layout.parts}) <= 9


def _inner(phase: str, count: int) -> set[str]:
    return {f"{phase} of blocks.{index}" for index in range(1, count - 1)}


def test_every_call_is_in_one_part_in_order() -> None:
    """The parts are the program, cut."""
    planning = problem_of(blocks_program(count=3), Mesh({"x": 2}))
    calls = [name for name, site in planning.space.sites.items() if site.node and site.node.op == "call_function"]
    assert [name for part in step_layout(planning).parts for name in part.sites] == calls


class Bridged(nn.Module):
    """Two numbered layers with a function of no module between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.relu(self.layers[0](x))).sum()


def test_what_is_between_blocks_goes_with_the_one_before() -> None:
    """So that it is no block of its own, ahead of which parameters would be gathered."""
    layout = step_layout(problem_of(trace(Bridged(), (torch.ones(4, 8),)), Mesh({"x": 2})))
    names = [part.name for part in layout.parts]
    assert names[0] == "forward of layers.0"
    assert "forward of layers.1" in names
    (first,) = [part for part in layout.parts if part.name == "forward of layers.0"]
    assert any("relu" in name for name in first.sites)


def test_parameters_and_what_is_made_of_them_are_free_of_the_step() -> None:
    """Their views too; activations are not."""
    layout = step_layout(problem_of(blocks_program(count=2), Mesh({"x": 2})))
    assert {"p_blocks_0_up_weight", "t", "input_0"} <= layout.free
    assert not {name for name in layout.free if name.startswith(("mm", "gelu", "native_layer_norm"))}


def test_the_layout_is_kept_with_its_problem() -> None:
    """Found once."""
    planning = problem_of(blocks_program(count=2), Mesh({"x": 2}))
    assert step_layout(planning) is step_layout(planning)
