"""A hash of everything that a traced program computes and returns.

`Program.digest`, which a plan stores to recognise its program, hashes only the program's text. A fingerprint also
covers constant tensors, results other than tensors, and guards.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autoshard.ir.program import Program


def fingerprint(program: Program) -> str:
    """Return the hash of a program, 16 hex digits, equal in every process that traced the model in the same way."""
    found = hashlib.sha256(program.text().encode())
    for part in _parts(program):
        found.update(part)
    return found.hexdigest()[:16]


def _parts(program: Program) -> Iterator[bytes]:
    yield repr(program.output_tree).encode()
    for index, value in sorted(program.output_constants.items()):
        yield f"{index}: {_text(value)}".encode()
    yield repr((program.guards, sorted(program.kept.items()))).encode()
    yield repr([(name, sorted(names)) for name, names in sorted(program.unreached.items())]).encode()
    yield from _constants(program.graph_module)
    if program.guard_program is not None:
        yield str(program.guard_program.graph).encode()
        yield from _constants(program.guard_program)


def _text(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def _constants(graph_module: fx.GraphModule) -> Iterator[bytes]:
    """Yield the name, shape, dtype and elements of each constant tensor of a graph, as bytes."""
    for node in graph_module.graph.nodes:
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(str(node.target))(graph_module)
        if isinstance(value, torch.Tensor):
            yield f"{node.name}: {tuple(value.shape)} {value.dtype}".encode()
            yield bytes_of(value)


def bytes_of(value: torch.Tensor) -> bytes:
    """Return the elements of a tensor in memory order as bytes; b"" for a meta tensor."""
    if value.is_meta or value.numel() == 0:
        return b""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
