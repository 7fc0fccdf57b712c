"""NumPy's linear algebra has one thread during a search, and its former threads afterwards."""

from __future__ import annotations

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from passes.solver.one_thread import one_blas_thread


def threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_there_is_one_thread_while_it_is_open() -> None:
    """Within `one_blas_thread` there is one thread, and afterwards there are two again, also after an error."""
    with threadpool_limits(2, "blas"):
        with one_blas_thread():
            assert threads() == {1}
        assert threads() == {2}
        assert one_blas_thread()(threads)() == {1}
        with pytest.raises(ValueError, match="the search fails"), one_blas_thread():
            raise ValueError("the search fails")
        assert threads() == {2}
