"""tests cost_models/operators.py, cost_models/contractions.py, cost_models/counting.py."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.counting import operator_cost
from cost_models.errors import UnknownOperatorError
from cost_models.operators import VIEWS, work
from cost_models.work import Kind, TensorInfo

SHAPES = st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple)


def tensor(*shape: int) -> TensorInfo:
    return TensorInfo(shape, 2, "bf16")


def indices(*shape: int) -> TensorInfo:
    return TensorInfo(shape, 8, "i64")


@pytest.mark.parametrize(
    ("name", "inputs", "output", "flops"),
    [
        ("aten.mm.default", [tensor(4, 8), tensor(8, 2)], tensor(4, 2), 2 * 4 * 8 * 2),
        ("aten.bmm.default", [tensor(3, 4, 8), tensor(3, 8, 2)], tensor(3, 4, 2), 3 * 2 * 4 * 8 * 2),
        ("aten.addmm.default", [tensor(2), tensor(4, 8), tensor(8, 2)], tensor(4, 2), 2 * 4 * 8 * 2),
        ("aten.baddbmm.default", [tensor(1), tensor(3, 4, 8), tensor(3, 8, 2)], tensor(3, 4, 2), 3 * 2 * 4 * 8 * 2),
        ("aten.linear.default", [tensor(5, 4, 8), tensor(2, 8), tensor(2)], tensor(5, 4, 2), 5 * 2 * 4 * 8 * 2),
        ("aten.mv.default", [tensor(4, 8), tensor(8)], tensor(4), 2 * 4 * 8),
        ("aten.dot.default", [tensor(8), tensor(8)], tensor(), 2 * 8),
    ],
)
def test_products_count_two_flops_per_multiply_add(name, inputs, output, flops):
    """And the bytes of operands and results."""
    found = work(name, inputs, [output])
    assert found.flops == flops == sum(shape.flops for shape in found.products)
    assert found.bytes_read == 2 * sum(prod(each.shape) for each in inputs)
    assert found.bytes_written == 2 * prod(output.shape)
    assert found.kind is Kind.MATMUL


def convolution_arguments(transposed: bool, groups: int) -> tuple:
    return (None, None, None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)


def test_convolution_is_an_implicit_product():
    """[2, 8, 5, 5] with 6 kernels of 3 x 3 in 2 groups."""
    inputs, output = [tensor(2, 8, 7, 7), tensor(6, 4, 3, 3)], tensor(2, 6, 5, 5)
    found = work("aten.convolution.default", inputs, [output], convolution_arguments(False, 2))
    assert found.flops == 2 * prod(output.shape) * 4 * 9


def test_transposed_convolution_counts_input_pixels():
    """Each input pixel meets the whole kernel of its group."""
    inputs, output = [tensor(2, 8, 5, 5), tensor(8, 3, 3, 3)], tensor(2, 6, 7, 7)
    found = work("aten.convolution.default", inputs, [output], convolution_arguments(True, 2))
    assert found.flops == 2 * prod(inputs[0].shape) * 3 * 9


@pytest.mark.parametrize("mask", [(True, True, False), (False, True, True)])
def test_convolution_backward_counts_the_gradients_asked_for(mask):
    """One product the size of the forward for each of grad_input, grad_weight."""
    x, weight, grad = tensor(2, 8, 7, 7), tensor(6, 8, 3, 3), tensor(2, 6, 5, 5)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
    found = work("aten.convolution_backward.default", [grad, x, weight], [x, weight], (None, None, None, *rest))
    assert found.flops == sum(mask[:2]) * 2 * prod(grad.shape) * 8 * 9


def attention(name: str, causal: bool, first: tuple, position: int):
    q, k, v = tensor(2, 4, 16, 8), tensor(2, 2, 32, 8), tensor(2, 2, 32, 8)
    arguments = (None,) * position + (causal,)
    return work(name, [*first, q, k, v], [q], arguments).flops


def test_attention_counts_both_products_halved_when_causal():
    """4 b h s t d forward, 2.5 times that backward; grouped keys do not change the FLOPs."""
    full = 4 * 2 * 4 * 16 * 32 * 8
    assert attention("autoshard.attention.default", False, (), 6) == full
    assert attention("autoshard.attention.default", True, (), 6) == full / 2
    grad = (tensor(2, 4, 16, 8),)
    assert attention("autoshard.attention_backward.default", False, grad, 9) == 2.5 * full
    assert attention("autoshard.attention_backward.default", True, grad, 9) == 1.25 * full


@pytest.mark.parametrize("name", [*(f"aten.{view}" for view in VIEWS), "operator.getitem"])
def test_views_move_nothing(name):
    """No FLOPs, no bytes, no launch."""
    assert work(name, [tensor(8, 8)], [tensor(8, 8)])[:4] == (0, 0, 0, Kind.VIEW)


def test_embedding_reads_rows_not_the_table():
    """8 rows of 16 from a table of 50000."""
    found = work("aten.embedding.default", [tensor(50000, 16), indices(8)], [tensor(8, 16)])
    assert found.bytes_read == 8 * 16 * 2 + 8 * 8
    assert found.bytes_written == 8 * 16 * 2


def test_embedding_backward_writes_the_whole_local_table():
    """The gradient has the table's shape."""
    found = work("aten.embedding_dense_backward.default", [tensor(8, 16), indices(8)], [tensor(50000, 16)])
    assert found.bytes_written == 50000 * 16 * 2 + 8 * 16 * 2


