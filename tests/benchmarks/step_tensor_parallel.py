"""Megatron's tensor parallelism of the cases' models, by torch's `parallelize_module` and as constraints of a
plan.

Projections into heads and into the wide layer are split by columns, and projections back by rows (Shoeybi et al.
2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from transformers.pytorch_utils import Conv1D

from autoshard import P, PartitionSpec

_COLUMNS = (
    *("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"),
    *("*.mlp.c_fc", "*.mlp.fc1"),
    *("*.self.query", "*.self.key", "*.self.value", "*.intermediate.dense"),
)
_PACKED = ("*.attn.c_attn",)  # queries, keys and values in one: the planner finds its layout
_ROWS = (
    *("*.o_proj", "*.down_proj", "*.attn.c_proj", "*.mlp.c_proj", "*.mlp.fc2"),
    *("*.layer.*.output.dense",),
)
_WORDS = ("*.embed_tokens", "*.wte", "*.word_embeddings")
_HEADS = ("lm_head", "cls.predictions.decoder")


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def tensor_specs(model: nn.Module) -> dict[str, PartitionSpec]:
    """Constraints that split matrices over "model" as Megatron does, and keep inputs whole."""
    specs = {"input:*": P()}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        transposed = isinstance(model.get_submodule(owner), Conv1D)
        is_matrix = parameter.dim() == 2
        if _fits(owner, _ROWS):
            specs |= {name: P("model") if transposed else P(None, "model")} if is_matrix else {}
        elif _fits(owner, _COLUMNS):
            specs[name] = P(None, "model") if transposed and is_matrix else P("model")
        elif _fits(owner, (*_WORDS, *_HEADS)) and is_matrix:
            specs[name] = P("model")
    return specs


def parallelize(
    model: nn.Module, mesh: DeviceMesh, head: str
) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """Split a model's projections, and return the model with the context of its step.

    Args:
        model, mesh: the model and a mesh of one axis.
        head: "split loss": logits and loss are split over words; "whole": logits are gathered. A model without words
            has neither.
    """
    _replace_conv1d(model, mesh.size())
    names = [name for name, _ in model.named_modules()]
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in names if _fits(name, (*_COLUMNS, *_PACKED))}
    styles |= {name: RowwiseParallel() for name in names if _fits(name, _ROWS)}
    styles |= {name: RowwiseParallel(input_layouts=Replicate()) for name in names if _fits(name, _WORDS)}
    heads = [name for name in names if _fits(name, _HEADS)]
    splits_loss = head == "split loss" and bool(heads)
    layout = Shard(-1) if splits_loss else Replicate()
    styles |= {name: ColwiseParallel(output_layouts=layout, use_local_output=not splits_loss) for name in heads}
    tied = _tied(model, heads)
    parallelize_module(model, mesh, styles)
    for head_name, words in tied.items():  # both are split over words, each by itself so far
        model.get_submodule(head_name).weight = model.get_submodule(words).weight
    return model, loss_parallel if splits_loss else nullcontext


def _tied(model: nn.Module, heads: Sequence[str]) -> dict[str, str]:
    """The embedding whose weight each head shares, by the name of the head. Heads with their own weight are absent."""
    words = {id(module.weight): name for name, module in model.named_modules() if _fits(name, _WORDS)}
    found = {head: words.get(id(model.get_submodule(head).weight)) for head in heads}
    return {head: name for head, name in found.items() if name is not None}


def _replace_conv1d(model: nn.Module, ranks: int) -> None:
    """Replace GPT-2's `Conv1D` by linear layers for `parallelize_module`, with rows of the heads' projection
    grouped by rank."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, Conv1D):
            continue
        weight, bias = module.weight.detach().t(), module.bias.detach()
        owner = model.get_submodule(name.rpartition(".")[0])
        kind = name.rpartition(".")[2]
        if kind == "c_attn":
            weight, bias = _heads_by_rank(weight, ranks), _heads_by_rank(bias, ranks)
            setattr(owner, "split_size", weight.shape[0] // 3 // ranks)  # noqa: B010
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight, linear.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
        setattr(owner, kind, linear)


def _heads_by_rank(rows: Tensor, ranks: int) -> Tensor:
    """Return rows of queries, keys and values, grouped by rank."""
    return rows.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
