"""Names of ranges: named work of a step, in profiles and in torch's profiler.

A name begins with a part of the step, which is a phase, or communication over mesh axes. Examples:

* `forward: layers.0.mlp mm`, an operator of a module;
* `communication over data: all-reduce of head`, a collective;
* `communication over data: issuing the all-reduce of head`, the call that starts the collective;
* `communication over data: waiting for the all-reduce of head`, the wait for the collective;
* `communication over data: adding up the all-reduce of head`, a local sum after the wait.
"""

from __future__ import annotations

from autoshard.ir.staged import PIPELINE_AXIS

OVER = "communication over "
WAITING, ADDING, ISSUING = "waiting for the ", "adding up the ", "issuing the "

RECEIVING = f"{OVER}{PIPELINE_AXIS}: {WAITING}message"
"""The wait for a value of another pipeline stage."""


def part_of(name: str) -> str:
    """Return the part of the step that a range belongs to: a phase, or communication over axes.

    Example:
        >>> part_of("communication over data: waiting for the all-reduce of head")
        'communication over data'
    """
    return name.partition(": ")[0]


def is_start(name: str) -> bool:
    """Whether a range is a collective itself: not its start by the host, the wait for it, or the local sum after it.

    Example:
        >>> is_start("communication over data: all-reduce"), is_start("communication over data: waiting for the x")
        (True, False)
    """
    return name.startswith(OVER) and not _rest(name).startswith((WAITING, ADDING, ISSUING))


def is_wait_for(name: str) -> bool:
    """Whether a range waits for a collective or a message."""
    return name.startswith(OVER) and _rest(name).startswith(WAITING)


def is_issue(name: str) -> bool:
    """Whether a range is the call that starts a collective. The collective itself has a range of its own."""
    return name.startswith(OVER) and _rest(name).startswith(ISSUING)


def issuing(name: str) -> str:
    """Return the name of the call that starts the collective `name`.

    Example:
        >>> issuing("communication over data: all-reduce of head")
        'communication over data: issuing the all-reduce of head'
    """
    return f"{part_of(name)}: {ISSUING}{_rest(name)}"


def collective_named(name: str) -> str:
    """Return the name of the collective whose local sum a range is; any other name unchanged.

    Example:
        >>> collective_named("communication over data: adding up the all-reduce of head")
        'communication over data: all-reduce of head'
    """
    return f"{part_of(name)}: {_rest(name).removeprefix(ADDING)}" if name.startswith(OVER) else name


def _rest(name: str) -> str:
    return name.partition(": ")[2]
