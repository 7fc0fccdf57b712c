"""Arguments that users pass by mistake are refused by name, before anything is traced or searched."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard import (
    AutoshardError,
    Cluster,
    InvalidSpecError,
    Mesh,
    MeshError,
    NotAvailableError,
    P,
    Recipe,
    TraceError,
)

MESH = Mesh({"data": 2})
CLUSTER = Cluster("cpu_laptop", 1, 4)
X = torch.ones(4, 6)
INPUTS = (X,)


def small() -> nn.Module:
    return nn.Linear(6, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"memory_budget": -1}, NotAvailableError, r"memory_budget=-1 must be a number of bytes above 0"),
        ({"memory_budget": 0}, NotAvailableError, r"memory_budget=0 must be a number of bytes above 0"),
        ({"memory_budget": "80GB"}, NotAvailableError, r"memory_budget='80GB' must be a number of bytes"),
        ({"memory_budget": math.nan}, NotAvailableError, r"memory_budget=nan must be a number of bytes"),
        ({"memory_budget": 1.5}, NotAvailableError, r"memory_budget=1.5 is no whole number of bytes. Of 80 GB write"),
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
            r"\['w\*'\] asks 'weight' to be P\(\), and const",
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
    """Both refuse them, in the same words."""
    arguments = {"example_inputs": INPUTS, **arguments}
    with pytest.raises(error, match=message):
        autoshard.plan(small(), MESH, **arguments)
    with pytest.raises(error, match=message):
        autoshard.compile(small(), MESH, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_programs": 0}, r"max_programs=0 must be a whole number, at least 1"),
        ({"dynamic_lengths": True}, r"dynamic_lengths=True must say for each argument"),
        ({"dynamic_lengths": {}}, r"dynamic_lengths={} must say for each argument"),
        ({"dynamic_lengths": {"input": "0"}}, r"must say for each argument that is padded what its padding holds"),
    ],
)
def test_programs_of_many_calls(arguments: dict[str, Any], message: str) -> None:
    """How many are kept and what is padded is refused where it makes no sense."""
    with pytest.raises(NotAvailableError, match=message):
        autoshard.Options(**arguments)


def test_options_of_another_kind() -> None:
    options: Any = {"timeout_s": 30}
    with pytest.raises(NotAvailableError, match=r"is a dict; pass autoshard.Options\(timeout_s=30\)"):
        autoshard.compile(small(), MESH, options=options)


def test_what_is_compiled_is_not_compiled_again() -> None:
    compiled = autoshard.compile(small(), MESH)
    with pytest.raises(TraceError, match=r"model is a ShardedModule, compiled already; pass the module it was made of"):
        autoshard.plan(compiled, MESH, example_inputs=INPUTS)


def test_a_call_that_a_model_does_not_take() -> None:
    """A pre-hook may make it one that it does, and a wrapper take what is not in what it wraps."""
    model = small()
    model.register_forward_pre_hook(lambda _, args: args[:1])
    assert autoshard.compile(model, MESH)(X, 3).shape == (4, 2)
    inner = small()
    model = nn.Identity()
    model.forward = functools.wraps(inner.forward)(lambda *args, **kwargs: inner(args[0] * kwargs["scale"]))
    assert autoshard.compile(model, MESH)(X, scale=2.0).shape == (4, 2)


def test_whole_numbers_of_bytes() -> None:
    """However they are written: 80e9 is one, and so is what NumPy counts."""
    budgets = [8 * 10**9, 8e9, np.int64(8 * 10**9), np.float64(8e9)]
    plans = [autoshard.plan(small(), MESH, example_inputs=INPUTS, memory_budget=budget) for budget in budgets]
    assert [(plan.memory_budget, type(plan.memory_budget)) for plan in plans] == [(8 * 10**9, int)] * 4


def test_an_empty_batch() -> None:
    """Refused in a call, too, in a recipe, and in a step."""
    empty = (torch.ones(0, 6),)
    with pytest.raises(TraceError, match=r"input:0 has shape=\(0, 6\), no elements.* at least one"):
        autoshard.compile(small(), MESH)(*empty)
    with pytest.raises(TraceError, match=r"input:0 has shape=\(0, 6\), no elements"):
        autoshard.price(small(), CLUSTER, Recipe(data=4), example_inputs=empty, loss_fn=torch.sum)
    with pytest.raises(TraceError, match=r"input:0 has shape=\(0, 6\), no elements"):
        autoshard.prove(small(), MESH, example_inputs=empty)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: autoshard.plan(model, MESH, example_inputs=INPUTS, optimizer="adamw"),
        lambda model: autoshard.plan(model, CLUSTER, example_inputs=INPUTS, optimizer="adamw", global_batch=8),
        lambda model: autoshard.price(model, CLUSTER, Recipe(data=4), example_inputs=INPUTS),
        lambda model: autoshard.prove(model, MESH, example_inputs=INPUTS, optimizer="adamw"),
    ],
)
def test_a_step_without_a_loss(call: Any) -> None:
    """Not planned, as no step could be trained; without an optimizer the model is planned as it is."""
    with pytest.raises(TraceError, match=r"returns no floating scalar; it returns tensors of shapes=\[\(\d, 2\)\]"):
        call(small())
    assert autoshard.plan(small(), MESH, example_inputs=INPUTS).parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 0}, r"micro_batches=0 must be a whole number, at least 1"),
        ({"micro_batches": 1.5}, r"micro_batches=1.5 must be a whole number"),
        ({"micro_batches": "2"}, r"micro_batches='2' must be a whole number"),
        ({"max_grad_norm": 0}, r"max_grad_norm=0 must be a positive number"),
        ({"max_grad_norm": math.nan}, r"max_grad_norm=nan must be a positive number"),
        ({"max_grad_norm": "1"}, r"max_grad_norm='1' must be a positive number"),
    ],
)
def test_arguments_of_a_step(arguments: dict[str, Any], message: str) -> None:
    model = small()
    with pytest.raises(NotAvailableError, match=message):
        autoshard.compile(model, MESH, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def test_an_optimizer_that_calls_the_model_itself() -> None:
    model = small()
    message = r"optimizer=LBFGS calls the model itself, by the closure that its step\(\) demands"
    with pytest.raises(NotAvailableError, match=message):
        autoshard.compile(model, MESH, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(NotAvailableError, match=message):
        autoshard.plan(model, MESH, example_inputs=INPUTS, optimizer="lbfgs")


def test_an_optimizer_with_a_schedule() -> None:
    """Which wraps its step."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    autoshard.compile(model, MESH, optimizer=optimizer)


