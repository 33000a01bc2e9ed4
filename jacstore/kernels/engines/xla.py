"""Products of slabs of rows on a device by XLA, added to accumulators there or, if these are too large, on the host.

The matmul precision is always explicit: the default on recent GPUs is TF32. On a CPU this engine can be forced, so that
tests run the code that a GPU runs.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jacstore.base.budget import GRAM_ON_ACCELERATOR, Budget
from jacstore.base.devices import accelerator_memory, device, on_accelerator
from jacstore.base.modes import Mode
from jacstore.terms.factor_set import FactorSet

# Numbers of a block of products of pairs of positions on the device.
PRODUCT_NUMBERS = 16_000_000


class XlaEngine:
    """Products by `lax.dot_general`, sums in float64.

    16-bit rows are multiplied as they are: the product of two of them is exact in float32, in which they are summed
    within a slab. `fast` rounds float32 rows to TF32 on GPUs and to bfloat16 elsewhere.

    Parameters
    ----------
    precision
        float64, float32 or fast.
    stored
        The type of the stored rows.
    resident_bytes
        Accumulators stay on the device up to this size, otherwise on the host.
    """

    name = "xla"
    slab_copies = 4
    tile_copies = 4

    def __init__(self, precision: str, stored: str, resident_bytes: int | None = None) -> None:
        self.precision, self.stored = precision, stored
        sixteen = stored in ("bfloat16", "float16") and precision != "float64"
        self.slab_dtype = np.dtype("uint16" if stored == "bfloat16" and sixteen else stored if sixteen else "float32")
        if precision == "float64":
            self.slab_dtype = np.dtype("float64")
        # Factors are multiplied before they are summed: they keep more digits than rows need.
        self.factor_dtype = np.dtype("float64" if precision == "float64" else "float32")
        self.device = f"{device().platform}: {device().device_kind}"
        self._left = resident_bytes
        self._on_gpu = device().platform != "cpu"
        self.rounded_to: str | None = None
        if precision == "fast":
            # Products of 16-bit rows are exact; products of factors are TF32 on a device, float32 elsewhere.
            self.rounded_to = "tf32" if self._on_gpu else None if sixteen else "bfloat16"

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.restore(np.zeros(shape))

    def restore(self, total: np.ndarray) -> Any:
        if self._left is not None:
            if total.nbytes > self._left:
                return np.array(total)
            self._left -= total.nbytes
        with jax.enable_x64(True):
            return jnp.array(total)

    def load(self, slab: np.ndarray) -> Any:
        with jax.enable_x64(True):
            # A copy: on a CPU `device_put` may keep the host buffer, which the next read overwrites.
            operand = jnp.array(slab, copy=True)
            if self.slab_dtype == np.uint16:
                operand = lax.bitcast_convert_type(operand, jnp.bfloat16)
            elif self.precision == "fast" and operand.dtype == jnp.float32 and not self._on_gpu:
                operand = operand.astype(jnp.bfloat16)
            return jax.block_until_ready(operand)

    def add(self, mode: Mode, total: Any, a: Any, rows: slice, b: Any, cols: slice, columns: slice) -> Any:
        sizes = (rows.stop - rows.start, cols.stop - cols.start, columns.stop - columns.start)
        starts = (rows.start, cols.start, columns.start)
        exact = not (self.precision == "fast" and self._on_gpu)
        with jax.enable_x64(True):
            if isinstance(total, np.ndarray):
                np.add(total, np.asarray(_product(mode, a, b, starts, sizes, exact)), out=total)
                return total
            return _add(total, mode, a, b, starts, sizes, exact)

    def load_factors(self, factors: FactorSet) -> FactorSet:
        with jax.enable_x64(True):
            return factors.on_device(jnp.asarray)

    def add_factors(self, mode: Mode, total: Any, a: FactorSet, rows: slice, b: FactorSet, cols: slice) -> Any:
        m, n = rows.stop - rows.start, cols.stop - cols.start
        block = m if mode.within_examples else a.block_examples(PRODUCT_NUMBERS)
        host = total if isinstance(total, np.ndarray) else np.zeros(total.shape)
        precision = None if self.precision == "fast" and self._on_gpu else "highest"
        with jax.enable_x64(True), jax.default_matmul_precision(precision):
            for i, j in itertools.product(range(0, m, block), range(0, n, block)):
                left = slice(rows.start + i, min(rows.start + i + block, rows.stop))
                right = slice(cols.start + j, min(cols.start + j + block, cols.stop))
                if mode.within_examples:
                    host += sum(np.asarray(part, np.float64) for part in a.own_parts(left, jnp))
                    continue
                size = slice(i, i + left.stop - left.start), slice(j, j + right.stop - right.start)
                target = mode.view(host, *size, a.n_outputs)
                target += np.asarray(sum(part.astype(jnp.float64) for part in a.parts(mode, left, b, right, jnp)))
            return host if host is total else total + jnp.asarray(host)

    def fetch(self, total: Any) -> np.ndarray:
        return np.array(total, np.float64)


@partial(jax.jit, static_argnames=("mode", "sizes", "exact"))
def _product(mode: Mode, a: Any, b: Any, starts: tuple[Any, Any, Any], sizes: tuple[int, int, int], exact: bool) -> Any:
    outputs = a.shape[1]
    left = lax.dynamic_slice(a, (starts[0], 0, starts[2]), (sizes[0], outputs, sizes[2]))
    right = lax.dynamic_slice(b, (starts[1], 0, starts[2]), (sizes[1], outputs, sizes[2]))
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    product = jnp.einsum(mode.equation, left, right, precision=precision, preferred_element_type=wide)
    return product.reshape(mode.shape(*sizes[:2], outputs))


@partial(jax.jit, static_argnames=("mode", "sizes", "exact"), donate_argnums=0)
def _add(
    total: Any, mode: Mode, a: Any, b: Any, starts: tuple[Any, Any, Any], sizes: tuple[int, int, int], exact: bool
) -> Any:
    return total + _product(mode, a, b, starts, sizes, exact).astype(total.dtype)


def resident_bytes(given: int | None) -> int | None:
    """Bytes of accumulators that may stay on the device, of what `--device-memory` gives or of what there is.

    None on a CPU, where device and host memory are one.
    """
    if given is None and not on_accelerator():
        return None
    return Budget(given or accelerator_memory()).split(**GRAM_ON_ACCELERATOR)["accumulators"]
