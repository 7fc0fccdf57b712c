"""`StepCheck` stops a training step before its update if the loss or a gradient is not finite on any rank.

A gradient with an element that is not finite has a norm that is not finite, so one number stands for all gradients.
The host reads loss and norm before it launches the update, and so waits for the device once per step.

If the loss is scaled, some gradients overflow. Their step is skipped, and the scale falls. At a scale of 1 or less the
scale is not the cause, so `on_nonfinite="raise"` raises.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.errors import NonFiniteError
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.loss_scale import LossScale

_ACTION = "compare the checks of the step"


@dataclass(frozen=True, slots=True)
class _Found:
    """The numbers of a rank; a number is None if the rank does not have it."""

    loss: float | None
    norm: float | None

    @property
    def has_finite_loss(self) -> bool:
        return self.loss is None or math.isfinite(self.loss)

    @property
    def has_finite_norm(self) -> bool:
        return self.norm is None or math.isfinite(self.norm)

    @property
    def are_finite(self) -> bool:
        return self.has_finite_loss and self.has_finite_norm


class StepCheck:
    """Checks the numbers of each step, and remembers the norm and the number of skipped steps.

    Args:
        control: the ranks of the whole run; None if this process runs alone.
        on_nonfinite: "raise" or "skip"; None checks nothing, except gradients of a scaled loss.
        loss_scale: the scale of the loss, which follows the checks; None: the loss is not scaled.

    Attributes:
        steps_done: number of steps that ended without an error, with those before a loaded checkpoint.
        skipped_steps: number of steps without an update, because loss or gradients were not finite.
        norm: the norm of the gradients of the last step before clipping, a scalar; None if it was not computed.
    """

    def __init__(
        self, control: ControlGroup | None, on_nonfinite: str | None, loss_scale: LossScale | None = None
    ) -> None:
        self.on_nonfinite = on_nonfinite
        self.loss_scale = loss_scale
        self.steps_done = 0
        self.skipped_steps = 0
        self.norm: torch.Tensor | None = None
        self._control = control
        self._seen: Hashable = None

    def begin(self) -> None:
        """Begin a step: `norm`, the gradient norm of the last step, becomes None."""
        self.norm = None

    def end(self) -> None:
        """Count a step that ended without an error."""
        self.steps_done += 1

    def passes(self, loss: torch.Tensor | None, norm: torch.Tensor | None, program: Hashable = "") -> bool:
        """Return whether the step may update parameters, the same on all ranks; all ranks must call together.

        This also sets `norm`, counts a skipped step, and updates the scale of the loss.

        Args:
            loss: the loss on this rank; None on ranks without a loss.
            norm: the norm over all gradients; None if there are no gradients.
            program: a value that is equal for steps of one program.

        Raises:
            NonFiniteError: on every rank, with "raise", if a number of any rank is not finite. If the loss is finite
                and scaled by more than 1, gradients that are not finite raise no error.
        """
        self.norm = norm
        if self.on_nonfinite is None and self.loss_scale is None:
            return True
        found = _read(None if self.on_nonfinite is None else loss, norm)
        is_skipped, has_overflown = self._has_any_failed(not found.are_finite, program), False
        if is_skipped:
            ranks = self._of_all_ranks(found)
            has_overflown = not all(item.has_finite_norm for item in ranks.values())
            if self._raises(ranks.values()):
                raise NonFiniteError(_describe(self.steps_done + 1, ranks))
            self.skipped_steps += 1
        if self.loss_scale is not None:
            self.loss_scale.update(was_skipped=has_overflown)
        return not is_skipped

    def _has_any_failed(self, has_failed: bool, program: Hashable) -> bool:
        """Return whether the check failed on any rank. The first call for a program waits for ranks that load it."""
        is_new, self._seen = program != self._seen, program
        return has_failed if self._control is None else self._control.any(has_failed, _ACTION, waits=is_new)

    def _of_all_ranks(self, found: _Found) -> dict[int, _Found]:
        if self._control is None:
            return {0: found}
        return dict(zip(self._control.channel.ranks, self._control.gather(found, _ACTION), strict=True))

    def _raises(self, ranks: Collection[_Found]) -> bool:
        """Whether a step with these numbers of all ranks, some of which are not finite, is an error."""
        if self.loss_scale is None or self.loss_scale.value <= 1 or not all(item.has_finite_loss for item in ranks):
            return self.on_nonfinite == "raise"
        return False


def _read(loss: torch.Tensor | None, norm: torch.Tensor | None) -> _Found:
    """Read `loss` and `norm` at once, so that the host waits only once for an accelerator."""
    given = [number.detach() for number in (loss, norm) if number is not None]
    if all(number.is_cpu for number in given):
        values = [float(number.item()) for number in given]
    else:
        values = torch.stack([number.double() for number in given]).tolist()
    taken = iter(values)
    return _Found(*(None if number is None else next(taken) for number in (loss, norm)))


def _describe(number: int, ranks: Mapping[int, _Found]) -> str:
    """Return the error of step `number`; `ranks` has the numbers of each rank."""
    failed = [rank for rank, found in ranks.items() if not found.are_finite]
    where = "" if len(failed) == len(ranks) else f" on ranks {failed}"
    loss = _worst([found.loss for found in ranks.values()])
    norm = _worst([found.norm for found in ranks.values()])
    return (
        f"Step {number} has loss={loss} and a gradient norm of {norm}{where}, and on_nonfinite='raise' stops it. No "
        "rank updated a parameter or its optimizer state. Look for the cause in the batch, the learning rate or the "
        "precision. To leave out the updates of such steps, pass Options(on_nonfinite='skip')."
    )


def _worst(numbers: Sequence[float | None]) -> float | None:
    """Return the first number that is not finite; else the first number."""
    known = [number for number in numbers if number is not None]
    return next((number for number in known if not math.isfinite(number)), known[0] if known else None)
