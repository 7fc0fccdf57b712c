"""Every public call refuses a wrong argument with one error, which has its name and says how to correct it.

Arguments are refused before any trace or search. The most usual mistakes are in docs/reference/messages.md, with
their whole messages; see docs/test_messages.py.
"""

from __future__ import annotations

import math
import re
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
    InvalidSpecError,
    Mesh,
    MeshError,
    NotAvailableError,
    P,
    PartitionSpec,
    Plan,
    PlanMismatchError,
    Recipe,
    TraceError,
)
from autoshard.rules import infer_rule, sharding_rule, strategies
from autoshard.testing import check_plan
from cost_models.errors import CostModelError

MM = torch.ops.aten.mm.default
X = torch.ones(4, 6)
MESH, CLUSTER, RECIPE = Mesh({"data": 2}), Cluster("h100_sxm", 1, 2), Recipe(data=2)


def total(y: Tensor) -> Tensor:
    return y.sum()


SGD = torch.optim.SGD
LAPTOP = Cluster("cpu_laptop", 1, 4)


def small() -> nn.Module:
    return nn.Linear(6, 2)


def planned(**options: Any) -> Plan:
    return autoshard.plan(small(), MESH, **{"example_inputs": (X,), **options})


def compiled(mesh: Any = MESH, **options: Any) -> Any:
    return autoshard.compile(small(), mesh, **options)


def stepping(make: Callable[..., Any] = SGD, **options: Any) -> Any:
    model = small()
    return autoshard.compile(model, MESH, optimizer=make(model.parameters(), lr=0.1), **options)


def without_groups() -> torch.optim.Optimizer:
    optimizer = SGD(small().parameters(), lr=0.1)
    optimizer.param_groups.clear()
    return optimizer


@torch.library.custom_op("autoshard_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x.flip(0)


mystery.register_fake(torch.empty_like)


class Mysterious(nn.Module):
    """A model that calls an operator without a sharding rule."""

    def forward(self, x: Tensor) -> Tensor:
        return mystery(x) + 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"memory_budget": -1}, NotAvailableError, r"memory_budget=-1 must be a number of bytes above 0"),
        ({"memory_budget": 0}, NotAvailableError, r"memory_budget=0 must be a number of bytes above 0"),
        ({"memory_budget": "80GB"}, NotAvailableError, r"memory_budget='80GB' must be a number of bytes"),
        ({"memory_budget": math.nan}, NotAvailableError, r"memory_budget=nan must be a number of bytes"),
        (
            {"memory_budget": 1.5},
            NotAvailableError,
            r"memory_budget=1.5 is no whole number of bytes. Write 80 \* 10\*\*9",
        ),
        ({"memory_budget": 0.8}, NotAvailableError, r"0.8 is no whole number of bytes.*int\(0.8 \* cluster.device"),
        ({"memory_budget": True}, NotAvailableError, r"memory_budget=True must be a number of bytes"),
        (
            {"example_inputs": (torch.ones(0, 6),)},
            TraceError,
            r"input:0 has shape=\(0, 6\), no elements: there is nothing",
        ),
        (
            {"example_inputs": (X.to_sparse(),)},
            TraceError,
            r"input:0 is of layout=torch.sparse_coo; pass a dense tensor",
        ),
        (
            {"example_inputs": {"inputs": X}},
            TraceError,
            r"does not fit Linear.forward\(input: .*\) -> .*: missing .* 'input'\. P",
        ),
        ({"example_inputs": {"input": X, 1: X}}, TraceError, r"example_inputs has the key 1; a dict has keyword"),
        (
            {"example_inputs": (X, X)},
            TraceError,
            r"The call does not fit Linear.forward.*: too many positional arguments",
        ),
        ({"loss_fn": torch.nn.functional.mse_loss}, TraceError, r"missing .* 'input' \(loss_fn= takes the last 1\)"),
        ({"strict": "no"}, NotAvailableError, r"strict='no' is a str; pass True or False"),
        ({"precision": ["bf16"]}, NotAvailableError, r"precision=\['bf16'\] is unknown; use 'bf16', 'f16', 'f32'"),
        (
            {"constraints": {"weight": P("data"), "w*": P()}},
            InvalidSpecError,
            r"\['w\*'\] lays out 'weight' as P\(\), and const",
        ),
        ({"example_inputs": {"input": torch.ones(4, 0)}}, TraceError, r"input:0 has shape=\(4, 0\), no elements"),
        ({"time_budget_s": -1}, NotAvailableError, r"time_budget_s=-1 must be a number of seconds, at least 0"),
        ({"time_budget_s": "10"}, NotAvailableError, r"time_budget_s='10' must be a number of seconds"),
        ({"time_budget_s": math.nan}, NotAvailableError, r"time_budget_s=nan must be a number of seconds"),
        ({"constraints": [("weight", P())]}, InvalidSpecError, r"constraints=\[.*\] is a list; pass a dict"),
        ({"loss_fn": "mse"}, TraceError, r"loss_fn='mse' is a str; pass a function"),
        ({"optimizer": 3}, TraceError, r"optimizer=3 is a int; pass a torch.optim optimizer"),
        ({"max_grad_norm": 1.0}, NotAvailableError, r"max_grad_norm=1.0 belongs to a training step"),
    ],
)
def test_arguments_of_plan_and_compile(arguments: dict[str, Any], error: type[AutoshardError], message: str) -> None:
    """`plan` and `compile` refuse a wrong argument with the same message."""
    arguments = {"example_inputs": (X,), **arguments}
    with pytest.raises(error, match=message):
        autoshard.plan(small(), MESH, **arguments)
    with pytest.raises(error, match=message):
        autoshard.compile(small(), MESH, **arguments)


