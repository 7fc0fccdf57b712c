"""Ranks that disagree after compilation, or do not arrive, raise one error on every rank within seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoshard
from autoshard import DoesNotFitError, LostRankError, Mesh, NotAvailableError, P, RankMismatchError
from autoshard.runtime.agreement import step_agreement
from autoshard.runtime.agreement.control_channel import ControlChannel
from autoshard.runtime.agreement.vector_exchange import VectorExchange
from tests.runtime.processes import on_processes

PAIR = Mesh({"data": 2})
TIMEOUT_S = 3.0
BY_ROWS = {"input:0": P("data")}


class Small(nn.Module):
    """A model with a layer, dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.layer(x) * self.scale).square().mean()


def batch(rows: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 8).view(rows, 8)


def compiled(**asked: Any) -> Any:
    """Return a module after four calls on each rank, so that its ranks already compare calls the fast way."""
    sharded = autoshard.compile(Small(), PAIR, options=autoshard.Options(timeout_s=TIMEOUT_S), **asked)
    for _ in range(4):
        sharded(batch())
    return sharded


def on_second_rank() -> bool:
    return dist.get_rank() == 1


def assert_all_raise(error: type[Exception], match: str, run: Callable[[], Any]) -> None:
    """Check that this rank raises in time; every rank calls this function."""
    start = time.monotonic()
    with pytest.raises(error, match=match):
        run()
    assert time.monotonic() - start < 3 * TIMEOUT_S


@contextmanager
def saying_nothing() -> Iterator[None]:
    """Make any message between ranks about a call an error within this context."""
    with (
        mock.patch.object(ControlChannel, "exchange", side_effect=AssertionError("said something")),
        mock.patch.object(VectorExchange, "post", side_effect=AssertionError("said something")),
    ):
        yield


def check_other_inputs() -> None:
    """Ranks with unequal inputs all raise, and the next call with equal inputs runs."""
    sharded = compiled()
    rows = batch().flip(0) if on_second_rank() else batch()
    match = r"Ranks disagree about input:0\. input:0: \w+ on ranks \[0\], \w+ on ranks \[1\]"
    assert_all_raise(RankMismatchError, match, lambda: sharded(rows))
    sharded(batch())


def check_one_element_of_a_large_input() -> None:
    """If one element of a large input differs on one rank, the next call raises on all ranks."""
    sharded = autoshard.compile(Small(), PAIR, options=autoshard.Options(timeout_s=TIMEOUT_S))
    large = torch.zeros(1 << 13, 8)
    for _ in range(3):
        sharded(large)
    if on_second_rank():
        large[4321, 3] = 1
    assert_all_raise(RankMismatchError, "Ranks disagree about input:0", lambda: sharded(large))


def check_a_second_thread() -> None:
    """A second thread that calls a running model gets an error; later calls of both threads succeed."""
    sharded = compiled()
    seen: list[str] = []

    def call() -> None:
        try:
            sharded(batch())
        except NotAvailableError as error:
            seen.append(str(error))

    def in_another_thread() -> None:
        thread = threading.Thread(target=call, name="second")
        thread.start()
        thread.join()

    with sharded.agreement.one_thread:
        in_another_thread()
        sharded(batch())
    assert len(seen) == 1
    assert "Thread 'second' calls a compiled model that thread 'MainThread' is running" in seen[0]
    in_another_thread()
    assert len(seen) == 1


def check_training_beside_evaluation() -> None:
    """All ranks raise if one rank trains and the other evaluates, whether or not both programs are compiled."""
    sharded = compiled()
    if on_second_rank():
        sharded.eval()
    match = r"call: .*, training \(runs.* on ranks \[0\], .* evaluation \(must be compiled\) on ranks \[1\]"
    assert_all_raise(RankMismatchError, match, lambda: sharded(batch()))
    sharded.eval()
    sharded(batch())
    sharded.train(not on_second_rank())
    assert_all_raise(RankMismatchError, r"call: .*, training \(runs.*evaluation \(runs", lambda: sharded(batch()))


