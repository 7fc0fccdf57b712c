"""Uses of models that depend on the batch's size, by batch norm or by a table with a row for each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both, one_device


class Table(nn.Module):
    """A layer whose output is added to a table with four rows, one for each sample; `cut` takes the first rows."""

    def __init__(self, table: Callable[[Tensor], Any], *, cut: bool = False) -> None:
        super().__init__()
        self.layer, self.table, self.cut = nn.Linear(8, 8), table(torch.randn(4, 8)), cut

    def forward(self, inputs: Tensor) -> Tensor:
        table = self.table[: len(inputs)] if self.cut else self.table
        return (self.layer(inputs) + table).square().mean()


class Buffer(Table):
    """A `Table` whose table is a buffer."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__(nn.Identity(), cut=cut)
        table = vars(self).pop("table")
        self.register_buffer("table", table)


def stepped(make: Callable[[], nn.Module], rows: int = 4, **options: Any) -> Callable[[Compile], Numbers]:
    """Return a script that takes one step of SGD, and returns the loss and parameters."""

    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        model = make()
        step = compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)
        return numbers(step(torch.randn(rows, 8)), *model.parameters())

    return script


class Normed(nn.Module):
    """The mean square of a perceptron with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()


def one_row(compile: Compile, *, training: bool = True) -> Numbers:
    """Call a model with batch norm on one row, which raises in training.

    The script on one device uses two rows in training, so that it returns numbers.
    """
    torch.manual_seed(0)
    model = Normed().train(training)
    rows = 2 if training and compile is one_device else 1
    return numbers(compile(model)(torch.randn(rows, 8)))


def one_place(compile: Compile) -> Numbers:
    """Call an instance norm on channels of one position, which raises; one device gets two positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4))
    inputs = torch.randn(2, 4, 2 if compile is one_device else 1)
    return numbers(compile(model)(inputs).square().sum())


_NEEDS = r"micro_batches=2 calls the model with one of 2 equal parts of the batch.* leave micro_batches out"
USES = (
    Use("a table of the batch's size", stepped(Buffer)),
    *on_both("a table of the batch's size, in micro-batches", stepped(Buffer, micro_batches=2), refused=_NEEDS),
    Use(
        "a trained table of the batch's size, in micro-batches",
        stepped(lambda: Table(nn.Parameter), micro_batches=2),
        refused=_NEEDS,
    ),
    Use(
        "a table that is cut to the batch, in micro-batches",
        stepped(lambda: Buffer(cut=True), micro_batches=2),
        refused=r"does not run the same operators for another batch size: node '\w+' \(aten",
    ),
    Use("batch norm on one row a rank", stepped(Normed, rows=2)),
    Use(
        "batch norm on one row of a micro-batch",
        stepped(Normed, rows=2, micro_batches=2),
        refused=rf"(?s)module 'layers\.1' \(BatchNorm1d\), raised ValueError.*{_NEEDS}",
    ),
    *on_both(
        "batch norm on one row",
        one_row,
        refused=r"module 'layers\.1' \(BatchNorm1d\), raised ValueError: .* pass a larger batch, or call \.eval\(\)",
    ),
    Use("batch norm on one row in evaluation", lambda compile: one_row(compile, training=False)),
    Use("instance norm on one place", one_place, refused=r"module '1' \(InstanceNorm1d\), raised ValueError"),
)
