"""Parameters drawn by `autoshard.tracing.initialisers` have the distribution of their modules' own initialisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autoshard.errors import TraceError
from autoshard.ir.initialisation import Box
from autoshard.runtime.weights.replay import Replay
from autoshard.tracing import record_initialisation

CPU = torch.device("cpu")
Init = Callable[[nn.Module], Any]


def weights_of(model: nn.Module, init_fn: Init | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Return the weights that the initialisers of a model on meta give."""
    record = record_initialisation(model, CPU, init_fn)
    found = Replay(record, torch.tensor(seed), lambda name: pytest.fail(f"{name} is read before it is given a value"))
    result = {}
    for name, end in record.ends.items():
        result[name] = torch.empty(end.shape, dtype=end.dtype)
        for piece, value in found.pieces(name, Box.whole(end.shape), result[name]):
            piece.of(result[name]).copy_(value)
    return result


def assert_alike(found: Tensor, expected: Tensor, name: str) -> None:
    """Check equality of constant elements, and the distribution of drawn elements.

    Mean and standard deviation may differ by six times their standard errors. The test of Kolmogorov and Smirnov for
    two samples passes at one in a million.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    one, other = found.detach().double().flatten().sort().values, expected.detach().double().flatten().sort().values
    if expected.unique().numel() == 1 or not expected.is_floating_point() or "inv_freq" in name:
        assert torch.equal(one, other), name
        return
    both = torch.cat([one, other])
    chance = 6.0 * other.std() * math.sqrt(2 / one.numel())
    assert (one.mean() - other.mean()).abs() < chance, name
    assert (one.std() - other.std()).abs() < chance, name
    gaps = [torch.searchsorted(sample, both, right=True) / sample.numel() for sample in (one, other)]
    most = math.sqrt(-math.log(0.5e-6) / 2) * math.sqrt(2 / one.numel())
    assert (gaps[0] - gaps[1]).abs().max() < most, name


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 48),
    "bilinear": lambda: nn.Bilinear(12, 10, 14),
    "embedding": lambda: nn.Embedding(64, 32),
    "embedding with padding": lambda: nn.Embedding(64, 32, padding_idx=3),
    "convolution": lambda: nn.Conv2d(8, 16, 3),
    "transposed convolution": lambda: nn.ConvTranspose1d(8, 16, 3),
    "layer norm": lambda: nn.LayerNorm(64),
    "rms norm": lambda: nn.RMSNorm(64),
    "group norm": lambda: nn.GroupNorm(4, 64),
    "batch norm": lambda: nn.BatchNorm2d(64),
    "lstm": lambda: nn.LSTM(16, 24, 2, bidirectional=True),
    "gru": lambda: nn.GRU(16, 24),
    "attention": lambda: nn.MultiheadAttention(48, 4, add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(32, 4, 64),
    "prelu": lambda: nn.PReLU(8),
    "in float16": lambda: nn.Linear(64, 48, dtype=torch.float16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name: str) -> None:
    torch.manual_seed(0)
    expected = LAYERS[name]()
    with torch.device("meta"):
        model = LAYERS[name]()
    found = weights_of(model)
    for key, value in state_of(expected).items():
        assert_alike(found[key], value, key)
    if name == "embedding with padding":
        assert not found["weight"][3].any()
    assert all(value.is_meta for value in state_of(model).values())


_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(vocab_size=90, n_positions=32, n_embd=64, n_layer=2, n_head=4),
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(
        vocab_size=90, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=3, **_SIZES
    ),
    "BertForMaskedLM": lambda: transformers.BertConfig(vocab_size=90, max_position_embeddings=32, **_SIZES),
    "ViTForImageClassification": lambda: transformers.ViTConfig(image_size=32, patch_size=8, **_SIZES),
    "ResNetForImageClassification": lambda: transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]
    ),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(
        vocab_size=90, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **_SIZES
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers(name: str) -> None:
    """Every parameter and buffer of a model of transformers has the distribution, or the constant values, of the
    model's own initialisation."""
    torch.manual_seed(0)
    expected = getattr(transformers, name)(CONFIGS[name]())
    with torch.device("meta"):
        model = getattr(transformers, name)(CONFIGS[name]())
    found = weights_of(model)
    assert found.keys() == state_of(expected).keys()
    for key, value in state_of(expected).items():
        assert_alike(found[key], value, key)


class Own(nn.Module):
    """A model with `_init_weights` as in nanoGPT, and a computed table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.register_buffer("table", torch.empty(64), persistent=False)
        self.reset_parameters()
        self.apply(self._init_weights)

    def reset_parameters(self) -> None:
        self.table = torch.arange(64) / 10.0

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
            nn.init.zeros_(module.bias)


def _init_fn(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)


def test_models_with_initialisers_of_their_own() -> None:
    """A buffer that an initialiser assigns is computed, and `init_fn` overrides the weights that it sets."""
    torch.manual_seed(0)
    expected = Own()
    with torch.device("meta"):
        model = Own()
    for key, value in weights_of(model).items():
        assert_alike(value, state_of(expected)[key], key)
    found = weights_of(model, _init_fn)
    torch.testing.assert_close(found["inner.0.weight"] @ found["inner.0.weight"].T, torch.eye(64), rtol=0, atol=1e-5)
    assert not found["inner.1.bias"].any()
    assert model.table.is_meta


def test_each_weight_and_each_seed_has_numbers_of_its_own() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found, other = weights_of(model), weights_of(model, seed=2)
    assert not torch.equal(found["0.weight"], found["1.weight"])
    assert not torch.equal(found["0.weight"], other["0.weight"])
    assert torch.equal(found["0.weight"], weights_of(model)["0.weight"])


def test_a_model_in_memory_keeps_its_values() -> None:
    """Recording the initialisation of a model in memory does not change its values."""
    model = nn.LSTM(4, 4)
    before = copy.deepcopy(model.state_dict())
    record_initialisation(model, CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model._flat_weights[0] is model.weight_ih_l0


class Faulty(nn.Linear):
    """A layer with a given initialiser."""

    def __init__(self, init: Callable[[Any], Any]) -> None:
        self.init = init
        super().__init__(4, 4, bias=False, device="meta")

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.init(self)


def _leave_an_attribute(module: Any) -> None:
    module.norm = module.weight.sum()


def _give_another_shape(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(2, 2))


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "reads": (lambda module: module.weight.data.normal_().div_(module.weight.norm().item()), "may not read values"),
    "raises": (lambda module: 1 / 0, r"init_weights ran Faulty.reset_parameters on '0' \(Faulty\).*ZeroDivisionError"),
    "attribute": (_leave_an_attribute, "leaves a tensor in attribute '0.norm'"),
    "shape": (_give_another_shape, r"'0.weight' of shape=\(4, 4\).* has shape=\(2, 2\)"),
    "generator": (lambda module: nn.init.normal_(module.weight, generator=torch.Generator()), "generator="),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_recorded_is_refused(name: str) -> None:
    init, message = FAULTS[name]
    with pytest.raises(TraceError, match=message):
        record_initialisation(nn.Sequential(Faulty(init)), CPU)
