"""QLoRA, adapters of peft beside 4-bit weights of bitsandbytes, equals one device, and ranks gather packed weights."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, P, Plan
from autoshard.testing import WholeStep, check_plan
from tests.end_to_end.test_adapters import adamw, assert_memory, assert_same, planned, whole
from tests.models import Inputs, build, words
from tests.runtime.processes import new_folder, on_processes, shared_folder

peft, bnb = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")

LINE, SQUARE, PAIR = Mesh({"data": 4}), Mesh({"data": 2, "model": 2}), Mesh({"data": 2})
STAGES = Mesh({"pipeline": 2, "data": 2})
PACKED = "*base_layer.weight"
ZERO = {PACKED: P("data"), "input:*": P("data")}
ROWS = {f"*{name}_proj.base_layer.weight": P("model") for name in ("q", "gate", "up")} | {"input:*": P("data")}


@cache
def base_folder() -> Path:
    """Return a folder with a saved Llama in float32."""
    folder = new_folder()
    sizes = {"words": 96, "width": 128, "inner": 256, "heads": 4, "key_heads": 2, "length": 16}
    build("llama", layers=2, **sizes).save_pretrained(folder)  # with processes, the first one writes
    if dist.is_initialized():
        dist.barrier()
    return folder


def quantised(folder: Path | None = None, **options: Any) -> Any:
    """Return the Llama in 4 bits, loaded as users load it."""
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **options}
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, **settings)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder or base_folder(), quantization_config=config, dtype=torch.float32)


def adapted(base: Any = None, **options: Any) -> tuple[Any, Inputs]:
    """Return the Llama in 4 bits with adapters that are not zero, and a batch."""
    model = peft.prepare_model_for_kbit_training(base or quantised(), use_gradient_checkpointing=False)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    torch.manual_seed(3)
    found = peft.get_peft_model(model, peft.LoraConfig(**config))
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    found.config.use_cache = False
    return found.train(), words(4, 8, 96)  # in evaluation, bitsandbytes computes in bfloat16 on some CPUs


def check(
    mesh: Mesh, settings: dict[str, Any] | None = None, base: Any = None, *, rounding: Any = None, **options: Any
) -> Plan:
    """Check that loss, parameters and optimizer state after two steps equal one device; return the plan.

    `rounding` has further arguments of `check_plan`.
    """
    model, inputs = adapted(base and base(), **options)
    plan = None if settings is None else planned(model, inputs, mesh, **settings)
    given = {"whole_step": WholeStep(adamw, max_grad_norm=None, micro_batches=1), **(rounding or {})}
    found = check_plan(model, mesh, inputs, plan=plan, steps=2, **given)
    found.raise_if_different()
    return found.plan


def descent(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD over trained parameters. AdamW would divide small gradients of 16 bits by their own rounding error."""
    return torch.optim.SGD([item for item in parameters if item.requires_grad], lr=1.0)


IN_16_BITS = {"whole_step": WholeStep(descent), "tolerance": torch.finfo(torch.bfloat16).eps}


CASES: dict[str, Any] = {
    "data": partial(check, LINE),
    "rows": partial(check, SQUARE, {"constraints": ROWS}),
    "zero": partial(check, LINE, {"constraints": ZERO}),
    "dropout": partial(check, SQUARE, lora_dropout=0.3, rounding={"precise": torch.float64}),
    "DoRA": partial(check, PAIR, use_dora=True),
    "some layers": partial(check, SQUARE, target_modules=["q_proj", "down_proj"]),
    "plain scales": partial(check, LINE, {"constraints": ZERO}, partial(quantised, bnb_4bit_use_double_quant=False)),
    "bfloat16": partial(
        check, PAIR, None, partial(quantised, bnb_4bit_compute_dtype=torch.bfloat16), rounding=IN_16_BITS
    ),
}  # fmt: skip
QUICK = ("zero",)  # rows are in the test below


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in CASES]
)
def test_adapters_of_4_bit_weights_train_as_on_one_device(name: str) -> None:
    """Each kind of adapter and layout beside 4-bit weights trains on simulated ranks as on one device."""
    CASES[name]()


def test_equal_to_peft_that_autoshard_never_saw() -> None:
    """Losses and adapters equal those of the same model in bitsandbytes' own layers on one device."""
    model, inputs = adapted()
    plain = copy.deepcopy(model)
    step = autoshard.compile(model, SQUARE, optimizer=adamw(model.parameters()), constraints=ROWS)
    assert_adapters_same(step, inputs, plain)
    assert_dequantised_twice(step)


def assert_dequantised_twice(step: Any) -> None:
    """Check that the forward saves no dequantised weight, and that the backward dequantises again."""
    phased = step.sharded.program.phased
    forward, backward = (
        [node.name for node in phase.graph.nodes if "dequantize_nf4" in str(node.target)]
        for phase in (phased.forward, phased.backward)
    )
    assert len(forward) == 14
    assert len(backward) == 11  # the input of the first three needs no gradient
    assert not set(forward) & set(phased.saved)


