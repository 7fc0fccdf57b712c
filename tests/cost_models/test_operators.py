"""Work of operators: FLOPs, bytes and kinds."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.kernels.random_numbers import random_reference
from autoshard.kernels.rejection import binomial_reference, gamma_reference, poisson_reference
from autoshard.rules import registry
from cost_models.counting import operator_cost
from cost_models.errors import UnknownOperatorError
from cost_models.operators import VIEWS, seems_to_contract, work
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
    """Products count two FLOPs per multiply-add, and the bytes of operands and results."""
    found = work(name, inputs, [output])
    assert found.flops == flops == sum(shape.flops for shape in found.products)
    assert found.bytes_read == 2 * sum(prod(each.shape) for each in inputs)
    assert found.bytes_written == 2 * prod(output.shape)
    assert found.kind is Kind.MATMUL


def test_4_bit_weights_move_their_bytes():
    """Dequantisation reads the bytes of packed weights and scales, and writes the weights."""
    operands = [TensorInfo(shape, 1, "u8") for shape in ((2048, 1), (64,), (1036,))]
    found = work("autoshard.dequantize_nf4.default", operands, [tensor(64, 64)])
    assert (found.bytes_read, found.bytes_written) == (2048 + 64 + 1036, 2 * 64 * 64)
    assert found.kind is Kind.POINTWISE


def test_ctc_moves_its_table():
    """CTC's forward and backward count ten and twenty FLOPs for each entry of its table."""
    lengths, loss, table = indices(2), tensor(2), tensor(2, 8, 7)
    operands = [tensor(8, 2, 5), indices(2, 3), lengths, lengths]
    forward = work("autoshard.ctc_loss.default", operands, [loss, table])
    assert forward.flops == 10 * 2 * 8 * 7
    assert forward.bytes_written == 2 * (2 + 2 * 8 * 7)
    backward = work("autoshard.ctc_loss_backward.default", [loss, *operands, loss, table], [operands[0]])
    assert backward.flops == 2 * forward.flops
    assert backward.bytes_read > forward.bytes_read


def convolution_arguments(transposed: bool, groups: int) -> tuple:
    return (None, None, None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)


def test_convolution_is_an_implicit_product():
    """A convolution counts the FLOPs of its product: each output with each of a group's 4 channels and 9 taps."""
    inputs, output = [tensor(2, 8, 7, 7), tensor(6, 4, 3, 3)], tensor(2, 6, 5, 5)
    found = work("aten.convolution.default", inputs, [output], convolution_arguments(False, 2))
    assert found.flops == 2 * prod(output.shape) * 4 * 9


def test_transposed_convolution_counts_input_pixels():
    """A transposed convolution multiplies each input pixel with the whole kernel of its group."""
    inputs, output = [tensor(2, 8, 5, 5), tensor(8, 3, 3, 3)], tensor(2, 6, 7, 7)
    found = work("aten.convolution.default", inputs, [output], convolution_arguments(True, 2))
    assert found.flops == 2 * prod(inputs[0].shape) * 3 * 9


@pytest.mark.parametrize("mask", [(True, True, False), (False, True, True)])
def test_convolution_backward_counts_the_gradients_asked_for(mask):
    """A convolution's backward counts a product for each requested gradient of input and weight, and
    none for the bias."""
    x, weight, grad = tensor(2, 8, 7, 7), tensor(6, 8, 3, 3), tensor(2, 6, 5, 5)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
    found = work("aten.convolution_backward.default", [grad, x, weight], [x, weight], (None, None, None, *rest))
    assert found.flops == sum(mask[:2]) * 2 * prod(grad.shape) * 8 * 9


def attention(name: str, causal: bool, first: tuple, position: int):
    q, k, v = tensor(2, 4, 16, 8), tensor(2, 2, 32, 8), tensor(2, 2, 32, 8)
    arguments = (None,) * position + (causal,)
    return work(name, [*first, q, k, v], [q], arguments).flops