ARGUMENTS: list[tuple[type[AutoshardError], str, Callable[[], Any]]] = [
    (NotAvailableError, "max_programs=0 must be a whole number, at least 1", lambda: autoshard.Options(max_programs=0)),
    (NotAvailableError, "timeout_s=inf must be a finite number of seconds, above 0",
     lambda: autoshard.Options(timeout_s=math.inf)),
    (NotAvailableError, "=True must say for each argument", lambda: autoshard.Options(dynamic_lengths=True)),
    (NotAvailableError, "={} must say for each argument", lambda: autoshard.Options(dynamic_lengths={})),
    (NotAvailableError, "must say for each argument what its padding holds",
     lambda: autoshard.Options(dynamic_lengths={"input": "0"})),
    (TraceError, "model is a ShardedModule, compiled already; pass the module from before",
     lambda: autoshard.plan(compiled(), MESH, example_inputs=(X,))),
    (TraceError, "model.0 is a ShardedModule, compiled already, and a program cannot call another program. Compile",
     lambda: autoshard.plan(nn.Sequential(compiled()), MESH, example_inputs=(X,))),
    (TraceError, "input:0 has shape=(0, 6), no elements: there is nothing", lambda: compiled()(X[:0])),
    (TraceError, "input:0 has shape=(0, 6), no elements",
     lambda: stepping(micro_batches=2, loss_fn=lambda y, times: y.sum() * times)(X[:0], 2)),
    (TraceError, "input:0 has shape=(0, 6), no elements",
     lambda: autoshard.price(small(), LAPTOP, Recipe(data=4), example_inputs=(X[:0],), loss_fn=total)),
    (TraceError, "input:0 has shape=(0, 6)", lambda: autoshard.prove(small(), MESH, example_inputs=(X[:0],))),
    (TraceError, "input:0 has shape=(0, 6)", lambda: autoshard.plan(
        small(), MESH, example_inputs=(X[:0],), loss_fn=total, optimizer="sgd", global_batch=4, recipe=Recipe())),
    (TraceError, "input:0 has shape=(0, 6)", lambda: autoshard.plan(
        small(), LAPTOP, example_inputs=(X[:0],), loss_fn=total, optimizer="sgd", recipe=Recipe(zero=1))),
    (TraceError, "returns no floating scalar; it returns tensors of shapes=[(4, 2)]",
     lambda: planned(optimizer="adamw")),
    (TraceError, "returns no floating scalar; it returns tensors of shapes=[(1, 2)]",
     lambda: autoshard.plan(small(), LAPTOP, example_inputs=(X,), optimizer="adamw", global_batch=8)),
    (TraceError, "returns no floating scalar; it returns tensors of shapes=[(1, 2)]",
     lambda: autoshard.price(small(), LAPTOP, Recipe(data=4), example_inputs=(X,))),
    (TraceError, "returns no floating scalar; it returns tensors of shapes=[(4, 2)]",
     lambda: autoshard.prove(small(), MESH, example_inputs=(X,), optimizer="adamw")),
    (NotAvailableError, "step.load_state_dict: the state has the keys ['weight', 'bias'], without 'model' and",
     lambda: stepping().load_state_dict(nn.Linear(6, 2).state_dict())),
    (NotAvailableError, "micro_batches=0 must be a whole number, at least 1", lambda: stepping(micro_batches=0)),
    (NotAvailableError, "micro_batches=1.5 must be a whole number", lambda: stepping(micro_batches=1.5)),
    (NotAvailableError, "micro_batches='2' must be a whole number", lambda: stepping(micro_batches="2")),
    (NotAvailableError, "max_grad_norm=0 must be a positive number", lambda: stepping(max_grad_norm=0)),
    (NotAvailableError, "max_grad_norm=nan must be a positive number", lambda: stepping(max_grad_norm=math.nan)),
    (NotAvailableError, "max_grad_norm='1' must be a positive number", lambda: stepping(max_grad_norm="1")),
    (NotAvailableError, "optimizer=LBFGS calls the model itself: its step()", lambda: stepping(torch.optim.LBFGS)),
    (NotAvailableError, "optimizer=LBFGS calls the model itself", lambda: planned(optimizer="lbfgs")),
    (NotAvailableError, "optimizer=SparseAdam takes sparse gradients only", lambda: planned(optimizer="sparseadam")),
    (TraceError, "optimizer=SGD holds no parameters. Make it with", lambda: compiled(optimizer=without_groups())),
    (TraceError, "optimizer='muon' cannot be made over all of the model's par", lambda: planned(optimizer="muon")),
    *(
        (MeshError, message, lambda target=target, call=call: call(small(), target, example_inputs=(X,)))
        for call in (autoshard.plan, autoshard.prove)
        for target, message in (
            ("h100_sxm:1x8", "target='h100_sxm:1x8' is a str; pass an autoshard.Cluster"),
            ({"data": 2}, "target={'data': 2} is a dict"),
            (None, "target=None is a NoneType"),
        )
    ),
    (MeshError, "mesh=4 is a int", lambda: compiled(4)),
    (MeshError, "Mesh(data=8) has 8 ranks, and the cluster", lambda: LAPTOP.mesh(Mesh({"data": 8}))),
    (MeshError, "Mesh(4): a int names no axes", lambda: LAPTOP.mesh(4)),
    (MeshError, "cluster=cpu_laptop:1x4 goes with a mesh, and mesh=",
     lambda: compiled(LAPTOP.mesh({"data": 4}), cluster=LAPTOP)),
    (MeshError, "cluster='h100_sxm' is a str; pass a Cluster", lambda: compiled(cluster="h100_sxm")),
    (MeshError, "cluster=cpu_laptop:1x4 goes with a mesh", lambda: compiled(LAPTOP, cluster=LAPTOP)),
    *(
        (
            TraceError,
            "is a function; pass a torch.nn.Module",
            lambda call=call: call(lambda x: x, MESH, example_inputs=(X,)),
        )
        for call in (autoshard.plan, autoshard.prove, autoshard.compile)
    ),
    *(
        (
            TraceError,
            "Wrap it, e.g. lambda outputs: loss",
            lambda call=call: call(small(), MESH, example_inputs=(X,), loss_fn=torch.sum),
        )
        for call in (autoshard.plan, autoshard.compile)
    ),
    *(
        (
            NotAvailableError,
            f"global_batch={batch!r} must be a whole number of sequences, at least 1",
            lambda batch=batch: autoshard.plan(
                small().bfloat16(), LAPTOP, example_inputs=(X,), optimizer="adamw", global_batch=batch
            ),
        )
        for batch in (0, -4, 1.5, "8")
    ),
    (NotAvailableError, "precision='bf17' is unknown; use 'bf16', 'f16', 'f8' or 'f32'",
     lambda: autoshard.plan(small(), LAPTOP, example_inputs=(X,), optimizer="adamw", global_batch=8,
     precision="bf17")),
    (NotAvailableError, "precision='int8' is unknown; use 'bf16', 'f16', 'f32'", lambda: compiled(precision="int8")),
    (NotAvailableError, "needs a process per rank", lambda: compiled(backend="inductor")),
    (NotAvailableError, "backend='nonsense' is unknown", lambda: compiled(backend="nonsense")),
    (NotAvailableError, "micro_batches=2 belongs to a training step", lambda: compiled(micro_batches=2)),
    (NotAvailableError, "on_nonfinite='skip' belongs to a training step",
     lambda: compiled(options=autoshard.Options(on_nonfinite="skip"))),
    (NotAvailableError, "grad_norm=True belongs to a training step",
     lambda: compiled(options=autoshard.Options(grad_norm=True))),
    (NotAvailableError, "on_nonfinite='stop' is unknown; a step whose loss or gradients are not finite",
     lambda: autoshard.Options(on_nonfinite="stop")),
    (NotAvailableError, "grad_norm='yes' is a str; pass True or False", lambda: autoshard.Options(grad_norm="yes")),
    (InvalidSpecError, "constraints['nothing.*'] matches no parameter",
     lambda: planned(constraints={"nothing.*": P("data")})),
    (InvalidSpecError, "constraints['output:3'] matches no output; there are: output:0",
     lambda: planned(constraints={"output:3": P("data")})),
    (InvalidSpecError, "constraints['weight']=('data',) is a tuple",
     lambda: compiled(constraints={"weight": ("data",)})),
    (PlanMismatchError, "parameter 'weight' has shape=(2, 6) in the plan",
     lambda: autoshard.compile(nn.Linear(6, 3), Mesh({"data": 4}), plan=planned(), example_inputs=(X,))(X)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "call"), ARGUMENTS, ids=[row[1][:40] for row in ARGUMENTS])