def test_optimizers_that_do_not_take_the_model() -> None:
    with pytest.raises(NotAvailableError, match=r"optimizer=SparseAdam takes sparse gradients only"):
        autoshard.plan(small(), MESH, example_inputs=INPUTS, optimizer="sparseadam")
    with pytest.raises(TraceError, match=r"optimizer='muon' cannot be made over all of the model's parameters: .*2D"):
        autoshard.plan(small(), MESH, example_inputs=INPUTS, optimizer="muon")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("h100_sxm:1x8", r"target='h100_sxm:1x8' is a str; pass an autoshard.Cluster"),
        ({"data": 2}, r"target=\{'data': 2\} is a dict"),
        (None, r"target=None is a NoneType"),
    ],
)
def test_what_plans_are_made_for(target: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        autoshard.plan(small(), target, example_inputs=INPUTS)
    with pytest.raises(MeshError, match=message):
        autoshard.prove(small(), target, example_inputs=INPUTS)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3}, r"Mesh\(data=3\) has 3 ranks, and the cluster cpu_laptop:1x4 has 4 devices"),
        (Mesh({"data": 8}), r"Mesh\(data=8\) has 8 ranks, and the cluster cpu_laptop:1x4 has 4 devices"),
        (4, r"Mesh\(4\): a int names no axes"),
    ],
)
def test_a_mesh_of_a_cluster_has_a_rank_for_each_device(axes: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        CLUSTER.mesh(axes)


def test_a_mesh_of_a_cluster_goes_with_no_other_cluster() -> None:
    with pytest.raises(MeshError, match=r"cluster=cpu_laptop:1x4 goes with a mesh, and mesh=.* is none"):
        autoshard.compile(small(), CLUSTER.mesh({"data": 4}), cluster=CLUSTER)


def test_a_model_that_is_a_function() -> None:
    for call in (autoshard.plan, autoshard.prove, autoshard.compile):
        with pytest.raises(TraceError, match=r"is a function; pass a torch.nn.Module"):
            call(lambda x: x, MESH, example_inputs=INPUTS)


@pytest.mark.parametrize("batch", [0, -4, 1.5, "8"])
def test_a_global_batch_that_is_no_count(batch: Any) -> None:
    with pytest.raises(NotAvailableError, match=r"global_batch=.* must be a whole number of sequences, at least 1"):
        autoshard.plan(small().bfloat16(), CLUSTER, example_inputs=INPUTS, optimizer="adamw", global_batch=batch)


@pytest.mark.parametrize("arguments", [{}, {"global_batch": 8}])
def test_a_step_that_trains_nothing(arguments: dict[str, Any]) -> None:
    """Planned as a step of no time before; a loss that is a number, is none, is detached, and a frozen model."""
    options: dict[str, Any] = {"example_inputs": INPUTS, "optimizer": "adamw", **arguments}
    for loss in (lambda y: 1.0, lambda y: None, lambda y: y.detach().sum()):
        with pytest.raises(TraceError, match=r"needs a loss, but nothing that the model|returns no floating scalar"):
            autoshard.plan(small(), CLUSTER, loss_fn=loss, **options)
    for model in (small().requires_grad_(False), nn.ReLU()):
        model = nn.Sequential(model, nn.Dropout()) if arguments == {} else model
        with pytest.raises(TraceError, match=r"needs something to train, but no parameter of the model requires grad"):
            autoshard.plan(model, CLUSTER, loss_fn=lambda y: y.sum(), **options)


@pytest.mark.parametrize("call", [autoshard.plan, autoshard.compile])
def test_a_loss_function_without_a_signature(call: Any) -> None:
    with pytest.raises(TraceError, match=r"loss_fn=<built-in method sum .* wrap it: lambda outputs: loss"):
        call(small(), MESH, example_inputs=INPUTS, loss_fn=torch.sum)


def test_a_precision_that_recipes_do_not_know() -> None:
    with pytest.raises(NotAvailableError, match=r"precision='bf17' is unknown; use 'bf16', 'f16', 'f8' or 'f32'"):
        autoshard.plan(small(), CLUSTER, example_inputs=INPUTS, optimizer="adamw", global_batch=8, precision="bf17")


def test_a_constraint_on_an_output_that_is_not_there() -> None:
    """It was passed over."""
    with pytest.raises(InvalidSpecError, match=r"constraints\['output:3'\] matches no output; there are: output:0"):
        autoshard.plan(small(), MESH, example_inputs=INPUTS, constraints={"output:3": P("data")})


def test_verify_of_what_is_not_compiled() -> None:
    with pytest.raises(TraceError, match=r"a Linear is not compiled; pass what autoshard.compile gave"):
        autoshard.verify(small())


@pytest.mark.parametrize(
    ("mesh", "cluster", "words"),
    [
        (Mesh({"data": 2}), "h100_sxm", r"cluster='h100_sxm' is a str; pass a Cluster"),
        (Mesh({"data": 2}), CLUSTER, r"Mesh\(data=2\) has 2 ranks, and cluster=cpu_laptop:1x4 has 4 devices"),
        (CLUSTER, CLUSTER, r"cluster=cpu_laptop:1x4 goes with a mesh"),
    ],
)
def test_hardware_that_plans_are_for_suits_the_mesh(mesh: Any, cluster: Any, words: str) -> None:
    """One device for each rank."""
    with pytest.raises(MeshError, match=words):
        autoshard.compile(nn.Linear(2, 2), mesh, cluster=cluster)


def test_plans_are_for_the_hardware_that_is_given() -> None:
    """With a mesh, instead of this machine."""
    given = Cluster("h100_sxm", 1, 2)
    sharded = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), cluster=given, example_inputs=(torch.ones(4, 4),))
    assert sharded.plan is not None
    assert sharded.plan.hardware == given.name


def test_a_part_that_is_compiled() -> None:
    model = nn.Sequential(nn.Sequential(autoshard.compile(small(), MESH)))
    message = r"model\.0\.0 is a ShardedModule, compiled already, and a program cannot call another one\. Compile the"
    with pytest.raises(TraceError, match=message):
        autoshard.plan(model, MESH, example_inputs=INPUTS)
