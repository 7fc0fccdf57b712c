"""LoRA and DoRA of peft, unmodified, train as on one device; frozen weights get no gradients or optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import autoshard
from autoshard import Checkpoints, Cluster, Mesh, P, Plan
from autoshard.ir.program import OutputKind
from autoshard.testing import WholeStep, check_plan
from autoshard.tracing import trace
from tests.benchmarks.live_memory import peak_bytes_of
from tests.end_to_end.training import assert_trains_alike, whole
from tests.models import Inputs, build, gpt2, llama, words
from tests.runtime.processes import on_processes, shared_folder

peft = pytest.importorskip("peft")

LINE, SQUARE, PAIR = Mesh({"data": 4}), Mesh({"data": 2, "model": 2}), Mesh({"data": 2})
STAGES = Mesh({"pipeline": 2, "data": 2})
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
FROZEN = "*base_layer.weight"


def adapted(kind: str, base: nn.Module | None = None, layers: int = 1, **options: Any) -> tuple[Any, Inputs]:
    """Return a small model whose adapters are not zero, and a batch."""
    model, inputs = {"llama": llama, "gpt2": gpt2}[kind](layers)
    config = {"r": 3, "lora_alpha": 6, "target_modules": TARGETS[kind], "task_type": "CAUSAL_LM", **options}
    config["fan_in_fan_out"] = kind == "gpt2"
    torch.manual_seed(3)
    found = peft.get_peft_model(model if base is None else base, peft.LoraConfig(**config))
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return found, inputs


def trained_by(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [item for item in parameters if item.requires_grad]


def adamw(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters alone; `tests.end_to_end.training.train` explains its eps."""
    return torch.optim.AdamW(trained_by(parameters), lr=1e-2, eps=1e-4, **options)


def planned(model: nn.Module, inputs: Inputs, mesh: Mesh, **options: Any) -> Plan:
    settings = {"optimizer": adamw(model.parameters()), "precision": None, **options}
    return autoshard.plan(model, mesh, example_inputs=inputs, **settings)


def check(kind: str, mesh: Mesh, settings: dict[str, Any] | None = None, **options: Any) -> Plan:
    """Check that loss, parameters and optimizer state after three steps equal those of peft on one device."""
    model, inputs = adapted(kind, **options)
    plan = None if settings is None else planned(model, inputs, mesh, **settings)
    whole_step = WholeStep(adamw, max_grad_norm=None, micro_batches=1)
    found = check_plan(model, mesh, inputs, plan=plan, steps=3, whole_step=whole_step)
    found.raise_if_different()
    return found.plan


CONSTRAINTS: dict[str, dict[str, P]] = {
    "tensor": {"*c_attn.base_layer.weight": P(None, "model")},
    "both": {"*q_proj.base_layer.weight": P("model"), "input:*": P("data")},
    "sequence": {"input:*": P("data", "model")},
}
CASES: dict[str, Any] = {
    "data": partial(check, "llama", LINE),
    "tensor": partial(check, "gpt2", Mesh({"model": 4}), {"constraints": CONSTRAINTS["tensor"]}),
    "data and tensor": partial(check, "llama", SQUARE, {"constraints": CONSTRAINTS["both"]}),
    "sequence": partial(check, "llama", SQUARE, {"constraints": CONSTRAINTS["sequence"]}),
    "dropout": partial(check, "llama", SQUARE, lora_dropout=0.3),
    "dropout of all": partial(check, "gpt2", SQUARE, lora_dropout=0.3, use_dora=True),
    "DoRA": partial(check, "llama", SQUARE, use_dora=True),
    "rank-stabilised": partial(check, "gpt2", LINE, use_rslora=True),
    "a trained head": partial(check, "llama", SQUARE, modules_to_save=["lm_head"]),
    "biases": partial(check, "gpt2", SQUARE, bias="all"),
    "patterns": partial(check, "llama", SQUARE, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}),
    "all layers": partial(check, "llama", LINE, target_modules="all-linear"),
}  # fmt: skip
QUICK = ("data and tensor",)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in CASES]
)
def test_adapters_train_as_on_one_device(name: str) -> None:
    """Each kind of adapter and layout trains on four simulated ranks as on one device."""
    CASES[name]()


@pytest.mark.sample(1)
@pytest.mark.parametrize("use_dora", [False, True])
def test_frozen_weights_lie_sharded_and_are_gathered(use_dora: bool) -> None:
    """With frozen weights split over four ranks and whole adapters, training equals one device."""
    constraints = {FROZEN: P("data"), "*lora_*": P(), "input:*": P("data")}
    plan = check("llama", LINE, {"constraints": constraints}, use_dora=use_dora)
    specs = {name: item.spec for name, item in plan.parameters.items()}
    assert {spec for name, spec in specs.items() if name.endswith("base_layer.weight")} == {P("data", None)}
    assert all(not spec.axes for name, spec in specs.items() if "lora_" in name)


