"""Mutations of the order in which a step runs its micro-batches, in the form of `mutations`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from autoshard.ir.step_order import Action, StepOrder, Task

Mutated = tuple[str, StepOrder]


def _places(order: StepOrder, *actions: Action) -> list[int]:
    return [place for place, task in enumerate(order.tasks) if task.action in actions]


def _with_tasks(order: StepOrder, tasks: list[Task]) -> StepOrder:
    return replace(order, tasks=tuple(tasks))


def exchange_tasks(order: StepOrder, random: Random) -> Mutated:
    """Two tasks in each other's place: micro-batches reordered, or something before what it needs."""
    tasks = list(order.tasks)
    first, second = random.sample(range(len(tasks)), 2)
    tasks[first], tasks[second] = tasks[second], tasks[first]
    return f"tasks {first} and {second} exchanged", _with_tasks(order, tasks)


def reverse_micro_batches(order: StepOrder, random: Random) -> Mutated:
    """The last micro-batch first, in full."""
    last = len(_places(order, Action.FORWARD)) - 1
    tasks = [
        task if task.micro_batch is None else replace(task, micro_batch=last - task.micro_batch) for task in order.tasks
    ]
    return "micro-batches in reverse", _with_tasks(order, tasks)


def drop_task(order: StepOrder, random: Random) -> Mutated:
    """A micro-batch without its forward or backward, or a step without its update."""
    place = random.randrange(len(order.tasks))
    return f"without task {place}", _with_tasks(order, [*order.tasks[:place], *order.tasks[place + 1 :]])


def double_task(order: StepOrder, random: Random) -> Mutated:
    """A micro-batch that runs, or is added, twice."""
    place = random.randrange(len(order.tasks))
    return f"task {place} twice", _with_tasks(order, [*order.tasks[:place], order.tasks[place], *order.tasks[place:]])


def take_other_micro_batch(order: StepOrder, random: Random) -> Mutated:
    """A task that takes another micro-batch than its own."""
    place = random.choice(_places(order, Action.FORWARD, Action.BACKWARD))
    tasks = list(order.tasks)
    tasks[place] = replace(tasks[place], micro_batch=1 - (tasks[place].micro_batch or 0))
    return f"task {place} is of micro-batch {tasks[place].micro_batch}", _with_tasks(order, tasks)


def divide_otherwise(order: StepOrder, random: Random) -> Mutated:
    """Gradients that are a sum where a mean is due, or half of it."""
    divisor = random.choice([number for number in (1, 2, 3, 4) if number != order.divisor])
    return f"losses divided by {divisor}", replace(order, divisor=divisor)


ORDER_MUTATIONS: Mapping[str, Callable[[StepOrder, Random], Mutated]] = {
    item.__name__: item
    for item in (
        exchange_tasks, reverse_micro_batches, drop_task, double_task, take_other_micro_batch, divide_otherwise,
    )
}  # fmt: skip