def test_attention_counts_both_products_halved_when_causal():
    """Attention counts 4 b h s t d FLOPs, its backward 2.5 times that, and a causal mask half."""
    full = 4 * 2 * 4 * 16 * 32 * 8
    assert attention("autoshard.attention.default", False, (), 6) == full
    assert attention("autoshard.attention.default", True, (), 6) == full / 2
    grad = (tensor(2, 4, 16, 8),)
    assert attention("autoshard.attention_backward.default", False, grad, 9) == 2.5 * full
    assert attention("autoshard.attention_backward.default", True, grad, 9) == 1.25 * full


def test_causal_attention_of_pieces_is_that_of_the_last_rank():
    """Causal attention of 16 queries at row 0 counts half of the products, and at unknown rows the last rank's 3/4."""
    q, k = tensor(2, 4, 16, 8), tensor(2, 2, 32, 8)
    for row, share in ((0, 1 / 2), (None, 3 / 4)):
        arguments = (*[None] * 5, 0.0, True, 1.0, 0, [0, 0, row, 0], [2, 4, 32, 32])
        found = work("autoshard.attention.default", [q, k, k], [q], arguments)
        assert found.flops == share * 4 * 2 * 4 * 16 * 32 * 8


@pytest.mark.parametrize("name", [*(f"aten.{view}" for view in VIEWS), "operator.getitem"])
def test_views_move_nothing(name):
    """Views have no FLOPs, no bytes and no launch."""
    assert work(name, [tensor(8, 8)], [tensor(8, 8)])[:4] == (0, 0, 0, Kind.VIEW)


def test_embedding_reads_rows_not_the_table():
    """An embedding of 8 rows of 16 reads 8 rows of a table of 50000."""
    found = work("aten.embedding.default", [tensor(50000, 16), indices(8)], [tensor(8, 16)])
    assert found.bytes_read == 8 * 16 * 2 + 8 * 8
    assert found.bytes_written == 8 * 16 * 2


def test_embedding_backward_writes_the_whole_local_table():
    """The backward of an embedding writes the whole table."""
    found = work("aten.embedding_dense_backward.default", [tensor(8, 16), indices(8)], [tensor(50000, 16)])
    assert found.bytes_written == 50000 * 16 * 2 + 8 * 16 * 2


def test_factories_read_nothing():
    """A factory such as ones_like reads no bytes."""
    assert work("aten.ones_like.default", [tensor(8, 8)], [tensor(8, 8)]).bytes_read == 0


@given(st.lists(SHAPES, min_size=1, max_size=3), SHAPES)
def test_an_operator_without_entry_is_bound_by_its_bytes(shapes, result):
    """An operator without a formula reads its operands once and writes its results once."""
    found = work("mylib.fused.default", [tensor(*shape) for shape in shapes], [tensor(*result)])
    assert found.bytes_read == 2 * sum(prod(shape) for shape in shapes)
    assert found.bytes_written == 2 * prod(result)
    assert found.kind in (Kind.POINTWISE, Kind.REDUCTION)


def test_a_call_without_tensors_is_free():
    """A call without tensors is a view, which is free."""
    assert work("autoshard.ir.local.axis_index", [], []).kind is Kind.VIEW


@pytest.mark.parametrize(
    "name",
    ["mylib.fused_matmul.default", "xformers.efficient_attention.default", "aten.conv_depthwise3d.default"],
)
def test_an_unknown_contraction_raises(name):
    """An operator without a formula whose name is that of a contraction is refused, and the error says how to add
    a formula."""
    with pytest.raises(UnknownOperatorError, match=rf"'{name}'.*operator_cost"):
        work(name, [tensor(2, 2)], [tensor(2, 2)])


@pytest.mark.parametrize(
    "name", ["prims.convert_element_type.default", "aten.linalg_vector_norm.default", "my.gelu.v2"]
)
def test_what_moves_bytes_alone_is_priced_by_them(name):
    """An operator without a formula whose name is that of no contraction is priced by its bytes."""
    assert work(name, [tensor(8, 4)], [tensor(8, 4)])[1:3] == (64, 64)


def test_sparse_products_are_refused():
    """A sparse product is refused, because its shapes do not give the number of stored elements."""
    with pytest.raises(UnknownOperatorError, match="stored"):
        work("aten._sparse_mm.default", [tensor(2, 2), tensor(2, 2)], [tensor(2, 2)])


