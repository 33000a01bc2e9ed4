"""Resolve NumPy-style indices into the block that must be read and an index within it."""

from __future__ import annotations

import operator
from typing import Any


def resolve(index: Any, shape: tuple[int, ...]) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """Spans `(low, high)` of the smallest block that holds an index, and the index within that block.

    Integers drop their axis, as in NumPy; slices may have any step.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    entries += [slice(None)] * (len(shape) - len(entries))
    spans: list[tuple[int, int]] = []
    within: list[Any] = []
    for entry, length in zip(entries, shape, strict=True):
        if not isinstance(entry, slice):
            at = operator.index(entry) % length
            spans.append((at, at + 1))
            within.append(0)
            continue
        taken = range(*entry.indices(length))
        if taken:
            spans.append((min(taken[0], taken[-1]), max(taken[0], taken[-1]) + 1))
            within.append(slice(None, None, taken.step))
        else:
            spans.append((0, 0))
            within.append(slice(None))
    return spans, tuple(within)
