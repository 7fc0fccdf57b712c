"""Load weight files on the simulator; `tests/end_to_end/test_weights.py` has the tests on processes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from autoshard.errors import WeightsError
from autoshard.ir.mesh import Mesh
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.weights.load_weights import load_weights
from tests.runtime.architectures import BUILDERS, build, logits

ENGINE = SimulatorEngine(Mesh({"data": 2}))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2), persistent=False)


def load(model: nn.Module, path: Path, *, strict: bool = True, cast: bool = False) -> None:
    load_weights(model, ENGINE, path, strict=strict, cast=cast)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", BUILDERS)
def test_what_transformers_saved_is_loaded(name: str, tmp_path: Path) -> None:
    """Files of `save_pretrained`, one or several, are loaded with equal weights and logits."""
    saved = build(name)
    for number, size in enumerate(("1GB", "3KB")):
        saved.save_pretrained(tmp_path / str(number), max_shard_size=size)
        model = build(name, seed=1)
        assert not torch.equal(logits(name, model), logits(name, saved))
        load(model, tmp_path / str(number))
        assert_equal(model, saved)
        assert torch.equal(logits(name, model), logits(name, saved))


def test_a_model_with_a_head_takes_the_base_models_weights(tmp_path: Path) -> None:
    """A model with a head loads its base model's file, and the base model loads the head's file."""
    saved = build("gpt2, tied")
    saved.transformer.save_pretrained(tmp_path / "base")
    assert "wte.weight" in load_file(tmp_path / "base" / "model.safetensors")
    model = build("gpt2, tied", seed=1)
    load(model, tmp_path / "base")
    assert_equal(model, saved)
    saved.save_pretrained(tmp_path / "head")
    base = build("gpt2, tied", seed=1).transformer
    load(base, tmp_path / "head")
    assert_equal(base, saved.transformer)


def test_buffers_that_models_compute_may_be_in_old_files(tmp_path: Path) -> None:
    """Rotary frequencies in an old Llama file, which the model computes itself, are ignored."""
    saved = build("llama")
    stored = {**saved.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(stored, tmp_path / "model.safetensors")
    model = build("llama", seed=1)
    load(model, tmp_path)
    assert_equal(model, saved)


@pytest.mark.parametrize("dropped", [[], ["head.weight"], ["embedding.weight"]])
def test_tied_parameters_are_there_once_or_more(dropped: list[str], tmp_path: Path) -> None:
    """Tied parameters are loaded from a file with either name or both, and stay tied."""
    saved, model = Tied(), Tied()
    stored = {name: value.clone() for name, value in saved.state_dict().items() if name not in dropped}
    save_file(stored, tmp_path / "a.safetensors")
    load(model, tmp_path / "a.safetensors")
    assert_equal(model, saved)
    assert model.head.weight is model.embedding.weight


def test_tied_parameters_that_differ_are_refused(tmp_path: Path) -> None:
    """A file with different values for tied parameters raises, and the model is unchanged."""
    model, before = _changed(tmp_path, lambda stored: stored["head.weight"].add_(1))
    with pytest.raises(WeightsError, match=r"Tied in the model, but not equal: 'embedding.weight' = 'head.weight'"):
        load(model, tmp_path)
    assert_equal(model, before)


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    """One error lists weights that are missing, unexpected or of another shape or type; the model is unchanged."""

    def change(stored: dict[str, torch.Tensor]) -> None:
        del stored["norm.weight"], stored["norm.bias"], stored["embedding.weight"], stored["head.weight"]
        stored |= {"norm.more": torch.ones(1), "scale": torch.ones(2)}
        stored["head.bias"] = torch.ones(4)
        stored["norm.running_mean"] = torch.ones(3, dtype=torch.bfloat16)

    model, before = _changed(tmp_path, change)
    with pytest.raises(WeightsError) as caught:
        load(model, tmp_path)
    message = str(caught.value)
    assert f"{tmp_path} does not hold the weights of Tied, whose weights are unchanged" in message
    assert "Missing: 'embedding.weight' = 'head.weight', 'norm.weight', 'norm.bias'." in message
    assert "Unexpected: 'norm.more', 'scale'." in message
    assert "Of another shape: 'head.bias' (float32[4], in the model float32[5])." in message
    assert "Of another dtype: 'norm.running_mean' (bfloat16[3], in the model float32[3])." in message
    assert_equal(model, before)


def test_what_fits_is_taken_where_that_is_asked(tmp_path: Path) -> None:
    """`strict=False` allows missing and unexpected weights, `cast=True` converts types, and no option other shapes."""

    def change(stored: dict[str, torch.Tensor]) -> None:
        del stored["norm.weight"]
        stored["more"] = torch.ones(1)
        stored["head.bias"] = torch.arange(5.0).bfloat16()

    model, before = _changed(tmp_path, change)
    nn.init.constant_(model.norm.weight, 7.0)
    with pytest.raises(WeightsError, match=r"whose weights are unchanged\. Of another dtype: 'head.bias'"):
        load(model, tmp_path, strict=False)
    load(model, tmp_path, strict=False, cast=True)
    assert model.norm.weight.tolist() == [7.0] * 3
    assert model.head.bias.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert model.head.bias.dtype is torch.float32
    stored = {**before.state_dict(), "head.bias": torch.ones(4)}
    save_file({name: value.clone() for name, value in stored.items()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"Of another shape: 'head.bias'"):
        load(model, tmp_path, strict=False, cast=True)


def test_parameters_stay_the_objects_that_optimizers_hold(tmp_path: Path) -> None:
    """Loading writes parameters in place, so that objects stay, versions rise and gradients are still required."""
    saved, model = Tied(), Tied()
    before = [(parameter, parameter._version) for parameter in model.parameters()]
    save_file({name: value.clone() for name, value in saved.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.inference_mode():
        load(model, tmp_path)
    for parameter, (same, version) in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert parameter._version > version
        assert parameter.requires_grad
        assert not parameter.is_inference()


def _changed(folder: Path, change) -> tuple[Tied, Tied]:
    """Return a model and its copy; write a file of other weights, after `change` has modified them."""
    model = Tied()
    stored = {name: value.clone() for name, value in Tied().state_dict().items()}
    change(stored)
    save_file(stored, folder / "model.safetensors")
    return model, copy.deepcopy(model)
