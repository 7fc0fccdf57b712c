"""`make_engines` makes the engine of a stage, and the messages between stages."""

from __future__ import annotations

import pytest
import torch

from autoshard import Mesh
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.stages.stage_engines import make_engines
from autoshard.runtime.stages.stage_messages import MessagesInProcess


@pytest.mark.parametrize(
    ("mesh", "of_stages"),
    [
        (Mesh({"pipeline": 2}), Mesh({"data": 1})),
        (Mesh({"pipeline": 2, "data": 2}), Mesh({"data": 2})),
        (Mesh({"pipeline": 2, "model": 2}), Mesh({"model": 2})),
    ],
)
def test_a_simulated_stage_has_the_axes_that_the_pipeline_leaves(mesh: Mesh, of_stages: Mesh) -> None:
    """The mesh of a stage has all axes but "pipeline", or one axis of one rank if none is left."""
    engine, messages = make_engines(mesh, torch.device("cpu"))
    assert isinstance(engine, SimulatorEngine)
    assert engine.mesh == of_stages
    assert isinstance(messages, MessagesInProcess)


def test_without_a_pipeline_nothing_is_handed_on() -> None:
    """Without a pipeline axis, there is one engine on the whole mesh, and no messages."""
    engine, messages = make_engines(Mesh({"data": 2}), torch.device("cpu"))
    assert engine.mesh == Mesh({"data": 2})
    assert messages is None