def test_arguments(error: type[AutoshardError], words: str, call: Callable[[], Any]) -> None:
    """Each wrong argument is refused by an error with its value."""
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_a_plan_of_a_model_with_the_same_parameters() -> None:
    """The plan of a model is refused for another model with equal parameters."""
    plan = autoshard.plan(nn.Sequential(small()), MESH, example_inputs=(X,))
    with pytest.raises(PlanMismatchError, match=r"another model or other inputs"):
        autoshard.compile(nn.Sequential(small(), nn.ReLU()), MESH, plan=plan)(X)


def test_a_mesh_larger_than_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh with more ranks than the run has processes is refused."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match=r"Mesh\(data=4\) has 4 ranks, but this run has 2 processes"):
        compiled(Mesh({"data": 4}))


@pytest.mark.parametrize("arguments", [{}, {"global_batch": 8}])
def test_a_step_that_trains_nothing(arguments: dict[str, Any]) -> None:
    """A step without a trained parameter, or with a number, None or a detached value for its loss, is refused."""
    options: dict[str, Any] = {"example_inputs": (X,), "optimizer": "adamw", **arguments}
    for loss in (lambda y: 1.0, lambda y: None, lambda y: y.detach().sum()):
        with pytest.raises(TraceError, match=r"needs a loss, but nothing that the model|returns no floating scalar"):
            autoshard.plan(small(), LAPTOP, loss_fn=loss, **options)
    for model in (small().requires_grad_(False), nn.ReLU()):
        model = nn.Sequential(model, nn.Dropout()) if arguments == {} else model
        with pytest.raises(TraceError, match=r"needs something to train, but no parameter of the model requires grad"):
            autoshard.plan(model, LAPTOP, loss_fn=lambda y: y.sum(), **options)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Linear(6, 2)


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> Plan:
    return autoshard.plan(model, MESH, example_inputs=(X,), loss_fn=total)


