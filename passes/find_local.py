"""Find, in a lowered program, the nodes that a definition would emit.

Rules and reshards are defined by what they emit into a graph (`autoshard.rules.emit_local`, `autoshard.ir.emit`).
Run on a `FindingTracer`, the same definitions look up each call instead of adding it: what comes back is what the
lowered program already computes, or `NotFoundError`. So the verifier needs no second description of any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx
from torch.fx.proxy import TracerBase

from passes.number_values import Numbering, call_key, draws_numbers


class NotFoundError(LookupError):
    """The lowered program has no such call; internal to verification, where it ends one attempt."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a proxy of a `FindingTracer` stands for: the numbers of local values, any of which will do.

    `args` and `meta` are what emitters look at in a new node, to infer its fake value; here they find nothing to infer.
    """

    numbers: frozenset[int]
    args: tuple[None, ...] = (None,)
    meta: Mapping[str, Any] = field(default_factory=dict)


class FindingTracer(TracerBase):
    """Answers each call with the local values that it yields in a lowered program.

    Args:
        local: the numbers of the lowered program's nodes.
        draw: for operators that draw random numbers, which of the equal calls is meant.
    """

    def __init__(self, local: Numbering, draw: int = 0) -> None:
        super().__init__()
        self.touched: set[int] = set()
        self._local = local
        self._draw = draw

    def proxy_of(self, numbers: Iterable[int]) -> fx.Proxy:
        """A proxy that stands for any of `numbers`."""
        return fx.Proxy(cast(fx.Node, Found(frozenset(numbers))), self)

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> fx.Proxy:
        """The values of this call; `NotFoundError` where the lowered program does not make it."""
        key = call_key(kind, target, args, kwargs, numbers_of)
        found = self._local.find((*key, self._draw) if draws_numbers(target) else key)
        if not found:
            raise NotFoundError(str(target))
        self.touched |= found
        return self.proxy_of(found)


def numbers_of(proxy: fx.Proxy | fx.Node) -> frozenset[int]:
    """The numbers that a proxy, or the node of one, stands for."""
    found = proxy.node if isinstance(proxy, fx.Proxy) else proxy
    assert isinstance(found, Found), "only proxies of a FindingTracer are passed to definitions"
    return found.numbers
