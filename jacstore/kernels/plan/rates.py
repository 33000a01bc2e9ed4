"""How fast this machine's BLAS multiplies beside what is done number by number: the weights of a plan's choices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

from jacstore.base.threads import blas_threads

# Adding and multiplying numbers one by one costs about this many multiplications of a matrix product.
ELEMENTWISE = 12


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Costs in operations of a large matrix product.

    Attributes
    ----------
    elementwise
        Of a number that is added or multiplied by itself.
    expanding
        Of an operation that forms rows, in products of one example.
    """

    elementwise: int = ELEMENTWISE
    expanding: int = 1

    def to_dict(self) -> dict[str, int]:
        """As JSON."""
        return asdict(self)


@cache
def measured_rates() -> Rates:
    """Rates of one thread of this process, measured once, in some milliseconds.

    Powers of four: the choices of a busy machine are those of an idle one, and seldom another process's.
    """
    draw = np.random.default_rng(0)
    a, b, out = (draw.standard_normal((512, 512), np.float32) for _ in range(3))
    # Sums over windows run over products of some pairs of examples, a few positions further along.
    pairs, total = (draw.standard_normal((16, 22, 16, 88), np.float32) for _ in range(2))
    patches = draw.standard_normal((32, 16, 64), np.float32)
    cotangents, rows = draw.standard_normal((32, 64, 256), np.float32), np.empty((32, 16, 256), np.float32)
    with blas_threads(1):
        product = _seconds(lambda: np.matmul(a, b, out=out)) / (2 * 512**3)
        elementwise = _seconds(lambda: np.add(total[1:], pairs[:-1], out=total[1:])) / total[1:].size
        expanding = _seconds(lambda: np.matmul(patches, cotangents, out=rows)) / (2 * 64 * rows.size)
    return Rates(elementwise=_power_of_four(elementwise / product), expanding=_power_of_four(expanding / product))


def _seconds(work: Callable[[], object]) -> float:
    """The fastest of a few runs, in seconds of this thread: others may use the cores meanwhile."""
    work()
    found = []
    for _ in range(5):
        started = time.thread_time()
        work()
        found.append(time.thread_time() - started)
    # Where clocks are coarse a short run may take no time.
    return max(min(found), 1e-9)


def _power_of_four(ratio: float) -> int:
    return int(4 ** round(math.log(min(max(ratio, 1), 4096), 4)))
