"""Products of slabs of rows on a device by XLA, added to accumulators there or, if these are too large, on the host.

The matmul precision is always explicit: the default on recent GPUs is TF32. On a CPU this engine can be forced, so that
tests run the code that a GPU runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jacstore.base.budget import GRAM_ON_ACCELERATOR, Budget
from jacstore.base.devices import accelerator_memory, device, local_devices, on_accelerator
from jacstore.base.limits import PRECISIONS
from jacstore.base.modes import Mode
from jacstore.errors import InvalidRequestError
from jacstore.terms.factor_set import FactorSet

# Numbers of a block of products of pairs of positions on the device.
PRODUCT_NUMBERS = 16_000_000
# What JAX calls a precision that names how products of float32 numbers are formed.
ALGORITHMS = {
    "bf16x9": lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
    "bf16x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "bf16x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
}


class XlaEngine:
    """Products by `lax.dot_general`, sums in float64.

    16-bit rows are multiplied as they are: the product of two of them is exact in float32, in which they are summed
    within a slab. `fast` rounds float32 rows to TF32 on GPUs and to bfloat16 elsewhere; the other names say how the
    device multiplies float32 rows and factors, and a device that cannot is refused.

    Parameters
    ----------
    precision
        float64, float32, a key of `ALGORITHMS`, or fast.
    stored
        The type of the stored rows.
    resident_bytes
        Accumulators stay on the device up to this size, otherwise on the host.

    Raises
    ------
    InvalidRequestError
        If the device cannot multiply so, naming what it can.
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
        refuse_unsupported(precision)
        self._left = resident_bytes
        self._on_gpu = device().platform != "cpu"
        self.rounded_to: str | None = None
        if precision == "fast":
            # Products of 16-bit rows are exact; products of factors are TF32 on a device, float32 elsewhere.
            self.rounded_to = "tf32" if self._on_gpu else None if sixteen else "bfloat16"
        elif precision in ALGORITHMS:
            self.rounded_to = precision
        # How slabs and factors are multiplied. Products of 16-bit numbers are exact whatever is asked for.
        named: Any = ALGORITHMS.get(precision, lax.Precision.HIGHEST)
        named = lax.Precision.DEFAULT if precision == "fast" and self._on_gpu else named
        self._slab_products = lax.Precision.HIGHEST if sixteen and precision in ALGORITHMS else named
        self._factor_products = named.name if precision in ALGORITHMS else named.name.lower()

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.restore(np.zeros(shape))

    def restore(self, total: np.ndarray) -> Any:
        if self._left is not None:
            if total.nbytes > self._left:
                return np.array(total)
            self._left -= total.nbytes
        with jax.enable_x64(True):
            return jnp.array(total)

    def load(self, slab: np.ndarray, turn: int = 0) -> Any:
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
        precision = self._slab_products
        with jax.enable_x64(True):
            if isinstance(total, np.ndarray):
                np.add(total, np.asarray(_product(mode, a, b, starts, sizes, precision)), out=total)
                return total
            return _add(total, mode, a, b, starts, sizes, precision)

    def load_factors(self, factors: FactorSet) -> FactorSet:
        with jax.enable_x64(True):
            return factors.on_device(jnp.asarray)

    def add_factors(self, mode: Mode, total: Any, a: FactorSet, rows: slice, b: FactorSet, cols: slice) -> Any:
        m, n = rows.stop - rows.start, cols.stop - cols.start
        block = m if mode.within_examples else a.block_examples(PRODUCT_NUMBERS)
        host = total if isinstance(total, np.ndarray) else np.zeros(total.shape)
        with jax.enable_x64(True), jax.default_matmul_precision(self._factor_products):
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


@dataclass(frozen=True)
class _Sums:
    """An accumulator on each device; None where nothing was added yet."""

    shape: tuple[int, ...]
    parts: list[Any]


