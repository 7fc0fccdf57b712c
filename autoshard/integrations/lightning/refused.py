"""Settings and overridden hooks of Lightning that a compiled step cannot follow, each with the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from autoshard.errors import NotAvailableError

_OF_GRADIENTS = (
    *("backward", "on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step"),
    *("configure_gradient_clipping", "clip_gradients"),
)
"""Hooks between forward and update, which are one compiled step. Modules and callbacks must not override them."""

_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "f16"}


def check_run(trainer: Trainer, module: LightningModule) -> None:
    """Check that a compiled step can train a module as a Trainer asks for.

    Raises:
        NotAvailableError: a compiled step cannot do so; the message names each reason.
    """
    found = [*_refused_settings(trainer, module), *_refused_hooks(vars(trainer)["callbacks"], module)]
    if found:
        raise NotAvailableError(f"autoshard's Strategy cannot train {type(module).__name__} with {'; '.join(found)}.")


def _refused_settings(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "automatic_optimization=False: forward, backward and update are one compiled step"
    if trainer.accumulate_grad_batches != 1:
        parts = trainer.accumulate_grad_batches
        yield (
            f"accumulate_grad_batches={parts}: make the batches of the loader {parts} times as large, and pass "
            f"micro_batches={parts} to the Strategy"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        yield "gradient_clip_algorithm='value': a compiled step clips the norm"
    own = set(map(id, module.parameters()))
    if not all(id(item) in own for group in trainer.optimizers[0].param_groups for item in group["params"]):
        yield "an optimizer over other parameters: configure_optimizers must return one over the module's parameters"
    if any(parameter.is_meta for parameter in module.parameters()):
        yield "parameters on the meta device: make the module with its weights"


def _refused_hooks(callbacks: Sequence[Callback], module: LightningModule) -> Iterator[str]:
    for name in _OF_GRADIENTS:
        if hasattr(LightningModule, name) and is_overridden(name, module):
            yield f"{type(module).__name__}.{name}: gradients exist within the compiled step only"
    for callback in callbacks:
        own = [name for name in _OF_GRADIENTS if hasattr(Callback, name) and is_overridden(name, callback)]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            yield f"{type(callback).__name__}: it averages whole weights"
        elif own:
            yield f"{type(callback).__name__}.{own[0]}: gradients exist within the compiled step only"


def precision_of(plugin: Precision) -> str | None:
    """Return the `precision` of `compile` for Lightning's plugin; None: the types of the module.

    Raises:
        NotAvailableError: the plugin is neither Lightning's default nor its mixed precision.
    """
    if type(plugin) is Precision:
        return None
    if type(plugin) is MixedPrecision:
        return _PRECISIONS[plugin.precision]
    raise NotAvailableError(
        f"precision={plugin.precision!r} ({type(plugin).__name__}): autoshard's Strategy takes '32-true', 'bf16-mixed' "
        "and '16-mixed'. For weights of another type, convert the module before: module.to(torch.bfloat16)."
    )
