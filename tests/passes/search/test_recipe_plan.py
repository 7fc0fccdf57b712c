"""Meshes and specs of plans that execute recipes."""

from __future__ import annotations

import torch

import autoshard
from autoshard import Cluster, Mesh, P
from autoshard.ir.execution import Execution
from passes.search.layers.propagate_axis import AXIS
from passes.search.recipe_plan import combined, recipe_mesh


def test_the_expert_axis_is_the_fastest_part_of_data() -> None:
    """The expert axis is the inner part of the data axis; a larger expert group covers the tensor axis too."""
    within = Execution(data=4, tensor=2, expert=2, expert_tensor=1)
    beyond = Execution(data=2, tensor=2, expert=4, expert_tensor=1)
    assert recipe_mesh(within) == Mesh({"data": 2, "expert": 2, "tensor": 2})
    assert recipe_mesh(beyond) == Mesh({"expert": 4})
    assert recipe_mesh(Execution(data=4, pipeline=2)) == Mesh({"pipeline": 2, "data": 4})


def test_a_dim_has_the_axes_that_split_it_in_their_order() -> None:
    """A dim that two axes split has both in their order, and a value partial over an axis stays partial."""
    assert combined({"context": P(AXIS), "tensor": P(AXIS)}) == P(("context", "tensor"))
    found = combined({"context": P(AXIS), "tensor": P(partial={AXIS: "sum"})})
    assert found == P("context", partial={"tensor": "sum"})


def test_a_price_has_the_specs_of_its_layouts() -> None:
    """A price with two tensor ranks has specs that split weights and activations over the tensor axis."""
    block = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    found = autoshard.price(
        block, Cluster("h100_sxm", 1, 2), Execution(tensor=2), example_inputs=(torch.zeros(1, 64),),
        loss_fn=lambda y: y.sum(),
    )  # fmt: skip
    assert any("tensor" in spec.axes for node in found.nodes.values() for spec in node.outputs)
    assert found.parameters["0.weight"].spec == P("tensor")
