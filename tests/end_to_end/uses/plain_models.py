"""Uses of models with control flow, grouped products, sparse matrices, quantisation, and lists with missing layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, PerChannelMinMaxObserver
from torch.func import vmap
from torch.nn import functional as F

from autoshard import P
from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both, train

Forward = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """The mean square of a given function of a list of layers, expert weights and an edge list."""

    edges: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), None, nn.Linear(8, 8)])  # type: ignore[list-item]
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 7], [1, 2, 3, 0]]))
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x).square().mean()


def _skips(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x.sin() if layer is None else layer(x)
    return x


def _branches(model: Layers, x: Tensor) -> Tensor:
    return torch.cond(x.mean() > 0, model.layers[0], model.layers[1], (x,))


def _rows_branch(model: Layers, x: Tensor) -> Tensor:
    return vmap(lambda row: torch.cond(row.mean() > 0, model.layers[0], model.layers[1], (row,)))(x)


def _groups(model: Layers, x: Tensor) -> Tensor:
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    return F.grouped_mm(model.layers[0](x), model.experts, offs=ends)


def _batches(model: Layers, x: Tensor) -> Tensor:
    return F.grouped_mm(model.layers[0](x).expand(4, 8, 8), model.experts)


def _propagates(model: Layers, x: Tensor) -> Tensor:
    weights = torch.ones(4)
    adjacency = torch.sparse_coo_tensor(model.edges, weights, (8, 8), check_invariants=False)
    return torch.sparse.mm(adjacency, model.layers[0](x))


def _drops_by_rows(model: Layers, x: Tensor) -> Tensor:
    return vmap(lambda row: F.dropout(model.layers[0](row), 0.5, training=False), randomness="different")(x)


def trains(forward: Forward) -> Callable[[Compile], Numbers]:
    """Return a script that trains for three steps, on inputs whose mean changes its sign."""

    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        x = torch.randn(8, 8)
        compiled = compile(Layers(forward))
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01, weight_decay=0.5)
        signs = iter((1, -1, 1))
        losses = train(optimizer, lambda: compiled(next(signs) * x))
        return numbers(*losses, *compiled.parameters())

    return script


class Quantized(nn.Module):
    """A layer whose weight is fake-quantised by channel."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        self.layer, self.quantize = nn.Linear(8, 4), FakeQuantize(PerChannelMinMaxObserver, -128, 127, **options)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantize(self.layer.weight), self.layer.bias).square().mean()


def quantised(*, first_call: bool) -> Callable[[Compile], Numbers]:
    """Return a script that trains a quantised layer, after a first call of the plain model or without."""

    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        model, x = Quantized(), torch.randn(8, 8)
        if first_call:
            model(x)
        compiled = compile(model)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.5)
        losses = train(optimizer, lambda: compiled(x))
        return numbers(*losses, *compiled.parameters())

    return script


class Recognises(nn.Module):
    """A speech model that writes at masked positions, adds to masked rows, and has concatenated CTC targets."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 5)
        self.token = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.table(x)
        h[x == 0] = self.token
        special = (x > 6).clone()
        h[special, :] = h[special, :] + self.table(x)[special].tanh()
        is_label = labels >= 0
        counts = torch.bincount(x.flatten(), minlength=10)[x].unsqueeze(-1)
        log_probs = self.linear(h / counts).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(log_probs, labels.masked_select(is_label), lengths, is_label.sum(-1), zero_infinity=True)


def speech(compile: Compile) -> Numbers:
    """Return losses and gradients on batches with different numbers of masked positions and targets."""
    torch.manual_seed(0)
    compiled, found = compile(Recognises()), []
    for _ in range(3):
        x, labels = torch.randint(0, 10, (4, 9)), torch.randint(0, 5, (4, 3))
        compiled.zero_grad()
        loss = compiled(x, labels.masked_fill(labels == 0, -100))
        loss.backward()
        gradients = [parameter.grad for parameter in compiled.parameters()]
        found += numbers(loss, *(item.to_dense() if item.is_sparse else item for item in gradients))
    return found


class OwnRprop(torch.optim.Rprop):
    """An optimizer class of the user's own, derived from torch's."""


def own_update(kind: type[torch.optim.Optimizer], spec: P) -> Callable[[Compile], Numbers]:
    """Return a script that trains with an optimizer that is not traced, on weights with a given spec."""

    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        model, x = Layers(_skips), torch.randn(8, 8)
        optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        step = compile(model, optimizer=optimizer, constraints={"*.weight": spec})
        return numbers(*(step(x) for _ in range(3)))

    return script


USES = (
    Use("a list of layers with None in it", trains(_skips)),
    *on_both("torch.cond whose predicate changes", trains(_branches)),
    Use("torch.cond for each row", trains(_rows_branch)),
    Use("grouped_mm of float32", trains(_groups)),
    Use("grouped_mm of batches of float32", trains(_batches)),
    *on_both("a sparse adjacency made in forward", trains(_propagates)),
    Use("dropout under vmap in evaluation", trains(_drops_by_rows)),
    Use("speech with masks and targets of other sizes, on two ranks", speech, processes=True, tolerance=1e-4),
    Use("a weight quantised by channel, called once before", quantised(first_call=True)),
    Use("a weight quantised by channel", quantised(first_call=False), refused="call the model once before compile"),
    Use(
        "Adafactor on split weights",
        own_update(torch.optim.Adafactor, P("data")),
        refused="optimizer=Adafactor needs each parameter whole.*splits 'layers.0.weight'",
    ),
    Use(
        "an elementwise optimizer with an operator that torch does not shard, on split weights",
        own_update(OwnRprop, P("data")),
        processes=True,
        refused="optimizer=OwnRprop cannot step sharded weights.*Keep the weights whole",
    ),
    Use("Adamax on split weights", own_update(torch.optim.Adamax, P("data")), processes=True),
)
