"""The semantic operator of CTC equals torch's loss and gradient, and the size of its table follows from
shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import autoshard.kernels  # noqa: F401  (defines the operators)

ops = torch.ops.autoshard


def _operands(longest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_probs = torch.randn(8, 3, 5, dtype=torch.float64).log_softmax(-1)
    targets = torch.randint(1, 5, (3, 4))
    return log_probs, targets, torch.tensor([8, 6, 7]), torch.tensor([longest, 1, 0])


def test_it_equals_torch_whatever_the_longest_target_is() -> None:
    """Loss and gradient equal torch's for longest targets of 0 to 4 labels, and the table is as wide as `targets`."""
    for longest in range(5):
        log_probs, targets, inputs, lengths = _operands(longest)
        log_probs.requires_grad_(True)
        expected = F.ctc_loss(log_probs, targets, inputs, lengths, reduction="none")
        loss, log_alpha = ops.ctc_loss(log_probs, targets, inputs, lengths, 0, False)
        torch.testing.assert_close(loss, expected)
        assert log_alpha.shape == (3, 8, 9)
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        found, wanted = (torch.autograd.grad((each * weights).sum(), log_probs) for each in (loss, expected))
        torch.testing.assert_close(found, wanted)


def test_shapes_and_types_are_those_of_its_fake() -> None:
    """The real run and the fake run agree, forward and backward, also for targets of width zero."""
    for operands in (_operands(2), (_operands(0)[0], torch.empty(3, 0, dtype=torch.int64), *_operands(0)[2:])):
        operands = (*operands[:3], operands[3].clamp_max(operands[1].shape[1]))
        torch.library.opcheck(ops.ctc_loss.default, (*operands, 0, True), test_utils="test_faketensor")
        results = ops.ctc_loss(*operands, 0, True)
        arguments = (torch.ones(3, dtype=torch.float64), *operands, *results, 0, True)
        torch.library.opcheck(ops.ctc_loss_backward.default, arguments, test_utils="test_faketensor")
