"""Layer classes priced with shared parts keep their prices."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from passes.search.layers.count_layers import LayerKernel
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import Busy, KernelPricer, LayerPrice, LayerPricer
from passes.search.layers.price_model import CountedModel, RecipeKind
from tests.passes.decoders import HIDDEN, SEQUENCE, priced_sparse

DEVICE = Cluster("h100_sxm", 1, 8).device
USED = LayerPricer(KernelPricer(DEVICE, "bf16"))
SIZES = st.sampled_from([1, 2, 4])


def _model() -> CountedModel:
    return priced_sparse().counted


@given(st.integers(1, 3), SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_a_pricer_that_was_used_gives_the_prices_of_a_new_one(
    batch: int, tensor: int, context: int, expert: int, parallel: bool, split: bool
) -> None:
    """A used pricer gives a new pricer's prices to the last digit, and all kernels sum to the total."""
    kind = RecipeKind(tensor > 1, parallel and tensor > 1, context > 1, expert > 1, split and tensor > 1, fused=True)
    sizes = {"tensor": tensor, "context": context, "expert": expert}
    new = LayerPricer(KernelPricer(DEVICE, "bf16"))
    for name, layer in _model().count(kind).items():
        is_block = name not in (BEFORE, AFTER)
        price = USED.price((kind, name), layer, batch, sizes)
        assert _numbers(price) == _numbers(new.price((kind, name), layer, batch, sizes))
        assert price is USED.price((kind, name), layer, batch, sizes)
        for phase, found in ((layer.forward, price.forward), (layer.backward, price.backward)):
            total = Busy()
            for kernel in phase.kernels:
                total += new.kernel_pricer.price(kernel, batch, sizes, is_block=is_block)
            assert asdict(found.busy) == pytest.approx(asdict(total))
            assert len(found.traffic) == len(phase.sent)


def _numbers(price: LayerPrice) -> tuple[object, ...]:
    """Bytes and parameters, and both phases."""
    sizes = {name: size for name, size in vars(price).items() if isinstance(size, int)}
    return sizes, asdict(price.forward), asdict(price.backward)


def test_what_a_batch_does_not_change_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch prices only kernels with sequences anew, and a known batch prices no kernel."""
    priced: list[str] = []

    price = KernelPricer.price

    def counted(kernel_pricer: KernelPricer, kernel: LayerKernel, *others: Any, **named: Any) -> Busy:
        priced.append(kernel.operator)
        return price(kernel_pricer, kernel, *others, **named)

    monkeypatch.setattr(KernelPricer, "price", counted)
    pricer, sizes = LayerPricer(KernelPricer(DEVICE, "bf16")), {"tensor": 1, "context": 1, "expert": 1}
    layer = _model().count(RecipeKind(False, False, False, False, False, fused=True))[BEFORE]
    counts = []
    for batch in (1, 2, 1):
        priced.clear()
        found = pricer.price(("", BEFORE), layer, batch, sizes)
        assert found.forward.busy.kernels > 0
        assert found.backward.busy.kernels > 0
        counts.append(len(priced))
    assert counts[0] > counts[1] > counts[2] == 0


def test_products_with_weights_are_faster_in_8_bits_and_those_of_attention_are_not() -> None:
    """Forward, where a weight is read, and in both gradients."""
    layer = _model().count(RecipeKind(False, False, False, False, False, fused=True))["layers:0"]
    narrow, wide = (
        [
            [
                KernelPricer(DEVICE, precision).price(kernel, 4096, {"tensor": 1}, is_block=True).matmul_s
                for kernel in phase.kernels
            ]
            for phase in (layer.forward, layer.backward)
        ]
        for precision in ("f8", "bf16")
    )
    for phase in (0, 1):
        assert sum(x < y for x, y in zip(narrow[phase], wide[phase], strict=True)) == (4, 8)[phase]


def test_of_experts_gradients_a_rank_holds_its_share() -> None:
    """A rank has the gradients of its own experts, and receives tokens from other ranks."""
    stack_bytes, token_bytes = 4 * HIDDEN * 2 * HIDDEN * 2, 2 * SEQUENCE * 2 * HIDDEN * 2
    workspaces = [
        priced_sparse()
        .counted.layer_prices(Execution(data=4, expert=expert), Cluster("h100_sxm", 1, 4))["layers:1"]
        .workspace_bytes
        for expert in (1, 2, 4)
    ]
    assert workspaces == [stack_bytes // expert + token_bytes for expert in (1, 2, 4)]


def test_operands_of_products_in_8_bits_are_kept_so() -> None:
    """Products in 8 bits keep one byte per element in blocks, and the neighbouring layers keep as much as before."""
    cluster = Cluster("h100_sxm", 1, 4)
    wide, narrow = (
        _model().layer_prices(Execution(data=4, precision=precision), cluster) for precision in ("bf16", "f8")
    )
    for name, layer in _model().count(RecipeKind.of(Execution())).items():
        operands = sum(item.value.local_bytes(1, {}) for item in layer.saved if item.is_operand)
        less = operands // 2 if name not in (BEFORE, AFTER) else 0
        assert wide[name].saved_bytes - narrow[name].saved_bytes == less
        assert operands > 0 or name in (BEFORE, AFTER)