def rule_names() -> list[str]:
    """The operators with a sharding rule, by their names in the cost models."""
    return [str(operator) for operator in registry._rules]


UNPRICED: dict[str, str] = {}  # operator with a sharding rule: why it has no price


def test_every_operator_with_a_sharding_rule_can_be_priced():
    """Every operator with a sharding rule has a formula, or is bound by its bytes."""
    refused = {name for name in rule_names() if seems_to_contract(name)}
    assert refused == set(UNPRICED)
    assert len(rule_names()) > 400


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("ij,jk->ik", [(4, 8), (8, 2)], 2 * 4 * 8 * 2),
        ("bij,bjk->bik", [(3, 4, 8), (3, 8, 2)], 3 * 2 * 4 * 8 * 2),
        ("bhsd,bhtd->bhst", [(2, 3, 5, 8), (2, 3, 7, 8)], 2 * 6 * 5 * 7 * 8),
        ("ij,jk,kl->il", [(4, 8), (8, 2), (2, 6)], 2 * 4 * 8 * 2 + 2 * 4 * 2 * 6),
        ("i,i->", [(8,), (8,)], 2 * 8),
    ],
)
def test_einsum_contracts_pair_by_pair(equation, shapes, flops):
    """An einsum counts the products of pairs from left to right."""
    operands = [tensor(*shape) for shape in shapes]
    assert work("aten.einsum.default", operands, [tensor(1)], (equation, None)).flops == flops


def test_an_einsum_with_an_ellipsis_is_refused():
    """An einsum with an ellipsis is refused, because its dims have no names."""
    with pytest.raises(UnknownOperatorError, match="ellipsis"):
        work("aten.einsum.default", [tensor(2, 2)], [tensor(2, 2)], ("...i->...", None))


def test_chains_take_the_cheapest_order():
    """A chain of products counts 7500 multiply-adds in its cheapest order, of 75000 in the other."""
    operands = [tensor(10, 100), tensor(100, 5), tensor(5, 50)]
    assert work("aten.linalg_multi_dot.default", operands, [tensor(10, 50)]).flops == 2 * 7500


def test_an_orthogonalisation_has_three_products_a_step():
    """A step on [m, n] with m <= n takes 4 m^2 n + 2 m^3 FLOPs, however the matrix lies, and ranks share a batch."""
    for shape in ((4, 8), (8, 4)):
        whole = work("autoshard.orthogonalise.default", [tensor(6, *shape)], [tensor(6, *shape)], (None, None, 5, 1e-7))
        shared = work(
            "autoshard.orthogonalise.default", [tensor(2, *shape)], [tensor(2, *shape)], (None, None, 5, 1e-7)
        )
        assert whole.flops == 5 * 6 * (4 * 4**2 * 8 + 2 * 4**3) == 3 * shared.flops
        assert whole.steps == 15 * 6


@pytest.mark.parametrize(
    ("name", "shapes", "arguments", "flops"),
    [
        ("aten.addbmm.default", [(4, 2), (3, 4, 8), (3, 8, 2)], (), 3 * 2 * 4 * 8 * 2),
        ("aten.tensordot.default", [(4, 8, 3), (3, 8, 2)], (None, None, (2, 1), (0, 1)), 2 * 4 * 24 * 2),
        ("aten.bilinear.default", [(7, 4), (7, 5), (3, 4, 5)], (), 2 * 7 * 15 * 4 + 2 * 7 * 3 * 5),
        ("aten._cdist_forward.default", [(2, 4, 8), (2, 6, 8)], (), 2 * 2 * 4 * 6 * 8),
        ("aten._euclidean_dist.default", [(2, 4, 8), (2, 6, 8)], (), 2 * 2 * 4 * 6 * 8),
        ("aten._cdist_backward.default", [(4, 6), (4, 8), (6, 8), (4, 6)], (), 2 * 2 * 4 * 6 * 8),
    ],
)
def test_further_products(name, shapes, arguments, flops):
    """Further products count two FLOPs for each multiply-add."""
    assert work(name, [tensor(*shape) for shape in shapes], [tensor(1)], arguments).flops == flops


