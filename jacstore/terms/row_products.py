"""Products of rows from their factors, without forming the rows.

A row's part is `sum_t a_t ⊗ d_t`, so a product of two rows is `sum_{t,s} (a_t · b_s) (d_t · e_s)`: products of inputs
(of patches for convolutions, equality of indices for look-ups; each kind forms its own) times products of cotangents.
Formulas are written for NumPy and JAX alike; positions come first, so that the pairs of examples are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jacstore.base.modes import Mode
from jacstore.terms.dot import Dot
from jacstore.terms.index import Index
from jacstore.terms.kinds import Leaf, expand
from jacstore.terms.term import Factored, Operands, Shapes, positions_first, shapes_of


def squared_norms(leaf: Leaf, operands: Operands, xp: Any = np) -> Any:
    """Partial sums `(n, K, m)` of squared norms of a factored leaf's rows; summing over m is left to the caller."""
    terms = leaf.factored
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
    if any(term.formed for term in leaf.factored):
        return _formed_products(leaf, left, right, mode, xp)
    total = None
    for p in leaf.factored:
        for q in leaf.factored:
            part = _pair(p, q, left, right, mode, xp, {} if across is None else across)
            scale = p.scale * q.scale
            part = part if scale == 1 else part * part.dtype.type(scale)
            total = part if total is None else total + part
    return total


def _formed_products(leaf: Leaf, left: Operands, right: Operands, mode: Mode, xp: Any) -> Any:
    """As `products`, of rows."""
    a, b = (expand(leaf.terms, side, leaf.size, xp) for side in (left, right))
    if mode.sums_outputs:
        return xp.matmul(a.reshape(len(a), -1), b.reshape(len(b), -1).T)[:, None, :, None]
    if not mode.crosses_outputs:
        return xp.matmul(a.transpose(1, 0, 2), b.transpose(1, 2, 0))
    found = xp.matmul(a.reshape(-1, leaf.size), b.reshape(-1, leaf.size).T)
    return found.reshape(*a.shape[:2], *b.shape[:2])


def own_products(leaf: Leaf, operands: Operands, xp: Any = np) -> Any:
    """Products `(n, K, K)` of each example's rows of a factored leaf with each other, for mode blocks."""
    names = leaf.operands
    outputs = max(operands[term.cotangents].shape[1] for term in leaf.factored)
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
    terms = leaf.factored
    if any(term.sparse or term.formed for term in terms):
        return not any(term.sparse for term in terms)
    pairs = max((positions[term.cotangents] * n_outputs) ** 2 for term in terms)
    return n_outputs * leaf.size < pairs


def inside_flops(p: Factored, q: Factored, shapes: Shapes, elementwise: int) -> int | None:
    """Operations of products of what went into two terms' layers, for a pair of examples; see `Factored`."""
    if p.kind != q.kind:
        return elementwise * shapes[p.cotangents][1] * shapes[q.cotangents][1]
    return p.inside_flops(q, shapes, elementwise)


def _pair(
    p: Factored, q: Factored, left: Operands, right: Operands, mode: Mode, xp: Any, across: dict[Any, Any]
) -> Any:
    d, e = left[p.cotangents], right[q.cotangents]
    unlike = p.kind != q.kind
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
    groups = p.n_groups(d)
    d, e = _grouped(d, groups), _grouped(e, groups)
    if mode.sums_outputs:
        d, e = _outputs_as_channels(d), _outputs_as_channels(e)
    total = None
    for group in range(groups):
        n, m = len(d), len(e)
        inside = p.inside(q, left, right, group, xp)
        if inside is None:
            # A sum over positions is formed before anything is multiplied.
            a, b = (_rows(c[:, :, group].sum(2, keepdims=True)) for c in (d, e))
            part = positions_first(a, b, xp)[0, 0].reshape(n, d.shape[1], m, e.shape[1])
            total = part if total is None else total + part
            continue
        key = (p.cotangents, q.cotangents, groups, group)
        on_host = xp is np and inside.shape[:2] != (1, 1)
        if key not in across:
            rows = _rows_by_output if on_host else _rows
            across[key] = positions_first(rows(d[:, :, group]), rows(e[:, :, group]), xp)
        products_d = across[key]
        if products_d.shape[:2] == (1, 1):
            part = products_d[0, 0].reshape(n, d.shape[1], m, e.shape[1]) * inside[0, 0][:, None, :, None]
        elif on_host:
            part = _summed(products_d, inside, d.shape[1], e.shape[1])
        elif d.shape[1] == 1:
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


def _rows_by_output(d: np.ndarray) -> np.ndarray:
    """Cotangents of one group `(n, K, T, D)` as `(T, K * n, D)`."""
    n, k, t, width = d.shape
    return d.transpose(2, 1, 0, 3).reshape(t, k * n, width)


def _summed(along: np.ndarray, inside: np.ndarray, k: int, other_k: int) -> np.ndarray:
    """Sums `(n, K, m, K)` over positions of products of cotangents `(T, S, K * n, K * m)` and inputs `(T, S, n, m)`.

    One pair of outputs after the other, in runs of pairs of examples: NumPy would go number by number.
    """
    n, m = inside.shape[2:]
    along = along.reshape(*along.shape[:2], k, n, other_k, m)
    total = np.empty((n, k, m, other_k), inside.dtype)
    for one in range(k):
        for other in range(other_k):
            # Over S, then over T: a long sum one by one would lose digits.
            total[:, one, :, other] = np.einsum("tsnm,tsnm->tnm", along[:, :, one, :, other], inside).sum(0)
    return total


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
    if p.kind != q.kind:
        if isinstance(q, Index):
            p, q = q, p
        return _own_looked_up(p, q, operands, xp) * scale
    d, e = operands[p.cotangents], operands[q.cotangents]
    groups = p.n_groups(d)
    d, e = _grouped(d, groups), _grouped(e, groups)
    parts = []
    for group in range(groups):
        along = xp.matmul(d[:, :, group], xp.swapaxes(e[:, :, group], -1, -2))
        inside = p.own_inside(q, operands, group, xp)
        parts.append((along if inside is None else along * inside[:, None]).sum(-1))
    return xp.concatenate(parts, -1) * scale


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


def _expanding_is_cheaper(terms: Sequence[Factored], operands: Operands, size: int) -> bool:
    """Whether forming rows takes fewer multiplications than products of all pairs of positions."""
    if any(term.sparse or term.formed for term in terms):
        return not any(term.sparse for term in terms)
    implicit = expanded = 0
    for term in terms:
        shapes = shapes_of(operands, term.operands, term.cotangents)
        implicit += term.own_flops(shapes)
        expanded += shapes[term.cotangents][1] * size
    return implicit * len(terms) > expanded


def _runs(squares: Any, xp: Any) -> Any:
    """Sums over runs of 64 numbers, the rest apart."""
    *lead, size = squares.shape
    whole = size // 64 * 64
    parts = squares[..., :whole].reshape(*lead, 64, whole // 64).sum(-2)
    return xp.concatenate([parts, squares[..., whole:].sum(-1, keepdims=True)], -1)