def test_factories_read_nothing():
    """ones_like looks at shapes only."""
    assert work("aten.ones_like.default", [tensor(8, 8)], [tensor(8, 8)]).bytes_read == 0


@given(st.lists(SHAPES, min_size=1, max_size=3), SHAPES)
def test_an_operator_without_entry_is_bound_by_its_bytes(shapes, result):
    """Operands are read once and results written once."""
    found = work("mylib.fused.default", [tensor(*shape) for shape in shapes], [tensor(*result)])
    assert found.bytes_read == 2 * sum(prod(shape) for shape in shapes)
    assert found.bytes_written == 2 * prod(result)
    assert found.kind in (Kind.POINTWISE, Kind.REDUCTION)


def test_a_call_without_tensors_is_free():
    """Index arithmetic of the lowered program."""
    assert work("autoshard.ir.local.axis_index", [], []).kind is Kind.VIEW


def test_an_unknown_contraction_raises():
    """einsum is never priced as if it were pointwise; the message says how to add it."""
    with pytest.raises(UnknownOperatorError, match=r"'aten.einsum.default'.*@operator_cost"):
        work("aten.einsum.default", [tensor(2, 2)], [tensor(2, 2)])


def test_a_collective_raises():
    """It has a model of its own."""
    with pytest.raises(UnknownOperatorError, match="collectives"):
        work("_c10d_functional.all_reduce.default", [tensor(2)], [tensor(2)])


def test_a_second_entry_raises():
    """Nothing is overwritten silently."""
    with pytest.raises(ValueError, match="already has a cost formula"):
        operator_cost("aten.mm.default")(lambda inputs, outputs, arguments: work("aten.t.default", inputs, outputs))


@pytest.mark.parametrize(
    ("left", "right", "result", "flops"),
    [
        (tensor(8, 4), tensor(2, 4, 6), tensor(8, 6), 2 * 8 * 4 * 6),
        (tensor(2, 8, 4), tensor(4, 6), tensor(8, 6), 2 * 8 * 4 * 6),
        (tensor(8, 4), tensor(4, 6), tensor(2, 8, 6), 2 * 8 * 4 * 6),
        (tensor(2, 8, 4), tensor(2, 4, 6), tensor(2, 8, 6), 2 * 2 * 8 * 4 * 6),
    ],
)
def test_grouped_products_count_each_row_once(left, right, result, flops):
    """Whichever dim is grouped."""
    assert work("aten._grouped_mm.default", [left, right, indices(2)], [result]).flops == flops


def test_the_backward_of_a_grouped_product_is_two_products():
    """One for each gradient."""
    x, weight, grad = tensor(8, 4), tensor(2, 4, 6), tensor(8, 6)
    found = work("transformers.grouped_mm_fallback_backward.default", [x, weight, indices(2), grad], [x, weight])
    assert found.flops == 2 * (2 * 8 * 4 * 6)


def test_a_real_transform_is_half_a_complex_one():
    """5 N log2 N for the complex one."""
    real, complex_ = TensorInfo((3, 16), 4, "f32"), TensorInfo((3, 16), 8, "c64")
    found = work("aten._fft_c2c.default", [complex_], [complex_], (None, [1], 0, True))
    assert found.flops == 3 * 5 * 16 * 4
    assert work("aten._fft_r2c.default", [real], [complex_], (None, [1], 0, False)).flops == found.flops / 2
