"""FLOPs and bytes of operators, in one table by operator name ("aten.mm.default"); shapes are those on a rank.

Operands and results are each moved once, with three corrections: views move nothing, factories read nothing, and
lookups read only the returned rows. An operator without an entry counts as memory-bound. If its name is like that of a
contraction ("solve"), `UnknownOperatorError` is raised instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import log2, prod
from types import MappingProxyType

# Each import fills its part of the tables.
from cost_models import contractions as contractions
from cost_models import experts as experts
from cost_models import factorisations as factorisations
from cost_models import newton_schulz as newton_schulz
from cost_models import recurrent as recurrent
from cost_models import ring as ring
from cost_models.counting import FREE, TABLE, compute_dtype, memory_bound, numel, operator_cost, size_bytes
from cost_models.errors import UnknownOperatorError
from cost_models.exchanges import EXCHANGES as EXCHANGES
from cost_models.exchanges import WORKSPACE_BYTES as WORKSPACE_BYTES
from cost_models.work import Kind, TensorInfo, Work

_CONTRACTING_WORDS = re.compile(
    r"(^|_)(mm|bmm|addmm|\w*matmul|gemm|dot|einsum|linalg|solve|svd|eigh?|qr|cdist|fft|lstm|gru|rnn|attention|mha|conv(?:olution)?)"
    r"($|_|\d)"
)


def work(
    operator_name: str, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...] = ()
) -> Work:
    """Return the FLOPs and bytes of one call on a rank.

    Args:
        operator_name: `str(node.target)` of an OpOverload, e.g. "aten.mm.default"; "operator.getitem" is free.
        inputs: local tensors in the order of the call. Lists are flattened, and absent optional tensors are left out.
        outputs: local results, without absent results.
        arguments: the call's positional arguments in schema order. Tensors among them are ignored. Only operators whose
            work depends on more than shapes read them, e.g. attention (is_causal) and convolution (groups).

    Raises:
        UnknownOperatorError: a contraction, or a collective, has no entry.

    Example:
        >>> x, w, y = TensorInfo((4, 8), 2, "bf16"), TensorInfo((8, 2), 2, "bf16"), TensorInfo((4, 2), 2, "bf16")
        >>> work("aten.mm.default", (x, w), (y,)).flops
        128
    """
    counter = TABLE.get(operator_name)
    if counter is not None:
        return counter(inputs, outputs, arguments)
    if seems_to_contract(operator_name):
        raise UnknownOperatorError(
            f"Operator {operator_name!r} seems to contract its operands and has no cost formula; add one with "
            f"@cost_models.counting.operator_cost({operator_name!r}). Inputs: {list(inputs)}."
        )
    if operator_name.startswith(("_c10d_functional.", "c10d_functional.", "_dtensor.", "symm_mem.")):
        raise UnknownOperatorError(f"{operator_name!r} is a collective: price it with cost_models.collectives.")
    return memory_bound(inputs, outputs, arguments)


def seems_to_contract(operator_name: str) -> bool:
    """Whether an operator has no formula, and a name like that of a contraction, such as "einsum" or "solve".

    The time of a contraction does not follow from its bytes.
    """
    parts = operator_name.replace("::", ".").split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return operator_name not in TABLE and _CONTRACTING_WORDS.search(name) is not None


_VIEW_NAMES = """
    t.default view.default view.dtype _unsafe_view.default reshape.default _reshape_alias.default
    transpose.int permute.default expand.default expand_as.default unsqueeze.default squeeze.default
    squeeze.dim squeeze.dims slice.Tensor select.int split.Tensor split_with_sizes.default split.sizes
    chunk.default unbind.int detach.default alias.default narrow.default as_strided.default
    diagonal.default unfold.default view_as_real.default view_as_complex.default real.default imag.default
    movedim.int flatten.using_ints unflatten.int sym_size.int sym_numel.default sym_stride.int
    lift_fresh.default view_as.default T.default mT.default numpy_T.default swapaxes.default
    positive.default adjoint.default mH.default matrix_H.default _conj.default _neg_view.default
    resolve_conj.default resolve_neg.default unsafe_chunk.default unsafe_split.Tensor
    unsafe_split_with_sizes.default contiguous.default
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
    """Return the work of a view, `FREE`: nothing is moved and nothing is launched."""
    return FREE


