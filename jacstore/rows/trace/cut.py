"""Choose the terms of every parameter leaf, and make the function that computes what they store.

The backward pass of one example is traced once and cut just before the products that form gradients, which XLA then
never computes. A gradient that begins in any other way, such as inside `while`, is stored as rows: always right, only
larger.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jacstore.base.limits import LIMITS
from jacstore.problem.problem import Prepared, precision_context
from jacstore.problem.program import KEPT_PARTS, Recent
from jacstore.rows.trace.backward import Backward, hash_values
from jacstore.rows.trace.candidates import Made, Stacked
from jacstore.rows.trace.find_terms import Finder, Found
from jacstore.terms.kinds import Dense, Leaf, Operand, Term, expand


@dataclass(frozen=True, kw_only=True, eq=False)
class CutBackward:
    """A problem's backward pass, cut before the products that form its rows.

    Attributes
    ----------
    leaves
        With their terms; `Dense.start` counts columns of stored rows only.
    operands
        The operands of factored leaves, each once.
    programs
        What was compiled to compute it.
    """

    leaves: tuple[Leaf, ...]
    operands: tuple[Operand, ...]
    programs: Recent = field(repr=False, default_factory=lambda: Recent(KEPT_PARTS))
    _flat: Backward = field(repr=False)
    _read: Mapping[Any, str] = field(repr=False)
    _made: Mapping[str, Made | Stacked] = field(repr=False)
    _rows: tuple[tuple[int, tuple[Term, ...]], ...] = field(repr=False)

    def __call__(
        self, selected: list[Any], rest: list[Any], example: Any, cotangents: Any
    ) -> tuple[Any, dict[str, jax.Array], list[Any]]:
        """Compute for one example outputs `(K,)`, operands, and rows `(k, size)` of the leaves stored as rows.

        `cotangents` is `(k, K)`; operands that are cotangents have a leading k.
        """
        flat = self._flat
        names = list(self._made)
        vectors = [n for n in names if flat.of_cotangent(self._made[n].root)]
        others = [n for n in names if n not in vectors]

        def one(cotangent: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
            needs = [self._made[n].needs for n in [*others, *vectors]]
            wanted = [*flat.outputs, *(var for each in needs for var in each), *self._row_roots()]
            found = iter(flat.values(selected, rest, example, cotangent, wanted))
            outputs = [next(found) for _ in flat.outputs]
            given = [[next(found) for _ in each] for each in needs]
            made = [self._made[n].finish(v) for n, v in zip([*others, *vectors], given, strict=True)]
            return outputs[0], made[: len(others)], made[len(others) :], list(found)

        outputs, inputs, vectors_found, roots = jax.vmap(one, out_axes=(None, None, 0, 0))(cotangents)
        operands = dict(zip([*others, *vectors], [*inputs, *vectors_found], strict=True))
        return outputs, operands, self._finish_rows(operands, roots, len(cotangents))

    @property
    def cotangent_dtype(self) -> Any:
        """The type of cotangents: that of the outputs."""
        return self._flat.outputs[0].aval.dtype

    def is_for(self, parameters: Sequence[Any]) -> bool:
        """Whether what stands in the terms as numbers, or decided them, has the values that it had."""
        return all(hash_values(self._flat.constants(var, parameters)) == found for var, found in self._read.items())

    def _row_roots(self) -> list[Any]:
        return [self._flat.gradients[n] for n, terms in self._rows if not terms]

    def _finish_rows(self, operands: dict[str, Any], roots: list[Any], k: int) -> list[Any]:
        """Rows of dense leaves: a gradient as it came, or a convolution's by products of shifted images."""
        plain, rows, used = iter(roots), [], set[str]()
        for n, terms in self._rows:
            if terms:
                single = {name: operands[name][None] for name in {o for t in terms for o in t.operands}}
                rows.append(expand(terms, single, self.leaves[n].size, jnp)[0])
                used.update(single)
            else:
                rows.append(next(plain).reshape(k, -1))
        # One operand may be used for several rows: two convolutions that read the same image.
        for name in used:
            del operands[name]
        return rows


def cut_before_products(prepared: Prepared, layout: str, float64: bool) -> CutBackward:
    """Find the terms of every leaf and choose those that are stored.

    Parameters
    ----------
    layout
        auto: factors where they are smaller and the leaf is not tiny; dense: rows only; factored: factors wherever
        there are any.
    float64
        Whether it is computed in float64.
    """
    parameters = [*prepared.selected, *prepared.rest]
    with precision_context(float64):
        kept = prepared.backward()
        described = tuple((leaf.path, tuple(leaf.shape), leaf.dtype) for leaf in prepared.leaves)
        cut: CutBackward | None = kept.made.get(("cut", layout, described))
        if cut is None or not cut.is_for(parameters):
            assert kept.jaxpr is not None
            traced = kept.jaxpr
            flat = kept.made.made("backward", lambda: Backward(traced, len(parameters)))
            cut = kept.made.keep(
                ("cut", layout, described), _cut(flat, parameters, described, prepared.n_outputs, layout)
            )
        return cut


