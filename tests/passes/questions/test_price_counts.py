"""Formulas of the price of a recipe equal prices that are made at other sizes.

`test_plan_counts` checks plans of specs.
"""

from __future__ import annotations

import dataclasses
import pickle
from functools import cache
from typing import Any

import pytest
import sympy
import torch

from autoshard import Cluster, FormulaError, Mesh, P, Plan
from autoshard.ir.execution import Execution
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.driver.pricing import price_execution, priced_model
from passes.lowering.lower_program import lower_program
from passes.search.layers.price_model import PricedModel
from passes.search.price_recipe import model_flops
from tests.passes import decoders
from tests.passes.decoders import Decoder
from tests.passes.executions import under
from tests.passes.questions import numeric_counts

RECIPES = (
    under(Execution(data=2, tensor=2, sequence_parallel=True, micro_batch=2, global_batch=16), gradient_dtype="bf16"),
    Execution(data=2, zero=1, recompute="full", micro_batch=2, global_batch=8),
    Execution(data=4, zero=3, recompute="selective"),
    Execution(data=2, context=2, zero=2),
    Execution(data=4, zero=2, global_batch=16, recompute="selective"),
)
SIZES = ((1, 16, 3), (3, 24, 5), (2, 32, 8))
"""Micro-batch, sequence and layers."""

dense, sparse = cache(decoders.dense), cache(decoders.sparse)
"""A model is traced once for each length of its inputs."""


def price_of(recipe: Execution, length: int, model: Decoder) -> Plan:
    """Price a recipe on H100s, with example inputs of one sequence of `length` tokens."""
    one = torch.zeros(1, length, dtype=torch.int64, device="meta")
    return price_execution(model, Cluster("h100_sxm", 1, recipe.devices), recipe, (one, one))


def value_of(plan: Plan, name: str, fixed: tuple[str, ...] = (), **sizes: int) -> sympy.Expr:
    """The value of a plan's formula at given sizes. A formula with a fixed sequence needs fewer traces."""
    formula = plan.formula(name, fixed=fixed)
    value = formula.subs({symbol: sizes[str(symbol)] for symbol in formula.free_symbols})
    assert not value.free_symbols
    return value


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"zero{recipe.zero}-{recipe.recompute}")
def test_substituted_equals_priced(recipe: Execution) -> None:
    """Formulas of memory, FLOPs and parameters at other sizes equal a price that is made at these sizes."""
    plan = price_of(recipe, 16, dense(4))
    for micro_batch, length, depth in SIZES:
        batch = 2 * micro_batch * recipe.data
        other = dataclasses.replace(recipe, micro_batch=micro_batch, global_batch=batch)
        model = dense(depth)
        memory = price_of(other, length, model).predicted.memory_breakdown
        sizes = {"batch": batch, "micro_batch": micro_batch, "sequence": length, "layers": depth}
        sizes |= {"data": recipe.data, "tensor": recipe.tensor, "context": recipe.context}
        parts = {"parameter_bytes": "parameters", "gradient_bytes": "gradients", "optimizer_bytes": "optimizer state"}
        for name, part in parts.items():
            assert int(value_of(plan, name, **sizes)) == memory[part]
        if "activations" in memory:
            assert int(value_of(plan, "activation_bytes", **sizes)) == memory["activations"]
        priced: Any = _priced(model, length)
        cluster = Cluster("h100_sxm", 1, other.devices)
        wanted = model_flops(priced.counted.layer_prices(other, cluster), priced.folded.blocks, other)
        assert float(value_of(plan, "rank_flops", **sizes)) == pytest.approx(wanted, rel=1e-12)
        assert value_of(plan, "parameters", **sizes) == sum(item.numel() for item in model.parameters())
        assert value_of(plan, "tokens", **sizes) == batch * length


def _priced(model: Decoder, length: int) -> PricedModel:
    one = torch.zeros(1, length, dtype=torch.int64, device="meta")
    return priced_model(model, (one, one), None)


def test_data_parallel_gradients_travel_as_an_all_reduce() -> None:
    """In data parallelism over n ranks, each rank sends 2 (n - 1) / n of the gradient bytes. One rank sends nothing."""
    plan = price_of(Execution(data=4), 16, dense(4))
    data = sympy.Symbol("data")
    wanted = 2 * plan.formula("gradient_bytes") * (data - 1) / data
    assert sympy.simplify(plan.formula("communication_bytes") - wanted) == 0
    assert plan.formula("communication_bytes_data").subs({data: 1}) == 0


