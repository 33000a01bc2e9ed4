"""In: factors of one leaf for some examples. Out: slabs of its rows, a few channels of cotangents at a time.

The columns of a slab stand in another order than those of the leaf; products of rows do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np

from jacstore.base import machine
from jacstore.base.blas_threads import blas_threads
from jacstore.base.limits import EXPANDED_BYTES
from jacstore.terms.kinds import Leaf, expand
from jacstore.terms.term import Factored

Operands = Mapping[str, np.ndarray]


def expanded_slabs(
    leaf: Leaf, sources: Sequence[Operands], slab_columns: int, *, patches_kept: bool, threads: int | None = None
) -> Iterator[list[np.ndarray]]:
    """Rows of a factored leaf as slabs `(n, K, w)`, one for each source.

    Parameters
    ----------
    sources
        Operands `(n, ...)` of the examples on each side of the products.
    slab_columns
        Columns of a slab at least, where rows are that long.
    patches_kept
        Whether images are cut into patches once, which takes memory, or anew for every slab.
    """
    terms: list[Factored] = [term.changed(views=()) for term in leaf.factored]
    channels = sources[0][terms[0].cotangents].shape[-1]
    columns = leaf.size // channels
    channel_bytes = columns * max(source[terms[0].cotangents][:, :, 0, 0, 0].nbytes for source in sources)
    width = max(1, min(channels, max(slab_columns // columns, EXPANDED_BYTES // channel_bytes)))
    names = {term.cotangents for term in terms}
    given = [_with_patches(terms, source) for source in sources] if patches_kept else sources
    if patches_kept:
        terms = [term.of_patches() for term in terms]
    threads = threads or machine.cores()
    with ThreadPoolExecutor(threads, "jacstore-expand") as pool:
        for first in range(0, channels, width):
            last = min(first + width, channels)
            slabs = []
            for source in given:
                cut = {name: v[..., first:last] if name in names else v for name, v in source.items()}
                slabs.append(_rows(terms, cut, columns * (last - first), pool, threads))
            yield slabs


def _rows(terms: Sequence[Factored], operands: Operands, columns: int, pool: Executor, threads: int) -> np.ndarray:
    """Rows `(n, K, columns)`, a range of examples per thread: a product of one example is too small for several."""
    cotangents = operands[terms[0].cotangents]
    n = len(cotangents)
    rows = np.empty((n, cotangents.shape[1], columns), cotangents.dtype)
    step = -(-n // (4 * threads))

    def fill(start: int) -> None:
        part = {name: values[start : start + step] for name, values in operands.items()}
        rows[start : start + step] = expand(tuple(terms), part, columns)

    with blas_threads(1):
        for _ in pool.map(fill, range(0, n, step)):
            pass
    return rows


def _with_patches(terms: Sequence[Factored], operands: Operands) -> Operands:
    return {**operands, **{name: values for term in terms for name, values in term.patch_operands(operands).items()}}