def refused(call: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
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
    """An operator that is unknown or ambiguous, and a call that the operator refuses, are refused by their names."""
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
    """Wrong dims and partial axes of specs, and wrong fields of recipes, are refused with their values."""
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
    """Wrong parts, counts and files of a cluster are refused with their values."""
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
        (lambda plan: plan.explain(["w"]), "explain(['w']): the plan has no parameter"),
        (lambda plan: plan.formula("tokens", dims="batch"), "dims='batch' is a str; pass a dict"),
        (lambda plan: plan.formula("step_flops", fixed=3), "fixed=3 is a int; pass the names of symbols"),
        (lambda _: autoshard.vectorise("batch"), "formula='batch' is a str; pass a result of Plan.formula"),
        (lambda _: Plan.load("/no/such.json"), "'/no/such.json' cannot be read: No such file"),
        (lambda _: Plan.load("/"), "'/' cannot be read: Is a directory"),
        (lambda _: Plan.load(""), "'' cannot be read: Is a directory"),
        (lambda _: Plan.load(None), "path=None is a NoneType"),
    ],
)
def test_what_plans_are_asked(plan: Plan, call: Callable[[Plan], Any], words: str) -> None:
    """Wrong arguments of a plan's methods are refused with their values."""
    assert words in refused(lambda: call(plan))


