"""Every entry of the public face refuses what it cannot mean by one error of ours, which names it and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import (
    AutoshardError,
    Cluster,
    Mesh,
    P,
    PartitionSpec,
    Plan,
    Recipe,
)
from autoshard.rules import infer_rule, sharding_rule, strategies
from autoshard.testing import check_plan
from cost_models.errors import CostModelError

MM = torch.ops.aten.mm.default
X = torch.ones(4, 6)
MESH, CLUSTER, RECIPE = Mesh({"data": 2}), Cluster("h100_sxm", 1, 2), Recipe(data=2)


def total(y: Tensor) -> Tensor:
    return y.sum()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Linear(6, 2)


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> Plan:
    return autoshard.plan(model, MESH, example_inputs=(X,), loss_fn=total)


def refused(call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises((AutoshardError, CostModelError)) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: strategies(torch.mm, (X, X.T), {}, 2), "torch.ops.aten.mm.default"),
        (lambda: strategies("aten.mm", (X, X.T), {}, 2), "'aten.mm' is a str; pass an operator of torch.ops"),
        (lambda: strategies(None, (X, X.T), {}, 2), "None is a NoneType; pass an operator of torch.ops"),
        (lambda: strategies(MM, (X,), {}, 2), "aten.mm.default refuses the call: aten::mm() is missing value"),
        (lambda: strategies(MM, X, {}, 2), "args is a Tensor; pass a tuple"),
        (lambda: strategies(MM, (X, "x"), {}, 2), "aten.mm.default refuses the call: "),
        (lambda: strategies(MM, (X, X), {}, 2), "a and b must have same reduction dim, but got [4, 6] X [4, 6]"),
        (lambda: strategies(MM, (X, X.T), [2], 2), "kwargs is a list; pass a dict"),
        (
            lambda: strategies(torch.ops.aten.nonzero.default, (X.to("meta"),), {}, 2),
            "depends on the values of an operand, which has none",
        ),
        (lambda: infer_rule(torch.mm, (X, X.T)), "torch.ops.aten.mm.default"),
        (lambda: infer_rule(torch.ops.aten.logdet.default, None), "sample_inputs is a NoneType; pass a tuple"),
        (lambda: infer_rule(MM, (X, X.T)), "aten.mm.default already has a sharding rule; there is nothing to infer"),
        (lambda: sharding_rule(torch.mm), "torch.ops.aten.mm.default"),
        (lambda: sharding_rule("mm"), "'mm' is no operator's name: write library.name.overload"),
        (lambda: sharding_rule(torch.ops.aten.logdet.default)(3), "A sharding rule is a function, and 3 is a int"),
    ],
)
def test_operators(call: Callable[[], Any], words: str) -> None:
    """A name of no operator, a name of several, and a call that the operator refuses are refused."""
    assert words in refused(call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: P(3), "dim=3; a dim is an axis name"),
        (lambda: P(""), "dim=''; a dim is an axis name"),
        (lambda: P("data", ("model", "a b")), "dim=('model', 'a b'); a dim is an axis name"),
        (lambda: P(partial="data"), "partial='data'; write partial={'data': 'sum'}"),
        (lambda: P(partial=["data"]), "partial=['data']; write partial={"),
        (lambda: PartitionSpec.parse("P('data'"), "cannot be read; write it as P('data', None)"),
        (lambda: Recipe(stage_layers=3), "stage_layers=3 is a int; pass a tuple"),
    ],
)
def test_specs_and_recipes(call: Callable[[], Any], words: str) -> None:
    """Dims, partial axes, and fields that hold several numbers."""
    assert words in refused(call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Cluster.of("a100_sxm_40gb", 8), "devices_per_node= is missing"),
        (lambda: Cluster.of("a100_sxm_40gb", 8, devices_per_node=8, switch="x"), "'switch' is no part of a node"),
        (lambda: Cluster.of("a100_sxm_40gb", "8", devices_per_node=8), "'8' devices"),
        (lambda: Cluster.of("a100_sxm_40gb", 0, devices_per_node=8), "0 devices"),
        (lambda: Cluster.of("a100_sxm_40gb", 8, devices_per_node="8"), "devices_per_node='8'"),
        (lambda: Cluster.of("a100_sxm_40gb", 8, devices_per_node=0), "devices_per_node=0"),
        (lambda: Cluster.of("a100_sxm_40gb", True, devices_per_node=8), "True devices"),
        (lambda: Cluster("h100_sxm", nodes=True), "nodes=True, devices_per_node=8): at least one node, and 1 to 8"),
        (lambda: Cluster("h100_sxm", nodes=1.5), "nodes=1.5, devices_per_node=8): at least one node, and 1 to 8"),
        (lambda: CLUSTER.node.with_network(bytes_per_s_per_device="25e9"), "'25e9'; it must be a positive number"),
        (lambda: MESH.rank_at({"model": 0}), "no rank at {'model': 0}; 'data' goes from 0 to 1"),
        (lambda: MESH.rank_at({"data": 2}), "no rank at {'data': 2}; 'data' goes from 0 to 1"),
        (lambda: MESH.coordinates("0"), "rank='0' is not among them"),
        (lambda: Cluster.of(3, 8, devices_per_node=8), "unit=3 is a int; pass the name of a device"),
        (lambda: Cluster.of("a100_sxm_40gb", 8, devices_per_node=8, fabric=3), "fabric=3 is a int"),
        (lambda: Cluster.of("a100_sxm_40gb", 8, devices_per_node=8, network=3), "network=3 is a int"),
        (lambda: Cluster.load(3), "path=3 is a int"),
        (lambda: Cluster.load("/no/such.toml"), "no file /no/such.toml"),
        (lambda: Cluster.load("/"), "no file /"),
    ],
)
def test_clusters(call: Callable[[], Any], words: str) -> None:
    """Parts, counts and files of hardware."""
    assert words in refused(call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda plan: plan.compare("plan.json"), "compare('plan.json'): a str is no plan; pass an autoshard.Plan"),
        (lambda plan: plan.compare(None), "a NoneType is no plan"),
        (lambda plan: plan.save("/no/such/plan.json"), "'/no/such/plan.json' cannot be written: No such file"),
        (lambda plan: plan.save(""), "'' cannot be written: Is a directory"),
        (lambda plan: plan.save(None), "path=None is a NoneType"),
        (lambda plan: plan.report("/"), "'/' cannot be written: Is a directory"),
        (lambda plan: plan.report(3), "path=3 is a int"),
        (lambda plan: plan.trace("/no/such/trace.json"), "'/no/such/trace.json' cannot be written"),
        (lambda plan: plan.explain(3), "explain(3): the plan has no parameter"),
        (lambda plan: plan.why_not(["fsdp"]), "why_not(['fsdp']): unknown"),
        (lambda plan: plan.why_not(None), "why_not(None): unknown"),
        (lambda plan: plan.formula("tokens", dims="batch"), "dims='batch' is a str; pass a dict"),
        (lambda plan: plan.formula("step_flops", fixed=3), "fixed=3 is a int; pass the names of symbols"),
        (lambda _: autoshard.vectorise("batch"), "formula='batch' is a str; pass what Plan.formula gave"),
        (lambda _: Plan.load("/no/such.json"), "'/no/such.json' cannot be read: No such file"),
        (lambda _: Plan.load("/"), "'/' cannot be read: Is a directory"),
        (lambda _: Plan.load(""), "'' cannot be read: Is a directory"),
        (lambda _: Plan.load(None), "path=None is a NoneType"),
    ],
)
def test_what_plans_are_asked(plan: Plan, call: Callable[[Plan], Any], words: str) -> None:
    """Other plans, files, names and symbols."""
    assert words in refused(lambda: call(plan))


def test_a_file_of_half_a_node(tmp_path: Path) -> None:
    """A count that is no whole number is not cut to one."""
    path = tmp_path / "mine.toml"
    CLUSTER.save(path, source="test", date="2026-11-23")
    text = path.read_text()
    path.write_text(text.replace("[nodes]\nvalue = 1", "[nodes]\nvalue = 1.5"))
    assert path.read_text() != text
    assert "'nodes' has value=1.5; a whole number of nodes is needed" in refused(lambda: Cluster.load(path))


def test_a_file_that_holds_no_plan(tmp_path: Path) -> None:
    """Not the errors of Python's readers."""
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "empty.json").write_text("")
    assert "list.json' is not a plan that autoshard wrote" in refused(lambda: Plan.load(tmp_path / "list.json"))
    assert "empty.json' is not a plan that autoshard wrote" in refused(lambda: Plan.load(tmp_path / "empty.json"))
    for number, (text, kind) in enumerate((("[1]", "list"), ("3", "int"), ('"plan"', "str"), ("null", "NoneType"))):
        (path := tmp_path / f"{number}.json").write_text(text)
        assert f"autoshard wrote: it holds {kind}, and a plan is an object." in refused(
            lambda path=path: Plan.load(path)
        )
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "autoshard wrote: its lists and objects lie in each other too deeply" in refused(
        lambda: Plan.load(tmp_path / "deep.json")
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"example_inputs": None}, "example_inputs is a NoneType; pass a tuple"),
        ({"example_inputs": X}, "example_inputs is a Tensor; pass a tuple"),
        ({"loss_fn": 3}, "loss_fn=3 is a int; pass a function"),
        ({"recipe": "data=2"}, "recipe='data=2' is a str; pass an autoshard.Recipe"),
        ({"cluster": "h100"}, "were given 'h100': pass a Cluster"),
        ({"cluster": MESH}, "pass a Cluster"),
        ({"model": "gpt"}, "model='gpt' is a str; pass a torch.nn.Module"),
    ],
)
def test_price(model: nn.Module, options: dict[str, Any], words: str) -> None:
    """Each argument."""
    given = {"model": model, "cluster": CLUSTER, "recipe": RECIPE, "example_inputs": (X,), "loss_fn": total, **options}
    assert words in refused(lambda: autoshard.price(**given))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_budget": float("inf")}, "memory_budget=inf must be a number of bytes"),
        ({"constraints": {3: P("data")}}, "constraints has the key 3, which is a int"),
        ({"global_batch": 8, "constraints": 3}, "constraints=3 is a int; pass a dict"),
        ({"global_batch": 8, "example_inputs": None}, "example_inputs is a NoneType; pass a tuple"),
        ({"runtime": "fsdp2"}, "runtime='fsdp2' is what executes a recipe. Pass recipe=Recipe(...), or global_batch="),
    ],
)
def test_plan(model: nn.Module, options: dict[str, Any], words: str) -> None:
    """Arguments that both kinds of search share are refused alike."""
    given = {"example_inputs": (X,), "loss_fn": total, "optimizer": "adamw", **options}
    assert words in refused(lambda: autoshard.plan(model, CLUSTER, **given))


def test_compile_and_check_plan(model: nn.Module) -> None:
    """A plan's file that is missing, and calls that cannot be compared."""
    assert "'/no/such.json' cannot be read" in refused(lambda: autoshard.compile(model, MESH, plan="/no/such.json"))
    assert "example_inputs is a NoneType" in refused(lambda: check_plan(model, MESH, None))
    assert "steps='2' compares nothing" in refused(lambda: check_plan(model, MESH, (X,), steps="2"))
