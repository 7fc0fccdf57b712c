"""Verify that a step runs its micro-batches so that it computes what one device does with the whole batch.

The loss of a batch is the sum of those of its micro-batches, each times a weight (`passes.verification.weigh_loss`):
of a mean, one over their number. So the gradient of the whole is the sum of those of all micro-batches, each once, of
their weighed losses. Forwards run in the order of the batch: each draws the next seed, and reads the buffers that the
one before it wrote. That what is added up is what the update reads of the backward is shown by
`passes.verification.verify_program`.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.errors import VerificationError
from autoshard.ir.step_order import Action, StepOrder


def verify_order(order: StepOrder, micro_batches: int) -> None:
    """Prove that a step takes each of its micro-batches once, in order, and updates when it has all gradients.

    Raises:
        VerificationError: it does not; the message names what it does instead.
    """
    expected = list(range(micro_batches))
    for action in (Action.FORWARD, Action.BACKWARD):
        found = [task.micro_batch for task in order.tasks if task.action is action]
        if found != expected:
            raise VerificationError(
                f"the step runs the {action} of micro-batches {found}; it has {expected}, in order."
            )
    places = {task: place for place, task in enumerate(order.tasks)}
    for task, place in places.items():
        if task.action is Action.FORWARD and place > places[replace(task, action=Action.BACKWARD)]:
            raise VerificationError(f"the step runs the backward of micro-batch {task.micro_batch} before its forward.")
    updates = [place for place, task in enumerate(order.tasks) if task.action is Action.UPDATE]
    if updates != [len(order.tasks) - 1]:
        raise VerificationError(f"the step updates at {updates} of {len(order.tasks)} tasks, not once, as the last.")
    if order.divisor != micro_batches:
        raise VerificationError(
            f"the losses of {micro_batches} micro-batches are divided by {order.divisor}, so that their sum is no mean."
        )
