"""Describes the collective of a lowered graph in which an error was raised, with the user's line."""

from __future__ import annotations

import linecache
from types import TracebackType

from torch import fx

from autoshard.graphs.name_ranges import IN_WORDS, issued_by, kind_of

_CODE = "<eval_with_key>"
"""First letters of the file name that torch.fx gives the code of a graph."""


def failed_collective(error: BaseException, graph: fx.Graph) -> str:
    """Describe the collective of `graph` in which `error` was raised; return "" if it was raised elsewhere.

    For example: "waiting for the all-reduce over 'data' of mlp.up (model.py:12 in forward)".
    """
    name = _failed_name(error.__traceback__)
    node = next((node for node in graph.nodes if node.name == name), None)
    if node is None:
        return ""
    issued = issued_by(node)
    is_wait = issued is not node
    kind = issued.meta.get("collective", kind_of(issued))
    kind = IN_WORDS.get(kind, kind)
    group = issued.meta.get("group")
    over = f" over {group!r}" if group else ""
    noted = next((item.meta for item in (issued, node) if item.meta.get("source") or item.meta.get("module")), {})
    of = f" of {noted['module']}" if noted.get("module") else ""
    line = f" ({noted['source']})" if noted.get("source") else ""
    return f"{'waiting for' if is_wait else 'in'} the {kind}{over}{of}{line}"


def _failed_name(trace: TracebackType | None) -> str | None:
    """Return the name that the failing line assigns, in the innermost frame of a graph's code; None without one."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_CODE):
            line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals)
            found = line.partition("=")[0].partition(":")[0].strip()
        trace = trace.tb_next
    return found
