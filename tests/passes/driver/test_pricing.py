"""Recipes are priced on plain models without annotations of their layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, P, Plan, RecipeError
from autoshard.errors import NotAvailableError
from autoshard.ir.execution import Execution
from autoshard.ir.text import format_bytes
from passes.driver.pricing import price_execution
from tests.passes.decoders import dense, sparse, tokens

MODEL, SPARSE = dense(8), sparse()
PLAIN = Execution(micro_batch=2)


def _price(recipe: Execution, model: nn.Module = MODEL, per_node: int | None = None) -> Plan:
    count = recipe.devices
    cluster = Cluster("h100_sxm", max(1, count // 8), per_node or min(8, count))
    return price_execution(model, cluster, recipe, tokens())


def test_a_plan_says_where_parameters_of_all_blocks_lie() -> None:
    """Under tensor parallelism, the plan states the spec and the bytes per rank of the weights of every block."""
    plan = _price(Execution(tensor=4))
    assert plan.parameters["layers.7.wide.weight"].spec == P("tensor")
    assert plan.parameters["layers.7.narrow.weight"].spec == P(None, "tensor")
    assert plan.parameters["layers.7.wide.weight"].local_bytes == 256 * 64 * 2 // 4
    assert len(plan.parameters) == len(list(MODEL.parameters()))


def test_zero_3_splits_parameters_over_replicas() -> None:
    """Under ZeRO-3, a parameter's spec splits the parameter over the data axis."""
    assert _price(Execution(data=8, zero=3)).parameters["layers.0.wide.weight"].spec == P("data")


def test_breakdown_sums_to_the_step() -> None:
    """The time breakdown sums to the step time, and the memory breakdown sums to the peak memory."""
    for recipe in (PLAIN, Execution(data=4, tensor=2, zero=1), Execution(pipeline=4, global_batch=16, data=2)):
        predicted = _price(recipe).predicted
        assert sum(predicted.breakdown.values()) == pytest.approx(predicted.step_time_s)
        assert sum(predicted.memory_breakdown.values()) == predicted.peak_memory_bytes


def test_tokens_and_utilisation_follow_from_the_time() -> None:
    """Tokens per second are the tokens of the whole batch over the step time.

    Model FLOPs utilisation is between 0 and 1.
    """
    predicted = _price(Execution(data=2, micro_batch=2, global_batch=8)).predicted
    assert predicted.tokens_per_s == pytest.approx(8 * 32 / predicted.step_time_s)
    assert predicted.mfu is not None
    assert 0 < predicted.mfu < 1


