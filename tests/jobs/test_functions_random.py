"""Functions drawn from a grammar of layers and maps of weights: rows, norms and kernels are those of jacrev.

Whatever a function does to its weights, its row is that of `jax.jacrev`: factors are found or they are not, but no
number is wrong. A case is one seed. `python tests/test_functions_random.py --cases 2000` draws many and says which
seeds went wrong, `--only SEED` repeats one. Networks whose terms are known beforehand are in test_terms_random.py.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jacstore
from helpers_limits import limited
from jacstore import Problem
from jacstore.errors import JacstoreError
from jacstore.testing import contraction, dense_kernel, dense_rows

LIMIT = 1e-11
# What is cast to 16 bits inside is rounded wherever the compiler likes.
LIMITS_16 = {"bfloat16": 0.1, "float16": 0.01}
# Where all that is summed cancels (an odd function of x and of -x), only its rounding is left.
VANISHED = 1e-13
FAST_COMPILATION = "jax_disable_most_optimizations"
CASES = 24
# Rows that cancel to their rounding, kinks, and long sums over pairs of positions, which were once taken for faults.
REFUSED_ONCE = (10109, 10511, 10948, 11606)

Apply = Callable[[Any, Any], Any]
Weight = Callable[[Any], Any]


@dataclass
class Function:
    """A function as it is drawn: parameters by name, steps, and the shape that they have led to.

    Attributes
    ----------
    words
        The names of what was drawn, to read a failure by.
    """

    rng: np.random.Generator
    shape: tuple[int, ...]
    params: dict[str, np.ndarray] = field(default_factory=dict)
    steps: list[Apply] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    limit: float = LIMIT

    def chance(self, probability: float = 0.5) -> bool:
        return bool(self.rng.random() < probability)

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def one_of(self, things: Any) -> Any:
        return things[int(self.rng.integers(len(things)))]

    def fixed(self, *shape: int) -> np.ndarray:
        """Numbers that no gradient is taken of."""
        return self.rng.standard_normal(shape) / max(1, shape[0] if shape else 1) ** 0.5

    def leaf(self, *shape: int, shared: float = 0.2) -> Weight:
        """A parameter; now and then one of that shape that is there already."""
        alike = [name for name, value in self.params.items() if value.shape == shape]
        if alike and self.chance(shared):
            name = self.one_of(alike)
            self.words.append("shared")
        else:
            name = f"p{len(self.params):02d}"
            self.params[name] = 0.3 + self.fixed(*shape) if np.prod(shape) < 3 else self.fixed(*shape)
        return lambda params: params[name]

    def run(self, params: Any, x: Any) -> Any:
        for step in self.steps:
            x = step(params, x)
        return x


# ------------------------------------------------------------------------------------------------------ maps of weights


def weight(f: Function, *shape: int, depth: int = 2) -> Weight:
    """A weight of that shape, as it is or made of others."""
    if depth == 0 or f.chance(0.3):
        return f.leaf(*shape)
    draw = f.one_of(MAPS if len(shape) > 1 else MAPS_OF_VECTORS)
    f.words.append(draw.__name__)
    return draw(f, shape, lambda *inner: weight(f, *inner, depth=depth - 1))


def gain(f: Function, shape: Any, inner: Any) -> Weight:
    """Multiplied or divided by an array that varies along some axes."""
    kind = f.number(0, 3)
    by_shape = (
        () if kind == 0 else (1,) * f.number(1, len(shape)) if kind == 1 else tuple(f.one_of((1, n)) for n in shape)
    )
    while kind == 2 and len(by_shape) > 1 and f.chance():
        by_shape = by_shape[1:]
    by_shape = tuple(shape) if kind == 3 else by_shape
    w = inner(*shape)
    if f.chance(0.6):
        by = f.leaf(*by_shape)
    else:
        number = f.fixed(*by_shape) if f.chance() else np.round(3 * f.fixed(*by_shape))
        by = lambda params: number  # noqa: E731
    how = f.number(0, 4)
    if how == 0:
        return lambda p: w(p) / (2 + jnp.square(by(p)))
    if how == 1:
        return lambda p: jnp.exp(by(p) / 3) * w(p)
    if how == 2:
        # Rounding and casts stand between the parameter and what it multiplies.
        return lambda p: w(p) * (by(p) * 5).astype(jnp.int32).astype(w(p).dtype)
    if how == 3:
        return lambda p: w(p) * by(p) + by(p)
    return lambda p: w(p) * by(p)


def mask(f: Function, shape: Any, inner: Any) -> Weight:
    w, kept = inner(*shape), f.rng.random(tuple(f.one_of((1, n, n)) for n in shape)) < 0.6
    if f.chance():
        return lambda p: jnp.where(kept, w(p), 0)
    return lambda p: w(p) * kept


def triangle(f: Function, shape: Any, inner: Any) -> Weight:
    w, k = inner(*shape), f.number(-1, 1)
    return lambda p: jnp.tril(w(p), k)


def centred(f: Function, shape: Any, inner: Any) -> Weight:
    w, axis = inner(*shape), f.one_of([None, *range(len(shape))])
    return lambda p: w(p) - w(p).mean(axis, keepdims=True)


def normalised(f: Function, shape: Any, inner: Any) -> Weight:
    w, axis = inner(*shape), f.one_of([None, *range(len(shape))])
    v = f.leaf(*shape)
    if f.chance():
        return lambda p: w(p) / jnp.sqrt(0.5 + jnp.square(w(p)).sum(axis, keepdims=True))
    return lambda p: w(p) / jnp.sqrt(0.5 + jnp.square(lax.stop_gradient(v(p))).sum(axis, keepdims=True))


def low_rank(f: Function, shape: Any, inner: Any) -> Weight:
    *lead, c, d = shape
    r, s = f.number(1, 2), f.leaf()
    w, a, b = inner(*shape), inner(*lead, c, r), inner(r, d) if f.chance() else f.leaf(r, d)
    if f.chance():
        return lambda p: w(p) + s(p) * a(p) @ b(p)
    return lambda p: w(p) + 0.5 * jnp.einsum("...cr,rd->...cd", a(p), b(p))


def mixed(f: Function, shape: Any, inner: Any) -> Weight:
    """An axis multiplied by a matrix, fixed or of parameters."""
    axis = f.number(0, len(shape) - 1)
    n = f.number(1, 4)
    w = inner(*shape[:axis], n, *shape[axis + 1 :])
    number = f.fixed(shape[axis], n)
    m = f.leaf(shape[axis], n) if f.chance() else lambda p: number
    if f.chance():
        return lambda p: jnp.moveaxis(jnp.tensordot(m(p), w(p), (1, axis)), 0, axis)
    return lambda p: jnp.moveaxis(jnp.tensordot(w(p), m(p), (axis, 1)), -1, axis)


def cut(f: Function, shape: Any, inner: Any) -> Weight:
    """A slice, plain, strided or reversed, of some axes."""
    slices, wide = [], []
    for n in shape:
        by, low, high = f.one_of([1, 1, 2, -1]), f.number(0, 2), f.number(0, 2)
        if f.chance(0.4):
            by, low, high = 1, 0, 0
        size = (n - 1) * abs(by) + 1 + low + high
        wide.append(size)
        stop = size - high
        slices.append(slice(low, stop, by) if by > 0 else slice(stop - 1, low - 1 if low else None, by))
    w = inner(*wide)
    return lambda p: w(p)[tuple(slices)]


def dynamic_cut(f: Function, shape: Any, inner: Any) -> Weight:
    """A slice at a place that is a value, beyond the end as well."""
    axis = f.number(0, len(shape) - 1)
    extra = f.number(1, 2)
    wide = list(shape)
    wide[axis] += extra
    w, place = inner(*wide), np.int32(f.number(-1, extra + 2))
    return lambda p: lax.dynamic_slice_in_dim(w(p), jnp.asarray(place), shape[axis], axis)


def taken(f: Function, shape: Any, inner: Any) -> Weight:
    """Indexed by an array along an axis: permuted, repeated, beyond the end."""
    axis = f.number(0, len(shape) - 1)
    n, size = shape[axis], shape[axis] + f.number(0, 2)
    wide = list(shape)
    wide[axis] = size
    w = inner(*wide)
    ids = (f.rng.permutation(size)[:n] if f.chance() else f.rng.integers(-2, size + 2, n)).astype(np.int32)
    mode = f.one_of(["clip", "fill", "wrap", None])
    if mode is None:
        at = (slice(None),) * axis + (np.clip(ids, -size, size - 1),)
        return lambda p: w(p)[at]
    if mode == "fill":
        ids = np.clip(ids, -2, size - 1)
    return lambda p: jnp.take(w(p), ids, axis=axis, mode=mode)


def taken_one_by_one(f: Function, shape: Any, inner: Any) -> Weight:
    """Indexed by `vmap` of a single index."""
    axis = f.number(0, len(shape) - 1)
    size = shape[axis] + f.number(0, 2)
    wide = list(shape)
    wide[axis] = size
    w, ids = inner(*wide), f.rng.integers(-1, size + 1, shape[axis]).astype(np.int32)
    kept = f.chance()

    def apply(p: Any) -> Any:
        found = jax.vmap(lambda n: lax.dynamic_index_in_dim(w(p), n, axis, keepdims=kept), out_axes=axis)(ids)
        return found.reshape(shape)

    return apply


def padded(f: Function, shape: Any, inner: Any) -> Weight:
    widths = [(f.number(0, 1), f.number(0, 1), f.number(0, 1)) if n > 2 else (0, 0, 0) for n in shape]
    sizes = []
    for n, (low, high, inside) in enumerate(widths):
        rest = shape[n] - low - high
        if inside and (rest - 1) % 2:
            widths[n] = (low, high, 0)
        sizes.append((rest - 1) // 2 + 1 if widths[n][2] else rest)
    w, value = inner(*sizes), f.one_of([0.0, 0.5])
    return lambda p: lax.pad(w(p), jnp.asarray(value, w(p).dtype), widths)


def joined(f: Function, shape: Any, inner: Any) -> Weight:
    axis = f.number(0, len(shape) - 1)
    if shape[axis] < 2:
        return inner(*shape)
    n = f.number(1, shape[axis] - 1)
    parts = [inner(*shape[:axis], size, *shape[axis + 1 :]) for size in (n, shape[axis] - n)]
    return lambda p: jnp.concatenate([part(p) for part in parts], axis)


def stacked(f: Function, shape: Any, inner: Any) -> Weight:
    """One of several weights that are stacked, or their sum."""
    axis, n = f.number(0, len(shape)), f.number(1, 3)
    w, at = inner(*shape[:axis], n, *shape[axis:]), f.number(0, n - 1)
    if f.chance(0.3):
        return lambda p: w(p).sum(axis)
    if f.chance(0.3):
        return lambda p: jnp.moveaxis(w(p), axis, 0)[at] + jnp.moveaxis(w(p), axis, 0)[0]
    return lambda p: jnp.moveaxis(w(p), axis, 0)[at]


def turned(f: Function, shape: Any, inner: Any) -> Weight:
    order = f.rng.permutation(len(shape))
    w = inner(*(shape[axis] for axis in np.argsort(order)))
    return lambda p: w(p).transpose([int(axis) for axis in np.argsort(np.argsort(order))])


def reshaped(f: Function, shape: Any, inner: Any) -> Weight:
    size = int(np.prod(shape))
    ways = [(size,), (size, 1), (1, *shape)]
    ways += [(n, size // n) for n in range(2, size) if size % n == 0]
    ways += [(*shape[:-1], n, shape[-1] // n) for n in range(2, shape[-1]) if shape[-1] % n == 0]
    w = inner(*f.one_of(ways))
    return lambda p: w(p).reshape(shape)


def rolled(f: Function, shape: Any, inner: Any) -> Weight:
    w, axis, by = inner(*shape), f.number(0, len(shape) - 1), f.number(-2, 3)
    return lambda p: jnp.roll(w(p), by, axis)


def repeated(f: Function, shape: Any, inner: Any) -> Weight:
    """A smaller weight broadcast, repeated or tiled."""
    axis = f.number(0, len(shape) - 1)
    small = list(shape)
    if shape[axis] % 2 == 0 and f.chance():
        small[axis] //= 2
        w, tiles = inner(*small), f.chance()
        reps = [2 if n == axis else 1 for n in range(len(shape))]
        return lambda p: jnp.tile(w(p), reps) if tiles else jnp.repeat(w(p), 2, axis)
    small[axis] = 1
    w = inner(*small)
    return lambda p: jnp.broadcast_to(w(p), shape)


def symmetric(f: Function, shape: Any, inner: Any) -> Weight:
    w = inner(*shape)
    if shape[-1] != shape[-2]:
        return lambda p: w(p) * 0.5 - w(p)[::-1]
    return lambda p: w(p) + jnp.swapaxes(w(p), -1, -2)


def placed(f: Function, shape: Any, inner: Any) -> Weight:
    """Part of a weight written over by another."""
    w, axis = inner(*shape), f.number(0, len(shape) - 1)
    small, at = list(shape), f.number(0, shape[axis] - 1)
    small[axis] = 1
    v, adds = f.leaf(*small), f.chance()
    index = (slice(None),) * axis + (slice(at, at + 1),)
    return lambda p: w(p).at[index].add(v(p)) if adds else w(p).at[index].set(v(p))


def curved(f: Function, shape: Any, inner: Any) -> Weight:
    w, how = inner(*shape), f.one_of([jnp.tanh, jnp.square, lambda v: v * v, lambda v: -v, lambda v: 1 + v])
    return lambda p: how(w(p))


def summed(f: Function, shape: Any, inner: Any) -> Weight:
    v, w = inner(*shape), inner(*shape)
    return lambda p: v(p) - 0.3 * w(p)


def outer(f: Function, shape: Any, inner: Any) -> Weight:
    v, w = inner(*shape[:-1]), f.leaf(shape[-1])
    return lambda p: v(p)[..., None] * w(p)


def diagonal_block(f: Function, shape: Any, inner: Any) -> Weight:
    w = inner(*shape)
    return lambda p: w(p) + jnp.eye(*shape[-2:])


def cast16(f: Function, shape: Any, inner: Any) -> Weight:
    w = inner(*shape)
    if not f.chance(0.3):
        return w
    kind = f.one_of(["bfloat16", "float16"])
    f.limit = max(f.limit, LIMITS_16[kind])
    return lambda p: w(p).astype(kind).astype(w(p).dtype)


MAPS = (
    *(gain, gain, mask, triangle, centred, normalised, low_rank, mixed, cut, cut, dynamic_cut, taken, taken_one_by_one),
    *(padded, joined, stacked, turned, reshaped, rolled, repeated, symmetric, placed, curved, summed, outer),
    *(diagonal_block, cast16),
)
MAPS_OF_VECTORS = (gain, mask, centred, normalised, mixed, cut, taken, padded, joined, stacked, reshaped, rolled)


# --------------------------------------------------------------------------------------------------------------- layers


def biased(f: Function, d: int, y: Apply) -> Apply:
    """With a bias, a scale or neither."""
    how = f.number(0, 3)
    if how == 0:
        return y
    b = weight(f, *((1, d) if f.chance(0.2) else (d,)), depth=1)
    s = f.leaf()
    if how == 1:
        return lambda p, x: y(p, x) + b(p).reshape(d)
    if how == 2:
        return lambda p, x: (y(p, x) - 0.3 * b(p).reshape(d)) * s(p)
    return lambda p, x: y(p, x) * b(p).reshape(d) + b(p).reshape(d)


def dense(f: Function) -> None:
    *lead, c = f.shape
    d = f.one_of([c, f.number(1, 5)])
    how = f.number(0, 6)
    w = weight(f, *((d, c) if how in (1, 4) else (c, d)))

    def apply(p: Any, x: Any) -> Any:
        if how == 1:
            return (w(p) @ x.reshape(-1, c).T).T.reshape(*lead, d)
        if how == 2:
            return jnp.einsum("...c,cd->...d", x, w(p))
        if how == 3 and lead:
            return jax.vmap(lambda row: jnp.dot(row, w(p)))(x.reshape(-1, c)).reshape(*lead, d)
        if how == 4:
            return lax.dot_general(x, w(p), (((x.ndim - 1,), (1,)), ((), ())))
        if how == 5:
            return (x[..., None] * w(p)).sum(-2)
        return x @ w(p)

    step(f, (*lead, d), biased(f, d, apply))


def along_positions(f: Function) -> None:
    """A weight that mixes positions, on its own or one for each channel."""
    if len(f.shape) < 2:
        return dense(f)
    t, *rest = f.shape
    s = f.number(1, 4)
    if len(rest) == 1 and f.chance():
        w = weight(f, rest[0], s, t)
        step(f, (s, *rest), lambda p, x: jnp.einsum("cst,tc->sc", w(p), x))
    else:
        w = weight(f, s, t)
        step(f, (s, *rest), lambda p, x: jnp.tensordot(w(p), x, 1))
    return None


def experts(f: Function) -> None:
    """A weight for each group or expert: batch dimensions, or one chosen by the example."""
    *lead, c = f.shape
    e, d = f.number(1, 3), f.number(1, 4)
    w, chosen = weight(f, e, c, d), f.number(0, 3)
    g = f.fixed(c, e)

    def apply(p: Any, x: Any) -> Any:
        if chosen == 0:
            return w(p)[jnp.argmax(x.reshape(-1, c).sum(0) @ g)].T.dot(x.reshape(-1, c).T).T.reshape(*lead, d)
        if chosen == 1:
            return jnp.einsum("...c,...cd->...d", x, w(p)[jnp.argmax(x @ g, -1)])
        if chosen == 2:
            gates = jax.nn.softmax(x @ g)
            return jnp.einsum("...e,...c,ecd->...d", gates, x, w(p))
        return jax.vmap(lambda m: jnp.tanh(x @ m))(w(p)).sum(0)

    step(f, (*lead, d), apply)


def tied(f: Function) -> None:
    *lead, c = f.shape
    d = f.number(1, 4)
    w = weight(f, c, d, depth=1)
    b = f.leaf(c)
    step(f, (*lead, c), lambda p, x: jnp.tanh(x @ w(p)) @ w(p).T + b(p) + x)


def twice(f: Function) -> None:
    """One weight, or maps of it, and one bias used twice."""
    *lead, c = f.shape
    base = f.leaf(c, c)
    names = set(f.params)
    v, w = (f.one_of(MAPS)(f, (c, c), lambda *s: base if s == (c, c) else f.leaf(*s, shared=0)) for _ in range(2))
    b = f.leaf(c)
    f.words.append(f"{len(set(f.params) - names)} more")
    step(f, (*lead, c), lambda p, x: jnp.tanh(x @ v(p) + b(p)) @ w(p) + b(p))


def complex_layer(f: Function) -> None:
    *lead, c = f.shape
    d, how = f.number(1, 4), f.number(0, 4)
    w = weight(f, c, d, depth=1)
    v = weight(f, c, d, depth=1)

    def apply(p: Any, x: Any) -> Any:
        if how == 0:
            z = (x * jnp.exp(1j * x)) @ w(p).astype(complex)
        elif how == 1:
            z = x @ (w(p) + 1j * v(p))
        elif how == 2:
            z = (x + 1j * x**2) @ w(p)
        elif how == 3:
            z = jnp.fft.fft(x) @ (w(p) * 1j).conj()
        else:
            z = lax.complex(x @ w(p), x @ v(p)) ** 2
        return jnp.stack([z.real, jnp.abs(z + 0.3) + z.imag]).sum(0)

    step(f, (*lead, d), apply)


def spectrum(f: Function) -> None:
    """A product over channels between a transform and its inverse."""
    if len(f.shape) < 2:
        return complex_layer(f)
    *lead, t, c = f.shape
    d = f.number(1, 4)
    modes = t // 2 + 1
    w, per_mode = weight(f, c, d), f.chance()
    v = weight(f, modes, c, d, depth=1)

    def apply(p: Any, x: Any) -> Any:
        z = jnp.fft.rfft(x, axis=-2)
        z = jnp.einsum("...mc,mcd->...md", z, v(p) + 0j) if per_mode else z @ w(p)
        return jnp.fft.irfft(z, n=t, axis=-2)

    step(f, (*lead, t, d), apply)
    return None


def norm_layer(f: Function) -> None:
    c = f.shape[-1]
    g, b = weight(f, c, depth=1), f.leaf(c)

    def apply(p: Any, x: Any) -> Any:
        middle = x - x.mean(-1, keepdims=True)
        return middle / jnp.sqrt(jnp.square(middle).mean(-1, keepdims=True) + 0.3) * g(p) + b(p)

    step(f, f.shape, apply)


def attention(f: Function) -> None:
    if len(f.shape) < 2:
        return dense(f)
    c, h = f.shape[-1], f.number(1, 2)
    d = f.number(1, 2)
    if f.chance():
        qkv = weight(f, c, 3 * h * d, depth=1)
        heads = lambda p, x: [m.reshape(*m.shape[:-1], h, d) for m in jnp.split(x @ qkv(p), 3, -1)]  # noqa: E731
    else:
        each = [weight(f, c, h, d, depth=1) for _ in range(3)]
        heads = lambda p, x: [jnp.einsum("...tc,chd->...thd", x, m(p)) for m in each]  # noqa: E731
    out = weight(f, h, d, c, depth=1)

    def apply(p: Any, x: Any) -> Any:
        q, k, v = heads(p, x)
        scores = jax.nn.softmax(jnp.einsum("...thd,...shd->...hts", q, k))
        return x + jnp.einsum("...hts,...shd,hdc->...tc", scores, v, out(p))

    step(f, f.shape, apply)
    return None


def embedding(f: Function) -> None:
    """A table that is looked up at ids that the values of the example make."""
    *lead, c = f.shape
    size, d, how = f.number(2, 6), f.number(1, 4), f.number(0, 8)
    table = weight(f, size, d, depth=1)
    columns = weight(f, d, size, depth=1)
    spread = f.fixed(c) * 3
    back, s = f.chance(0.3), f.leaf()
    lead = lead or [1]

    def ids(x: Any) -> Any:
        return jnp.floor(x.reshape(*lead, c) @ spread + size / 2).astype(jnp.int32)

    def look_up(p: Any, i: Any) -> Any:
        if how == 0:
            return table(p)[i]
        if how == 1:
            return table(p)[i] * s(p)
        if how == 2:
            return jax.vmap(lambda n: table(p)[n])(i.reshape(-1)).reshape(*lead, d)
        if how == 3:
            return jnp.broadcast_to(table(p)[i.reshape(-1)[0]], (*lead, d))
        if how == 4:
            return jnp.moveaxis(jnp.take(columns(p), i, axis=1, mode="clip"), 0, -1)
        if how == 5:
            rows = jnp.clip(i.reshape(-1, 1), 0, size - 1)
            return jnp.take_along_axis(table(p), jnp.broadcast_to(rows, (rows.size, d)), 0).reshape(*lead, d)
        if how == 6:
            each = jax.vmap(lambda n: lax.dynamic_index_in_dim(table(p), n, keepdims=False))(i.reshape(-1))
            return each.reshape(*lead, d)
        if how == 7:
            return jax.nn.one_hot(i, size, dtype=s(p).dtype) @ table(p)
        return jnp.take(table(p), i, axis=0, mode="clip") + columns(p)[:, jnp.clip(i, 0, size - 1)].transpose(
            *range(1, i.ndim + 1), 0
        )

    def apply(p: Any, x: Any) -> Any:
        y = look_up(p, ids(x)) + jnp.tanh(x.sum())
        return jnp.tanh(y) @ table(p).T if back else y

    step(f, (*lead, size if back else d), apply)


def sequence(f: Function) -> tuple[int, int]:
    """Make the values a sequence, and return its length and channels."""
    if len(f.shape) != 2:
        n = f.shape[-1]
        step(f, (int(np.prod(f.shape)) // n, n), lambda p, x: x.reshape(-1, n))
    t, c = f.shape
    return t, c


def recurrent(f: Function) -> None:
    """A recurrence by `lax.scan`: plain or gated, either way round, of maps of weights."""
    t, c = sequence(f)
    h, gated, way = f.number(1, 3), f.chance(0.4), f.chance(0.3)
    g = 3 * h if gated else h
    w, u, b = weight(f, c, g), weight(f, h, g), weight(f, g, depth=1)
    inside, start, what = f.chance(), f.leaf(h), f.number(0, 3)

    def apply(p: Any, x: Any) -> Any:
        wide = u(p)

        def one(state: Any, now: Any) -> Any:
            a, r = now @ w(p) + b(p), state @ (u(p) if inside else wide)
            if gated:
                z, reset = jax.nn.sigmoid(a[:h] + r[:h]), jax.nn.sigmoid(a[h : 2 * h] + r[h : 2 * h])
                new = (1 - z) * jnp.tanh(a[2 * h :] + reset * r[2 * h :]) + z * state
            else:
                new = jnp.tanh(a + r)
            return new, (new, state, now.sum() * new, None)[what]

        last, ys = lax.scan(one, start(p), x, reverse=way, unroll=f_unroll)
        return jnp.broadcast_to(last, (t, h)) if ys is None else ys + last

    f_unroll = f.one_of([1, 1, 2])
    step(f, (t, h), apply)


def added_up(f: Function) -> None:
    """A carry that only adds up, and is also what every step returns or reads."""
    t, c = sequence(f)
    d, how = f.number(1, 4), f.number(0, 3)
    w = weight(f, c, d, depth=1)
    v = weight(f, d, d, depth=1)

    def apply(p: Any, x: Any) -> Any:
        def one(total: Any, now: Any) -> Any:
            new = total + now @ w(p)
            if how == 0:
                return new, new
            if how == 1:
                return new, jnp.tanh(new) @ v(p)
            if how == 2:
                return total + jnp.outer(now, now) @ w(p), now @ w(p)
            return new, None

        if how == 2:
            total, ys = lax.scan(one, jnp.zeros((c, d), x.dtype), x)
            return ys + total.sum(0)
        total, ys = lax.scan(one, jnp.zeros(d, x.dtype), x)
        return jnp.broadcast_to(total, (t, d)) if ys is None else ys

    step(f, (t, d), apply)


def scanned_layers(f: Function) -> None:
    """Layers over stacked weights, some of them with a scan of their own, or of one shared weight."""
    *lead, c = f.shape
    n, shared, nested = f.number(1, 3), f.chance(0.3), len(f.shape) == 2 and f.chance(0.3)
    w, b = weight(f, n, c, c), weight(f, n, c, depth=1)
    v = weight(f, c, c, depth=1) if shared else None
    wrap, way = f.one_of([lambda g: g, jax.checkpoint, jax.jit]), f.chance(0.3)

    def apply(p: Any, x: Any) -> Any:
        @wrap
        def layer(x: Any, q: Any) -> Any:
            m, shift = q
            if nested:
                x = lax.scan(lambda s, now: (s + jnp.tanh(now @ m),) * 2, jnp.zeros(c, x.dtype), x)[1]
            y = x + jnp.tanh(x @ m + shift)
            return (y @ v(p) if v else y), (y.sum() if way else None)

        return lax.scan(layer, x, (w(p), b(p)), reverse=way)[0]

    step(f, (*lead, c), apply)


def mapped(f: Function) -> None:
    """`lax.map` or a loop over positions, with one weight or one for each."""
    t, c = sequence(f)
    d, each, way = f.number(1, 4), f.chance(0.3), f.number(0, 2)
    w = weight(f, *((t, c, d) if each else (c, d)))
    b = f.leaf(d)

    def apply(p: Any, x: Any) -> Any:
        if each:
            return lax.map(lambda q: jnp.tanh(q[0] @ q[1]) + b(p), (x, w(p)))
        if way == 0:
            return lax.map(lambda row: jnp.tanh(row @ w(p) + b(p)), x)
        if way == 1:
            body = lambda n, y: y.at[n].set(x[n] @ w(p) + b(p))  # noqa: E731
            return lax.fori_loop(0, t, body, jnp.zeros((t, d), x.dtype))
        return lax.scan(lambda _, n: (None, w(p).T @ x[n] + b(p)), None, jnp.arange(t))[1]

    step(f, (t, d), apply)


def looked_up_in_scan(f: Function) -> None:
    """A decoder: a table at every step, its transpose for what it returns."""
    t, _ = sequence(f)
    size, h, own = f.number(2, 5), f.number(1, 3), f.chance()
    table, u = weight(f, size, h, depth=1), weight(f, h, h, depth=1)
    head, how = weight(f, h, size, depth=1), f.number(0, 2)

    def apply(p: Any, x: Any) -> Any:
        def one(state: Any, now: Any) -> Any:
            i = jnp.floor(now.sum() + 1).astype(jnp.int32)
            if how == 0:
                row = table(p)[i]
            elif how == 1:
                row = lax.dynamic_index_in_dim(table(p), i, keepdims=False)
            else:
                row = table(p)[jnp.stack([i, i + 1])].sum(0)
            state = jnp.tanh(row + state @ u(p) + now.sum())
            return state, state @ (table(p).T if own else head(p))

        return lax.scan(one, jnp.zeros(h, x.dtype), x)[1]

    step(f, (t, size), apply)


def convolution(f: Function) -> None:
    """One or two convolutions of one image."""
    *space, c = f.shape
    if not space or len(space) > 2:
        return dense(f)
    n, axes = len(space), "HW"[: len(space)]
    groups = f.one_of([g for g in (1, 1, 2, 3) if c % g == 0])
    d = groups * f.number(1, 2)
    window = tuple(f.number(1, min(3, size + 1)) for size in space)
    strides, dilation = (tuple(f.one_of([1, 1, 2]) for _ in space) for _ in range(2))
    spread = tuple(f.one_of([1, 1, 1, 2]) for _ in space)
    reach = [(w - 1) * a + 1 for w, a in zip(window, dilation, strict=True)]
    fits = all((s - 1) * a + 1 >= r for s, a, r in zip(space, spread, reach, strict=True))
    padding = f.one_of(["SAME", "VALID"] if fits else ["SAME"])
    if f.chance(0.3) and fits:
        padding = [(f.number(-1 if s - r > 2 else 0, 2), f.number(0, 2)) for s, r in zip(space, reach, strict=True)]
    if padding == "VALID":
        padding = [(0, 0)] * n
    elif padding == "SAME":
        padding = [(r // 2, r - r // 2) for r in reach]
    layout = f.one_of([f"{axes}IO", f"OI{axes}", f"I{axes}O"])
    sizes = {"I": c // groups, "O": d, **dict(zip(axes, window, strict=True))}
    v, two = weight(f, *(sizes[a] for a in layout)), f.chance(0.3)
    w = weight(f, *(sizes[a] for a in layout)) if two else None

    def run(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            x[None],
            kernel,
            strides,
            padding,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            dimension_numbers=(f"N{axes}C", layout, f"N{axes}C"),
            feature_group_count=groups,
        )[0]

    shape = jax.eval_shape(run, jax.ShapeDtypeStruct(f.shape, np.float32), np.zeros([sizes[a] for a in layout], "f4"))
    assert len(shape.shape) == n + 1
    y = (lambda p, x: jnp.tanh(run(x, v(p))) + run(x, w(p))) if two else (lambda p, x: run(x, v(p)))
    step(f, shape.shape, biased(f, d, y))
    return None


def pooled(f: Function) -> None:
    if len(f.shape) < 2 or f.shape[0] < 2:
        return activation(f)
    step(f, (f.shape[0] // 2, *f.shape[1:]), lambda p, x: jnp.maximum(x[: len(x) // 2 * 2 : 2], x[1::2]))
    return None


def flattened(f: Function) -> None:
    step(f, (int(np.prod(f.shape)),), lambda p, x: x.reshape(-1))


def turned_values(f: Function) -> None:
    step(f, f.shape[::-1], lambda p, x: x.T)


def activation(f: Function) -> None:
    g = f.leaf(f.shape[-1])
    how = f.one_of([jnp.tanh, jax.nn.relu, jax.nn.gelu, jnp.sin])
    f.words.append("g")
    step(f, f.shape, lambda p, x: how(x * g(p)) + 0.1 * x)


def step(f: Function, shape: Any, apply: Apply) -> None:
    f.steps.append(apply)
    f.shape = tuple(int(n) for n in shape)


LAYERS = (
    *(dense, dense, dense, along_positions, experts, tied, twice, complex_layer, spectrum, norm_layer, attention),
    *(embedding, embedding, recurrent, recurrent, added_up, scanned_layers, scanned_layers, mapped, looked_up_in_scan),
    *(convolution, convolution, pooled, flattened, turned_values, activation),
)


def wrapped(f: Function, layer: Callable[[Function], None]) -> None:
    """A layer as it is, under a transformation, or only for some examples."""
    f.words.append(layer.__name__)
    before, shape = len(f.steps), f.shape
    layer(f)
    made = f.steps[before:]
    del f.steps[before:]

    def whole(p: Any, x: Any) -> Any:
        for one in made:
            x = one(p, x)
        return x

    how = max(0, f.number(-8, 9))
    inside, after = whole, f.shape
    if how in (1, 2, 3):
        whole = (jax.jit, jax.checkpoint, lambda g: jax.jit(jax.checkpoint(g)))[how - 1](inside)
    elif how == 4 and shape == after:
        whole = lambda p, x: lax.cond(x.sum() > 0, inside, lambda p, x: x, p, x)  # noqa: E731
    elif how == 5:
        whole = lambda p, x: lax.cond(x.sum() > 0, inside, lambda p, x: 2 * inside(p, -x), p, x)  # noqa: E731
    elif how == 6:
        whole = lambda p, x: jnp.where(x.mean() > 0, inside(p, x), inside(p, x * 0.5))  # noqa: E731
    elif how == 7:
        whole = lambda p, x: jax.vmap(inside, (None, 0))(p, jnp.stack([x, -x])).sum(0)  # noqa: E731
    elif how == 8 and shape == after:
        whole = lambda p, x: lax.fori_loop(0, 2, lambda _, y: jnp.tanh(inside(p, y)), x)  # noqa: E731
    elif how == 9 and shape == after:
        whole = lambda p, x: x + jnp.tanh(inside(p, x))  # noqa: E731
    if how:
        f.words.append(f"how{how}")
    step(f, after, whole)


# ---------------------------------------------------------------------------------------------------------------- cases


@dataclass(kw_only=True)
class Case:
    """A problem, and how it is built and judged."""

    problem: Problem
    layout: str
    mode: str
    way: str
    limit: float
    words: str


def case_of(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    t, c = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    kinds = [(c,), (t, c), (t, c), (int(rng.integers(2, 6)), int(rng.integers(2, 6)), int(rng.integers(1, 5)))]
    f = Function(rng=rng, shape=kinds[rng.integers(4)])
    n, k = f.number(3, 4), f.number(2, 3)
    inputs = rng.standard_normal((n, *f.shape))
    for _ in range(f.one_of([1, 1, 2, 2, 3, 4])):
        wrapped(f, f.one_of(LAYERS))
    while not f.params:
        dense(f)

    def apply(params: Any, x: Any) -> Any:
        flat = jnp.tanh(f.run(params, x).reshape(-1))
        return jnp.stack([flat.sum(), (flat * jnp.arange(flat.size) / flat.size).sum(), (flat**2).sum()][:k])

    params, names = dict(f.params), sorted(f.params)
    return Case(
        problem=Problem(apply=apply, params=params, inputs=inputs),
        layout=f.one_of(["auto", "factored", "factored", "dense"]),
        mode=f.one_of(["trace", "diagonal", "blocks"]),
        way=f.one_of(["implicit", "expanded"]),
        limit=f.limit,
        words=f"{' '.join(f.words)} | {len(names)} leaves, inputs {inputs.shape}",
    )


def check(case: Case) -> Counter[str]:
    """Compare with jacrev; returns the kinds of terms."""
    rows = dense_rows(case.problem)
    store = jacstore.build(case.problem, None, dtype="float64", layout=case.layout, unit_size=2)
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    close("rows", found, rows, case.limit)
    close("norms", store.norms.sum(-1), np.square(rows).sum(-1), 2 * case.limit)
    with contraction(case.way):
        for mode in ("full", case.mode):
            kernel = jacstore.gram(store, mode=mode, tile=2).array.compute(scheduler="synchronous")
            close(f"kernel {mode}", kernel, dense_kernel(rows, mode=mode), 2 * case.limit)
    return Counter("+".join(sorted({term.kind for term in leaf.terms})) for leaf in store.leaves)


def close(what: str, found: Any, truth: np.ndarray, limit: float) -> None:
    found = np.asarray(found)
    if found.shape != truth.shape:
        raise AssertionError(f"{what}: shape {found.shape} instead of {truth.shape}")
    error = np.linalg.norm(found - truth)
    if not error <= limit * np.linalg.norm(truth) + VANISHED:
        raise AssertionError(f"{what}: error {error:.3g} of {np.linalg.norm(truth):.3g}")


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Small leaves are stored by their factors too, and programs, which run three times each, compile quickly."""
    before = jax.config.values[FAST_COMPILATION]
    jax.config.update(FAST_COMPILATION, True)
    try:
        with limited(smallest_factored=0):
            yield
    finally:
        jax.config.update(FAST_COMPILATION, before)


