"""Check every unit before it is stored: compare `uᵀ J` of some examples with one plain backward pass.

Terms are found once, in the program of one example. The rows that they give are compared, leaf by leaf, with `jax.vjp`
of the user's function for a random cotangent `u` `(K,)` at random examples of each unit. The plain pass shares nothing
with the cut program, and is compiled quickly rather than well, because it runs for few examples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from jacstore.base.budget import BUILD, Budget
from jacstore.base.limits import LIMITS
from jacstore.base.precision import ROUNDOFF, compute_dtype
from jacstore.base.threads import Pool
from jacstore.errors import InvalidFunctionError
from jacstore.problem.fingerprint import still_holds
from jacstore.problem.probes import SHAKEN, SHAKES, shaken
from jacstore.problem.problem import Prepared, precision_context
from jacstore.problem.program import Recent
from jacstore.problem.twofold import compiled_quickly, of_two, twice
from jacstore.store.arrays import operand_array
from jacstore.store.unit_buffers import UnitBlock
from jacstore.terms.kinds import Leaf, expand

# Wrong terms are off by about the size of the row. Rounding, and a ReLU that falls to the other side of zero, are not.
LOOSE = {"float32": 1e-2, "float64": 1e-6}
ROUNDINGS = 64
# Gradients with numbers moved by a rounding, and how often as far as the largest move a stored row may be away.


def leaves_checked(leaves: Sequence[Leaf], memory: int) -> tuple[list[int], int]:
    """Leaves whose gradients fit in the memory's part `row_check`, the smallest first, and the bytes that they take."""
    checked, taken = [], 0
    allowed = Budget(memory).split(**BUILD)["row_check"]
    for n in sorted(range(len(leaves)), key=lambda n: leaves[n].size):
        # The gradient as it is computed, in float64, and what is compared with it.
        needed = 3 * 8 * leaves[n].size
        if taken + needed <= allowed:
            taken += needed
            checked.append(n)
    return checked, taken


