"""Calls of the same micro-batch are traced once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autoshard.ir.request import Request
from passes.driver.traces import Traces, trace_call


def test_a_call_is_traced_once() -> None:
    """Requests with equal fields share one traced program. Another batch size or another margin has its own program."""
    request = Request(nn.Linear(4, 4), (torch.zeros(2, 4),), {}, grad=False)
    traces = Traces()

    def program(call: Request, margin: int | None = None) -> object:
        return traces.once(call, margin, lambda: trace_call(call, None, None))

    first = program(request)
    assert program(replace(request)) is first
    assert program(replace(request, args=(torch.zeros(3, 4),))) is not first
    assert program(request, 2) is not first
    assert program(request) is first