@pytest.mark.parametrize("seed", [*range(CASES), *REFUSED_ONCE])
def test_rows_norms_and_kernels_of_any_function_are_those_of_jacrev(seed):
    with prepared():
        check(case_of(seed))


# -------------------------------------------------------------------------------------------------------------- by hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="repeat one seed, with its traceback")
    given = parser.parse_args()
    if given.only is not None:
        case = case_of(given.only)
        print(f"{case.words}; layout {case.layout}, {case.mode}, {case.way}", flush=True)
        with prepared():
            print(dict(check(case)))
        return
    counts, reasons, kinds = Counter[str](), Counter[str](), Counter[str]()
    began = time.monotonic()
    for n, seed in enumerate(range(given.seed, given.seed + given.cases), start=1):
        words, verdict = "", "right"
        try:
            case = case_of(seed)
            words = f"{case.words}; {case.layout}, {case.way}"
            with prepared():
                kinds += check(case)
        except JacstoreError as error:
            verdict, _ = "refused", reasons.update([str(error)[:100]])
            print(f"refused {seed}: {error} [{words}]", flush=True)
        except Exception as error:
            verdict = "wrong"
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            print(f"WRONG {seed}: {type(error).__name__} {str(error)[:200]} at {place} [{words}]", flush=True)
        counts[verdict] += 1
        if n % 25 == 0:
            jax.clear_caches()
            seconds = time.monotonic() - began
            print(f"{n:,} cases, {seconds:,.0f} s: {dict(counts)}; terms {dict(kinds)}", flush=True)
    print(f"{dict(counts)}; terms {dict(kinds)}")
    for reason, count in reasons.most_common():
        print(f"{count:>6,}  {reason}")


if __name__ == "__main__":
    main()