@operator_cost(
    *("aten.ones_like.default", "aten.zeros_like.default", "aten.full_like.default", "aten.new_zeros.default"),
    *("aten.new_ones.default", "aten.new_full.default", "aten.rand_like.default", "aten.randn_like.default"),
)
def factory(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Return the work of a factory such as `zeros_like`: the result is written, and operands give only a shape."""
    return memory_bound((), outputs)


RANDOM_KERNELS: Mapping[str, int] = MappingProxyType({"random": 190, "poisson": 2300, "binomial": 540, "gamma": 1840})
"""Number of kernels that each operator on random numbers of `autoshard.kernels` launches; for "random" within 7 %.

Rejection sampling launches more kernels for more elements; the numbers are for 100,000 elements.
"""

_WORD_BYTES = 8


def _register_random(name: str) -> None:
    def count(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
        """Return the work of a random operator: each kernel reads and writes 64 bits per element, with one FLOP."""
        kernels, elements = RANDOM_KERNELS[name], numel(outputs[0])
        moved = kernels * elements * _WORD_BYTES
        return Work(kernels * elements, moved, moved, Kind.POINTWISE, "f32", steps=kernels)

    operator_cost(f"autoshard.{name}.default")(count)


for _name in RANDOM_KERNELS:
    _register_random(_name)


@operator_cost(
    *("aten.embedding.default", "aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.gather.default"),
    *("aten.index_select.default", "aten.take_along_dim.default", "aten.take.default"),
)
def lookup(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Return the work of a lookup: it reads indices and the looked-up rows of the table, and writes the result."""
    result = size_bytes(outputs)
    return Work(0, result + size_bytes(inputs[1:]), result, Kind.GATHER, compute_dtype(inputs))


@operator_cost("aten.embedding_dense_backward.default", "aten.embedding_backward.default")
def embedding_backward(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]
) -> Work:
    """Return the work of the gradient of an embedding's local table.

    All rows of the table's gradient are set to zero, then each row of the result's gradient is added to its row.
    """
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
    """Return the work of a Fourier transform of N points: 5 N log2 N FLOPs if complex, half if real (as FFTW).

    The transform reads and writes x once for each transformed dim. Complex numbers count as pairs of float32.

    arguments: (x, dim, ...).
    """
    whole = max(inputs[0].shape, outputs[0].shape, key=prod)
    dims = tuple(arguments[1]) if len(arguments) > 1 else tuple(range(len(whole)))  # type: ignore[arg-type]
    per_element = 5 * sum(log2(max(2, whole[dim])) for dim in dims)
    flops = prod(whole) * per_element * (1.0 if inputs[0].dtype == outputs[0].dtype else 0.5)
    passes = max(1, len(dims))
    return Work(flops, passes * size_bytes(inputs), passes * size_bytes(outputs), Kind.REDUCTION, "f32")


@operator_cost(
    *("aten.linalg_vector_norm.default", "aten.linalg_cross.default", "aten._thnn_fused_lstm_cell.default"),
    *("aten._thnn_fused_gru_cell.default", "aten._thnn_fused_lstm_cell_backward_impl.default"),
    "aten._thnn_fused_gru_cell_backward.default",
)
def bytes_alone(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Return the work of moving the operands and results, with one FLOP for each element of the largest.

    Without this entry, `work` would raise for these operators, because their names match `_CONTRACTING_WORDS`.
    """
    return memory_bound(inputs, outputs)


@operator_cost("autoshard.ctc_loss.default")
def ctc_loss(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Return the work of the CTC loss, from the elements of its second result, log_alpha [N, T, 2 S + 1].

    Each element adds three exponentials and one log-probability, some 10 operations in torch's kernel. Each column of
    log_alpha is read once for the next column.
    """
    table = outputs[1]
    read = size_bytes(inputs) + size_bytes([table])
    return Work(10 * numel(table), read, size_bytes(outputs), Kind.GATHER, compute_dtype(inputs))


@operator_cost("autoshard.ctc_loss_backward.default")
def ctc_loss_backward(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]
) -> Work:
    """Return the work of the CTC loss's gradient.

    Backward variables, as large as log_alpha (the last operand), are written and read.
    """
    table = inputs[-1]
    read, written = size_bytes(inputs) + 2 * size_bytes([table]), size_bytes(outputs) + size_bytes([table])
    return Work(20 * numel(table), read, written, Kind.GATHER, compute_dtype(inputs))


_SORTING_NAMES = """
    sort.default sort.stable argsort.default argsort.stable msort.default median.default median.dim
    nanmedian.default nanmedian.dim mode.default unique_dim.default _unique2.default unique_consecutive.default
"""


@operator_cost(*(f"aten.{name}" for name in _SORTING_NAMES.split()))
def sort(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Return the work of a radix sort (Merrill, Grimshaw 2011).

    For each byte of the key, keys and indices are read and written once.
    """
    passes = inputs[0].itemsize
    moved = passes * (size_bytes(inputs[:1]) + 8 * numel(inputs[0]))
    return Work(0, moved, moved, Kind.REDUCTION, compute_dtype(inputs), steps=passes)


@operator_cost("aten.topk.default", "aten.kthvalue.default")
def radix_select(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Return the work of a radix select: one read for each byte of the key, and a final gather (Alabi et al. 2012)."""
    passes = inputs[0].itemsize + 1
    read = passes * size_bytes(inputs[:1])
    return Work(0, read, size_bytes(outputs), Kind.REDUCTION, compute_dtype(inputs), steps=passes)


@operator_cost("aten.searchsorted.Tensor", "aten.bucketize.Tensor")
def binary_search(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Return the work of a binary search: each value reads log2(n) of the n boundaries.

    At most 4 of these reads miss the cache.
    """
    values = outputs[0]
    misses = min(4.0, log2(max(2, max(tensor.shape[-1] if tensor.shape else 1 for tensor in inputs))))
    read = size_bytes(inputs) + misses * 32 * numel(values)  # a miss moves a sector of 32 bytes
    return Work(0, read, size_bytes(outputs), Kind.GATHER, compute_dtype(inputs))


@operator_cost(
    *("aten._sparse_mm.default", "aten._sparse_addmm.default", "aten.sparse_sampled_addmm.default"),
    "aten._cslt_sparse_mm.default",
)
def sparse(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], arguments: tuple[object, ...]) -> Work:
    """Raise UnknownOperatorError, because a trace does not know how many elements a sparse matrix stores."""
    raise UnknownOperatorError(
        "Sparse products have no cost formula: how many elements are stored is not known. Multiply the dense matrix, "
        f"matrix.to_dense() @ x. Inputs: {list(inputs)}."
    )
