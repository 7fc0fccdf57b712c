"""Uses that write parameters and buffers in place or through `.data`, in forward or between calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both, one_device, train

Move = Callable[[Tensor, Tensor], None]


def _set_data(kept: Tensor, new: Tensor) -> None:
    kept.data = kept.data * 0.5 + new.data * 0.5


def _write_data(kept: Tensor, new: Tensor) -> None:
    kept.data.mul_(0.5).add_(new.data, alpha=0.5)


@torch.no_grad()
def _write(kept: Tensor, new: Tensor) -> None:
    kept.mul_(0.5).add_(new, alpha=0.5)


@torch.no_grad()
def _copy(kept: Tensor, new: Tensor) -> None:
    kept.copy_(kept.lerp(new, 0.5))


def _transpose_data(kept: Tensor, new: Tensor) -> None:
    kept.data = new.data[:1]


class _Momentum(nn.Module):
    """A query encoder, and a key encoder whose parameters `forward` moves towards those of the query."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self._move = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), move

    def forward(self, inputs: Tensor) -> Tensor:
        for new, kept in zip(self.query.parameters(), self.key.parameters(), strict=True):
            self._move(kept, new)
        return (self.query(inputs) - self.key(inputs)).square().mean()


class _Buffered(nn.Module):
    """A `_Momentum` whose moved weight is a buffer."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self._move = nn.Linear(8, 8), move
        self.register_buffer("weight", torch.randn(8, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        self._move(self.weight, self.query.weight)
        return (self.query(inputs) - F.linear(inputs, self.weight)).square().mean()


def trained(kind: Callable[[Move], nn.Module], move: Move) -> Callable[[Compile], Numbers]:
    """Return a script that trains for three steps a model whose forward writes parameters or buffers."""

    def script(compile: Compile) -> Numbers:
        compiled = compile(kind(move))
        optimizer = torch.optim.SGD([item for item in compiled.parameters() if item.requires_grad], lr=0.1)
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        found = train(optimizer, lambda: compiled(inputs))
        return numbers(*found, *compiled.state_dict().values())

    return script


def moved_between_calls(move: Move) -> Callable[[Compile], Numbers]:
    """Return a script whose loop moves the key encoder between calls."""

    def script(compile: Compile) -> Numbers:
        model = _Momentum(lambda kept, new: None)
        compiled = compile(model)
        inputs, found = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), []
        for _ in range(3):
            found.append(compiled(inputs))
            for new, kept in zip(compiled.query.parameters(), compiled.key.parameters(), strict=True):
                move(kept, new)
        return numbers(*found)

    return script


def moved_model(compile: Compile) -> Numbers:
    """Call a compiled model before and after `.to("cpu").float()`, which changes nothing."""
    compiled = compile(_Momentum(lambda kept, new: None))
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    first = compiled(inputs)
    compiled.to("cpu").float()
    return numbers(first, compiled(inputs))


def max_norm(compile: Compile) -> Numbers:
    """Call an embedding with `max_norm`, which overwrites its table in `forward`."""
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, max_norm=1.0)
    return numbers(compile(model)(torch.arange(6)))


def scaled_between_calls(compile: Compile) -> Numbers:
    """Train an embedding whose rows are scaled before each call; on one device, `max_norm` scales them."""
    torch.manual_seed(0)
    is_one = compile is one_device
    model = nn.Embedding(6, 4, max_norm=1.0 if is_one else None)
    compiled = compile(model)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        if not is_one:
            with torch.no_grad():
                weight = compiled.weight
                weight.mul_((1.0 / weight.norm(dim=1, keepdim=True)).clamp(max=1))
        optimizer.zero_grad()
        loss = (compiled(torch.arange(6)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss)
    return numbers(*found)


_REFUSED = "changes parameter .* in place in forward.*after the call"

USES = (
    *(
        Use(f"a momentum encoder, {move.__name__}", trained(_Momentum, move), refused=_REFUSED)
        for move in (_set_data, _write_data, _write, _copy)
    ),
    *(
        Use(f"a momentum buffer, {move.__name__}", trained(_Buffered, move))
        for move in (_set_data, _write_data, _write, _copy)
    ),
    Use("a momentum buffer, on two ranks", trained(_Buffered, _set_data), processes=True),
    Use("an encoder moved between calls", moved_between_calls(_set_data)),
    Use("an encoder moved between calls in place, on two ranks", moved_between_calls(_write), processes=True),
    Use("data in place between calls, on two ranks", moved_between_calls(_write_data), processes=True),
    Use(
        "data set between calls, on two ranks",
        moved_between_calls(_set_data),
        processes=True,
        refused=".data of key.weight was set.*Write in place",
    ),
    Use("a model sent to its device, on two ranks", moved_model, processes=True),
    Use("data of another shape", trained(_Buffered, _transpose_data), refused="a program keeps shapes"),
    Use("a table with max_norm", max_norm, refused=r"An embedding with max_norm= goes without it"),
    *on_both("a table scaled before each call", scaled_between_calls),
)
