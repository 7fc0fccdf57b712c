"""Sharding rules that `infer_rule` finds by running operators on pieces, and rules that users write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autoshard
from autoshard.errors import OperatorError, RuleInferenceError
from autoshard.ir.mesh import Mesh
from autoshard.rules import strategies
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import as_overload, bound_rule, inferred_operators
from tests.rules.run_strategy import check_strategy, results_of

_generator = torch.Generator().manual_seed(0)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator)


def _custom(name: str, function: Callable[..., Any], **options: Any) -> Any:
    """Define a custom operator whose output shape is inferred by running the operator."""
    operator = torch.library.custom_op(f"autoshard_test_infer::{name}", function, mutates_args=(), **options)
    operator.register_fake(function)
    return operator


def _gate(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).softmax(-1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _affine(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("bsk,nk->bsn", x, w) + bias


def _in_order(x: Tensor) -> Tensor:
    """An operator whose elements depend on their position and on all earlier elements."""
    return (x.flatten().cumsum(0) * torch.arange(1, x.numel() + 1)).view_as(x)


def _by_fours(x: Tensor) -> Tensor:
    """Softmax over groups of four if the groups fit, else over the whole row."""
    group = 4 if x.shape[-1] % 4 == 0 else x.shape[-1]
    return x.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    return table[index].clone()


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(-1), x.exp() - 1


def _norms(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(-1), x.amin(-1)


def _clipped_total(x: Tensor) -> Tensor:
    return x.sum(-1).relu()


def _repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, 0)


gate = _custom("gate", _gate)
product = _custom("product", _product)
affine = _custom("affine", _affine)
in_order = _custom("in_order", _in_order)
by_fours = _custom("by_fours", _by_fours)
lookup = _custom("lookup", _lookup)
spread = _custom("spread", _range)
norms = _custom("norms", _norms)
clipped_total = _custom("clipped_total", _clipped_total)
repeated = _custom("repeated", _repeated)


pytestmark = pytest.mark.usefixtures("own_rules")


_CASES: list[tuple[Any, tuple[Tensor, ...], str]] = [
    (gate, (_draw(6, 4), _draw(4)), "a _, _ -> a _"),
    (product, (_draw(4, 4), _draw(4, 4)), "a b, b c -> a c  (b: sum; linear in (0), (1))"),
    (
        affine,
        (_draw(2, 4, 6), _draw(8, 6), _draw(8)),
        "a b c, d c, d -> a b d  (c: sum; linear in (0 2), (1 2); added: 2)",
    ),
    (in_order, (_draw(4, 6),), "_ _ -> _ _  (linear in (0))"),
    (by_fours, (_draw(4, 8),), "a _ -> a _"),
    (lookup, (_draw(10, 4), torch.tensor([[0, 9], [3, 2], [1, 1]])), "_ a, b c -> b c a  (linear in (0))"),
    (spread, (_draw(4, 6),), "a b -> a, a b  (b: max)"),
    (norms, (_draw(4, 6),), "a _ -> a, a"),
    (clipped_total, (torch.rand(4, 6, generator=_generator),), "a _ -> a"),
    (repeated, (_draw(4, 6),), "a b -> (a _) b  (linear in (0))"),
]


@pytest.mark.parametrize(("op", "sample", "text"), _CASES, ids=[case[2] for case in _CASES])
def test_rules_are_found(op: Any, sample: tuple[Tensor, ...], text: str) -> None:
    """The inferred rule has the expected text, and every strategy gives one device's results on the sample."""
    assert str(autoshard.infer_rule(op, sample)) == text
    _check_all_strategies(op, sample)


def _check_all_strategies(op: Any, args: Sequence[Tensor]) -> None:
    overload, mesh = as_overload(op), Mesh({"a": 2, "b": 2})
    rule = bound_rule(overload, args, {}, results_of(overload, args, {}))
    assert rule is not None
    for strategy in enumerate_strategies(rule, mesh):
        check_strategy(overload, args, {}, rule, strategy, mesh)


def test_a_guess_that_holds_in_one_shape_only_is_dropped() -> None:
    """A softmax over groups of four gets no split of its rows: rows of eight split in two, rows of twelve do not."""
    x = _draw(2, 8)
    halves = torch.cat([_by_fours(half) for half in x.chunk(2, 1)], 1)
    torch.testing.assert_close(halves, _by_fours(x))
    rule = autoshard.infer_rule(by_fours, (x,))
    assert rule.notation == "a _ -> a _"


