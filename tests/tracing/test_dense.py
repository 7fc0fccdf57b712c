"""Lookups with sparse gradients become programs with dense gradients of equal numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import TraceError

MESHES = (autoshard.Mesh({"data": 2}), autoshard.Mesh({"data": 2, "model": 2}))


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8, padding_idx=0, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().mean()


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(12, 8, mode="sum", padding_idx=1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().mean()


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.gather(self.table, 0, x, sparse_grad=True).square().mean()


@pytest.mark.parametrize("kind", [Embeds, Bags, Gathers])
def test_a_sparse_gradient_is_dense_and_trains(kind: type[nn.Module]) -> None:
    """Losses, gradients and parameters over three steps of SGD with momentum equal one device's, and gradients are
    dense."""
    for mesh in MESHES:
        torch.manual_seed(0)
        model = kind()
        one_device = kind()
        one_device.load_state_dict(model.state_dict())
        sharded = autoshard.compile(model, mesh)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, one_device)]
        for _ in range(3):
            x = torch.randint(0, 12, (8, 4))
            found, expected = sharded(x), one_device(x)
            torch.testing.assert_close(found, expected)
            for loss in (found, expected):
                loss.backward()
            for parameter, other in zip(model.parameters(), one_device.parameters(), strict=True):
                assert parameter.grad is not None
                assert other.grad is not None
                assert not parameter.grad.is_sparse
                torch.testing.assert_close(parameter.grad, other.grad.to_dense())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(dict(model.state_dict()), dict(one_device.state_dict()))


def test_sparse_adam_is_refused_by_name() -> None:
    """SparseAdam as `optimizer=` is refused at once, and otherwise its step raises torch's error for
    dense gradients."""
    model = Embeds()
    optimizer = torch.optim.SparseAdam(model.parameters())
    with pytest.raises(autoshard.NotAvailableError, match="SparseAdam takes sparse gradients only"):
        autoshard.compile(model, MESHES[0], optimizer=optimizer)
    autoshard.compile(model, MESHES[0])(torch.randint(0, 12, (8, 4))).backward()
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        optimizer.step()


class Products(nn.Module):
    """A model that computes with a sparse matrix."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function, self.weight = function, nn.Parameter(torch.randn(6, 6, generator=generator))
        self.register_buffer("places", torch.tensor([[0, 1, 1, 5], [2, 0, 4, 5]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x).square().sum()


def _edges(model: Any, x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(model.places, model.weight[0, :4] * x.sum(), (6, 6))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: torch.sparse.mm(_edges(model, x), x @ model.weight),
        lambda model, x: torch.sparse.mm(x @ model.weight.relu(), _edges(model, x)),
        lambda model, x: _edges(model, x) @ x,
        lambda model, x: _edges(model, x).to_dense() @ x,
        lambda model, x: torch.sparse.mm((x @ model.weight).relu().to_sparse(), x),
        lambda model, x: (x @ model.weight).relu().to_sparse().to_dense().cos(),
        lambda model, x: (x @ model.weight).to_dense(dtype=torch.float64).cos(),
    ],
)
def test_matrices_that_are_sparse_within(function: Callable[..., Tensor]) -> None:
    """Loss and gradients of a model that makes a sparse matrix in its forward equal one device's."""
    model, x = Products(function), torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    loss = model(x)
    (expected,) = torch.autograd.grad(loss, [model.weight])
    compiled: Any = autoshard.compile(model, MESHES[0])
    found = compiled(x)
    found.backward()
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(next(iter(compiled.parameters())).grad, expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_buffers_that_are_sparse(layout: torch.layout) -> None:
    """A sparse buffer is refused, and the error says to make the matrix in forward."""
    model = Products(lambda model, x: model.matrix @ x)
    model.register_buffer("matrix", torch.eye(6).to_sparse(layout=layout))
    with pytest.raises(TraceError, match=r"keeps 'matrix' of layout=torch.sparse_.*make it in forward"):
        autoshard.compile(model, MESHES[0], example_inputs=(torch.ones(6, 6),))


def test_constants_that_are_sparse() -> None:
    """A sparse constant is refused, and the error names its layout and shape."""
    matrix = torch.eye(6).to_sparse()
    model = Products(lambda model, x: matrix @ (x * model.weight))
    with pytest.raises(TraceError, match=r"constant tensor of layout=torch.sparse_coo, shape=\(6, 6\)"):
        autoshard.compile(model, MESHES[0], example_inputs=(torch.ones(6, 6),))
