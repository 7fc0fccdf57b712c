"""tests passes/search/layers/combine_layouts.py: specs of single axes, put together."""

from __future__ import annotations

import torch

import autoshard
from autoshard import Cluster, P
from autoshard.ir.execution import Execution
from passes.driver.pricing import priced_model
from passes.search.layers.combine_layouts import combine_layouts, combined
from passes.search.layers.price_model import RecipeKind
from passes.search.layers.propagate_axis import AXIS


def test_a_dim_has_the_axes_that_split_it_in_their_order() -> None:
    """And a value that is partial over one axis stays so."""
    assert combined(("context", "tensor"), (P(AXIS), P(AXIS))) == P(("context", "tensor"))
    assert combined(("context", "tensor"), (P(AXIS), P(partial={AXIS: "sum"}))) == P(
        "context", partial={"tensor": "sum"}
    )


def test_specs_of_a_kind_of_recipe_are_found_once() -> None:
    """Plans of recipes of one kind share them; they are those of its layouts."""
    block = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    inputs, total = (torch.zeros(1, 64),), lambda y: y.sum()
    one, two = (
        autoshard.price(
            block, Cluster("h100_sxm", 1, size), Execution(tensor=size), example_inputs=inputs, loss_fn=total
        )
        for size in (2, 4)
    )
    assert one.nodes is two.nodes
    priced, kind = priced_model(block, inputs, total), RecipeKind.of(Execution(tensor=2))
    assert one.nodes == combine_layouts(priced.folded, priced.layouts(kind))
    assert any("tensor" in spec.axes for node in one.nodes.values() for spec in node.outputs)