def test_positive_samples_do_not_mislead() -> None:
    """A clipped sum gets no reduction from positive samples, because other signs are drawn too."""
    rule = autoshard.infer_rule(clipped_total, (torch.ones(4, 6),))
    assert rule.reduce == {}
    assert rule.linear == []


def test_found_rules_are_listed() -> None:
    """Inferred rules are listed, so that a plan can name its assumptions."""
    autoshard.infer_rule(gate, (_draw(6, 4), _draw(4)))
    assert inferred_operators()["autoshard_test_infer.gate.default"] == ("a _, _ -> a _",)
    assert autoshard.rules.has_rule(gate)


def test_other_calls_of_the_operator_run_whole() -> None:
    """A rule covers calls with the sample's numbers of dims. A second sample adds a rule for other numbers."""
    op = as_overload(product)
    autoshard.infer_rule(product, (_draw(4, 6), _draw(6, 8)))
    batched = (_draw(2, 4, 6), _draw(2, 6, 8))
    assert len(strategies(op, batched, {}, 2)) == 1
    autoshard.infer_rule(product, batched)
    assert len(strategies(op, batched, {}, 2)) == 7
    assert len(strategies(op, (_draw(4, 6), _draw(6, 8)), {}, 2)) == 6
    assert len(inferred_operators()[str(op)]) == 2


def test_other_arguments_run_whole() -> None:
    """A rule that was inferred with `dim=0` does not cover `dim=1`, which runs whole."""
    op = _custom("softmax", _softmax)
    rule = autoshard.infer_rule(op, {"x": _draw(4, 6), "dim": 0})
    assert rule.notation == "_ a -> _ a"
    overload = as_overload(op)
    assert len(strategies(overload, (_draw(4, 6), 0), {}, 2)) == 2
    assert len(strategies(overload, (_draw(4, 6), 1), {}, 2)) == 1


def _softmax(x: Tensor, dim: int) -> Tensor:
    return x.softmax(dim)


def test_sizes_that_do_not_fit_run_whole() -> None:
    """A dim of size one is not split, and the other dims of the call still are."""
    op = as_overload(gate)
    autoshard.infer_rule(gate, (_draw(6, 4), _draw(4)))
    assert len(strategies(op, (_draw(6, 4), _draw(1)), {}, 2)) == 2
    autoshard.infer_rule(product, (_draw(6, 4), _draw(4, 2)))
    assert len(strategies(as_overload(product), (_draw(6, 1), _draw(1, 2)), {}, 2)) == 5


def test_a_user_writes_a_rule() -> None:
    """A user's rule, as notation or as a `Rule`, for a `custom_op` or for an overload, gives one device's results."""

    @autoshard.sharding_rule(gate)
    def gate_rule(x: Tensor, w: Tensor) -> str:
        return "rows _, _ -> rows _"

    @autoshard.sharding_rule(torch.ops.autoshard_test_infer.product.default)
    def product_rule(a: Tensor, b: Tensor) -> autoshard.Rule:
        return autoshard.Rule("m k, k n -> m n", reduce={"k": "sum"}, linear=[(0,), (1,)])

    _check_all_strategies(gate, (_draw(8, 4), _draw(4)))
    _check_all_strategies(product, (_draw(8, 4), _draw(4, 8)))
    assert len(strategies(as_overload(gate), (_draw(8, 4), _draw(4)), {}, 2)) == 2
    assert inferred_operators() == {}


def test_an_operator_has_one_rule() -> None:
    """A second rule for an operator raises, also over one of our rules."""
    sample = (_draw(6, 4), _draw(4))
    autoshard.infer_rule(gate, sample)
    with pytest.raises(OperatorError, match=r"gate.default already has a sharding rule"):
        autoshard.sharding_rule(gate)(lambda x, w: None)
    with pytest.raises(OperatorError, match=r"aten.mm.default already has a sharding rule; there is nothing to infer"):
        autoshard.infer_rule(torch.ops.aten.mm.default, sample)


@pytest.mark.parametrize("sample", [[(_draw(6, 4), _draw(4))], (_draw(6, 4), _draw(5)), (_draw(6, 4),)])
def test_a_sample_that_an_operator_refuses_is_refused(sample: Any) -> None:
    """A sample that the operator refuses raises an error that asks for the arguments of one call."""
    with pytest.raises(OperatorError, match=r"gate.default refuses sample_inputs: .* Pass one call's arguments"):
        autoshard.infer_rule(gate, sample)


