"""Standard normal noise from a key, the same in whatever order and whatever blocks it is asked for.

Counter-based (Philox): the numbers of a sample are found by its number and by blocks of columns, so that a second pass
draws them again instead of keeping them, and neither memory nor other samples change them.

References
----------
Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, doi:10.1145/2063384.2063405.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jacstore.errors import InvalidRequestError

BLOCK = 8192  # numbers that are drawn together
PARAMETERS, ROWS = 0, 1


class Noise(Protocol):
    """The input of a sampler: columns of numbers, one column per sample."""

    @property
    def n(self) -> int: ...

    def parameters(self, start: int, stop: int) -> np.ndarray:
        """Numbers of parameters `start` to `stop`, `(stop - start, n)`."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Numbers of rows of J `start` to `stop`, `(stop - start, n)`."""


@dataclass(frozen=True, kw_only=True)
class KeyedNoise:
    """Standard normal noise of samples 0 to n of a key."""

    key: int
    n: int

    def __post_init__(self) -> None:
        for name, given, low in (("key", self.key, 0), ("n", self.n, 1)):
            integer = isinstance(given, int | np.integer) and not isinstance(given, bool)
            if not integer or not low <= given < 2**64:
                raise InvalidRequestError(f"--{name} {given}: allowed are integers from {low} below 2**64 ({name}=)")

    def parameters(self, start: int, stop: int) -> np.ndarray:
        """Numbers of parameters `start` to `stop`, `(stop - start, n)`."""
        return self._columns(PARAMETERS, start, stop)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Numbers of rows of J `start` to `stop`, `(stop - start, n)`."""
        return self._columns(ROWS, start, stop)

    def _columns(self, stream: int, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, self.n))
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first = block * BLOCK
            a, b = max(start, first), min(stop, first + BLOCK)
            for index in range(self.n):
                # Drawing advances the lowest word of the counter.
                bits = np.random.Philox(key=[int(self.key), index], counter=[0, 0, block, stream])
                out[a - start : b - start, index] = np.random.Generator(bits).standard_normal(b - first)[a - first :]
        return out