def test_full_recomputation_takes_time_and_saves_memory() -> None:
    """Full recomputation has a longer step and smaller activations than no recomputation."""
    none, full = (
        _price(dataclasses.replace(PLAIN, micro_batch=16, recompute=kind)).predicted for kind in ("none", "full")
    )
    assert full.step_time_s > none.step_time_s
    assert full.memory_breakdown["activations"] < none.memory_breakdown["activations"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_zero_stage_saves_memory(stage: int) -> None:
    """ZeRO-1 shrinks the optimizer state of a rank, ZeRO-2 also its gradients, and ZeRO-3 also its parameters."""
    before, after = (_price(Execution(data=8, zero=zero)).predicted for zero in (stage - 1, stage))
    part = ("optimizer state", "gradients", "parameters")[stage - 1]
    assert after.memory_breakdown[part] < before.memory_breakdown[part]


def test_a_pipeline_has_a_bubble_that_micro_batches_shrink() -> None:
    """The pipeline bubble takes a smaller share of the step if the step has more micro-batches."""
    few, many = (_price(Execution(pipeline=4, global_batch=batch)).predicted for batch in (4, 64))
    shares = [item.breakdown["pipeline bubble"] / item.step_time_s for item in (few, many)]
    assert shares[0] > 2 * shares[1] > 0


def test_experts_are_shared_out_and_tokens_exchanged() -> None:
    """Expert parallelism splits expert weights over the expert axis, and the step has communication over this axis."""
    recipe = Execution(data=4, expert=4, micro_batch=4096)
    plan = _price(recipe, SPARSE)
    assert plan.parameters["layers.1.up"].spec == P("expert")
    assert plan.predicted.breakdown["communication over expert"] > 0
    assert "communication over expert" not in _price(dataclasses.replace(recipe, expert=1), SPARSE).predicted.breakdown


def test_context_parallelism_halves_activations() -> None:
    """With the sequence split over two ranks, activations take about half the memory on each rank."""
    one, two = (_price(Execution(context=size, micro_batch=8)).predicted for size in (1, 2))
    assert two.memory_breakdown["activations"] == pytest.approx(one.memory_breakdown["activations"] / 2, rel=0.2)


def test_the_example_batch_does_not_matter() -> None:
    """The prediction does not depend on the batch size of the example inputs, because the recipe sets the batch."""
    cluster = Cluster("h100_sxm", 1, 1)
    one, many = (price_execution(MODEL, cluster, PLAIN, tokens(batch)) for batch in (1, 7))
    assert one.predicted == many.predicted


def _froze(model: nn.Module) -> None:
    model.get_parameter("words.weight").requires_grad_(requires_grad=False)


def _grew(model: nn.Module) -> None:
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    layers.append(layers[0])


def _replaced(model: nn.Module) -> None:
    model.get_submodule("layers.1").two = nn.Identity()


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [nn.Module.double, _froze, _grew, _replaced])
def test_a_model_that_was_changed_is_priced_as_it_is_now(change: Callable[[nn.Module], object]) -> None:
    """After a change of its dtype, frozen parameters, blocks or modules, a model has the price of a new model."""
    cluster, model, new = Cluster("h100_sxm", 1, 1), dense(2), dense(2)
    before = price_execution(model, cluster, PLAIN, tokens())
    for each in (model, new):
        change(each)
    after, other = (price_execution(each, cluster, PLAIN, tokens()) for each in (model, new))
    assert after.predicted == other.predicted != before.predicted
    assert after.parameters == other.parameters


class Repeated(nn.Module):
    """One layer that is applied `times` x `config.times` times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times, self.config = nn.Linear(8, 8), 1, SimpleNamespace(times=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times * self.config.times):
            x = self.layer(x)
        return x.float().sum()


@dataclasses.dataclass
class Scaled:
    """A loss that is compared by its fields, and so has no hash."""

    factor: float = 1.0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        return self.factor * loss


def test_a_setting_that_was_changed_counts() -> None:
    """A changed number of a module or its config changes the price.

    Pricing again without a change gives the same price.
    """
    model, loss, inputs = Repeated().bfloat16(), Scaled(), (torch.zeros(2, 8, dtype=torch.bfloat16),)

    def price() -> float:
        plan = price_execution(model, Cluster("h100_sxm", 1, 1), PLAIN, inputs, loss_fn=loss)
        return plan.predicted.step_time_s

    once = price()
    assert price() == once
    model.times = 2
    twice = price()
    model.config.times = 2
    assert once < twice < price()


class Wide(nn.Module):
    """Four large matrix products in sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


def test_eight_bits_are_faster_where_products_are_large() -> None:
    """For large products, the step is shorter in 8-bit floats than in bfloat16, although quantisation takes time."""
    with torch.device("meta"):
        model = Wide().bfloat16()
    inputs = (torch.zeros(1, 2048, 4096, dtype=torch.bfloat16, device="meta"),)
    cluster = Cluster("h100_sxm", 1, 1)
    times = [
        price_execution(model, cluster, Execution(micro_batch=4, precision=precision), inputs)
        for precision in ("bf16", "f8")
    ]
    assert times[1].predicted.step_time_s < times[0].predicted.step_time_s


def _total(y: torch.Tensor) -> torch.Tensor:
    return y.float().sum()


