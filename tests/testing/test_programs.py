"""Drawn programs are ordinary models with finite gradients, and their source reproduces them."""

import torch
from hypothesis import given
from torch.utils import _pytree as pytree

from autoshard.testing.programs import DrawnProgram, programs, run_source


@given(programs())
def test_drawn_programs_run_and_have_finite_gradients(program: DrawnProgram) -> None:
    """Every output is finite float32, and every parameter that the loss uses has a finite gradient."""
    leaves = pytree.tree_leaves(program.model(*program.inputs))
    assert all(leaf.dtype == torch.float32 and leaf.isfinite().all() for leaf in leaves)
    parameters = list(program.model.parameters())
    gradients = torch.autograd.grad(leaves[0].sum(), parameters, allow_unused=True) if parameters else ()
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


@given(programs())
def test_source_reproduces_the_program(program: DrawnProgram) -> None:
    """Running the source again gives the same parameters and inputs, and does not change the random state."""
    state = torch.random.get_rng_state()
    again = run_source(program.source)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = zip(program.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    assert all(torch.equal(first, second) for first, second in zip(program.inputs, again.inputs, strict=True))


@given(programs(uneven=False))
def test_even_programs_divide_by_four(program: DrawnProgram) -> None:
    """Without uneven dims, every dim of every input divides by four."""
    assert all(size % 4 == 0 for tensor in program.inputs for size in tensor.shape)
