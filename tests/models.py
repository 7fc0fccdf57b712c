"""Models that tests share: small modules of torch, and architectures of transformers in any size.

`build("llama", layers=2, width=16)` names sizes equally for all architectures. `gpt2()`, `llama()` and similar
functions return a small model with a batch that has a loss. Weights are random and equal at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, BATCH, LENGTH = 48, 8, 8

Inputs = dict[str, Any]

_SIZES = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "words": "vocab_size",
    "inner": "intermediate_size", "length": "max_position_embeddings", "key_heads": "num_key_value_heads",
}  # fmt: skip
"""Our name of a size, and that of most configs; `_NAMES` has the names of other configs."""
_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
             "intermediate_size": "n_inner", "max_position_embeddings": "n_positions"},
    "t5": {"num_hidden_layers": "num_layers", "hidden_size": "d_model", "num_attention_heads": "num_heads",
           "intermediate_size": "d_ff"},
}  # fmt: skip
_DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
    "bart": ("dropout",),
}
_HEADS = {
    "bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "resnet": "AutoModelForImageClassification", "whisper": "AutoModelForSpeechSeq2Seq",
}  # fmt: skip
_NO_CACHE = ("gpt2", "llama", "mixtral", "t5")


def build(kind: str, *, dropout: float | None = None, **options: Any) -> nn.Module:
    """Return a model of transformers with a head for training, from a config.

    Args:
        kind: the `model_type` of its config: "llama", "gpt2", "bert", "t5", "vit", "mixtral", ...
        dropout: every dropout of the architecture; None: the config's own.
        options: `layers`, `width`, `heads`, `words`, `inner`, `length`, `key_heads`, or the config's own names.
    """
    import transformers

    rates = {} if dropout is None else dict.fromkeys(_DROPOUT.get(kind, ("attention_dropout",)), dropout)
    settings: dict[str, Any] = {"use_cache": False} if kind in _NO_CACHE else {}
    for name, value in {**rates, **options}.items():
        theirs = _SIZES.get(name, name)
        settings[_NAMES.get(kind, {}).get(theirs, theirs)] = value
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    return getattr(transformers, _HEADS.get(kind, "AutoModelForCausalLM")).from_config(config)


def words(rows: int = BATCH, length: int = LENGTH, count: int = VOCABULARY, seed: int = 1) -> Inputs:
    """Return a batch of a language model: random words, which are also the labels."""
    drawn = torch.randint(0, count, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": drawn, "labels": drawn.clone()}


def gpt2(layers: int = 1, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    sizes = {"words": VOCABULARY, "length": 16, "width": 32, "heads": 4, "attn_implementation": "sdpa"}
    return build("gpt2", layers=layers, dropout=dropout, **sizes), _causal_inputs()


def llama(layers: int = 1, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    sizes = {"words": VOCABULARY, "width": 32, "inner": 48, "heads": 4, "key_heads": 2, "length": 16}
    return build("llama", layers=layers, dropout=dropout, attn_implementation="sdpa", **sizes), _causal_inputs()


def mixtral(layers: int = 1) -> tuple[nn.Module, Inputs]:
    sizes = {"words": VOCABULARY, "width": 32, "inner": 48, "heads": 4, "key_heads": 2, "length": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "sdpa"}
    return build("mixtral", layers=layers, **sizes, **experts), _causal_inputs()


def bert(layers: int = 1, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """A BERT of one layer, with a batch that has a mask of padding."""
    sizes = {"words": VOCABULARY, "width": 32, "inner": 64, "heads": 4, "length": 16, "attn_implementation": "sdpa"}
    inputs = _causal_inputs()
    inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    inputs["attention_mask"][1, 5:] = 0
    return build("bert", layers=layers, dropout=dropout, **sizes), inputs


def t5(layers: int = 1) -> tuple[nn.Module, Inputs]:
    """A T5 whose one embedding serves encoder, decoder and head, with a batch."""
    sizes = {"words": VOCABULARY, "width": 32, "d_kv": 8, "inner": 48, "heads": 4, "decoder_start_token_id": 0}
    tied = {"pad_token_id": 0, "tie_word_embeddings": True}
    return build("t5", layers=layers, dropout=0.0, **sizes, **tied), _causal_inputs()


def vit(layers: int = 1, size: int = 8) -> tuple[nn.Module, Inputs]:
    sizes = {"width": 32, "heads": 4, "inner": 48, "image_size": size, "patch_size": 4, "num_labels": 5}
    pixels = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))
    model = build("vit", layers=layers, dropout=0.0, **sizes)
    return model, {"pixel_values": pixels, "labels": torch.arange(BATCH) % 5}


def odd() -> tuple[nn.Module, Inputs]:
    """GPT-2 in sizes that no mesh divides: seven heads, 47 words, a batch of five sequences of seven."""
    sizes = {"words": 47, "length": 13, "width": 28, "heads": 7, "attn_implementation": "sdpa"}
    return build("gpt2", layers=1, dropout=0.0, **sizes), words(5, 7, 47)


MODELS: dict[str, Callable[..., tuple[nn.Module, Inputs]]] = {"gpt2": gpt2, "llama": llama, "bert": bert}


def _causal_inputs() -> Inputs:
    inputs = words()
    inputs["labels"][0, :3] = -100
    return inputs


class Perceptron(nn.Module):
    """`down(activation(up(x)))` reduced to its mean square, or to the mean squared error if a target is given."""

    def __init__(
        self,
        width: int = 8,
        inner: int = 16,
        out: int | None = None,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width if out is None else out)
        self.activation = activation

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = self.down(self.activation(self.up(x)))
        return y.square().mean() if target is None else F.mse_loss(y, target)


class Chain(nn.Module):
    """Layers with an activation behind each, and the mean square of the result."""

    def __init__(self, width: int, layers: int, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x.square().mean()


class Residual(nn.Module):
    """A block x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, inner: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        inner = 4 * width if inner is None else inner
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """A stack of `Residual` blocks, reduced to the mean square, or to the mean squared error if a target is given."""

    def __init__(self, width: int, count: int, inner: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Residual(width, inner, bias=bias) for _ in range(count))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() if target is None else F.mse_loss(x, target)


class Attention(nn.Module):
    """Causal attention between two projections, of heads of `size` features, and the mean square of the result."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, width = heads, heads * size
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).transpose(1, 2).unbind(-2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


class Tied(nn.Module):
    """An embedding tied to the head, a batch norm, dropout, and a loss for each token."""

    def __init__(self, count: int = 13, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(count, width), nn.Linear(width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, count, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.linear(self.embed(tokens))))
        return F.cross_entropy(self.head(hidden), tokens)
