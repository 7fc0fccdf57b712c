"""Find the calls of a program that read a parameter, make the parameter's gradient, or update the parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autoshard.kernels.optimizers import IN_PLACE
from passes.planning.build_assignment import PlanningProblem
from passes.strategies.enumerate_strategies import Link, Site, operands_of, resolve


def gradient_of(parameter: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the call that makes the gradient of a parameter, and the index of the gradient among the call's results.

    None is returned if the program does not update the parameter.
    """
    update = update_of(parameter)
    return None if update is None else resolve(operands_of(update)[1])


def update_of(parameter: fx.Node) -> fx.Node | None:
    """Return the optimizer's call that updates a parameter, or None if the program does not update it."""
    return next((user for user in parameter.users if user.target in IN_PLACE and user.args[0] is parameter), None)


def uses_of(planning: PlanningProblem, name: str) -> Iterator[Link]:
    """Return the links into the calls of the forward that use a value, directly or through views, fan-outs and casts.

    `name` is the site of the value. Links into views, fan-outs and casts are not returned.
    """
    sites = planning.space.sites
    return (link for link in forward_links(planning, name) if not passes_on(sites[link.head], link))


def forward_links(planning: PlanningProblem, name: str) -> Iterator[Link]:
    """Yield the links into all calls of the forward that read a value, or a view, fan-out or cast of the value.

    Views, fan-outs and casts count as readers.
    """
    readers: dict[str, list[Link]] = planning.derived.setdefault("readers", {})
    if not readers:
        for link in planning.space.links:
            readers.setdefault(link.tail, []).append(link)
    waiting = [name]
    while waiting:
        for link in readers.get(waiting.pop(), ()):
            head = planning.space.sites[link.head]
            if head.phase != "forward" or link.operand < 0 or head.node is None:
                continue
            yield link
            if passes_on(head, link):
                waiting.append(link.head)


def passes_on(head: Site, link: Link) -> bool:
    """Whether the head of a link is a fan-out, a view or a cast, so that its result has the elements of its operand.

    An `expand`, which repeats the value for each sample, does not count.
    """
    target = None if head.node is None else head.node.target
    is_cast, repeats = target is torch.ops.aten._to_copy.default, target is torch.ops.aten.expand.default
    return link.operand == 0 and (is_cast or (head.is_alias and not repeats))
