"""Products of rows from their factors, without forming the rows.

A row's part is `sum_t a_t ⊗ d_t`, so a product of two rows is `sum_{t,s} (a_t · b_s) (d_t · e_s)`: products of inputs
(of patches for convolutions, equality of indices for look-ups) times products of cotangents. Formulas are written for
NumPy and JAX alike; positions come first, so that the pairs of examples are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jacstore.base.modes import Mode
from jacstore.terms.kinds import Conv, Dense, Dot, Factored, Index, Leaf, expand

Operands = Mapping[str, Any]


def squared_norms(leaf: Leaf, operands: Operands, xp: Any = np) -> Any:
    """Partial sums `(n, K, m)` of squared norms of a factored leaf's rows; summing over m is left to the caller."""
    terms = _factored(leaf)
    if _expanding_is_cheaper(terms, operands, leaf.size):
        rows = expand(leaf.terms, operands, leaf.size, xp)
        return _runs(rows * rows, xp)
    parts = [_own(left, right, operands, xp) for left in terms for right in terms]
    return xp.concatenate(parts, -1)


def products(
    leaf: Leaf, left: Operands, right: Operands, mode: Mode, xp: Any = np, across: dict[Any, Any] | None = None
) -> Any:
    """Products of a factored leaf's rows of n examples with those of m others, for mode full, trace or diagonal.

    Returns `(n, K, m, K)`, `(n, 1, m, 1)` or `(K, n, m)`. `across` keeps products of cotangents for other leaves of the
    same two sets of examples that share them.
    """
    total = None
    for p in _factored(leaf):
        for q in _factored(leaf):
            part = _pair(p, q, left, right, mode, xp, {} if across is None else across)
            scale = p.scale * q.scale
            part = part if scale == 1 else part * part.dtype.type(scale)
            total = part if total is None else total + part
    return total


def own_products(leaf: Leaf, operands: Operands, xp: Any = np) -> Any:
    """Products `(n, K, K)` of each example's rows of a factored leaf with each other, for mode blocks."""
    names = list(operands)
    outputs = max(operands[term.cotangents].shape[1] for term in _factored(leaf))
    expanded = own_rows_are_smaller(leaf, {name: operands[name].shape[-2] for name in names}, outputs)
    blocks = []
    for n in range(len(operands[names[0]])):
        one = {name: operands[name][n : n + 1] for name in names}
        if expanded:
            rows = expand(leaf.terms, one, leaf.size, xp)[0]
            blocks.append(xp.matmul(rows, rows.T))
        else:
            blocks.append(products(leaf, one, one, Mode.FULL, xp)[0, :, 0])
    return xp.stack(blocks)


def own_rows_are_smaller(leaf: Leaf, positions: Mapping[str, int], n_outputs: int) -> bool:
    """Whether K rows of one example take less than products of all pairs of its K x T cotangents with each other."""
    terms = _factored(leaf)
    if any(isinstance(term, Index) for term in terms):
        return False
    pairs = max((positions[term.cotangents] * n_outputs) ** 2 for term in terms)
    return n_outputs * leaf.size < pairs


def _factored(leaf: Leaf) -> list[Factored]:
    return [term for term in leaf.terms if not isinstance(term, Dense)]


def _pair(
    p: Factored, q: Factored, left: Operands, right: Operands, mode: Mode, xp: Any, across: dict[Any, Any]
) -> Any:
    d, e = left[p.cotangents], right[q.cotangents]
    unlike = isinstance(p, Index) != isinstance(q, Index)
    if not mode.crosses_outputs and (unlike or not mode.sums_outputs):
        # One output at a time.
        parts = []
        for k in range(d.shape[1]):
            mine, other = dict(left), dict(right)
            mine[p.cotangents], other[q.cotangents] = d[:, k : k + 1], e[:, k : k + 1]
            parts.append(_pair(p, q, mine, other, Mode.FULL, xp, {})[:, 0, :, 0])
        return sum(parts)[:, None, :, None] if mode.sums_outputs else xp.stack(parts)
    if unlike:
        return _looked_up_pairs(p, q, left, right, xp)
    groups = p.groups if isinstance(p, Conv) else d.shape[2]
    d, e = _grouped(d, groups), _grouped(e, groups)
    if mode.sums_outputs:
        d, e = _outputs_as_channels(d), _outputs_as_channels(e)
    total = None
    for group in range(groups):
        n, m = len(d), len(e)
        inside = _inside(p, q, left, right, group, xp)
        if inside is None:
            # A sum over positions is formed before anything is multiplied.
            a, b = (_rows(c[:, :, group].sum(2, keepdims=True)) for c in (d, e))
            part = _positions_first(a, b, xp)[0, 0].reshape(n, d.shape[1], m, e.shape[1])
            total = part if total is None else total + part
            continue
        key = (p.cotangents, q.cotangents, groups, group)
        if key not in across:
            across[key] = _positions_first(_rows(d[:, :, group]), _rows(e[:, :, group]), xp)
        products_d = across[key]
        if products_d.shape[:2] == (1, 1):
            part = products_d[0, 0].reshape(n, d.shape[1], m, e.shape[1]) * inside[0, 0][:, None, :, None]
        elif d.shape[1] == 1:
            # Multiplied in place and summed over whole blocks of pairs: einsum would go number by number.
            inside *= products_d
            part = inside.reshape(-1, n, m).sum(0)[:, None, :, None]
        else:
            shaped = products_d.reshape(*products_d.shape[:2], n, d.shape[1], m, e.shape[1])
            part = xp.einsum("tsikjl,tsij->ikjl", shaped, inside)
        total = part if total is None else total + part
    return total