def assert_adapters_same(step: Any, inputs: Inputs, plain: nn.Module, steps: int = 3) -> None:
    assert type(plain.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer")) is bnb.nn.Linear4bit
    for item in step.sharded.modules():
        for name in ("absmax", "nested"):  # bitsandbytes keeps them elsewhere
            assert item._parameters.get(name) is None or not item._parameters[name].requires_grad
    assert_same(step, inputs, plain, steps)


@pytest.mark.slow
def test_stages_train_adapters_of_4_bit_weights() -> None:
    """Two pipeline stages of two ranks, which split packed weights, train as one device."""
    model, inputs = adapted()
    plain = copy.deepcopy(model)
    settings = {"micro_batches": 2, "constraints": {PACKED: P("data")}}
    step = autoshard.compile(model, STAGES, optimizer=adamw(model.parameters()), **settings)
    assert_adapters_same(step, inputs, plain)


def llama_of_8b(layers: int) -> Any:
    """Return a few layers of Llama 3 8B on meta, in 4 bits, with adapters of all linear layers."""
    sizes = {"words": 128256, "width": 4096, "inner": 14336, "heads": 32, "key_heads": 8, "length": 8192}
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    with torch.device("meta"):
        model = build("llama", layers=layers, **sizes).bfloat16()
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, **settings)
        transformers.integrations.replace_with_bnb_linear(
            model, modules_to_not_convert=["lm_head"], quantization_config=config
        )
        model.is_loaded_in_4bit = True
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)


PACKED_BYTES = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) // 2
"""Bytes of the packed 4-bit weights of one layer of Llama 3 8B."""


def plan_of_8b(model: nn.Module, target: Any, rows: int, **options: Any) -> Plan:
    tokens = torch.empty(rows, 2048, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    return autoshard.plan(model, target, example_inputs=batch, optimizer="adamw", global_batch=rows, **options)


def test_a_model_on_meta_is_planned_in_4_bits() -> None:
    """For a model on meta, predicted memory has 4-bit weights and a bfloat16 embedding and head, within 6 GiB."""
    budget, weights = 6 * 2**30, 2 * PACKED_BYTES + 2 * 2 * 128256 * 4096
    target = Cluster("h100_sxm", 1, 2).mesh({"data": 2})
    plan = plan_of_8b(llama_of_8b(2), target, 2, memory_budget=budget, constraints={"*weight": P()})
    assert weights < plan.predicted.memory_breakdown["parameters"] < 1.1 * weights
    assert plan.predicted.peak_memory_bytes < budget


def test_ranks_gather_packed_weights() -> None:
    """Between hosts, ZeRO-3 gathers the bytes of packed weights once or twice, and not those of bfloat16 weights."""
    model = llama_of_8b(2)
    whole = dict.fromkeys(("*lora_*", "*norm.weight", "*embed_tokens.weight", "*lm_head.weight"), P())
    plan = plan_of_8b(model, Cluster("h100_sxm", 8, 1).mesh({"data": 8}), 8, constraints={**ZERO, **whole})
    adapters = sum(item.nbytes for item in model.parameters() if item.requires_grad)
    gathered = sum(plan.predicted.sent_bytes.values()) / (7 / 8) - 2 * adapters
    assert 0.99 < gathered / (2 * PACKED_BYTES) < 2.1  # weights in bfloat16 are 4 times as large


# Two Gloo ranks.


def check_training(**options: Any) -> None:
    model, inputs = adapted(**options)
    plain = copy.deepcopy(model)
    step = autoshard.compile(model, PAIR, optimizer=adamw(model.parameters()), constraints=ZERO)
    assert_adapters_same(step, inputs, plain)


def check_memory(packed: P) -> None:
    assert_memory(*adapted(), {PACKED: packed})


def check_files(**options: Any) -> None:
    """Peft loads the exported adapter, and transformers the merged model in float32; both have the trained loss."""
    model, inputs = adapted(**options)
    step = autoshard.compile(model, PAIR, optimizer=adamw(model.parameters()), constraints=ZERO)
    step(**inputs)
    expected = whole(step.sharded(**inputs).loss.detach())
    with shared_folder() as folder:
        step.export(folder / "adapter")
        step.export(folder / "merged", merge=True)
        assert all("lora_" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))
        again = peft.PeftModel.from_pretrained(quantised(), folder / "adapter")
        merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert {type(item) for item in merged.modules() if isinstance(item, nn.Linear)} == {nn.Linear}
    for found in (again, merged):
        torch.testing.assert_close(found.train()(**inputs).loss.detach(), expected, rtol=1e-5, atol=1e-6)


def check_own_code() -> None:
    """`generate` on two ranks returns the tokens of one device, with 4-bit weights split."""
    model, inputs = adapted()
    plain = copy.deepcopy(model)
    step = autoshard.compile(model, PAIR, optimizer=adamw(model.parameters()), example_inputs=inputs, constraints=ZERO)
    prompt, options = inputs["input_ids"][:1], {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    found = step.sharded.generate(input_ids=prompt, **options)
    assert torch.equal(found, plain.generate(input_ids=prompt, **options))


CHECKS = {
    "QLoRA": check_training,
    "memory, copied": partial(check_memory, P()),
    "memory, in pieces": partial(check_memory, P("data")),
    "files": check_files,
    "files, DoRA": partial(check_files, use_dora=True),
    "own code": check_own_code,
}

test_on_two_gloo_ranks = on_processes(CHECKS, ranks=2, slow=set(CHECKS) - {"QLoRA"})