@pytest.mark.slow
def test_stages_train_adapters() -> None:
    """Two pipeline stages of two ranks, which split the frozen weights, train as one device."""
    model, inputs = adapted("llama", layers=2, use_dora=True)
    plain = copy.deepcopy(model)
    settings = {"micro_batches": 2, "constraints": {FROZEN: P("data")}}
    step = autoshard.compile(model, STAGES, optimizer=adamw(model.parameters()), **settings)
    assert_same(step, inputs, plain)


def assert_same(step: Any, inputs: Inputs, plain: nn.Module, steps: int = 3) -> None:
    """Check that losses and parameters, also the frozen ones, equal those of peft on one device."""
    assert_trains_alike(step, plain, adamw(plain.parameters()), [inputs] * steps)


def test_an_optimizer_over_all_parameters_trains_the_adapters_alone() -> None:
    """`AdamW(model.parameters())` leaves frozen weights unchanged, and keeps state for adapters alone."""
    model, inputs = adapted("llama")
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    step = autoshard.compile(model, SQUARE, optimizer=optimizer, example_inputs=inputs)
    assert_same(step, inputs, plain)
    with_state = [name for name, item in step.sharded.named_parameters() if optimizer.state.get(item)]
    assert with_state == [name for name, item in plain.named_parameters() if item.requires_grad]


@cache
def wide_llama() -> nn.Module:
    """Return a Llama whose sizes all differ, so that a matrix product is known by its shape."""
    return build("llama", layers=2, words=97, width=64, inner=136, heads=4, key_heads=2, length=16)


