"""The compiled device pass, which turns a batch of examples into rows, factors, norms and outputs.

The backward pass of one example is run for unit cotangents, K of them by `vmap`, in slices where K rows of a batch are
too large. A second `vmap` runs over examples, so that nothing couples them, and weights stay unbatched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jacstore.base.budget import BUILD
from jacstore.base.devices import device, on_accelerator, where_from
from jacstore.base.machine import format_size
from jacstore.base.precision import NORM_RUN
from jacstore.errors import InvalidRequestError
from jacstore.problem.fingerprint import still_holds
from jacstore.problem.problem import Prepared, own_code, precision_context
from jacstore.problem.user_errors import error_line
from jacstore.rows.trace.cut import CutBackward
from jacstore.terms.kinds import Leaf
from jacstore.terms.row_products import squared_norms

LARGEST_BATCH = 512
# Rows of a batch: on a CPU, blocks above 32 MB go back to the system after each batch, and faulting them in again took
# twice the time of computing them (2.4M parameters: 0.4 GB/s at 64 examples per batch, 1.2 GB/s at 1).
BATCH_BYTES = {"cpu": 24_000_000}
BATCH_BYTES_ELSEWHERE = 512_000_000
# What a compiled program is first taken to hold, in rows of its batch; the batch shrinks where it holds more.
COPIES_OF_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class BatchRows:
    """Rows of one batch and one slice of outputs, on the host; `last` marks a batch's last slice.

    `rows` holds for each leaf stored as rows `(n, k, size)` in the stored type, `factors` operands `(n, ...)` and
    `(n, k, ...)`, `norms` `(n, k, L)` in float64, `outputs` `(n, K)`.
    """

    first_output: int
    last: bool
    rows: list[np.ndarray]
    factors: dict[str, np.ndarray]
    norms: np.ndarray
    outputs: np.ndarray


class DevicePass:
    """A compiled pass with a static batch shape.

    Parameters
    ----------
    budget
        Bytes that the program may take, on the device that it runs on.
    landing
        Bytes that rows of a batch may take on the host of an accelerator.
    device_memory
        Whether `budget` was given by `--device-memory`: what an error tells to change.

    Attributes
    ----------
    batch_size, output_batch
        Examples per batch, outputs per slice.
    devices
        What batches go round; empty where parameters stay on the devices on which the user placed them.
    bytes_needed
        Argument, temporary and output bytes of the compiled program.
    landed_bytes
        Of these what comes to the host of an accelerator; 0 on a CPU, where it is there already.
    seconds_compile
        Tracing and compiling, apart from everything else.
    """

    def __init__(
        self,
        prepared: Prepared,
        cut: CutBackward,
        *,
        stored_dtype: str,
        budget: int,
        unit_size: int,
        batch_size: int | None = None,
        output_batch: int | None = None,
        landing: int | None = None,
        device_memory: int | None = None,
        devices: Sequence[Any] = (),
    ) -> None:
        self._landing = landing if on_accelerator() else None
        self.prepared, self.cut = prepared, cut
        placed = any(getattr(leaf, "committed", False) for leaf in (*prepared.selected, *prepared.rest))
        self.devices = () if placed or list(devices) == [device()] else tuple(devices)
        self.batches = [0] * max(1, len(self.devices))
        self.stored_dtype = jnp.dtype(stored_dtype)
        self.float64 = stored_dtype == "float64"
        self.output_batch = min(output_batch or self._slice_that_fits(budget), prepared.n_outputs)
        self.batch_size = min(batch_size or self._batch_that_fits(budget), unit_size)
        started = time.perf_counter()
        self._parameters = self._on_device()
        self._compile()
        while self.bytes_needed > budget:
            if batch_size is not None or self.batch_size == 1:
                smaller = ["--batch-size (batch_size=)"] * (self.batch_size > 1)
                smaller += ["--output-batch (output_batch=)"] * (self.output_batch > 1)
                source, more = where_from(device_memory, BUILD["device_pass"])
                if more.startswith("--memory"):
                    more += " or --device-memory (device_memory=)"
                raise InvalidRequestError(
                    f"a device pass over {self.batch_size} example(s) and {self.output_batch} output(s) needs "
                    f"{format_size(self.bytes_needed)}, {source} has {format_size(budget)}; give "
                    f"{'a smaller ' + ' or '.join(smaller) + ', or ' if smaller else ''}more {more}"
                )
            self.batch_size = self._smaller_batch(budget)
            self._compile()
        self.seconds_compile = time.perf_counter() - started

    @property
    def _row_bytes(self) -> int:
        """Bytes of one row as computed and as stored, and its gradient's working copy."""
        rows = sum(leaf.size for leaf in self.cut.leaves if leaf.dense)
        numbers = rows + sum(operand.numbers(1) for operand in self.cut.operands)
        return max(1, numbers) * (8 if self.float64 else 4) * 2

    def _slice_that_fits(self, allowed: int) -> int:
        return max(1, allowed // (2 * self._row_bytes))

    def _smaller_batch(self, allowed: int) -> int:
        return max(1, min(self.batch_size // 2, self.batch_size * allowed // self.bytes_needed))

    def _batch_that_fits(self, allowed: int) -> int:
        rows = self.output_batch * self._row_bytes // 2
        most = min(allowed // COPIES_OF_ROWS, BATCH_BYTES.get(device().platform, BATCH_BYTES_ELSEWHERE))
        fits = (most if self._landing is None else min(most, self._landing)) // rows
        return max(1, min(fits, LARGEST_BATCH, self.prepared.n_examples))

    def _on_device(self) -> Any:
        """Parameters go to each device once, not with every batch."""
        parameters = (self.prepared.selected, self.prepared.rest)
        with precision_context(self.float64):
            return [jax.device_put(parameters, place) for place in self.devices or (None,)]

    def _compile(self) -> None:
        key = (self.stored_dtype.name, self.batch_size, self.output_batch, self.devices)
        self._programs = self.cut.programs.made(key, lambda: [self._compiled(given) for given in self._parameters])
        if not still_holds(self.prepared.backward()):
            self.cut.programs.drop(key)
        program, finish = self._programs[0]
        programs = [(program, True)] + ([(finish, False)] if finish else [])
        self.bytes_needed = sum(_bytes_of(each, given) for each, given in programs)
        self.landed_bytes = sum(_output_bytes(each) for each, _ in programs) if on_accelerator() else 0

    def _compiled(self, parameters: Any) -> tuple[Any, Any]:
        """The programs of a batch, which depend on the cut alone: parameters and examples are arguments."""
        # The user's function was traced with the cut, under the user's own flags.
        with precision_context(self.float64), own_code():
            lowered = jax.jit(self._batch).lower(*parameters, self._padded(self.prepared.read(0, 1)), 0)
            program = lowered.compile()
            # Norms of factors are a program of their own: in one program, XLA computed a deep network's
            # cotangents anew for each of them, which took most of the time to compile it.
            factors = lowered.out_info[2]
            if not factors:
                return program, None
            factors = jax.tree_util.tree_map(_placed, factors, program.output_shardings[2])
            return program, jax.jit(self._finished).lower(factors).compile()

    def _batch(self, selected: list[Any], rest: list[Any], examples: Any, first: Any) -> tuple[Any, Any, Any, Any]:
        """Outputs, rows in the stored type, factors as they are computed, partial norms of the rows."""
        n_outputs = self.prepared.n_outputs
        wanted = first + jnp.arange(self.output_batch)
        # Cotangents beyond the last output are zero; their rows are dropped on the host.
        cotangents = (wanted[:, None] == jnp.arange(n_outputs)).astype(self.cut.cotangent_dtype)
        try:
            outputs, factors, rows = jax.vmap(lambda example: self.cut(selected, rest, example, cotangents))(examples)
        except NotImplementedError as error:
            raise InvalidRequestError(
                f"apply cannot be computed for a batch of examples: {error_line(error)}; change apply=, or give its "
                "callbacks a vmap_method"
            ) from error
        return outputs, [self._rounded(row) for row in rows], factors, [_partial_squares(row) for row in rows]

    def _finished(self, factors: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], list[Any]]:
        """Factors whose stored type is another, and partial norms of the leaves that they make."""
        integers = {operand.name for operand in self.cut.operands if operand.integers}
        other = {name: self._rounded(v) for name, v in factors.items() if name not in integers}
        rounded = {name: v for name, v in other.items() if v.dtype != factors[name].dtype}
        return rounded, [_norms_of(leaf, factors) for leaf in self.cut.leaves if not leaf.dense]

    def _rounded(self, rows: Any) -> Any:
        """Rows in the stored type."""
        if self.stored_dtype != jnp.bfloat16 or rows.dtype != jnp.float32 or device().platform != "cpu":
            return rows.astype(self.stored_dtype)
        # On CPUs XLA's own rounding took a quarter more time for the whole pass than this one, nearest even as well.
        bits = lax.bitcast_convert_type(rows, jnp.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(jnp.uint16)
        return jnp.where(jnp.isnan(rows), jnp.uint16(0x7FC0), rounded)

    def _padded(self, examples: Any) -> Any:
        """Fill a batch up with copies of its last example."""

        def pad(leaf: Any) -> np.ndarray:
            array = np.asarray(leaf)
            missing = self.batch_size - len(array)
            return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing > 0 else array

        return jax.tree_util.tree_map(pad, examples)

    def dispatch(self, examples: Any, made: int = 0) -> Iterator[tuple[int, Any]]:
        """Start the pass for a batch; yields device values for each slice of outputs without waiting for them.

        The first `made` slices are left out.
        """
        padded = self._padded(examples)
        # Batches go round the devices: which one computes a batch depends on nothing but how many came before.
        turn = sum(self.batches) % len(self.batches)
        self.batches[turn] += 1
        (program, finish), parameters = self._programs[turn], self._parameters[turn]
        for first in range(made * self.output_batch, self.prepared.n_outputs, self.output_batch):
            with precision_context(self.float64):
                outputs, rows, factors, squares = program(*parameters, padded, first)
                rounded, of_factors = finish(factors) if finish else ({}, [])
                yield first, (outputs, rows, {**factors, **rounded}, squares, of_factors)

    def fetch(self, first: int, values: Any, count: int) -> BatchRows:
        """Wait for the values of one dispatch and bring those of the first `count` examples to the host."""
        outputs, rows, stored, squares, of_factors = values
        kept = min(self.output_batch, self.prepared.n_outputs - first)
        host = [_as_bits(np.asarray(row)[:count, :kept]) for row in rows]
        factors = {}
        for operand in self.cut.operands:
            held = np.asarray(stored[operand.name])[:count]
            factors[operand.name] = _as_bits(held[:, :kept] if operand.per_output else held)
        dense, factored = iter(squares), iter(of_factors)
        partial = [next(dense if leaf.dense else factored) for leaf in self.cut.leaves]
        norms = [np.asarray(p)[:count, :kept].sum(-1, dtype=np.float64) for p in partial]
        return BatchRows(
            first_output=first,
            last=first + kept == self.prepared.n_outputs,
            rows=host,
            factors=factors,
            norms=np.stack(norms, -1),
            outputs=np.asarray(outputs)[:count],
        )


def _placed(shape: Any, sharding: Any) -> Any:
    """Shape and type of an array, and where it is."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _norms_of(leaf: Leaf, factors: dict[str, Any]) -> Any:
    """Partial squared norms of a leaf; leaves that are made alike, as those of a network's blocks are, trace once."""
    names = {name: str(n) for n, name in enumerate(leaf.operands)}
    alike = replace(leaf, path="", offset=0, why="", terms=tuple(term.renamed(names) for term in leaf.factored))
    return _norms(alike, {new: factors[name] for name, new in names.items()})


@partial(jax.jit, static_argnums=0)
def _norms(leaf: Leaf, operands: dict[str, Any]) -> Any:
    return squared_norms(leaf, operands, jnp)


def _bytes_of(program: Any, given: bool) -> int:
    """Bytes of temporaries, outputs and, if `given`, arguments of a compiled program."""
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes + given * analysis.argument_size_in_bytes)


def _output_bytes(program: Any) -> int:
    analysis = program.memory_analysis()
    return 0 if analysis is None else int(analysis.output_size_in_bytes)


def _as_bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16) if values.dtype == jnp.bfloat16 else values


def _partial_squares(rows: Any) -> Any:
    """Sums of squares of `(B, S, size)` over runs of `NORM_RUN`, at least in float32: 16-bit squares overflow."""
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    size = rows.shape[-1]
    runs = size // NORM_RUN
    # Reducing over the middle axis keeps neighbouring numbers in one vector register.
    whole = jnp.square(wide[..., : runs * NORM_RUN]).reshape(*rows.shape[:2], NORM_RUN, runs).sum(-2)
    rest = jnp.square(wide[..., runs * NORM_RUN :]).sum(-1, keepdims=True)
    return jnp.concatenate([whole, rest], -1)
