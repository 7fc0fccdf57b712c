"""The table of rules covers the operators, and is sound on PyTorch's own samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from autoshard.errors import InvalidSpecError, OperatorError
from autoshard.ir.mesh import Mesh
from autoshard.rules import has_rule, sharding_rule, strategies
from autoshard.rules.registry import bound_rule, evaluate
from tests.rules.recording import Tally, check_call, check_database, tensor

aten = torch.ops.aten

_COMPLEX = torch.complex(tensor(4, 6), tensor(4, 6))


def test_a_second_rule_raises() -> None:
    """A second rule for an operator raises, and the error names the file of the first rule."""
    with pytest.raises(OperatorError, match=r"aten.mm.default already has a sharding rule: .*matmul.py"):
        sharding_rule(aten.mm.default)(lambda a, b: None)


@pytest.mark.parametrize(
    ("number", "result", "error", "message"),
    [
        (1, 3, OperatorError, r"mistaken1\.default, at test_registry\.py:\d+, returned 3, a int\. Return a Rule"),
        (2, "i j -> k", InvalidSpecError, r"mistaken2\.default, at test_registry\.py:\d+, is wrong: rule 'i j -> k'"),
    ],
)
def test_a_mistaken_rule_is_named(number: int, result: Any, error: type[Exception], message: str) -> None:
    """If a rule returns a wrong result, the error names the operator and the line of the rule's function."""
    operator = torch.library.custom_op(f"autoshard_tests::mistaken{number}", mutates_args=())(_flipped)
    sharding_rule(operator)(lambda x: result)
    with pytest.raises(error, match=message):
        bound_rule(operator._opoverload, (tensor(4),), {}, (tensor(4),))


def _flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def test_an_operator_without_rule_is_replicated() -> None:
    """An operator without a rule has one strategy, with whole operands and results."""
    assert not has_rule(aten.nonzero.default)
    found = strategies(aten.logdet.default, (tensor(4, 4),), {}, 2)
    assert [str(placement) for side in found[0] for placement in side] == ["R", "R"]
    assert len(found) == 1


def test_absent_results_are_left_out() -> None:
    """Results that are None have no entry in a rule."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    args = (x, x, [8], torch.randn(4, 1), torch.rand(4, 1), weight, weight, [True, False, True])
    rule = bound_rule(
        aten.native_layer_norm_backward.default, args, {}, evaluate(aten.native_layer_norm_backward.default, args, {})
    )
    assert rule is not None
    assert len(rule.outputs) == 2


def test_few_bits_carry_no_sums_into_more() -> None:
    """Pending sums of int8 do not pass operators with wider results, because sums wrap in int8."""
    x = tensor(4, 6).to(torch.int8)
    for op, args, options in (
        (aten.trace.default, (x,), {}),
        (aten.mul.Tensor, (x, torch.randn(4, 6)), {}),
        (aten.div.Scalar, (x, 2), {}),
        (aten._to_copy.default, (x,), {"dtype": torch.float32}),
    ):
        assert not any(inputs[0].is_partial("sum") for inputs, _ in strategies(op, args, options, 2))
    assert any(inputs[0].is_partial("sum") for inputs, _ in strategies(aten.neg.default, (x,), {}, 2))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.prod.dim_int, (_COMPLEX, 0)),
        (aten.clone.default, (_COMPLEX,)),
        (aten.cat.default, ([_COMPLEX, _COMPLEX],)),
        (aten._to_copy.default, (tensor(4, 6), torch.complex64)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_of_complex_numbers_only_sums_are_pending(op: Any, args: tuple[Any, ...]) -> None:
    """Complex numbers have no pending reductions but sums, and every strategy has one device's results."""
    kwargs = {"dtype": args[-1]} if op is aten._to_copy.default else {}
    args = args[:1] if kwargs else args
    check_call(op, *args, **kwargs)
    for inputs, outputs in strategies(op, args, kwargs, 2):
        of_complex = [*(inputs if not kwargs else ()), *outputs]
        assert all(not placement.is_partial() or placement.is_partial("sum") for placement in of_complex)


def test_nothing_is_allocated_to_list_strategies() -> None:
    """Strategies of a tensor of 2 ** 40 elements are listed, because nothing is allocated for them."""
    size = [1 << 20, 1 << 20]
    assert len(strategies(aten.zeros.default, (size,), {"device": torch.device("cpu")}, 2)) == 4


