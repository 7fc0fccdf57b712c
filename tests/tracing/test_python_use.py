"""Records of the Python values that a trace reads of a model."""

from __future__ import annotations

from torch import nn

from autoshard.tracing.python_use import all_reads


def test_attributes_are_read_and_members_are_not() -> None:
    """The reads of a dropout layer are its own attributes, without parameters, buffers, submodules and mode."""
    model = nn.Dropout(0.25)
    ((_, module, names), *_) = all_reads(model).names
    assert module is model
    assert {"p", "inplace"} <= set(names)
    assert not {"_parameters", "_buffers", "_modules", "training"} & set(names)