def test_a_file_of_half_a_node(tmp_path: Path) -> None:
    """A file with a fractional number of nodes is refused."""
    path = tmp_path / "mine.toml"
    CLUSTER.save(path, source="test", date="2026-11-23")
    text = path.read_text()
    path.write_text(text.replace("[nodes]\nvalue = 1", "[nodes]\nvalue = 1.5"))
    assert path.read_text() != text
    assert "'nodes' has value=1.5; a whole number of nodes is needed" in refused(lambda: Cluster.load(path))


def test_a_file_that_holds_no_plan(tmp_path: Path) -> None:
    """A file that holds no plan is refused with autoshard's error."""
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "empty.json").write_text("")
    assert "list.json: This is not a plan that autoshard wrote" in refused(lambda: Plan.load(tmp_path / "list.json"))
    assert "This is not a plan that autoshard wrote" in refused(lambda: Plan.from_json([]))
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
        ({"cluster": "h100"}, "was given 'h100': pass a Cluster"),
        ({"cluster": MESH}, "pass a Cluster"),
        ({"model": "gpt"}, "model='gpt' is a str; pass a torch.nn.Module"),
    ],
)
def test_price(model: nn.Module, options: dict[str, Any], words: str) -> None:
    """Each wrong argument of `price` is refused with its value."""
    given = {"model": model, "cluster": CLUSTER, "recipe": RECIPE, "example_inputs": (X,), "loss_fn": total, **options}
    assert words in refused(lambda: autoshard.price(**given))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_budget": float("inf")}, "memory_budget=inf must be a number of bytes"),
        ({"constraints": {3: P("data")}}, "constraints has the key 3, which is a int"),
        ({"global_batch": 8, "constraints": 3}, "constraints=3 is a int; pass a dict"),
        ({"global_batch": 8, "example_inputs": None}, "example_inputs is a NoneType; pass a tuple"),
        (
            {"runtime": "fsdp2"},
            "runtime='fsdp2' is a framework that runs a recipe. Pass recipe=Recipe(...) too, or global_batch=",
        ),
    ],
)
def test_plan(model: nn.Module, options: dict[str, Any], words: str) -> None:
    """Each wrong argument that both kinds of search take is refused with its value."""
    given = {"example_inputs": (X,), "loss_fn": total, "optimizer": "adamw", **options}
    assert words in refused(lambda: autoshard.plan(model, CLUSTER, **given))


def test_compile_and_check_plan(model: nn.Module) -> None:
    """A missing plan file, missing inputs, and a comparison of no steps are refused."""
    assert "'/no/such.json' cannot be read" in refused(lambda: autoshard.compile(model, MESH, plan="/no/such.json"))
    assert "example_inputs is a NoneType" in refused(lambda: check_plan(model, MESH, None))
    assert "steps='2' compares nothing" in refused(lambda: check_plan(model, MESH, (X,), steps="2"))
