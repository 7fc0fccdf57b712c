"""Export adapters of peft as files, and merged into the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Mesh, P
from autoshard.errors import WeightsError
from autoshard.runtime.four_bit import take_over_4bit_layers
from autoshard.runtime.weights.peft_weights import merged
from tests.runtime.processes import checked_once, report, shared_folder

peft = pytest.importorskip("peft")

PAIR = Mesh({"data": 2})
INPUTS = torch.arange(24.0).reshape(4, 6) / 24
TOKENS = dict.fromkeys(("input_ids", "labels"), torch.arange(32).reshape(4, 8))


class Net(nn.Module):
    """A model with three layers, whose head may share the first layer's weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.rest, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.head.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rest(self.up(x).tanh()).tanh()).square().mean()


class Wrapped(nn.Module):
    """A user's model that contains a model of peft."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = adapted(Net()), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.scale(x))


def adapted(model: nn.Module, **options: Any) -> Any:
    """Return the model with LoRA adapters that are not zero."""
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": ["up"], **options})
    found = peft.get_peft_model(model, config)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return found


def tied_llama() -> transformers.LlamaForCausalLM:
    """Return a Llama of two layers whose head is tied to the embedding."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trained(model: nn.Module, **inputs: Tensor) -> Any:
    """Return a training step, after one step, of a model with matrices split by rows."""
    rows = {name: P("data") for name, item in model.named_parameters() if item.dim() > 1 and not item.shape[0] % 2}
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.1)
    step = autoshard.compile(model, PAIR, optimizer=optimizer, constraints=rows)
    step(**inputs or {"x": INPUTS})
    return step


def wholes(step: Any) -> dict[str, Tensor]:
    """Return every parameter of the model as a whole tensor."""
    named = step.sharded.named_parameters()
    return {name: item.detach().full_tensor() if isinstance(item, DTensor) else item for name, item in named}


def assert_computes(plain: nn.Module, step: Any) -> None:
    torch.testing.assert_close(plain(INPUTS), step.sharded(INPUTS), rtol=1e-5, atol=1e-6)


def assert_same_loss(plain: Any, step: Any) -> None:
    torch.testing.assert_close(plain(**TOKENS).loss, step.sharded(**TOKENS).loss, rtol=1e-5, atol=1e-6)


def check_adapter() -> None:
    """The exported folder has peft's names and configuration, adapters and `modules_to_save`, and no base weights."""
    step = trained(adapted(Net(), modules_to_save=["head"]))
    expected = wholes(step)
    with shared_folder() as folder:
        (folder / "out").mkdir(exist_ok=True)
        (folder / "out" / "model.safetensors").touch()
        step.export(folder / "out")
        found = load_file(folder / "out" / "adapter_model.safetensors")
        config = json.loads((folder / "out" / "adapter_config.json").read_text())
        names = ("adapter_config.json", "adapter_model.safetensors", "model.safetensors")
        assert sorted(file.name for file in (folder / "out").iterdir()) == [*names]
    prefix = "base_model.model."
    of_file = {
        f"{prefix}up.lora_A.weight": f"{prefix}up.lora_A.default.weight",
        f"{prefix}up.lora_B.weight": f"{prefix}up.lora_B.default.weight",
        f"{prefix}head.weight": f"{prefix}head.modules_to_save.default.weight",
        f"{prefix}head.bias": f"{prefix}head.modules_to_save.default.bias",
    }
    assert found.keys() == of_file.keys()
    assert all(torch.equal(found[name], expected[own]) for name, own in of_file.items())
    assert config["peft_type"] == "LORA"
    assert config["inference_mode"] is True
    assert config["auto_mapping"]["base_model_class"] == "Net"


def check_merged() -> None:
    """A plain model loads the merged file and computes the same; the compiled model's weights are unchanged."""
    step = trained(adapted(Net(), modules_to_save=["head"]))
    before = wholes(step)
    with shared_folder() as folder:
        step.export(folder)
        step.export(folder, merge=True)
        assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
        plain = Net()
        plain.load_state_dict(load_file(folder / "model.safetensors"))
    assert_computes(plain, step)
    assert all(torch.equal(item, before[name]) for name, item in wholes(step).items())
    step(INPUTS)