def _outputs_as_channels(d: Any) -> Any:
    """Cotangents `(n, K, G, T, D)` as `(n, 1, G, T, K * D)`: the trace sums over outputs as over channels."""
    n, k, g, t, width = d.shape
    return d.transpose(0, 2, 3, 1, 4).reshape(n, 1, g, t, k * width)


def _grouped(d: Any, groups: int) -> Any:
    """Cotangents `(n, K, G, T, D)`; a convolution's groups, which lie within its channels, as an axis of their own."""
    n, k, g, t, width = d.shape
    if g == groups:
        return d
    return d[:, :, 0].reshape(n, k, t, groups, width // groups).transpose(0, 1, 3, 2, 4)


def _rows(d: Any) -> Any:
    """Cotangents of one group `(n, K, T, D)` as `(T, n * K, D)`."""
    n, k, t, width = d.shape
    return d.transpose(2, 0, 1, 3).reshape(t, n * k, width)


def _positions_first(a: Any, b: Any, xp: Any) -> Any:
    """Products `(T, S, n, m)` of `(T, n, C)` with `(S, m, C)`."""
    if len(a) == len(b) == 1:
        return xp.matmul(a[0], b[0].T)[None, None]
    return xp.matmul(a[:, None], xp.swapaxes(b, -1, -2)[None])


def _inside(p: Factored, q: Factored, left: Operands, right: Operands, group: int, xp: Any) -> Any:
    """Products `(T, S, n, m)` of what went into the layer; None where all are 1."""
    if isinstance(p, Index) and isinstance(q, Index):
        a, b = left[p.ids].T, right[q.ids].T
        same = (a[:, None, :, None] == b[None, :, None, :]) & (a >= 0)[:, None, :, None]
        return same.astype(left[p.cotangents].dtype)
    if isinstance(p, Conv) and isinstance(q, Conv):
        if by_patches(p, left[p.inputs].shape[1:]):
            a, b = (_patch_group(t, side[t.inputs], group, xp) for t, side in ((p, left), (q, right)))
            return _positions_first(a.transpose(1, 0, 2), b.transpose(1, 0, 2), xp)
        images, others = (_image_group(t, side[t.inputs], group, xp) for t, side in ((p, left), (q, right)))
        term = _unspread(p)
        pixels = _positions_first(_pixels_first(images), _pixels_first(others), xp)
        return _over_window(term, images.shape[1:-1], pixels, xp)
    assert isinstance(p, Dot) and isinstance(q, Dot)
    if p.inputs is None or q.inputs is None:
        return None
    a, b = left[p.inputs][:, group], right[q.inputs][:, group]
    return _positions_first(a.transpose(1, 0, 2), b.transpose(1, 0, 2), xp)


def _unspread(term: Conv) -> Conv:
    """A convolution whose images have been padded because their pixels stand apart."""
    if all(apart == 1 for apart in term.spread):
        return term
    return replace(term, spread=(1,) * len(term.spread), padding=(0,) * len(term.padding))


def _image_group(term: Conv, images: Any, group: int, xp: Any) -> Any:
    images = term.padded(images, xp) if any(apart > 1 for apart in term.spread) else images
    size = images.shape[-1] // term.groups
    return images[..., group * size : (group + 1) * size]


def by_patches(term: Conv, shape: tuple[int, ...]) -> bool:
    """Whether products of patches of images `(B, *space, C)` take less than those of pixels, added over the window."""
    positions, pixels = _positions_and_pixels(term, shape)
    channels, window = shape[-1] // term.groups, math.prod(term.window)
    if positions >= pixels or positions * (window * channels + positions) > pixels**2:
        return False
    return positions**2 * window * channels <= pixels**2 * channels + positions**2 * window


def _positions_and_pixels(term: Conv, shape: tuple[int, ...]) -> tuple[int, int]:
    """Places of the window, and pixels, with those that are put between them, of images `(B, *space, C)`."""
    space = ((size - 1) * apart + 1 for size, apart in zip(shape[1:-1], term.spread, strict=True))
    return shape[0] * math.prod(term.positions), shape[0] * math.prod(space)


def product_numbers(term: Conv, shape: tuple[int, ...]) -> int:
    """Numbers that products of what went into a convolution take for one pair of examples, with its patches."""
    positions, pixels = _positions_and_pixels(term, shape)
    if not by_patches(term, shape):
        return pixels**2 + positions**2
    return positions**2 + 2 * positions * math.prod(term.window) * (shape[-1] // term.groups)


def _patch_group(term: Conv, images: Any, group: int, xp: Any) -> Any:
    """Patches `(n, T, window * C)` of one group's channels."""
    size = images.shape[-1] // term.groups
    return term.patches(images[..., group * size : (group + 1) * size], xp)[:, 0]


def _pixels_first(images: Any) -> Any:
    n, channels = len(images), images.shape[-1]
    return images.reshape(n, -1, channels).transpose(1, 0, 2)


def _over_window(term: Conv, shape: tuple[int, ...], pixels: Any, xp: Any) -> Any:
    """Products of patches `(T, T, ...)` from products of pixels `(P, P, ...)` of images `(B, *space)`.

    Each entry of the window adds the products of the pixels that it meets; outside the image there is nothing to add.
    """
    batch, space = shape[0], shape[1:]
    rest = pixels.shape[2:]
    pixels = pixels.reshape(*shape, *shape, *rest)
    count = batch * math.prod(term.positions)
    total = xp.zeros((batch, *term.positions, batch, *term.positions, *rest), pixels.dtype)
    for entry in np.ndindex(*term.window):
        to: list[slice] = [slice(None)]
        source: list[slice] = [slice(None)]
        for w, size, positions, stride, dilation, padding in zip(
            entry, space, term.positions, term.strides, term.dilation, term.padding, strict=True
        ):
            shift = w * dilation - padding
            first = max(0, -(shift // stride))
            last = min(positions, (size - 1 - shift) // stride + 1)
            to.append(slice(first, max(first, last)))
            source.append(slice(first * stride + shift, (max(first, last) - 1) * stride + shift + 1, stride))
        if any(part.start >= part.stop for part in to[1:]):
            continue
        places, pairs = (*to, *to), (*source, *source)
        if xp is np:
            total[places] += pixels[pairs]
        else:
            total = total.at[places].add(pixels[pairs])
    return total.reshape(count, count, *rest)


def _looked_up_pairs(p: Factored, q: Factored, left: Operands, right: Operands, xp: Any) -> Any:
    """Products `(n, K, m, K)` of a look-up's rows with those of a product with the same table: a tied embedding."""
    if isinstance(q, Index):
        return _looked_up_pairs(q, p, right, left, xp).transpose(2, 3, 0, 1)
    assert isinstance(p, Index) and isinstance(q, Dot) and q.inputs is not None
    ids, d = left[p.ids], left[p.cotangents][:, :, 0]
    table, inner = right[q.cotangents][:, :, 0], right[q.inputs]
    if not q.views:
        # The product's inputs run over the table's rows, its cotangents over the columns.
        table, inner = inner, table
    found = xp.where(ids >= 0, ids, 0)
    # (m, K or 1, S, n, T): the other term's value at the rows that were looked up.
    looked = table[..., found] * (ids >= 0)
    # (n, K, T, m, K or 1, S)
    along = xp.einsum("iktc,jlsc->iktjls", d, inner)
    k = d.shape[1]
    along = xp.broadcast_to(along, (*along.shape[:4], k, along.shape[5]))
    looked = xp.broadcast_to(looked, (len(looked), k, *looked.shape[2:]))
    return xp.einsum("iktjls,jlsit->ikjl", along, looked)


# -------------------------------------------------------------------------------------- each example with itself, norms


def _own(p: Factored, q: Factored, operands: Operands, xp: Any) -> Any:
    """Parts `(n, K, m)` of the products of each row with itself that two terms give."""
    scale = p.scale * q.scale
    if isinstance(p, Index) != isinstance(q, Index):
        if isinstance(q, Index):
            p, q = q, p
        return _own_looked_up(p, q, operands, xp) * scale
    d, e = operands[p.cotangents], operands[q.cotangents]
    groups = p.groups if isinstance(p, Conv) else d.shape[2]
    d, e = _grouped(d, groups), _grouped(e, groups)
    parts = []
    for group in range(groups):
        along = xp.matmul(d[:, :, group], xp.swapaxes(e[:, :, group], -1, -2))
        inside = _own_inside(p, q, operands, group, xp)
        parts.append((along if inside is None else along * inside[:, None]).sum(-1))
    return xp.concatenate(parts, -1) * scale


def _own_inside(p: Factored, q: Factored, operands: Operands, group: int, xp: Any) -> Any:
    """Products `(n, T, S)` of what went into the layer, of each example with itself; None where all are 1."""
    if isinstance(p, Index) and isinstance(q, Index):
        a, b = operands[p.ids], operands[q.ids]
        return ((a[:, :, None] == b[:, None, :]) & (a >= 0)[:, :, None]).astype(operands[p.cotangents].dtype)
    if isinstance(p, Conv) and isinstance(q, Conv):
        if by_patches(p, operands[p.inputs].shape[1:]):
            a, b = (_patch_group(t, operands[t.inputs], group, xp) for t in (p, q))
            return xp.matmul(a, xp.swapaxes(b, -1, -2))
        images, others = (_image_group(p, operands[t.inputs], group, xp) for t in (p, q))
        flat, other = (i.reshape(len(i), -1, i.shape[-1]) for i in (images, others))
        pixels = xp.moveaxis(xp.matmul(flat, xp.swapaxes(other, -1, -2)), 0, -1)
        return xp.moveaxis(_over_window(_unspread(p), images.shape[1:-1], pixels, xp), -1, 0)
    assert isinstance(p, Dot) and isinstance(q, Dot)
    if p.inputs is None or q.inputs is None:
        return None
    a, b = operands[p.inputs][:, group], operands[q.inputs][:, group]
    return xp.matmul(a, xp.swapaxes(b, -1, -2))


def _own_looked_up(p: Factored, q: Factored, operands: Operands, xp: Any) -> Any:
    assert isinstance(p, Index) and isinstance(q, Dot) and q.inputs is not None
    ids, d = operands[p.ids], operands[p.cotangents][:, :, 0]
    table, inner = operands[q.cotangents][:, :, 0], operands[q.inputs]
    if not q.views:
        table, inner = inner, table
    found = xp.where(ids >= 0, ids, 0)
    # (n, K or 1, S, T)
    looked = xp.take_along_axis(table, xp.broadcast_to(found[:, None, None], (*table.shape[:3], ids.shape[1])), -1)
    looked = looked * (ids >= 0)[:, None, None]
    along = xp.matmul(d, xp.swapaxes(inner, -1, -2))
    return (along * xp.swapaxes(looked, -1, -2)).sum(-1)


def _expanding_is_cheaper(terms: list[Factored], operands: Operands, size: int) -> bool:
    """Whether forming rows takes fewer multiplications than products of all pairs of positions."""
    if any(isinstance(term, Index) for term in terms):
        return False
    implicit = expanded = 0
    for p in terms:
        t, width = operands[p.cotangents].shape[3:]
        channels = operands[p.operands[0]].shape[-1]
        if isinstance(p, Conv):
            shape = operands[p.inputs].shape[1:]
            pixels, window = _positions_and_pixels(p, shape)[1], math.prod(p.window)
            inside = t * t * window * channels if by_patches(p, shape) else pixels**2 * channels + t * t * window
            implicit += inside + t * t * width
        else:
            inside = 0 if isinstance(p, Dot) and p.inputs is None else channels
            implicit += t * t * (inside + width)
        expanded += t * size
    return implicit * len(terms) > expanded


def _runs(squares: Any, xp: Any) -> Any:
    """Sums over runs of 64 numbers, the rest apart."""
    *lead, size = squares.shape
    whole = size // 64 * 64
    parts = squares[..., :whole].reshape(*lead, 64, whole // 64).sum(-2)
    return xp.concatenate([parts, squares[..., whole:].sum(-1, keepdims=True)], -1)
