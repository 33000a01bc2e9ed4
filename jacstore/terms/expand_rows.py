"""Form rows of one leaf from its factors in slabs, a few channels of cotangents at a time.

The columns of a slab stand in another order than those of the leaf; products of rows do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jacstore.base import machine
from jacstore.base.limits import LIMITS
from jacstore.base.threads import all_done, blas_threads
from jacstore.terms.kinds import Leaf, expand
from jacstore.terms.term import Factored

Operands = Mapping[str, np.ndarray]
# Numbers of inputs that are cut out at once, to be multiplied while they are in the cache.
CUT_NUMBERS = 250_000


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
    orders = {term.order() for term in leaf.factored}
    if len(orders) > 1 or None in orders:
        yield from _column_slabs(leaf, sources, slab_columns, threads or machine.cores())
        return
    terms = [term.for_slabs() for term in leaf.factored]
    channels = sources[0][terms[0].cotangents].shape[-1]
    columns = leaf.size // channels
    channel_bytes = columns * max(source[terms[0].cotangents][:, :, 0, 0, 0].nbytes for source in sources)
    width = max(1, min(channels, max(slab_columns // columns, LIMITS.expanded_bytes // channel_bytes)))
    counts = {term.input_columns(sources[0]) for term in terms}
    if len(counts) == 1 and None not in counts:
        row_bytes = channel_bytes // columns
        least = min(LIMITS.slab_columns, max(columns, LIMITS.expanded_bytes // row_bytes))
        yield from _product_slabs(terms, sources, (columns, channels), max(slab_columns, least), threads)
        return
    names = {term.cotangents for term in terms}
    given = [_with_patches(terms, source) for source in sources] if patches_kept else sources
    if patches_kept:
        terms = [term.of_patches() for term in terms]
    threads = threads or machine.cores()
    with ThreadPoolExecutor(threads, "jacstore-expand") as pool:
        for first in range(0, channels, width):
            last = min(first + width, channels)
            slabs = []
            some = [term.of_channels(first, last) for term in terms]
            for source in given:
                cut = {name: v[..., first:last] if name in names else v for name, v in source.items()}
                slabs.append(_rows(some, cut, slice(0, columns * (last - first)), pool, threads))
            yield slabs


def _product_slabs(
    terms: Sequence[Factored], sources: Sequence[Operands], shape: tuple[int, int], most: int, threads: int | None
) -> Iterator[list[np.ndarray]]:
    """Slabs of up to `most` columns: some columns of inputs, or of patches, times some channels of cotangents.

    Both are cut, so that each product is wide enough for BLAS, and nothing but the slab itself is kept.
    """
    columns, channels = shape
    along = min(channels, most, max(LIMITS.expanded_channels, most // columns))
    down = min(columns, max(1, most // along))
    threads = threads or machine.cores()
    with ThreadPoolExecutor(threads, "jacstore-expand") as pool:
        for a in range(0, columns, down):
            for c in range(0, channels, along):
                inputs, some = slice(a, min(a + down, columns)), slice(c, min(c + along, channels))
                yield [_products(terms, source, inputs, some, pool, threads) for source in sources]


def _products(
    terms: Sequence[Factored],
    operands: Operands,
    inputs: slice,
    channels: slice,
    pool: ThreadPoolExecutor,
    threads: int,
) -> np.ndarray:
    """Rows `(n, K, inputs * channels)`, a few examples at a time, written where they belong."""
    n, k, _, t, _ = operands[terms[0].cotangents].shape
    shape = inputs.stop - inputs.start, channels.stop - channels.start
    rows = np.empty((n, k, *shape), operands[terms[0].cotangents].dtype)
    step = max(1, min(-(-n // (4 * threads)), CUT_NUMBERS // (t * shape[0])))

    def fill(start: int) -> None:
        part = {name: values[start : start + step] for name, values in operands.items()}
        into = rows[start : start + step]
        # As in an item; threads of a pool do not inherit it.
        with np.errstate(over="ignore", invalid="ignore"):
            for number, term in enumerate(terms):
                a = term.some_inputs(part, inputs.start, inputs.stop).swapaxes(1, 2)[:, None]
                d = part[term.cotangents][:, :, 0, :, channels]
                found = np.matmul(a, d) if number else np.matmul(a, d, out=into)
                if term.scale != 1:
                    found *= found.dtype.type(term.scale)
                if number:
                    into += found

    with blas_threads(1):
        all_done(pool, fill, range(0, n, step))
    return rows.reshape(n, k, -1)


def _column_slabs(
    leaf: Leaf, sources: Sequence[Operands], slab_columns: int, threads: int
) -> Iterator[list[np.ndarray]]:
    """Columns of rows whose channels of cotangents are mixed: rows are formed anew for every slab."""
    column_bytes = max(source[leaf.factored[0].cotangents][:, :, 0, 0, 0].nbytes for source in sources)
    width = max(slab_columns, LIMITS.expanded_bytes // column_bytes)
    with ThreadPoolExecutor(threads, "jacstore-expand") as pool:
        for first in range(0, leaf.size, width):
            some = slice(first, min(first + width, leaf.size))
            yield [_rows(leaf.factored, source, some, pool, threads, leaf.size) for source in sources]


def _rows(
    terms: Sequence[Factored],
    operands: Operands,
    columns: slice,
    pool: ThreadPoolExecutor,
    threads: int,
    size: int | None = None,
) -> np.ndarray:
    """Rows `(n, K, columns)`, a range of examples per thread: a product of one example is too small for several."""
    size = columns.stop - columns.start if size is None else size
    cotangents = operands[terms[0].cotangents]
    n = len(cotangents)
    rows = np.empty((n, cotangents.shape[1], columns.stop - columns.start), cotangents.dtype)
    # Whole rows, of which columns are kept, and what is summed to them may be much larger than the slab.
    larger = -(-max(term.most_numbers(size) for term in terms) // rows.shape[2])
    step = max(1, -(-n // (4 * threads)) // larger)

    def fill(start: int) -> None:
        part = {name: values[start : start + step] for name, values in operands.items()}
        rows[start : start + step] = expand(terms, part, size)[..., columns]

    with blas_threads(1):
        for _ in pool.map(fill, range(0, n, step)):
            pass
    return rows


def _with_patches(terms: Sequence[Factored], operands: Operands) -> Operands:
    return {**operands, **{name: values for term in terms for name, values in term.patch_operands(operands).items()}}
