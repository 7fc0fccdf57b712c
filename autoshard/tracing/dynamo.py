"""Rung 3: Dynamo's graph of the call, for models whose Python cannot run under fake tensors."""

from __future__ import annotations

from torch import nn

from autoshard.tracing.calling import Call
from autoshard.tracing.joint import JointGraph, TraceOptions


class NotYet(Exception):
    pass


def capture_with_dynamo(model: nn.Module, call: Call, options: TraceOptions) -> JointGraph:
    raise NotYet("no dynamo")