def check_merged_inside() -> None:
    """A peft model inside a user's model is exported only with `merge=True`."""
    step = trained(Wrapped())
    with shared_folder() as folder:
        with pytest.raises(WeightsError, match=r"inner.* of peft\) is a part of Wrapped.*merge=True"):
            step.export(folder / "a")
        assert not [*folder.iterdir()]
        step.export(folder / "b", merge=True)
        plain = Wrapped()
        plain.inner = Net()
        plain.load_state_dict(load_file(folder / "b" / "model.safetensors"))
    assert_computes(plain, step)


def check_tied() -> None:
    """Merging an adapter into a tied weight raises; a head in `modules_to_save` is no longer tied, and merges."""
    step = trained(adapted(Net(tied=True)))
    with shared_folder() as folder:
        with pytest.raises(WeightsError, match=r"'up.weight' and 'head.weight' are one tensor"):
            step.export(folder / "a", merge=True)
        step.export(folder / "a")
        copied = trained(adapted(Net(tied=True), target_modules=["rest"], modules_to_save=["head"]))
        copied.export(folder / "b", merge=True)
        plain = Net()
        plain.load_state_dict(load_file(folder / "b" / "model.safetensors"))
    assert_computes(plain, copied)


def check_transformers(**options: Any) -> None:
    """Transformers loads merged weights, whose configuration unties the head, with the loss of the step."""
    step = trained(adapted(tied_llama(), **options), **TOKENS)
    with shared_folder() as folder:
        step.export(folder, merge=True, max_file_bytes=20_000)
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
        found: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            found |= load_file(file)
    plain.load_state_dict(found)
    assert len(found) == len(list(plain.parameters()))
    assert_same_loss(plain, step)


def check_no_adapters() -> None:
    """With `merge=True`, a model without adapters is exported as it is."""
    step = trained(Net())
    with shared_folder() as folder:
        step.export(folder, merge=True)
        assert load_file(folder / "model.safetensors").keys() == wholes(step).keys()


def check_what_peft_computes() -> None:
    """An adapter whose file only peft can compute, such as prompts, raises an error with its name on both ranks."""
    step = trained(adapted(Net()))
    step.sharded.peft_config["default"] = SimpleNamespace(is_prompt_learning=True, peft_type="PROMPTS")
    with shared_folder() as folder:
        with pytest.raises(WeightsError, match=r"'default' is of the type PROMPTS.*whole_parameters"):
            step.export(folder / "a")
        with pytest.raises(WeightsError, match=r"cannot be merged.*export\(path\)"):
            step.export(folder / "a", merge=True)


CHECKS: dict[str, Callable[[], None]] = {
    "adapter": check_adapter,
    "merged": check_merged,
    "merged inside": check_merged_inside,
    "tied": check_tied,
    "transformers: a head": partial(
        check_transformers, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
    ),
    "transformers: an adapted head": partial(check_transformers, target_modules=["lm_head"]),
    "no adapters": check_no_adapters,
    "what peft computes": check_what_peft_computes,
}

outcomes = checked_once(CHECKS, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_with_a_process_per_rank(outcomes: dict[str, str], name: str) -> None:
    """The check passes on two ranks, which split matrices by rows."""
    report(outcomes, name)


def test_other_adapters_of_4_bit_weights_are_not_merged() -> None:
    """Merging IA3 into 4-bit weights raises an error that names the layer and an alternative."""
    bnb = pytest.importorskip("bitsandbytes")
    model: Any = Net()
    model.up = bnb.nn.Linear4bit(6, 6, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    model.is_loaded_in_4bit = True
    scaled = peft.get_peft_model(model, peft.IA3Config(target_modules=["up"], feedforward_modules=[]))
    take_over_4bit_layers(scaled)
    with pytest.raises(WeightsError, match=r"Linear4bit cannot be merged into 4-bit weights.*export\(path\)"):
        merged(scaled, {})


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"trainable_token_indices": [1, 3]}])
def test_peft_loads_what_is_written(tmp_path: Path, options: dict[str, Any]) -> None:
    """Peft loads the exported adapter, and transformers the merged model, with the loss of the step."""
    model = tied_llama()
    model.save_pretrained(tmp_path / "base")
    step = trained(adapted(model, target_modules=["q_proj"], task_type="CAUSAL_LM", **options), **TOKENS)
    step.export(tmp_path / "adapter")
    step.export(tmp_path / "merged", merge=True)
    load = transformers.LlamaForCausalLM.from_pretrained
    assert_same_loss(peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter"), step)
    assert_same_loss(load(tmp_path / "merged"), step)
