"""Compare a store with the problem it was built from: fingerprint, inputs, outputs, and recomputed rows.

Rows are recomputed in float64 by plain `jax.vjp` of the user's function, sharing nothing with the code that built them
but the names of leaves. A row that is out of bound is recomputed in the build's own precision before it counts: a ReLU
may fall to the other side of zero between float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jacstore.base.precision import LOST, ROUNDOFF, compute_dtype, computed_bound, row_bound
from jacstore.problem.inputs import examples_at_once
from jacstore.problem.probes import SHAKEN, SHAKES, shaken
from jacstore.problem.problem import Prepared, Problem, precision_context, prepare
from jacstore.problem.pytrees import dtype_of, is_kind, paths_and_leaves
from jacstore.rows.unit import hash_inputs
from jacstore.store.norms import leaf_row
from jacstore.store.reader import JacobianStore
from jacstore.terms.rounding import lost_to_underflow, squared_magnitudes
from jacstore.verification.report import FAILED, OK, Check, Tally, skipped
from jacstore.verification.store_checks import StoreChecks

FIELDS = ("parameters", "function", "constants", "outputs", "selection", "inputs")
# The text of a program differs between versions of JAX.
TEXTS = ("function", "constants")
INPUTS_AT_ONCE = 64
EVERYTHING = ("inputs: all rows", "rows", "outputs", "rows in the build's precision only")
# `(example, k) -> outputs (K,), the row of output k leaf by leaf`.
Plain = Callable[..., tuple[np.ndarray, list[np.ndarray]]]


class TargetChecks:
    """Checks of a store against its problem.

    Attributes
    ----------
    package
        The package whose version decides the text of the function.
    input_bytes
        Bytes of one example, and of what is held beside the examples while some are read.
    same
        Whether nothing that decides the rows differs, so that a wrong row is the store's fault.
    """

    package = "jax"

    def __init__(self, store: JacobianStore, problem: Problem, checks: StoreChecks) -> None:
        self.store, self.problem, self.checks = store, problem, checks
        self.prepared: Prepared = prepare(problem, float64=store.dtype == "float64")
        self.same, self.input_bytes = True, self.prepared.input_bytes
        self.n_outputs, self.n_examples = self.prepared.n_outputs, problem.n_examples
        self.described = [(leaf.path, leaf.shape) for leaf in self.prepared.leaves]
        self.selected: list[Any] = list(self.prepared.selected)
        self.wanted: dict[str, Any] = self.prepared.requested_like(store.requested)

    def run(self, samples: int, full: bool, draw: np.random.Generator) -> Iterator[Check]:
        yield from self._fingerprint()
        found = [(leaf.path, leaf.shape) for leaf in self.store.leaves]
        if found != self.described:
            yield from (skipped(name, "the target's leaves are others") for name in EVERYTHING)
        elif (self.store.n_outputs, True) != (self.n_outputs, self._shift() is not None):
            yield from (skipped(name, "the target has other outputs or fewer examples") for name in EVERYTHING)
        else:
            yield self._inputs()
            yield from self._rows(self._chosen(samples, full, draw))

    def _shift(self) -> int | None:
        """The target's example that is the store's first; None if the target has too few."""
        first, last = self._range()
        return first if last <= self.n_examples else None

    def _range(self) -> tuple[int, int]:
        """The target's examples that are stored; all of them if the request does not name a range."""
        named = self.store.requested.get("examples")
        if isinstance(named, list) and len(named) == 2 and all(type(n) is int for n in named):
            first, last = named
            if first >= 0 and last - first == self.store.n_examples:
                return first, last
        return 0, self.store.n_examples

    def _fingerprint(self) -> Iterator[Check]:
        """Compare the fingerprint field by field, as a rerun of the build does."""
        before, now = self.store.requested, self.wanted
        versions = self.store.versions.get(self.package), version(self.package)
        for field in FIELDS:
            name = f"fingerprint: {field}"
            if field not in before:
                yield skipped(name, "rows came from outside and name none")
                continue
            equal = before[field] == now[field]
            if not equal and field in TEXTS and versions[0] != versions[1]:
                yield skipped(
                    name, f"written by {self.package} {versions[0]}, this is {versions[1]}: their programs differ"
                )
                continue
            self.same &= equal
            where = "" if equal else f"{field}: {_brief(before[field])} -> {_brief(now[field])}"
            yield Check(name=name, state=OK if equal else FAILED, where=where)
        wanted = self._range()
        if self._shift() is None:
            self.same = False
            where = f"examples {wanted[0]} to {wanted[1] - 1} are stored, the target has {self.n_examples}"
            yield Check(name="fingerprint: examples", state=FAILED, where=where)
        else:
            yield Check(name="fingerprint: examples", state=OK)

    def _read(self, a: int, b: int) -> Any:
        shift = self._shift() or 0
        return self.prepared.read(shift + a, shift + b)

    def _inputs(self) -> Check:
        """Compare the hashes of the inputs of every unit."""
        store, tally = self.store, Tally(EVERYTHING[0])
        units = [unit for unit in self.checks.units if store.unit(unit).inputs is not None]
        if not units:
            return skipped(tally.name, "no unit's record names its inputs")
        at_once = examples_at_once(self.input_bytes, self.checks.budget.total, INPUTS_AT_ONCE)
        for unit in units:
            start, stop = store.unit_range(unit)
            if hash_inputs(self._read, start, stop, at_once) != store.unit(unit).inputs:
                tally.fault(f"inputs of unit {unit} (examples {start} to {stop - 1}) are not those that were built")
                self.same = False
        return tally.done()

    def _chosen(self, samples: int, full: bool, draw: np.random.Generator) -> list[tuple[int, int]]:
        """Rows (example, output) to recompute, among those of units in which nothing was found wrong."""
        store, k = self.store, self.store.n_outputs
        examples = [n for unit in self.checks.units for n in range(*store.unit_range(unit))]
        known = {n for unit in self.checks.units for n in store.unit(unit).nonfinite_examples}
        finite = [n for n in examples if n not in known]
        total = len(finite) * k
        picked = range(total) if full else sorted(draw.choice(total, min(samples, total), replace=False))
        return [(finite[at // k], int(at % k)) for at in picked]

    def _rows(self, chosen: list[tuple[int, int]]) -> Iterator[Check]:
        if not chosen:
            yield from (skipped(name, "no sound unit to take rows from") for name in EVERYTHING[1:])
            return
        store = self.store
        rows, outputs, flips = Tally("rows"), Tally("outputs"), Tally(EVERYTHING[3])
        bound, outputs_bound = row_bound(store.dtype, store.lowest), computed_bound(store.dtype, store.lowest)
        exact, as_built = self._plain(float64=True), self._plain(float64=store.dtype == "float64")
        size = float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in self.selected)))
        for n, k in chosen:
            example, stored = self._example(n), np.empty((1, store.n_outputs))
            store.read("outputs", n, n + 1, 0, store.n_outputs, stored)
            values, row = exact(example, k)
            row_found = _StoredRow(store, n, k)
            fine = row_found.agrees(row, bound)
            scale = abs(values[k]) + size * row_found.size
            output_fine = abs(stored[0, k] - values[k]) <= outputs_bound * scale
            if not (fine and output_fine):
                # Once more in the precision of the build.
                (values, row), truth = as_built(example, k), row
                scale = abs(values[k]) + size * row_found.size
                again = row_found.agrees(row, bound)
                if not again and not fine:
                    again = row_found.agrees(row, bound, self._rounding_of(as_built, example, k, row, truth))
                if again:
                    flips.seen += 1
                    flips.figure += 1
                    flips.note = flips.note or f"the first is example {n}, output {k}"
            where = f"{store.path}: unit {n // store.unit_size}, "
            leaf, figure, allowed = row_found.worst
            sound = rows.see(figure, allowed, f"{where}leaf {leaf}: the row of example {n}, output {k}")
            error = abs(float(stored[0, k]) - values[k])
            sound &= outputs.see(error / (scale or 1.0), outputs_bound, f"{where}output {k} of example {n}")
            if not sound and self.same:
                self.checks.bad[n // store.unit_size] = True
        yield rows.done()
        yield outputs.done()
        flips.bound = float(len(chosen))
        yield flips.done()

    def _plain(self, float64: bool) -> Plain:
        return _plain(self.problem, self.store, float64)

    def _rounding_of(self, plain: Plain, example: Any, k: int, row: list[np.ndarray], truth: list[np.ndarray]) -> float:
        """How far this very row may be off by the rounding of the build, where its gradient cancels or meets a kink.

        Such a row is as far from the exact one when `plain` computes it, or moves when all numbers move by a rounding:
        the slope of a saturated tanh is what rounding leaves of 1 - tanh².
        """
        draw, moved = np.random.default_rng(0), _distance(row, truth)
        rounding = max(ROUNDOFF[self.store.lowest], ROUNDOFF[compute_dtype(self.store.dtype)])
        for _ in range(SHAKES):
            _, other = plain(example, k, lambda tree: shaken(tree, rounding, draw))
            moved = max(moved, _distance(other, row))
        return SHAKEN * moved

    def _example(self, n: int) -> Any:
        """One example as the user's data holds it."""
        at = (self._shift() or 0) + n
        return jax.tree_util.tree_map(lambda leaf: leaf[0], self.problem.read(at, at + 1))


def _distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in zip(one, other, strict=True))))