# Operators of a random sample of 181 models that have no rule, and why.
_WHOLE = {
    "aten._ctc_loss.Tensor": "its intermediate's size is the longest target of the batch",
    "aten._ctc_loss_backward.Tensor": "likewise",
    "aten._unique2.default": "the size of the result depends on the data",
    "aten.eye.default": "made whole at no cost",
    "aten.linspace.default": "steps of floats round by their distance from the start",
    "aten.mkldnn_rnn_layer.default": "one device's own recurrence, with opaque memory; traces have autoshard::lstm",
    "aten.mkldnn_rnn_layer_backward.default": "likewise",
    "aten.multinomial.default": "traces have autoshard::random",
    "aten.nonzero.default": "the size of the result depends on the data",
    "aten.rand.default": "traces have autoshard::random",
    "aten.randn.default": "likewise",
    "aten.randn_like.default": "likewise",
    "aten.repeat_interleave.Tensor": "the size of the result depends on the data",
    "aten.tril_indices.default": "made whole at no cost",
}


@pytest.mark.parametrize("name", sorted(_WHOLE))
def test_operators_that_stay_whole(name: str) -> None:
    """No operator in the list of operators that stay whole has a rule."""
    packet, overload = name.removeprefix("aten.").split(".")
    assert not has_rule(getattr(getattr(aten, packet), overload))


_SIGNATURE_SAMPLES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mm.default, (tensor(4, 4), tensor(4, 4))),
    (aten.view.default, (tensor(4, 4), [2, 8])),
    (aten.sum.dim_IntList, (tensor(4, 4), [0])),
]


@pytest.mark.parametrize(("op", "args"), _SIGNATURE_SAMPLES, ids=str)
def test_rules_see_only_shapes(op: Any, args: tuple[Any, ...]) -> None:
    """A call with meta tensors has the strategies of the same call with real tensors."""
    on_meta = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)
    assert strategies(op, args, {}, 2) == strategies(op, on_meta, {}, 2)


_PARTS = 8
"""Number of parts of PyTorch's database, which tests may check in parallel."""

_UNREACHED = {
    "gives no tensor": ("allclose", "broadcast_shapes", "equal", "item"),
    "the size of the result depends on the data": ("argwhere", "bincount", "unique", "unique_consecutive"),
    "has no rule": ("hash_tensor", "histogram", "histogramdd", "nonzero_static"),
    "made whole at no cost": ("eye", "linspace", "logspace", "tril_indices", "triu_indices"),
    "random": (
        "cauchy", "exponential", "geometric", "log_normal", "multinomial", "rand_like", "randint", "randint_like",
        "randn", "randn_like", "uniform",
    ),
    "memory as it happens to be": (
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    ),
    "calls nothing for real numbers": (
        "conj", "conj_physical", "contiguous", "positive", "real", "resolve_conj", "resolve_neg",
    ),
    "has no samples of numbers that we take": (
        "imag", "istft", "torch._scaled_mm", "torch._scaled_mm_v2", "torch.ops.aten._efficient_attention_forward",
        "torch.ops.aten._flash_attention_forward", "view_as_real",
    ),
    "sparse": ("sparse.mm", "sparse.sampled_addmm", "to_sparse"),
    "needs a GPU": (
        "jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary",
        "jiterator_binary_return_by_ref", "jiterator_unary",
    ),
}  # fmt: skip
"""PyTorch's names whose samples call no operator with a rule that values can check, and why."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(_PARTS))
def test_all_rules_on_all_samples_of_pytorch(part: int) -> None:
    """On all samples of PyTorch, every strategy on two and four ranks gives one device's results and gradients."""
    tally = check_database(_names(part), limit=None, meshes=[Mesh({"a": 2}), Mesh({"a": 4})])
    _assert_all_pass(tally, part)
    assert tally.left_out == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(_PARTS))
def test_all_rules_on_fives_and_on_two_axes(part: int) -> None:
    """On six samples per operator, up to 40 strategies on 5 and on 2 x 5 ranks have one device's results."""
    _assert_all_pass(
        check_database(_names(part), limit=6, meshes=[Mesh({"a": 5}), Mesh({"a": 2, "b": 5})], most=40), part
    )


def _assert_all_pass(tally: Tally, part: int) -> None:
    """Check that nothing fails, that all names but `_UNREACHED` are reached, and that calls are as many as samples.

    Samples of one name differ. On average a sample makes a call that no other sample made.
    """
    assert not tally.failures, f"{tally.calls} calls, {tally.strategies} strategies:\n" + "\n".join(tally.failures)
    names, unreached = set(_names(part)), {name for names in _UNREACHED.values() for name in names}
    assert names - tally.samples.keys() == names & unreached
    assert tally.refused.keys() <= unreached
    assert tally.calls >= tally.samples.total()


def _names(part: int) -> list[str]:
    return sorted({info.name for info in op_db})[part::_PARTS]