def test_no_product_makes_a_gradient_of_a_frozen_weight() -> None:
    """The program returns gradients of adapters alone, and no matrix product has the shape of a frozen weight."""
    model, _ = adapted("llama", copy.deepcopy(wide_llama()))
    program = trace(model, (), words(4, 7, 97))
    trained = {name for name, item in model.named_parameters() if item.requires_grad}
    assert {slot.name for slot in program.outputs if slot.kind is OutputKind.GRADIENT} == trained
    frozen = {tuple(item.shape) for item in model.parameters() if not item.requires_grad}
    made = [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert made
    assert not [shape for shape in made if shape in frozen or shape[::-1] in frozen]


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_memory_has_gradients_and_state_of_adapters_alone(optimizer: Any) -> None:
    """Predicted memory has gradients and state of adapters alone, with a traced or an untraced optimizer."""
    model, _ = adapted("llama", copy.deepcopy(wide_llama()))
    own = optimizer(trained_by(model.parameters()), lr=1e-2)
    constraints = {"*weight": P(), "input:*": P("data")}
    plan = planned(model, words(4, 8, 97), PAIR, optimizer=own, constraints=constraints)
    assert plan.updates is (optimizer is torch.optim.AdamW)
    parts = plan.predicted.memory_breakdown
    adapters = sum(item.nbytes for item in model.parameters() if item.requires_grad)
    assert parts["parameters"] == sum(item.nbytes for item in model.parameters())
    assert parts["optimizer state"] == 2 * adapters
    assert parts["gradients"] <= adapters
    assert plan.formula("optimizer_bytes").subs({"data": 2, "layers": 2}) == 2 * adapters


@pytest.mark.slow
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_base_in_16_bits_trains_with_adapters_in_float32(use_dora: bool) -> None:
    """A bfloat16 model with float32 adapters trains as one device, with precision "bf16" and with none."""
    model, inputs = adapted("llama", llama()[0].bfloat16(), use_dora=use_dora)
    assert {item.dtype for item in trained_by(model.parameters())} == {torch.float32}
    options = {"steps": 2, "whole_step": WholeStep(adamw)}
    check_plan(model, SQUARE, inputs, precision="bf16", **options).raise_if_different()
    check_plan(model, SQUARE, inputs, precise=torch.float64, **options).raise_if_different()


def llama_3_8b() -> Any:
    """Return Llama 3 8B in bfloat16 on the meta device, with float32 adapters in all linear layers."""
    sizes = {"layers": 32, "words": 128256, "width": 4096, "inner": 14336, "heads": 32, "key_heads": 8, "length": 8192}
    with torch.device("meta"):
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(build("llama", **sizes).bfloat16(), config)


def plan_for(model: nn.Module, devices: int, **options: Any) -> Plan:
    tokens = torch.empty(8, 2048, dtype=torch.int64, device="meta")
    options = {"example_inputs": {"input_ids": tokens, "labels": tokens}, "optimizer": "adamw", **options}
    return autoshard.plan(model, Cluster("h100_sxm", 1, devices), global_batch=2 * devices, **options)


@pytest.mark.slow
def test_llama_3_8b_with_adapters_is_planned_for_eight_gpus() -> None:
    """The plan for eight GPUs has gradients and state of adapters alone, and sends only their all-reduce."""
    model = llama_3_8b()
    plan = plan_for(model, 8)
    adapters = sum(item.nbytes for item in model.parameters() if item.requires_grad)
    parts = plan.predicted.memory_breakdown
    assert parts["gradients"] <= adapters
    assert parts["optimizer state"] <= 2 * adapters
    assert sum(plan.predicted.sent_bytes.values()) < 1.01 * 2 * 7 / 8 * adapters


@pytest.mark.slow
def test_frozen_weights_fit_where_trained_ones_do_not() -> None:
    """Llama 3 8B with adapters is planned within 30 GiB on one GPU; training all weights would need 90 GiB."""
    budget = 30 * 2**30  # 15 GiB of weights; with gradients and state of all parameters, 90 GiB
    assert plan_for(llama_3_8b(), 1, memory_budget=budget).predicted.peak_memory_bytes <= budget


# Two Gloo ranks.


def check_training(**options: Any) -> None:
    model, inputs = adapted("llama", **options)
    plain = copy.deepcopy(model)
    step = autoshard.compile(
        model, PAIR, optimizer=adamw(model.parameters()), constraints={FROZEN: P("data"), "input:*": P("data")}
    )
    assert_same(step, inputs, plain)


def assert_memory(model: nn.Module, inputs: Inputs, constraints: dict[str, P]) -> None:
    """Check that the measured memory peak of a step is within 5 % of the plan's predicted peak."""
    optimizer = adamw(model.parameters())
    constraints = {**constraints, "input:*": P("data")}
    step: Any = autoshard.compile(model, PAIR, optimizer=optimizer, example_inputs=inputs, constraints=constraints)
    step(**inputs)
    state = [item for kept in optimizer.state.values() for name, item in kept.items() if name != "step"]
    held = [*step.sharded.parameters(), *step.sharded.buffers(), *state, *inputs.values()]
    found, predicted = peak_bytes_of(partial(step, **inputs), held), step.plan.predicted.peak_memory_bytes
    assert abs(found / predicted - 1) < 0.05, (found, predicted)


def check_memory(frozen: P, **options: Any) -> None:
    assert_memory(adapted("llama", copy.deepcopy(wide_llama()), **options)[0], words(4, 8, 97), {FROZEN: frozen})


def check_files() -> None:
    """The exported adapter, loaded by peft, and the exported merged model both compute the trained model's loss."""
    with shared_folder() as folder:
        base = llama()[0]
        if dist.get_rank() == 0:
            base.save_pretrained(folder / "base")
        dist.barrier()
        model, inputs = adapted("llama", base, use_dora=True)
        step = autoshard.compile(model, PAIR, optimizer=adamw(model.parameters()), constraints={FROZEN: P("data")})
        step(**inputs)
        step.export(folder / "adapter")
        step.export(folder / "merged", merge=True)
        expected = step.sharded(**inputs).loss.detach()
        load = transformers.AutoModelForCausalLM.from_pretrained
        for found in (
            peft.PeftModel.from_pretrained(load(folder / "base"), folder / "adapter"),
            load(folder / "merged"),
        ):
            torch.testing.assert_close(found(**inputs).loss.detach(), whole(expected), rtol=1e-5, atol=1e-6)


def check_resume() -> None:
    """A run resumed from a checkpoint under another layout computes the same next loss as the original run."""

    def made(constraints: dict[str, P]) -> Any:
        model, _ = adapted("llama")
        return autoshard.compile(model, PAIR, optimizer=adamw(model.parameters()), constraints=constraints)

    with shared_folder() as folder:
        inputs = adapted("llama")[1]
        first = made({FROZEN: P("data"), "input:*": P("data")})
        checkpoints = Checkpoints(folder, every=1, keep=1)
        for number in range(2):
            first(**inputs)
            checkpoints.save(first, at=number + 1)
        checkpoints.wait()
        second = made({"*weight": P(), "input:*": P("data")})
        assert Checkpoints(folder, every=1, keep=1).load(second) == 2
        torch.testing.assert_close(second(**inputs), first(**inputs), rtol=1e-5, atol=1e-6)


CHECKS = {
    "LoRA": check_training,
    "DoRA": partial(check_training, use_dora=True),
    "memory, copied": partial(check_memory, P()),
    "memory, in pieces": partial(check_memory, P("data")),
    "memory, DoRA": partial(check_memory, P("data"), use_dora=True),
    "files": check_files,
    "resume": check_resume,
}

test_on_two_gloo_ranks = on_processes(CHECKS, ranks=2, slow=["DoRA", "memory, copied", "memory, in pieces", "files"])