class _StoredRow:
    """One stored row, leaf by leaf, and the error that it may have."""

    def __init__(self, store: JacobianStore, n: int, k: int) -> None:
        self.store, self.n, self.k = store, n, k
        self.leaves: list[np.ndarray] = []
        squares, self.lost = 0.0, 0.0
        for leaf in store.leaves:
            operands = {name: store.read_operand(name, n, n + 1, np.float64) for name in leaf.operands}
            row = leaf_row(store, leaf, n, k)
            self.leaves.append(row)
            summed = np.square(row).sum() if leaf.dense else squared_magnitudes(leaf, operands)[0, k]
            squares += float(summed)
            self.lost += lost_to_underflow(leaf, operands, k, store.dtype)
            self.lost += np.sqrt(leaf.size) * LOST[compute_dtype(store.dtype)]
        self.size = float(np.sqrt(squares))
        self.worst = ("", 0.0, 0.0)

    def agrees(self, truth: list[np.ndarray], bound: float, moved: float = 0.0) -> bool:
        """Whether it equals a recomputed row to within rounding; keep the leaf with the largest difference.

        `moved` is how far rounding is known to move this very row.
        """
        off = [float(np.linalg.norm(a - b)) for a, b in zip(self.leaves, truth, strict=True)]
        scale = max(self.size, float(np.sqrt(sum(np.square(b).sum() for b in truth)))) or 1.0
        total = float(np.sqrt(np.square(off).sum()))
        leaf = self.store.leaves[int(np.argmax(off))].path
        self.worst = (leaf, total / scale, bound + (self.lost + moved) / scale)
        return self.worst[1] <= self.worst[2]