class SeveralDevices:
    """The products of an `XlaEngine` on several devices: slabs go round, sums of the devices are added in their order.

    What each device adds depends on the number of devices alone. Products of factors are formed on the first one.
    """

    name = "xla"

    def __init__(self, precision: str, stored: str, resident_bytes: int | None, places: Sequence[Any]) -> None:
        self._places = tuple(places)
        self._engines = [XlaEngine(precision, stored, resident_bytes) for _ in places]
        first = self._engines[0]
        self.slab_dtype, self.factor_dtype = first.slab_dtype, first.factor_dtype
        self.rounded_to, self.device = first.rounded_to, first.device
        # Where device and host memory are one, each device holds a slab and an accumulator of its own.
        more = len(self._places) - 1 if not on_accelerator() else 0
        self.slab_copies, self.tile_copies = first.slab_copies + more, first.tile_copies + more

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return _Sums(tuple(shape), [None] * len(self._places))

    def restore(self, total: np.ndarray) -> Any:
        found = self.zeros(total.shape)
        with jax.default_device(self._places[0]):
            found.parts[0] = self._engines[0].restore(total)
        return found

    def load(self, slab: np.ndarray, turn: int = 0) -> Any:
        at = turn % len(self._places)
        with jax.default_device(self._places[at]):
            return at, self._engines[at].load(slab)

    def add(self, mode: Mode, total: Any, a: Any, rows: slice, b: Any, cols: slice, columns: slice) -> Any:
        (at, left), (other, right) = a, b
        if at != other:
            raise ValueError("slabs that are multiplied must be loaded in one turn")
        with jax.default_device(self._places[at]):
            part = self._part(total, at)
            total.parts[at] = self._engines[at].add(mode, part, left, rows, right, cols, columns)
        return total

    def _part(self, total: _Sums, at: int) -> Any:
        part = total.parts[at]
        return self._engines[at].zeros(total.shape) if part is None else part

    def load_factors(self, factors: FactorSet) -> FactorSet:
        with jax.default_device(self._places[0]):
            return self._engines[0].load_factors(factors)

    def add_factors(self, mode: Mode, total: Any, a: FactorSet, rows: slice, b: FactorSet, cols: slice) -> Any:
        with jax.default_device(self._places[0]):
            total.parts[0] = self._engines[0].add_factors(mode, self._part(total, 0), a, rows, b, cols)
        return total

    def fetch(self, total: Any) -> np.ndarray:
        found = np.zeros(total.shape)
        for engine, part in zip(self._engines, total.parts, strict=True):
            if part is not None:
                found += engine.fetch(part)
        return found


def xla_engine(precision: str, stored: str, resident_bytes: int | None, devices: Any = None) -> Any:
    """The engine of the devices that are asked for, all of this process if none are."""
    places = local_devices(devices)
    if places == [device()]:
        return XlaEngine(precision, stored, resident_bytes)
    return SeveralDevices(precision, stored, resident_bytes, places)


def refuse_unsupported(precision: str) -> None:
    """Refuse a precision that the device has no products of.

    Raises
    ------
    InvalidRequestError
        Naming the device and the precisions that it has.
    """
    if precision in ALGORITHMS and not _supports(precision, device()):
        there = [name for name in PRECISIONS if name not in ALGORITHMS or _supports(name, device())]
        raise InvalidRequestError(
            f"--precision {precision}: {device().platform} ({device().device_kind}) has no such products; it has "
            f"{', '.join(there)} (precision=)"
        )


@cache
def _supports(precision: str, where: Any) -> bool:
    """Whether a device multiplies so, found out by a product of few numbers."""
    ones = jax.device_put(np.ones((16, 16), np.float32), where)
    try:
        jax.block_until_ready(jax.jit(partial(jnp.dot, precision=ALGORITHMS[precision]))(ones, ones))
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return False
    return True


@partial(jax.jit, static_argnames=("mode", "sizes", "precision"))
def _product(
    mode: Mode, a: Any, b: Any, starts: tuple[Any, Any, Any], sizes: tuple[int, int, int], precision: Any
) -> Any:
    outputs = a.shape[1]
    left = lax.dynamic_slice(a, (starts[0], 0, starts[2]), (sizes[0], outputs, sizes[2]))
    right = lax.dynamic_slice(b, (starts[1], 0, starts[2]), (sizes[1], outputs, sizes[2]))
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    product = jnp.einsum(mode.equation, left, right, precision=precision, preferred_element_type=wide)
    return product.reshape(mode.shape(*sizes[:2], outputs))


@partial(jax.jit, static_argnames=("mode", "sizes", "precision"), donate_argnums=0)
def _add(
    total: Any, mode: Mode, a: Any, b: Any, starts: tuple[Any, Any, Any], sizes: tuple[int, int, int], precision: Any
) -> Any:
    return total + _product(mode, a, b, starts, sizes, precision).astype(total.dtype)


def resident_bytes(given: int | None) -> int | None:
    """Bytes of accumulators that may stay on the device, of what `--device-memory` gives or of what there is.

    None on a CPU, where device and host memory are one.
    """
    if given is None and not on_accelerator():
        return None
    return Budget(given or accelerator_memory()).split(**GRAM_ON_ACCELERATOR)["accumulators"]
