"""FLOPs and bytes of operators, in one table keyed by operator name ("aten.mm.default"); shapes are local.

Bytes are those of operands and results, each moved once. Three facts correct that: views move nothing, factories read
nothing, lookups read the rows that they return. An operator without an entry is memory-bound by its operands and
results, which holds for everything but contractions: a contraction without an entry raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod

from cost_models import contractions as contractions  # fills its part of the table
from cost_models.counting import FREE, TABLE, compute_dtype, memory_bound, numel, operator_cost, size_bytes
from cost_models.errors import UnknownOperatorError
from cost_models.work import Kind, TensorInfo, Work

_CONTRACTION_NAMES = """
    aten.einsum aten.tensordot aten.cdist aten._cdist_forward aten._cdist_backward aten.chain_matmul
    aten.addbmm aten.ger aten.outer aten.addr aten.vdot aten.inner aten.kron aten.bilinear aten._trilinear
    aten._scaled_mm aten._grouped_mm aten._scaled_grouped_mm aten._int_mm aten._sparse_mm
    aten.linalg_multi_dot aten.linalg_inv_ex aten.linalg_solve_ex aten._linalg_solve_ex aten._linalg_svd
    aten._linalg_eigh aten.linalg_qr aten.linalg_cholesky_ex aten.linalg_lu aten.linalg_lu_factor_ex
    aten.linalg_matrix_exp aten.linalg_householder_product aten.linalg_pinv aten.lstm aten.gru
    aten._thnn_fused_lstm_cell aten.mkldnn_rnn_layer aten._cudnn_rnn aten.miopen_rnn
    aten._native_multi_head_attention aten._transformer_encoder_layer_fwd aten._fft_c2c aten._fft_r2c
    aten._fft_c2r aten.scaled_dot_product_attention transformers.grouped_mm_fallback
    transformers.grouped_mm_fallback_backward
"""
CONTRACTIONS = frozenset(_CONTRACTION_NAMES.split())


def work(
    operator_name: str, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...] = ()
) -> Work:
    """What one call does.

    Args:
        operator_name: `str(node.target)` of an OpOverload, e.g. "aten.mm.default"; "operator.getitem" is free.
        inputs: local tensors in the order of the call, absent optional ones left out, lists flattened.
        outputs: local results, absent ones left out.
        arguments: the call's positional arguments in schema order (what stands at tensor positions is not read). Only
            attention (is_causal) and convolution (transposed, groups) read it.

    Raises:
        UnknownOperatorError: a contraction, or a collective, that has no entry.

    Example:
        >>> x, w, y = TensorInfo((4, 8), 2, "bf16"), TensorInfo((8, 2), 2, "bf16"), TensorInfo((4, 2), 2, "bf16")
        >>> work("aten.mm.default", (x, w), (y,)).flops
        128
    """
    counter = TABLE.get(operator_name)
    if counter is not None:
        return counter(inputs, outputs, arguments)
    packet = operator_name.rpartition(".")[0] if operator_name.count(".") > 1 else operator_name
    if packet in CONTRACTIONS:
        raise UnknownOperatorError(
            f"Operator {operator_name!r} contracts its operands and has no cost formula; "
            f"add one in cost_models with @operator_cost({operator_name!r}). Inputs: {list(inputs)}."
        )
    if operator_name.startswith(("_c10d_functional.", "c10d_functional.", "_dtensor.", "symm_mem.")):
        raise UnknownOperatorError(f"{operator_name!r} is a collective: price it with cost_models.collectives.")
    return memory_bound(inputs, outputs, arguments)


_VIEW_NAMES = """
    t.default view.default view.dtype _unsafe_view.default reshape.default _reshape_alias.default
    transpose.int permute.default expand.default expand_as.default unsqueeze.default squeeze.default
    squeeze.dim squeeze.dims slice.Tensor select.int split.Tensor split_with_sizes.default split.sizes
    chunk.default unbind.int detach.default alias.default narrow.default as_strided.default
    diagonal.default unfold.default view_as_real.default view_as_complex.default real.default imag.default
    movedim.int flatten.using_ints unflatten.int sym_size.int sym_numel.default sym_stride.int
    lift_fresh.default view_as.default T.default mT.default numpy_T.default swapaxes.default
    positive.default
"""
VIEWS = tuple(_VIEW_NAMES.split())


@operator_cost(
    *(f"aten.{name}" for name in VIEWS),
    *("operator.getitem", "_operator.getitem", "<built-in function getitem>", "getitem"),
    *(
        "_c10d_functional.wait_tensor.default",
        "prims.view_of.default",
        "aten.empty.memory_format",
        "aten.new_empty.default",
    ),
    *("aten.empty_like.default", "aten.new_empty_strided.default", "aten.empty_strided.default"),
)
def view(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Nothing is moved and nothing is launched."""
    return FREE


@operator_cost(
    *("aten.ones_like.default", "aten.zeros_like.default", "aten.full_like.default", "aten.new_zeros.default"),
    *("aten.new_ones.default", "aten.new_full.default", "aten.rand_like.default", "aten.randn_like.default"),
)
def factory(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Results are written; the operand gives its shape only."""
    return memory_bound((), outputs)


@operator_cost(
    *("aten.embedding.default", "aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.gather.default"),
    *("aten.index_select.default", "aten.take_along_dim.default", "aten.take.default"),
)
def lookup(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """The rows looked up are read, not the table: reads = bytes of the result + indices; writes = the result."""
    result = size_bytes(outputs)
    return Work(0, result + size_bytes(inputs[1:]), result, Kind.GATHER, compute_dtype(inputs))


@operator_cost("aten.embedding_dense_backward.default", "aten.embedding_backward.default")
def embedding_backward(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]
) -> Work:
    """The local table's whole gradient is zeroed, then each row of grad_output is added to it (read twice)."""
    rows = size_bytes(inputs[:1])
    return Work(
        numel(inputs[0]),
        2 * rows + size_bytes(inputs[1:]),
        size_bytes(outputs) + rows,
        Kind.GATHER,
        compute_dtype(inputs),
    )


@operator_cost("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def fft(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """arguments: (x, dim, ...). 5 N log2 N for a complex transform of N points, half for a real one (FFTW's count).

    Reads and writes x once for each dim that is transformed. Complex numbers are counted as float32 ones.
    """
    whole = max(inputs[0].shape, outputs[0].shape, key=prod)
    dims = tuple(arguments[1]) if len(arguments) > 1 else tuple(range(len(whole)))  # type: ignore[arg-type]
    per_element = 5 * sum(log2(max(2, whole[dim])) for dim in dims)
    flops = prod(whole) * per_element * (1.0 if inputs[0].dtype == outputs[0].dtype else 0.5)
    passes = max(1, len(dims))
    return Work(flops, passes * size_bytes(inputs), passes * size_bytes(outputs), Kind.REDUCTION, "f32")


@operator_cost("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
def sort(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Radix sort: one pass per byte of the key, each reads and writes keys and indices (Merrill, Grimshaw 2011)."""
    passes = inputs[0].itemsize
    moved = passes * (size_bytes(inputs[:1]) + 8 * numel(inputs[0]))
    return Work(0, moved, moved, Kind.REDUCTION, compute_dtype(inputs))