def _plain(problem: Problem, store: JacobianStore, float64: bool) -> Plain:
    """`(example, k) -> outputs (K,), the row of output k leaf by leaf`, by `jax.vjp` of the user's function."""
    paths = {leaf.path for leaf in store.leaves}
    named = paths_and_leaves(problem.params)
    structure = jax.tree_util.tree_structure(problem.params)
    moving = [n for n, (path, _) in enumerate(named) if path in paths]

    def wide(leaf: Any) -> Any:
        if dtype_of(leaf) is None or isinstance(leaf, float):
            return leaf
        floating = float64 and is_kind(dtype_of(leaf), np.floating)
        return jnp.asarray(leaf, np.float64) if floating else jnp.asarray(leaf)

    with precision_context(float64):
        leaves = [wide(leaf) for _, leaf in named]
        values = [jnp.asarray(leaves[n]) for n in moving]

    def outputs(moved: list[Any], example: Any) -> Any:
        whole = dict(enumerate(leaves)) | dict(zip(moving, moved, strict=True))
        params = jax.tree_util.tree_unflatten(structure, [whole[n] for n in range(len(leaves))])
        if problem.batched:
            batch = problem.apply(params, jax.tree_util.tree_map(lambda leaf: leaf[None], example))
            tree = jax.tree_util.tree_map(lambda leaf: leaf[0], batch)
        else:
            tree = problem.apply(params, example)
        flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree_util.tree_leaves(tree)])
        if isinstance(problem.outputs, str):
            return flat if problem.outputs == "all" else flat.sum(keepdims=True)
        return flat[np.asarray(problem.outputs)]

    @jax.jit
    def pulled(moved: list[Any], example: Any, k: Any) -> Any:
        found, pull = jax.vjp(lambda inner: outputs(inner, example), moved)
        return found, pull((jnp.arange(found.size) == k).astype(found.dtype))[0]

    def row(example: Any, k: int, change: Callable[[Any], Any] | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        with precision_context(float64):
            given = values, jax.tree_util.tree_map(wide, example)
            found, parts = pulled(*(change(given) if change else given), k)
        return np.asarray(found, np.float64), [np.asarray(part, np.float64).reshape(-1) for part in parts]

    return row


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
