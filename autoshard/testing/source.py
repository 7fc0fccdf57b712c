"""`run_code` runs Python source code so that a traceback shows its lines."""

from __future__ import annotations

import linecache
import zlib
from typing import Any

import torch


def run_code(source: str) -> dict[str, Any]:
    """Run Python code, and return the names that it defines with their values. The global random state is restored."""
    filename = f"<drawn program {zlib.crc32(source.encode()):08x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": "drawn_program"}
    with torch.random.fork_rng(devices=[]):
        exec(compile(source, filename, "exec"), scope)
    return scope
