"""Values of a lowered program that differ from rank to rank.

All ranks share one program text, so a rank's place on the mesh is itself a value of the program. `axis_index("model")`
is the index of the running rank along the axis. The runtime sets the place with `running_at`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from autoshard.errors import MeshError

_coordinates: ContextVar[Mapping[str, int] | None] = ContextVar("autoshard_coordinates", default=None)


def axis_index(axis: str) -> int:
    """Return the running rank's index along mesh axis `axis`. Raises `MeshError` outside `running_at`."""
    coordinates = _coordinates.get()
    if coordinates is None or axis not in coordinates:
        raise MeshError(
            f"axis_index({axis!r}) needs a running program with this axis; found coordinates={coordinates!r}."
        )
    return coordinates[axis]


@contextmanager
def running_at(coordinates: Mapping[str, int]) -> Iterator[None]:
    """Run the body of the context as the rank with these mesh `coordinates` (axis name to index)."""
    token = _coordinates.set(coordinates)
    try:
        yield
    finally:
        _coordinates.reset(token)