def test_a_model_without_blocks_is_priced() -> None:
    """A model without repeated blocks has a price."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).bfloat16()
    inputs = (torch.zeros(1, 64, dtype=torch.bfloat16, device="meta"),)
    plan = price_execution(model, Cluster("h100_sxm", 1, 1), PLAIN, inputs, loss_fn=_total)
    assert plan.predicted.step_time_s > 0


def test_a_plan_is_saved_and_loaded(tmp_path) -> None:
    """A recipe's plan has the same step time and parameters after it is saved and loaded."""
    plan = _price(Execution(tensor=2))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.predicted.step_time_s == plan.predicted.step_time_s
    assert loaded.parameters == plan.parameters


def test_a_recipe_for_another_number_of_devices_is_refused() -> None:
    """A recipe for four devices is refused on eight devices, and the error states both numbers."""
    with pytest.raises(RecipeError, match=r"tensor=2 = 4 devices; the cluster has 8"):
        price_execution(MODEL, Cluster("h100_sxm", 1, 8), Execution(data=2, tensor=2), tokens())


def test_experts_of_a_model_without_any_are_refused() -> None:
    """Expert parallelism is refused for a model without experts, that is, without a parameter that stacks weights."""
    with pytest.raises(RecipeError, match="no parameter of the model is a stack of weights"):
        _price(Execution(data=2, expert=2))


def test_more_stages_than_blocks_are_refused() -> None:
    """More stages than blocks are refused, and so are `stage_layers` whose sum is not the number of blocks."""
    with pytest.raises(RecipeError, match="16 stages cannot share 8 blocks"):
        _price(Execution(pipeline=16))
    with pytest.raises(RecipeError, match="shares out 4 blocks; the model has 8"):
        _price(Execution(pipeline=2, stage_layers=(2, 2)))


def test_what_has_no_price_yet_is_refused() -> None:
    """A recipe that offloads the optimizer is refused, because this offload has no price yet."""
    with pytest.raises(NotAvailableError, match="offload='optimizer' cannot be priced yet"):
        _price(Execution(data=8, zero=1, offload="optimizer"))


def test_offloaded_activations_have_a_price() -> None:
    """Offloading activations adds the time of copies and moves the saved memory to the host.

    Print and file state this memory.
    """
    recipe = Execution(data=8, micro_batch=64, global_batch=512)
    kept, away = _price(recipe), _price(dataclasses.replace(recipe, offload="activations"))
    assert away.predicted.step_time_s > kept.predicted.step_time_s
    saved = kept.predicted.peak_memory_bytes - away.predicted.peak_memory_bytes
    buffers = away.predicted.memory_breakdown["offload buffers"]
    assert away.offload.host_bytes == pytest.approx(saved + buffers, abs=2)
    assert away.offload.time_s == away.predicted.breakdown["communication over the host"]
    assert f"{format_bytes(away.offload.host_bytes)} on the host for each device" in str(away)
    assert Plan.from_json(away.to_json()).offload == away.offload


def test_experts_may_lie_on_tensor_ranks_too() -> None:
    """Four experts may be split over two data ranks times two tensor ranks, with one expert's weights on each rank."""
    recipe = Execution(data=2, tensor=2, expert=4, global_batch=4)
    plan = price_execution(SPARSE, Cluster("h100_sxm", 1, 4), recipe, tokens())
    split = {name: math.prod(item.shape) * 2 / item.local_bytes for name, item in plan.parameters.items()}
    assert split["words.weight"] == 2
    assert {share for name, share in split.items() if name.endswith((".up", ".down"))} == {4}


def test_what_is_no_recipe_is_refused() -> None:
    """A dict in place of a recipe is refused with a RecipeError."""
    with pytest.raises(RecipeError, match="pass an autoshard"):
        autoshard.price(MODEL, Cluster("h100_sxm", 1, 1), {"data": 1}, example_inputs=tokens())  # type: ignore[arg-type]
