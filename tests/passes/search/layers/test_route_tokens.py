"""Ranks that share tokens each route their own."""

from __future__ import annotations

import pytest
import torch

from autoshard import Cluster
from autoshard.ir.execution import Execution
from autoshard.ir.spec import P
from passes.driver.pricing import priced_model
from passes.search.layers.price_layers import Busy, LayerPrice
from passes.search.layers.propagate_axis import AXIS
from passes.search.layers.route_tokens import routed_calls
from tests.models import mixtral
from tests.passes.decoders import priced_sparse

SPARSE = "layers:1"
SPLIT = (Execution(data=2, context=2, expert=4, micro_batch=64),
         Execution(data=2, tensor=2, sequence_parallel=True, expert=4, micro_batch=64))  # fmt: skip


def _experts(recipe: Execution) -> LayerPrice:
    return priced_sparse().counted.layer_prices(recipe, Cluster("h100_sxm", 1, 4))[SPARSE]


def test_calls_between_the_two_permutations_are_routed() -> None:
    """Sorts, selections and products between the two permutations are routed; the router and the sums are not."""
    nodes = priced_sparse().folded.single.nodes_by_name()
    found = [nodes[name] for name in routed_calls(priced_sparse().folded, AXIS)]
    forward = [node.target for node in found
               if node.meta["phase"] == "forward" and priced_sparse().folded.layer_of[node.name] == SPARSE]  # fmt: skip
    aten = torch.ops.aten
    for target in (aten.sort.default, aten.index_select.default, aten.bmm.default):
        assert forward.count(target) == 2
    assert not {aten.mm.default, aten.topk.default, aten.sum.dim_IntList} & set(forward)


def test_tokens_are_split_and_weights_are_not() -> None:
    """Tokens are split and weights are whole, so a weight's gradient is a sum over ranks."""
    nodes = priced_sparse().folded.single.nodes_by_name()
    products = {name: strategy for name, strategy in routed_calls(priced_sparse().folded, AXIS).items()
                if nodes[name].target is torch.ops.aten.bmm.default}  # fmt: skip
    for name, strategy in products.items():
        weight_read = any(spec == P() for spec in strategy.inputs)
        assert strategy.outputs == ((P(None, AXIS),) if weight_read else (P(partial={AXIS: "sum"}),)), name
        assert nodes[name].meta["phase"] == "backward" or weight_read


@pytest.mark.parametrize("recipe", SPLIT)
def test_experts_cost_a_rank_with_half_the_tokens_what_half_the_sequences_cost(recipe: Execution) -> None:
    """Half the tokens cost a rank of experts as much as half the sequences, for context and tensor ranks."""
    split, half = _experts(recipe), _experts(Execution(data=4, expert=4, micro_batch=32))
    for one, two in ((split.forward, half.forward), (split.backward, half.backward)):
        assert _seconds(one.busy) == pytest.approx(_seconds(two.busy))
        assert one.traffic == two.traffic


def test_tokens_that_all_tensor_ranks_hold_are_not_split() -> None:
    """Without sequence parallelism each tensor rank routes all tokens."""
    whole = _experts(Execution(data=2, tensor=2, expert=4, micro_batch=64))
    alone = _experts(Execution(data=4, expert=4, micro_batch=64))
    assert [item for item in whole.forward.traffic if item.axis == "expert"] == list(alone.forward.traffic)


def test_a_layer_that_is_one_operator_shares_out_its_experts() -> None:
    """Rows go there and back in the forward, three ways in the backward; a tensor axis splits experts without it."""
    model, inputs = mixtral(layers=3)
    counted = priced_model(model, inputs, None, whole_experts=True).counted
    cluster = Cluster("h100_sxm", 1, 4)
    ends = {"before", "after"}
    alone, shared, split = (
        next(price for name, price in counted.layer_prices(recipe, cluster).items() if name not in ends)
        for recipe in (Execution(data=4), Execution(data=4, expert=4), Execution(tensor=4, expert_tensor=4))
    )
    config = model.config
    tokens = inputs["input_ids"].shape[1] * config.num_experts_per_tok  # a micro-batch is one sequence
    row_bytes = tokens * config.hidden_size * 4
    for phase, times in ((shared.forward, 2), (shared.backward, 3)):
        assert [item.bytes for item in phase.traffic if item.axis == "expert"] == [row_bytes] * times
    whole = alone.parameters + alone.expert_parameters
    matrices = config.num_local_experts * 3 * config.hidden_size * config.intermediate_size
    assert (alone.expert_parameters, shared.expert_parameters) == (0, matrices // 4)
    assert shared.parameters == whole - matrices
    assert not [item for item in split.forward.traffic if item.axis == "expert"]
    assert split.saved_bytes < alone.saved_bytes


def _seconds(busy: Busy) -> tuple[float, ...]:
    return busy.matmul_s, busy.memory_s, busy.flops
