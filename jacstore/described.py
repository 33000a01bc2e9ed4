"""In: a lazy kernel. Out: the same array, which also says how far its numbers are known and what they are not."""

from __future__ import annotations

import dask.array as da


class DescribedArray(da.Array):
    """A lazy float64 kernel, made from stored or computed products; arrays derived from it lose these attributes.

    Attributes
    ----------
    roundoff
        `u` such that the entries are known to about `u |G_ij|`.
    exact_diagonal
        Whether the diagonal of the kernel was replaced by exact norms.
    kernel_mode
        Mode of the kernel: full, trace, diagonal or blocks.
    """

    roundoff: float
    exact_diagonal: bool
    kernel_mode: str


def described(array: da.Array, *, roundoff: float, exact_diagonal: bool, mode: str) -> DescribedArray:
    """The array with what is known of it."""
    found = DescribedArray(array.dask, array.name, array.chunks, dtype=array.dtype)
    found.roundoff, found.exact_diagonal, found.kernel_mode = roundoff, exact_diagonal, mode
    return found
