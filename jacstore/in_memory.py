"""Kernels of small data in one call: what `build` and `gram` do, in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jacstore.base.budget import Budget
from jacstore.base.machine import default_memory
from jacstore.kernels.gram import gram
from jacstore.problem.problem import Problem
from jacstore.rows.build import build
from jacstore.store.reader import JacobianStore


def ntk(
    apply: Callable[[Any, Any], Any],
    params: Any,
    inputs: Any,
    other: Any = None,
    *,
    mode: str = "full",
    dtype: str = "float32",
    memory: int | str | None = None,
    **problem: Any,
) -> np.ndarray:
    """The empirical neural tangent kernel in memory, without files: for small data.

    Parameters
    ----------
    apply, params, inputs
        As for `Problem`; further keywords go there too.
    other
        Inputs of the columns; `inputs` if not given.
    mode
        full `(N*K, M*K)`, trace `(N, M)` (the sum over outputs, not the mean), diagonal `(K, N, M)` or blocks
        `(N, K, K)`.
    dtype
        As for `build`.

    Returns
    -------
    numpy.ndarray
        float64.
    """
    budget, stores = Budget(default_memory(memory)), list[JacobianStore]()
    for x in (inputs, other):
        if x is not None:
            # The first store stays in RAM while the second is built.
            left = max(1, budget.beside(stores_in_ram=sum(store.files.bytes_held for store in stores)))
            stores.append(
                build(Problem(apply=apply, params=params, inputs=x, **problem), None, dtype=dtype, memory=left)
            )
    return gram(stores[0], stores[1] if other is not None else None, mode=mode, memory=budget.total).array.compute(
        scheduler="synchronous"
    )
