"""Programs are cut into layer classes with sizes linear in the batch."""

from __future__ import annotations

import torch
from torch import nn

from autoshard import tracing
from passes.search.layers.count_layers import count_layers
from passes.search.layers.fold_program import fold_program
from tests.passes.decoders import dense, folded, sparse, tokens


def test_one_block_of_a_kind_stands_for_all() -> None:
    """Layer classes are the ends and one block; the whole model's blocks are counted."""
    program = folded(dense(5))
    assert program.layers == ("before", "layers:0", "after")
    assert program.blocks == ("layers:0",) * 5
    assert len(program.parameters["layers:0"]) == 12


def test_kinds_of_blocks_keep_their_order() -> None:
    """Blocks of two kinds in turn are two layer classes."""
    assert folded(sparse()).blocks == ("layers:0", "layers:1") * 3


def test_forward_and_backward_of_a_block_are_both_in_its_layer() -> None:
    """A block's forward and backward are in one layer, although residual gradient sums carry another module's name."""
    program = folded(dense())
    phases = dict.fromkeys(("forward", "backward"), 0)
    for node in program.single.graph.nodes:
        if program.layer_of.get(node.name) == "layers:0" and node.target is torch.ops.aten.add.Tensor:
            phases[node.meta["phase"]] += node.meta["val"].ndim == 3
    assert phases == {"forward": 2, "backward": 2}


def test_a_parameter_stands_for_those_of_all_alike_blocks() -> None:
    """Parameters of the last kept block stand for all repeated blocks."""
    program = folded(dense(4))
    assert program.names_of("layers.1.wide.weight") == tuple(f"layers.{index}.wide.weight" for index in range(4))
    assert program.names_of("layers.0.wide.weight") == ()
    assert program.names_of("last.weight") == ("last.weight",)


def test_inputs_of_any_batch_give_the_same_fold() -> None:
    """The trace does not depend on the batch of the example inputs."""
    assert tokens(3)[0].shape[0] == 3
    assert folded(dense()).layer_of == folded(dense()).layer_of


class Shared(nn.Module):
    """A model that adds one value to all sequences, as GPT-2 adds its position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 8), nn.Parameter(torch.ones(1, 6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.shared).square().sum()


def test_gradients_summed_over_sequences_are_counted() -> None:
    """One sequence needs no such sum, two do; so does the bias."""
    double, triple = (tracing.trace(Shared(), (torch.ones(batch, 6, 4),), {}) for batch in (2, 3))
    layer = count_layers(fold_program(double, triple, ()), {}, fused=False)["after"]
    sums = [kernel for kernel in layer.backward.kernels if kernel.operator == "aten.sum.dim_IntList"]
    sizes = {(item.inputs[0].shape(5, {}), item.outputs[0].shape(5, {})) for item in sums}
    assert sizes == {((5 * 6, 8), (1, 8)), ((5, 6, 8), (1, 6, 8))}