@torch.library.custom_op("autoshard_tests::asserting", mutates_args=())
def asserting(x: Tensor) -> Tensor:
    """Raise an error without a message, as `assert x.dim() == 1` does, unless `x` is a vector."""
    if x.dim() != 1:
        raise AssertionError
    return x.clone()


def test_a_refusal_without_words_is_named_by_its_class() -> None:
    """If an operator refuses a sample without a message, our error has the class of the operator's error."""
    with pytest.raises(OperatorError, match=r"asserting.default refuses sample_inputs: AssertionError Pass one"):
        autoshard.infer_rule(asserting, (_draw(6, 4),))


def _noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def _three(x: Tensor) -> int:
    return 3


def _exactly(x: Tensor) -> Tensor:
    if x.shape != (4, 6):
        raise ValueError("no")
    return x.clone()


def _picky(x: Tensor) -> Tensor:
    if not x.is_meta and x.double().sum() != 24:
        raise ValueError("no")
    return x.clone()


def _moody(x: Tensor) -> Tensor:
    return x.nonzero().float() if x.shape[0] == 4 else x.sum()


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("noise", _noise, r"noise.default gives other results when it is run again: it is random.*by hand"),
        ("three", _three, r"three.default gives no tensors .*nothing to split"),
        ("picky", _picky, r"picky.default accepts the sample, but only 0 draws"),
        ("moody", _moody, r"moody.default: the ranks of its results vary"),
    ],
)
def test_what_has_no_rule_is_refused(name: str, function: Callable[..., Any], message: str) -> None:
    """An operator that is random, gives no tensors or varies in its results' ranks is refused with the reason."""
    with pytest.raises(RuleInferenceError, match=message):
        autoshard.infer_rule(_custom(name, function), (torch.ones(4, 6),))


def test_an_operator_that_only_takes_the_sample_is_not_split() -> None:
    """An operator that accepts only the sample's sizes is not split, because no dim is known to be parallel."""
    assert autoshard.infer_rule(_custom("exactly", _exactly), (_draw(4, 6),)).notation == "_ _ -> _ _"


def test_random_and_in_place_operators_of_torch_are_refused() -> None:
    """Operators whose schema is random or in place are refused with the reason."""
    with pytest.raises(RuleInferenceError, match=r"aten.rand_like.default draws random numbers"):
        autoshard.infer_rule(torch.ops.aten.rand_like.default, (_draw(4),))
    with pytest.raises(RuleInferenceError, match=r"aten.xlogy_.Tensor writes to an operand"):
        autoshard.infer_rule(torch.ops.aten.xlogy_.Tensor, (_draw(4), _draw(4)))


def test_operators_are_known_by_what_defines_them() -> None:
    """A `triton_op`, its name in `torch.ops` and its overload are one operator."""
    double = torch.library.triton_op("autoshard_test_infer::double", _double, mutates_args=())
    assert str(autoshard.infer_rule(double, (_draw(4, 6),))) == "a b -> a b  (linear in (0))"
    assert autoshard.rules.has_rule(torch.ops.autoshard_test_infer.double)
    assert autoshard.rules.has_rule(torch.ops.autoshard_test_infer.double.default)


def _double(x: Tensor) -> Tensor:
    return x + x


def test_meta_tensors_are_refused() -> None:
    """Meta tensors are refused, because they have no values to compare."""
    with pytest.raises(RuleInferenceError, match=r"gate.default must be run to find its rule.*without data"):
        autoshard.infer_rule(gate, (_draw(6, 4).to("meta"), _draw(4).to("meta")))


def test_an_overload_must_be_named_where_there_are_several() -> None:
    """An operator of several overloads is refused with their list."""
    with pytest.raises(OperatorError, match=r"aten.add has \d+ overloads; name one of them: aten.add.Tensor"):
        autoshard.infer_rule(torch.ops.aten.add, (_draw(4), _draw(4)))


def _dequantized(x: Tensor, scale: Tensor) -> Tensor:
    return x.float() * scale[:, None]


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1) / 448
    return (x / scale[:, None]).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_operands_and_results_of_8_bits_have_rules(dtype: torch.dtype) -> None:
    """Operators with 8-bit operands or results get rules; operands are drawn, and results compared, in float32."""
    names = f"{dtype}".rpartition("_")[2]
    read, made = _custom(f"read_{names}", _dequantized), _custom(f"made_{names}", _quantized)
    assert autoshard.infer_rule(read, (_draw(6, 4).to(dtype), _draw(6))).notation == "a b, a -> a b"
    assert autoshard.infer_rule(made, (_draw(6, 4),)).notation == "a _ -> a _, a"