def cut_with_rows(prepared: Prepared, cut: CutBackward, paths: Collection[str], layout: str) -> CutBackward:
    """The same program with the leaves at `paths` stored as rows, as in a store that an earlier version began."""
    described = [(leaf.path, leaf.shape, leaf.dtype) for leaf in cut.leaves]
    return _cut(cut._flat, [*prepared.selected, *prepared.rest], described, prepared.n_outputs, layout, paths)


def _cut(
    flat: Backward,
    parameters: Sequence[Any],
    described: Sequence[tuple[str, tuple[int, ...], str]],
    n_outputs: int,
    layout: str,
    as_rows: Collection[str] = (),
) -> CutBackward:
    finder = Finder(flat, parameters)
    found = [finder.leaf(n) for n in range(len(described))]
    finder.tie_sums(found)
    chosen = _choose(found, described, n_outputs, layout, as_rows)
    names: dict[Any, str] = {}
    made: dict[str, Made | Stacked] = {}
    operands: dict[str, Operand] = {}

    def name_of(core_made: Made | Stacked, stored: bool) -> str:
        if core_made.key not in names:
            names[core_made.key] = f"{core_made.role}{len(names)}"
            made[names[core_made.key]] = core_made
        name = names[core_made.key]
        if stored and name not in operands:
            operands[name] = Operand(name=name, role=core_made.role, shape=core_made.shape)
        return name

    leaves, rows, start, offset = [], [], 0, 0
    for n, (path, shape, dtype) in enumerate(described):
        size, terms = math.prod(shape), found[n].terms
        built: tuple[Term, ...] = ()
        if chosen[n]:
            built = tuple(core.term(name_of, stored=True) for core in terms)
        else:
            by_factors = terms and all(core.from_factors for core in terms)
            shifted = tuple(core.term(lambda m, stored: _temporary(m, names, made), stored=False) for core in terms)
            rows.append((n, shifted if by_factors else ()))
            built = (Dense(start=start, size=size),)
            start += size
        leaves.append(Leaf(path=path, shape=tuple(shape), dtype=dtype, offset=offset, terms=built, why=found[n].why))
        offset += size
    used = {name for n, terms in rows for t in terms for name in t.operands} | operands.keys()
    made = {name: m for name, m in made.items() if name in used}
    return CutBackward(
        leaves=tuple(leaves),
        operands=tuple(operands.values()),
        _flat=flat,
        _read={var: hash_values(values) for var, values in finder.read.items()},
        _made=made,
        _rows=tuple(rows),
    )


def _temporary(core_made: Made | Stacked, names: dict[Any, str], made: dict[str, Made | Stacked]) -> str:
    """A name for an operand that is only needed to form rows and is not stored."""
    key = ("temporary", core_made.key)
    if key not in names:
        names[key] = f"temporary{len(names)}"
        made[names[key]] = core_made
    return names[key]


def _choose(
    found: list[Found],
    described: Sequence[tuple[str, tuple[int, ...], str]],
    n_outputs: int,
    layout: str,
    as_rows: Collection[str],
) -> list[bool]:
    """Which leaves are stored by their factors."""
    chosen = []
    for leaf, (path, shape, _) in zip(found, described, strict=True):
        if path in as_rows:
            leaf.terms, leaf.pending, leaf.why = [], [], "stored as rows by an earlier version"
        products = bool(leaf.terms) and not leaf.pending
        numbers, size = sum(core.numbers(n_outputs) for core in leaf.terms), n_outputs * math.prod(shape)
        smaller_by = max((core.smaller_by for core in leaf.terms), default=1)
        pays = LIMITS.smallest_factored <= size > smaller_by * numbers
        take = products and layout != "dense" and (layout == "factored" or pays)
        if products:
            leaf.why = f"{numbers:,} numbers against {size:,}" if layout != "dense" else "layout dense"
        chosen.append(take)
    cores = [core for leaf, take in zip(found, chosen, strict=True) if take for core in leaf.terms]
    stored = {core.cotangents.key for core in cores}
    held = stored | {core.inputs.key for core in cores if core.inputs}
    for n, (leaf, (_, shape, _)) in enumerate(zip(found, described, strict=True)):
        if leaf.pending and leaf.terms:
            chosen[n] = all(core.cotangents.key in stored for core in leaf.terms)
            leaf.why = "its layer's cotangents" if chosen[n] else "its layer is stored as rows"
        elif layout == "auto" and math.prod(shape) > 1 and any(core.maps for core in leaf.terms):
            # The lengths of a normalised weight, whose direction stores the same factors.
            free = all(made.key in held for core in leaf.terms for made in (core.inputs, core.cotangents) if made)
            leaf.why = "its layer's factors" if free and not chosen[n] else leaf.why
            chosen[n] = chosen[n] or free
    return chosen
