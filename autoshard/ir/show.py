"""Text and HTML of plans and their answers; `autoshard.report` registers a function for each class."""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def text_of(item: object) -> str:
    """Return the text that `print` shows for a plan or an answer."""
    raise TypeError(f"no text is registered for {type(item).__name__}: import autoshard.report")


@singledispatch
def page_of(item: object) -> str:
    """Return an HTML page of a plan, or of an answer."""
    raise TypeError(f"no page is registered for {type(item).__name__}: import autoshard.report")
