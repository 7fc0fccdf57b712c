"""`StepModule`: a LightningModule whose `training_step` is the forward, as `autoshard.compile` and `plan` need it.

A trace runs the Python of `training_step` once. Within the forward, `self.log` leaves the logged scalar in an
attribute, which compiled calls set. `self.trainer` has only the numbers that a trace can watch.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from autoshard.errors import NotAvailableError


@dataclass(frozen=True, slots=True)
class LogCall:
    """A call of `self.log` in `training_step`.

    Args:
        module: the module whose `log` is called.
        name: the logged name.
        options: the other arguments, except the value.
    """

    module: LightningModule
    name: str
    options: Mapping[str, Any]


@dataclass(slots=True)
class _LogCalls:
    """The calls of `log` that traces have found, by the attribute of the `StepModule` that gets the logged value."""

    module: LightningModule
    found: dict[str, LogCall] = field(default_factory=dict)

    def attribute_of(self, call: LogCall) -> str:
        """Record a call, and return the name of the attribute that gets its value.

        Calls with equal names share an attribute.
        """
        known = (name for name, item in self.found.items() if item.name == call.name)
        name = next(known, f"logged_{len(self.found)}")
        self.found[name] = call
        return name


@dataclass(frozen=True, slots=True)
class _Replaced:
    """The modules whose methods a trace replaces. They are found before traces, because metrics hash their state.

    Args:
        modules: the LightningModule, and the LightningModules within it.
        metrics: metrics of torchmetrics by qualified name.
    """

    modules: tuple[LightningModule, ...]
    metrics: Mapping[str, Metric]

    @classmethod
    def of(cls, module: LightningModule) -> _Replaced:
        inner = tuple(item for item in module.modules() if isinstance(item, LightningModule))
        return cls(inner, {name: item for name, item in module.named_modules() if isinstance(item, Metric)})


class StepModule(nn.Module):
    """A module whose forward is the `training_step` of a LightningModule. `autoshard.plan` takes it as the model.

    Names of parameters begin with "module.". An example of inputs is `(batch,)`.

    Args:
        module: the LightningModule.

    Attributes:
        batch_idx, current_epoch, global_step: the numbers that `training_step` may read.
        is_cut: whether a batch is cut into micro-batches, so that no other scalar than the loss can be logged.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.batch_idx = self.current_epoch = self.global_step = 0
        self.is_cut = False
        self._calls, self._replaced = _LogCalls(module), _Replaced.of(module)
        self._takes_index = len(inspect.signature(module.training_step).parameters) > 1
        self._reads_index = self._takes_index and _reads_second(module.training_step)

    def forward(self, batch: Any) -> torch.Tensor:
        """Run `training_step` on a batch; return the loss, and leave logged scalars in attributes."""
        index = (self.batch_idx if self._reads_index else 0,) if self._takes_index else ()
        with self._recording() as logged:
            loss = _loss_of(self.module.training_step(batch, *index))
        for call, value in logged:
            if self.is_cut and value is not loss:
                raise NotAvailableError(
                    f"self.log({call.name!r}, ...) in training_step: in micro-batches, the loss alone can be logged, "
                    "because other scalars would be those of one micro-batch. Log it in validation_step."
                )
            setattr(self, self._calls.attribute_of(call), True if value is loss else value.detach().reshape(()))
        return loss

    def take_logged(self, loss: torch.Tensor) -> Iterator[tuple[LogCall, torch.Tensor]]:
        """Yield the calls of `log` in the last compiled call, each with its value, and forget the values.

        Args:
            loss: the loss that the call returned.
        """
        for name, call in self._calls.found.items():
            value = vars(self).pop(name, None)
            if value is not None:
                yield call, loss if value is True else value

    @contextmanager
    def _recording(self) -> Iterator[list[tuple[LogCall, torch.Tensor]]]:
        """Within the context, record calls of the LightningModules' `log` in the yielded list, with the logged tensors.

        Their trainer is a `_TracedTrainer`. `update` of a torchmetrics metric raises NotAvailableError.
        """
        calls: list[tuple[LogCall, torch.Tensor]] = []
        trainers = [item._trainer for item in self._replaced.modules]
        updates = [item.update for item in self._replaced.metrics.values()]
        try:
            for name, metric in self._replaced.metrics.items():
                metric.update = _refuser(name)  # type: ignore[method-assign]
            for item in self._replaced.modules:
                item.log = _recorder(item, calls)  # type: ignore[method-assign]
                item._trainer = _TracedTrainer(self)  # type: ignore[assignment]
            yield calls
        finally:
            for metric, update in zip(self._replaced.metrics.values(), updates, strict=True):
                metric.update = update
            for item, trainer in zip(self._replaced.modules, trainers, strict=True):
                del item.log
                item._trainer = trainer


class _TracedTrainer:
    """The `trainer` of a traced `training_step`: the numbers of a `StepModule`.

    Reading any other attribute raises NotAvailableError.
    """

    training = True

    def __init__(self, step: StepModule) -> None:
        self._step = step

    @property
    def current_epoch(self) -> int:
        return self._step.current_epoch

    @property
    def global_step(self) -> int:
        return self._step.global_step

    def __getattr__(self, name: str) -> NoReturn:
        raise NotAvailableError(
            f"training_step reads trainer.{name}, of which a compiled step would keep the first value. Read it in a "
            "hook such as on_train_batch_end. training_step may read self.current_epoch and self.global_step."
        )


def _recorder(module: LightningModule, calls: list[tuple[LogCall, torch.Tensor]]) -> Any:
    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise NotAvailableError(
                f"self.log({name!r}, {type(value).__name__}) in training_step: a compiled step logs tensors of one "
                "element. Log numbers in on_train_batch_end, and update metrics of torchmetrics in validation_step."
            )
        given = inspect.signature(LightningModule.log).bind(module, name, value, *args, **options).arguments
        calls.append((LogCall(module, name, {key: given[key] for key in [*given][3:]}), value))

    return log


def _refuser(name: str) -> Any:
    def update(*args: Any, **options: Any) -> NoReturn:
        raise NotAvailableError(
            f"training_step updates the metric {name}, whose state a compiled step does not keep. Log a scalar by "
            "self.log, or update the metric in validation_step."
        )

    return update


def _loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping):
        others = [name for name in output if name != "loss"]
        if others:
            raise NotAvailableError(
                f"training_step returns {', '.join(map(repr, others))} beside 'loss': a compiled step returns the loss "
                "alone. Return the loss, and log scalars by self.log."
            )
        output = output.get("loss")
    if not isinstance(output, torch.Tensor):
        raise NotAvailableError(f"training_step returns {output!r}: a compiled step needs the loss, a tensor.")
    return output


def _reads_second(method: Any) -> bool:
    """Whether the code of a method may read its second argument besides `self`, such as `batch_idx`."""
    code = getattr(method, "__code__", None)
    if code is None or code.co_argcount < 3:
        return True
    return any(item.argval == code.co_varnames[2] for item in dis.get_instructions(code))