def test_complex_products_are_four_real_ones():
    """A complex product counts four real products in the dtype of its parts."""
    z = TensorInfo((4, 4), 8, "c64")
    found = work("aten.mm.default", [z, z], [z])
    assert (found.flops, found.dtype, len(found.products)) == (4 * 2 * 4**3, "f32", 4)


def test_selection_reads_once_per_byte_of_the_key():
    """A top-k of bf16 reads its operand three times: in two passes of selection and one of gathering."""
    assert work("aten.topk.default", [tensor(1000)], [tensor(5), indices(5)]).bytes_read == 3 * 2000


def test_a_search_misses_the_cache_a_few_times_per_value():
    """A search reads boundaries and values, and four sectors for each value."""
    found = work("aten.searchsorted.Tensor", [tensor(1024), tensor(10)], [indices(10)])
    assert found.bytes_read == 2 * 1034 + 4 * 32 * 10


def test_a_collective_raises():
    """A collective is refused as an operator, because collectives have their own model."""
    with pytest.raises(UnknownOperatorError, match="collectives"):
        work("_c10d_functional.all_reduce.default", [tensor(2)], [tensor(2)])


def test_a_second_entry_raises():
    """A second formula for an operator is refused."""
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
    """A grouped product counts each row once, whichever dim is grouped."""
    assert work("aten._grouped_mm.default", [left, right, indices(2)], [result]).flops == flops


def test_the_backward_of_a_grouped_product_is_two_products():
    """The backward of a grouped product counts two products, one for each gradient."""
    x, weight, grad = tensor(8, 4), tensor(2, 4, 6), tensor(8, 6)
    found = work("transformers.grouped_mm_fallback_backward.default", [x, weight, indices(2), grad], [x, weight])
    assert found.flops == 2 * (2 * 8 * 4 * 6)


def test_a_real_transform_is_half_a_complex_one():
    """A real transform counts half the 5 N log2 N of a complex transform."""
    real, complex_ = TensorInfo((3, 16), 4, "f32"), TensorInfo((3, 16), 8, "c64")
    found = work("aten._fft_c2c.default", [complex_], [complex_], (None, [1], 0, True))
    assert found.flops == 3 * 5 * 16 * 4
    assert work("aten._fft_r2c.default", [real], [complex_], (None, [1], 0, False)).flops == found.flops / 2


class _Launches(TorchDispatchMode):
    """Counts the calls that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += f"aten.{func._schema.name[6:]}.{func._overloadname}" not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("distribution", "parameters"),
    [("uniform", (0, 1)), ("normal", (0, 1)), ("integer", (0, 9)), ("bernoulli", (0.5,))],
)
def test_random_numbers_cost_what_their_definition_launches(distribution, parameters):
    """Random numbers count as many steps as their definition runs calls, within 7 %, each of 64 bits per element."""
    with _Launches() as launches:
        random_reference(torch.tensor(3), distribution, parameters, 0, (9,), (0,), (9,), dtype=torch.float32)
    found = work("autoshard.random.default", [indices()], [tensor(1000)])
    assert found.steps == pytest.approx(launches.count, rel=0.07)
    assert found.bytes_read == found.bytes_written == 8 * 1000 * found.steps


def test_numbers_that_are_drawn_until_accepted_cost_what_was_counted():
    """Poisson, binomial and gamma numbers count as many steps as their definition runs calls, within 15 %."""
    x, seed = torch.linspace(0.0, 1.0, 100_000), torch.tensor(3)
    place = (seed, 0, (0,), (len(x),))
    calls = {
        "poisson": lambda: poisson_reference(20.0 * x, *place),
        "binomial": lambda: binomial_reference(torch.full_like(x, 20.0), x, *place),
        "gamma": lambda: gamma_reference(2.0 * x, *place),
    }
    for name, call in calls.items():
        with _Launches() as launches:
            call()
        assert work(f"autoshard.{name}.default", [indices()], [tensor(9)]).steps == pytest.approx(
            launches.count, rel=0.15
        )