class RowCheck:
    """Compares what a build is about to store with plain gradients.

    Parameters
    ----------
    prepared
        The problem as it is built.
    leaves
        Its leaves with their terms.
    dtype
        What is stored.
    memory
        Bytes of the whole build.

    Attributes
    ----------
    bytes_needed
        Bytes that a comparison takes.
    """

    def __init__(self, prepared: Prepared, leaves: Sequence[Leaf], dtype: str, memory: int) -> None:
        self._prepared, self._leaves = prepared, leaves
        self._float64 = dtype == "float64"
        lowest = max(ROUNDOFF[prepared.lowest], ROUNDOFF[dtype], ROUNDOFF[compute_dtype(dtype)])
        tight = prepared.lowest == dtype == "float64"
        self._rounding = max(ROUNDOFF[prepared.lowest], ROUNDOFF[compute_dtype(dtype)])
        self._tolerance = max(LOOSE["float64" if tight else "float32"], ROUNDINGS * lowest)
        self._checked, self.bytes_needed = leaves_checked(leaves, memory)
        self._two_at_once = prepared.two_at_once
        self._draw = np.random.default_rng()
        self._seconds: float | None = None
        self._usual: dict[bool, tuple[Callable[..., Any], bool]] = {}
        self._program = self._begun()

    def _begun(self) -> Future[Callable[..., Any]]:
        """The plain pass: that of an equal function if there was one, else it is compiled by a thread."""
        backward = self._prepared.backward()
        made, key = backward.made, ("check", self._float64, tuple(self._checked))
        kept = made.get(key)
        if kept is not None:
            known: Future[Callable[..., Any]] = Future()
            program, self._two_at_once = kept
            known.set_result(program)
            return known
        lowered, two_at_once = self._lowered(self._float64), self._two_at_once
        made = made if still_holds(backward) else Recent(1)
        pool = Pool(1, "jacstore-check")
        begun = pool.submit(lambda: made.keep(key, (compiled_quickly(lowered), two_at_once))[0])
        pool.shutdown(wait=False)
        return begun

    def _as_usual(self, float64: bool) -> Callable[..., Any]:
        """The plain pass, compiled as all programs are.

        It is of the function as it is now: a row that is off may be so because a kept program was made of another one.
        """
        kept = self._usual.get(float64)
        if kept is None or kept[1] != self._two_at_once:
            lowered = self._lowered(float64)
            kept = self._usual[float64] = lowered.compile(), self._two_at_once
        return kept[0]

    def choose(self, start: int, stop: int, seconds: float) -> list[int]:
        """Examples of a unit to check, where the last unit took `seconds`."""
        count = 1 if self._seconds is None else max(1, int(LIMITS.check_share * seconds / self._seconds))
        return sorted(
            int(n) for n in self._draw.choice(np.arange(start, stop), min(count, stop - start), replace=False)
        )

    def compare(self, n: int, at: int, example: Any, blocks: Mapping[str, UnitBlock]) -> None:
        """Compare the rows of example n, the unit's `at`-th, as they will be stored.

        Raises
        ------
        InvalidFunctionError
            Naming the leaf whose row is not the gradient of the function.
        """
        program = self._program.result()
        began = time.perf_counter()
        cotangent = self._draw.standard_normal(self._prepared.n_outputs)
        truth = self._gradients(program, example, cotangent, self._float64)
        leaf, off = self._worst(truth, at, cotangent, blocks)
        # Where the function has a kink, or two numbers tie, rounding decides: the same pass compiled as usual, and then
        # in float64, may fall to the side to which the stored row fell.
        for float64 in (self._float64, True)[: 1 if self._float64 else 2]:
            if off > self._tolerance:
                # A function that fails when it is traced again, or in float64, leaves the first look as it is.
                with suppress(Exception):
                    truth = self._gradients(self._as_usual(float64), example, cotangent, float64)
                    leaf, off = self._worst(truth, at, cotangent, blocks)
        if off > self._tolerance:
            with suppress(Exception):
                moved = self._moved_by_rounding(example, cotangent)
                leaf, off = self._worst(truth, at, cotangent, blocks, moved)
        seconds = time.perf_counter() - began
        self._seconds = seconds if self._seconds is None else min(seconds, self._seconds)
        if off > self._tolerance:
            raise InvalidFunctionError(
                f"example {n}: what would be stored of leaf {leaf!r} is not the gradient of apply, a relative "
                f"difference of {off:.2g}; nothing of this unit is stored; build with --layout dense (layout='dense'), "
                "and please report this function"
            )

    def _moved_by_rounding(self, example: Any, cotangent: np.ndarray) -> list[float]:
        """How far each leaf's gradient moves when all numbers move by a rounding.

        A gradient that cancels, or that stands at a kink, moves by its own size: it says nothing about the stored row.
        One that does not is hardly moved.
        """
        program = self._as_usual(self._float64)
        still = self._gradients(program, example, cotangent, self._float64)
        moved = np.zeros(len(still))
        for _ in range(SHAKES):
            found = self._gradients(program, example, cotangent, self._float64, self._shaken)
            moved = np.maximum(moved, [_norm(part - was) for part, was in zip(found, still, strict=True)])
        return [SHAKEN * float(by) for by in moved]

    def _shaken(self, tree: Any) -> Any:
        """Floating numbers moved by about a rounding of the lowest type that is computed in."""
        return shaken(tree, self._rounding, self._draw)

    def _lowered(self, float64: bool) -> Any:
        """The plain backward pass of one example for one cotangent, traced by the calling thread."""
        if self._two_at_once:
            try:
                return self._lowered_once(float64)
            except Exception:
                # Where it cannot be computed for two examples it is the device pass that says so.
                self._two_at_once = False
        return self._lowered_once(float64)

    def _lowered_once(self, float64: bool) -> Any:
        prepared, moving = self._prepared, self._checked
        function = of_two(prepared.function) if self._two_at_once else prepared.function

        def pull(selected: list[Any], rest: list[Any], example: Any, cotangent: Any) -> list[Any]:
            def outputs(moved: list[Any]) -> Any:
                whole = list(selected)
                for n, leaf in zip(moving, moved, strict=True):
                    whole[n] = leaf
                return function(whole, rest, example)

            found, back = jax.vjp(outputs, [selected[n] for n in moving])
            gradients: list[Any] = back(cotangent.astype(found.dtype))[0]
            return gradients

        with precision_context(float64):
            example = jax.tree_util.tree_map(lambda leaf: leaf[0], prepared.read(0, 1))
            return jax.jit(pull).lower(*self._given(example, np.zeros(prepared.n_outputs), float64))

    def _given(self, example: Any, cotangent: np.ndarray, float64: bool) -> tuple[Any, ...]:
        """Arguments of the plain pass; of two copies each has half of the cotangent, and their gradients add up."""
        prepared = self._prepared
        if self._two_at_once:
            example, cotangent = twice(example), np.stack([cotangent / 2, cotangent / 2])
        wide: tuple[Any, ...] = _wide((prepared.selected, prepared.rest, example, cotangent), float64)
        return wide

    def _gradients(
        self,
        program: Callable[..., Any],
        example: Any,
        cotangent: np.ndarray,
        float64: bool,
        change: Callable[[Any], Any] = lambda given: given,
    ) -> list[Any]:
        with precision_context(float64):
            *given, weights = self._given(example, cotangent, float64)
            found = program(*change(tuple(given)), weights)
            return [np.asarray(part, np.float64).reshape(-1) for part in found]

    def _worst(
        self,
        truth: Sequence[np.ndarray],
        at: int,
        cotangent: np.ndarray,
        blocks: Mapping[str, UnitBlock],
        moved: Sequence[float] | None = None,
    ) -> tuple[str, float]:
        """The leaf that is off most, and by how much; examples that are not finite are the build's to report.

        `moved` says how far each leaf may be off beside.
        """
        worst, total = ("", 0.0), math.hypot(*(norms := [_norm(part) for part in truth]))
        if not np.isfinite(total):
            return worst
        rows = blocks["rows"].weighted(at, cotangent) if "rows" in blocks else np.empty(0)
        more = [0.0] * len(truth) if moved is None else moved
        for n, wanted, norm, beside in zip(self._checked, truth, norms, more, strict=True):
            found, size = self._stored(self._leaves[n], at, cotangent, blocks, rows)
            # Sums that cancel keep the rounding of what they are summed from.
            rounding = ROUNDINGS * ROUNDOFF["float64" if self._float64 else "float32"] * size
            difference = _norm(found - wanted) - rounding - beside
            scale = norm + self._tolerance * total
            off = difference / scale if scale else (np.inf if difference > 0 else 0.0)
            if not off <= worst[1]:
                worst = (self._leaves[n].path, off)
        return worst

    @staticmethod
    def _stored(
        leaf: Leaf, at: int, cotangent: np.ndarray, blocks: Mapping[str, UnitBlock], rows: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """`uᵀ J` of one leaf `(size,)` from what will be stored, and the size of what it is summed from."""
        if leaf.dense:
            row = rows[leaf.dense.start : leaf.dense.start + leaf.size]
            return row, _norm(row)
        operands: dict[str, np.ndarray] = {}
        size = 0.0
        for term in leaf.factored:
            for name in term.operands:
                block = blocks[operand_array(name)]
                if name == term.cotangents:
                    # Rows are linear in the cotangents: those of all outputs become one.
                    held = block.weighted(at, cotangent)[None]
                else:
                    held = block.example(at)
                    held = held.astype(np.float64) if held.dtype.kind == "f" else held
                operands[name] = held[None]
            floating = [name for name in term.operands if operands[name].dtype.kind == "f"]
            size += term.summed_size({name: _norm(operands[name]) for name in floating})
        return expand(leaf.terms, operands, leaf.size)[0, 0], size


def _norm(values: np.ndarray) -> float:
    """The norm of an array, its squares added without BLAS.

    BLAS shares a sum of 10,000 squares among threads, and waits milliseconds for those that are busy.
    """
    flat = values.reshape(-1)
    return float(np.sqrt(np.einsum("i,i->", flat, flat)))


def _wide(tree: Any, float64: bool) -> Any:
    """Floating numbers in float64, if it is computed in."""
    if not float64:
        return tree

    def wide(leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, np.floating)
        return leaf.astype(np.float64) if floating else leaf

    return jax.tree_util.tree_map(wide, tree)
