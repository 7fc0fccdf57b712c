"""Lookups with sparse gradients: programs make dense ones, of the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoshard

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
    """Loss, gradients, and the parameters after steps of SGD with momentum are those of one device."""
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
    """It takes sparse gradients only: as `optimizer=` before anything runs, and later by torch itself."""
    model = Embeds()
    optimizer = torch.optim.SparseAdam(model.parameters())
    with pytest.raises(autoshard.NotAvailableError, match="SparseAdam takes sparse gradients only"):
        autoshard.compile(model, MESHES[0], optimizer=optimizer)
    autoshard.compile(model, MESHES[0])(torch.randint(0, 12, (8, 4))).backward()
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        optimizer.step()