def check_another_learning_rate() -> None:
    """If one rank changes the learning rate of a traced optimizer, all ranks raise and name both rates."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = autoshard.compile(model, PAIR, optimizer=optimizer, options=autoshard.Options(timeout_s=TIMEOUT_S))
    for _ in range(4):
        step(batch())
    optimizer.param_groups[0]["lr"] = 0.2 if on_second_rank() else 0.1
    match = r"hyperparameters: AdamW\(.*lr=0.1,.* on ranks \[0\], AdamW\(.*lr=0.2,.* on ranks \[1\]"
    assert_all_raise(RankMismatchError, match, lambda: step(batch()))


def check_a_parameter_changed_in_place() -> None:
    """If one rank writes to a whole parameter, a split parameter or a buffer, all ranks raise."""
    sharded = compiled(constraints={**BY_ROWS, "layer.weight": P("data"), "layer.bias": P()})
    for name in ("weight", "bias"):
        if on_second_rank():
            with torch.no_grad():
                sharded.layer.get_parameter(name).add_(1.0)
        assert_all_raise(RankMismatchError, f"parameter 'layer.{name}'", partial(sharded, batch()))
        sharded = compiled(constraints={**BY_ROWS, "layer.weight": P("data"), "layer.bias": P()})
    if on_second_rank():
        sharded.scale.mul_(2)
    assert_all_raise(RankMismatchError, "buffer 'scale'", lambda: sharded(batch()))


def check_a_change_that_changes_nothing() -> None:
    """An in-place write that leaves the values equal on one rank raises no error."""
    sharded = compiled(constraints={**BY_ROWS, "layer.weight": P()})
    if on_second_rank():
        with torch.no_grad():
            sharded.layer.weight.mul_(1.0)
    sharded(batch())


def check_a_parameter_changed_through_data() -> None:
    """If one rank writes through `.data`, all ranks raise within four calls."""
    sharded = compiled(constraints={**BY_ROWS, "layer.*": P()})
    if on_second_rank():
        sharded.layer.bias.data.mul_(2)
    assert_all_raise(RankMismatchError, "parameter 'layer.bias'", lambda: [sharded(batch()) for _ in range(4)])


def check_parameters_that_round_apart() -> None:
    """A relative difference of 1e-6 in a parameter between ranks is allowed, with one warning."""
    sharded = compiled(constraints={**BY_ROWS, "layer.*": P()})
    if on_second_rank():
        sharded.layer.bias.data.mul_(1 + 1e-6)
    with mock.patch.object(step_agreement._LOGGER, "warning") as warn:
        for _ in range(6):
            sharded(batch())
    assert warn.call_count == 1


def check_swapped_rows() -> None:
    """If two rows of a parameter are swapped on one rank, the first call raises on all ranks."""
    model = Small()
    if on_second_rank():
        with torch.no_grad():
            model.layer.weight.copy_(model.layer.weight[[1, 0, *range(2, 8)]])
    sharded = autoshard.compile(model, PAIR, options=autoshard.Options(timeout_s=TIMEOUT_S))
    assert_all_raise(RankMismatchError, "Ranks disagree about parameter 'layer.weight'", lambda: sharded(batch()))


def check_a_shape_that_one_rank_knows() -> None:
    """If one rank calls a compiled input shape and the other a new shape, both raise."""
    sharded = compiled()
    match = (
        r"call: \(float32\[4, 8\]\), training \(runs program \w+\) on ranks \[0\], "
        r"\(float32\[6, 8\]\), training \(must be compiled\) on ranks \[1\]"
    )
    assert_all_raise(RankMismatchError, match, lambda: sharded(batch(6 if on_second_rank() else 4)))


def check_two_known_shapes() -> None:
    """If ranks call two different compiled input shapes, both raise instead of waiting for each other."""
    sharded = compiled()
    for _ in range(3):
        sharded(batch(6))
    match = r"call: \(float32\[4, 8\]\).*\[0\], \(float32\[6, 8\]\).*\[1\]"
    assert_all_raise(RankMismatchError, match, lambda: sharded(batch(6 if on_second_rank() else 4)))


def check_another_seed() -> None:
    """If ranks have different seeds, so that dropout would draw different masks, both raise."""
    sharded = compiled()
    torch.manual_seed(dist.get_rank())
    match = r"torch.initial_seed\(\): 0.* on ranks \[0\], 1 on ranks \[1\]"
    assert_all_raise(RankMismatchError, match, lambda: sharded(batch()))
    torch.manual_seed(0)
    sharded(batch())


def check_inputs_that_lie_on_ranks() -> None:
    """Input rows that each rank loaded for itself are not compared; an input that ranks hold whole is."""
    sharded = compiled(constraints=BY_ROWS)
    mesh = sharded.engine.device_mesh
    own = DTensor.from_local(batch()[dist.get_rank() * 2 :][:2], mesh, [Shard(0)], run_check=False)
    for _ in range(2):
        sharded(own)
    copies = DTensor.from_local(batch() + dist.get_rank(), mesh, [Replicate()], run_check=False)
    assert_all_raise(RankMismatchError, "Ranks disagree about input:0", lambda: sharded(copies))


def check_first() -> None:
    """With `check="first"`, the first call compares the inputs of ranks, and later calls send no messages."""
    sharded = autoshard.compile(Small(), PAIR, options=autoshard.Options(check="first", timeout_s=TIMEOUT_S))
    assert_all_raise(RankMismatchError, "Ranks disagree about input:0", lambda: sharded(batch() + dist.get_rank()))
    sharded(batch())
    with saying_nothing():
        sharded(batch() + dist.get_rank())


def check_off() -> None:
    """With `check="off"`, no call compares the inputs of ranks, and calls after the first send no messages."""
    sharded = autoshard.compile(Small(), PAIR, options=autoshard.Options(check="off", timeout_s=TIMEOUT_S))
    sharded(batch() + dist.get_rank())
    with saying_nothing():
        sharded(batch() + dist.get_rank())


def check_a_rank_asleep_before_it_compiles() -> None:
    """If one rank sleeps past the time limit before it compiles, both ranks get the same error."""
    sharded = autoshard.compile(Small(), PAIR, options=autoshard.Options(timeout_s=1.0))
    if on_second_rank():
        time.sleep(2.5)
    assert_all_raise(LostRankError, r"Ranks \[1\] did not come within 1 s", lambda: sharded(batch()))


def check_a_rank_asleep_between_two_steps() -> None:
    """If one rank sleeps past the time limit between two steps, both ranks get an error that names it."""
    sharded = autoshard.compile(Small(), PAIR, options=autoshard.Options(timeout_s=1.0))
    for _ in range(4):
        sharded(batch())
    if on_second_rank():
        time.sleep(2.5)
    assert_all_raise(LostRankError, r"Ranks \[1\] did not come", lambda: sharded(batch()))


def check_a_rank_that_fails_alone() -> None:
    """An error in one rank's forward is also raised on the rank that waits."""

    class Failing(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if on_second_rank():
                raise KeyError("only here")
            return super().forward(x)

    sharded = autoshard.compile(Failing(), PAIR, options=autoshard.Options(timeout_s=TIMEOUT_S))
    start = time.monotonic()
    with pytest.raises(Exception, match="only here"):
        sharded(batch())
    assert time.monotonic() - start < 2 * TIMEOUT_S


def check_a_model_that_does_not_fit() -> None:
    """If a model does not fit, every rank gets an error that states how much memory the model needs."""
    with pytest.raises(DoesNotFitError, match="memory") as caught:
        autoshard.compile(Small(), PAIR, memory_budget=16, options=autoshard.Options(timeout_s=TIMEOUT_S))(batch())
    assert caught.value.smallest_bytes > 16


def check_a_long_compile_is_life() -> None:
    """A rank that plans longer than the time limit is not taken for lost."""
    from passes.driver.planner import Planner

    right = Planner.trace

    def slowly(self: Planner, request: Any) -> Any:
        time.sleep(2.5 if on_second_rank() else 0.0)
        return right(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "trace", slowly)
        autoshard.compile(Small(), PAIR, options=autoshard.Options(timeout_s=1.0))(batch())


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


_SLOW = ["one_element_of_a_large_input", "swapped_rows", "two_known_shapes"]

test_on_two_processes = on_processes(CHECKS, ranks=2, deadline_s=120, slow=_SLOW)