def test_data_parallel_gradients_are_what_the_program_of_the_layout_sends() -> None:
    """In data parallelism, the formula's sent bytes are within 1 % of those of the lowered program."""
    batch, mesh, cluster = 2**16, Mesh({"data": 4}), Cluster("h100_sxm", 1, 4)  # so many that none is computed twice
    model, tokens = dense(2), torch.zeros(batch, 16, dtype=torch.int64, device="meta")
    constraints = {name: P() for name, _ in model.named_parameters()}
    program = trace(model, (tokens, tokens), {})
    plan = plan_program(program, mesh, cluster, PlanOptions(constraints=constraints, with_baselines=False))
    sent = numeric_counts.sent_bytes(lower_program(program, plan, cluster))["data"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    recipe = under(Execution(data=4, micro_batch=batch // 4), gradient_dtype="bf16")
    sizes = {"batch": batch, "micro_batch": batch // 4, "sequence": 16, "layers": 2, "data": 4, "tensor": 1}
    found = value_of(price_of(recipe, 16, model), "communication_bytes", ("sequence",), **sizes)
    assert float(found) == pytest.approx(sent, rel=0.01)


def test_sharded_gradients_travel_for_every_micro_batch() -> None:
    """Under ZeRO-2, each further micro-batch sends its gradients once more, and no parameters."""
    model = dense(4)
    often, once = (price_of(Execution(data=4, zero=2, global_batch=batch), 16, model) for batch in (12, 4))
    sizes = {"data": 4, "micro_batch": 1, "sequence": 16, "layers": 4}
    sent = [value_of(plan, "communication_bytes", batch=batch, **sizes) for plan, batch in ((often, 12), (once, 4))]
    gradients = 4 * sum(item.numel() for item in model.parameters())
    assert sent[0] - sent[1] == 2 * gradients * sympy.Rational(3, 4)


def test_stages_hand_on_parts_and_gather_those_that_are_no_whole_sequence() -> None:
    """With tensor parallelism, a stage sends 1/tensor of each boundary value.

    The next stage gathers the value, unless sequence parallelism keeps it split.
    """
    model, length, micro_batches, tensor, stages = dense(2), 16, 3, 2, 2
    crossing = 2 * micro_batches * 2 * length * 64 * (stages - 1) // stages  # in bfloat16
    sizes = {"batch": micro_batches, "micro_batch": 1, "sequence": length, "layers": 2, "data": 1, "tensor": tensor}
    for is_split in (False, True):
        base = Execution(tensor=tensor, sequence_parallel=is_split, global_batch=micro_batches)
        whole = price_of(base, length, model)
        piped = price_of(dataclasses.replace(base, pipeline=stages, schedule="1F1B"), length, model)
        assert value_of(piped, "communication_bytes_pipeline", pipeline=stages, **sizes) == crossing // tensor
        name, gathered = "communication_bytes_tensor", 0 if is_split else crossing * (tensor - 1) // tensor
        within = value_of(whole, name, pipeline=1, **sizes) / stages
        assert value_of(piped, name, pipeline=stages, **sizes) == within + gathered


def test_kinds_of_blocks_have_symbols_of_their_own() -> None:
    """A model with dense and sparse blocks has one symbol for the number of each kind."""
    plan = price_of(Execution(data=4, expert=2), 16, sparse())
    symbols = {str(symbol) for symbol in plan.formula("parameters", fixed=("sequence",)).free_symbols}
    assert symbols == {"layers_0", "layers_1"}


def test_names_that_do_not_exist_are_refused_with_those_that_do() -> None:
    """Unknown names of formulas and of fixed symbols are refused, and the errors list the known names."""
    plan = price_of(Execution(data=2), 16, dense(4))
    with pytest.raises(FormulaError, match=r"no formula 'flops'\. There are step_flops, .*communication_bytes_data"):
        plan.formula("flops")
    with pytest.raises(FormulaError, match=r"names 'depth'; the symbols are batch, micro_batch, sequence, layers"):
        plan.formula("step_flops", fixed=("depth",))


@pytest.mark.parametrize("dims", [["batch"], {1: 1}, {"seq": 0.5}, {"seq": True}, {"seq": {"input:0": "a"}}])
def test_dims_of_other_types_are_refused(dims: Any) -> None:
    """`dims` that are no dict from names to numbers, or to numbers for each input, are refused."""
    plan = price_of(Execution(data=2), 16, dense(4))
    with pytest.raises(FormulaError, match=r"dims=.*\{'batch': 0\}"):
        plan.formula("step_flops", dims=dims)


def test_plans_without_a_model_say_so(tmp_path: Any) -> None:
    """A loaded or unpickled plan refuses formulas, because it has no model."""
    plan = price_of(Execution(data=2), 16, dense(4))
    plan.save(tmp_path / "plan.json")
    for other in (Plan.load(tmp_path / "plan.json"), pickle.loads(pickle.dumps(plan))):
        with pytest.raises(FormulaError, match="no model at hand"):
            other.formula("step_flops")


def test_bytes_of_a_merged_dispatch_are_refused() -> None:
    """The formula for bytes of a merged expert dispatch is refused, because they depend on the routing."""
    plan = price_of(under(Execution(data=4, expert=4), merged_dispatch=True), 16, sparse())
    with pytest.raises(FormulaError, match="merged_dispatch=False"):
        plan.formula("communication_bytes_expert", fixed=("sequence",))
