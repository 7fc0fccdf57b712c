"""Text and HTML of plans and of their answers. `autoshard.report` registers a function for each class."""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def text_of(item: object) -> str:
    """Return the text of a plan or of an answer, for `print`."""
    raise TypeError(f"no text is registered for {type(item).__name__}: import autoshard.report")


@singledispatch
def page_of(item: object) -> str:
    """Return a plan or an answer as one page of HTML."""
    raise TypeError(f"no page is registered for {type(item).__name__}: import autoshard.report")
