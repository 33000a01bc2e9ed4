"""Collect the rows of batches into whole units, hash their inputs, and hand them to the writer."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jacstore.base.threads import Pool
from jacstore.errors import JacstoreError, RequestMismatchError
from jacstore.problem.inputs import examples_at_once
from jacstore.rows.device_pass import BatchRows
from jacstore.rows.row_check import RowCheck
from jacstore.store.arrays import operand_array
from jacstore.store.unit_buffers import UnitBlock
from jacstore.store.writer import StoreWriter

# How many finished units a rerun checks against the inputs it was given; `verify` checks all.
UNITS_REHASHED = 4
REHASHED_AT_ONCE = 256


class SpareBlocks:
    """Memory for units: that of written ones is used again, that of the first `count` is touched by a thread.

    Fresh pages cost as much as copying rows into them, and the first device passes take as long.
    """

    def __init__(self, writer: StoreWriter, count: int) -> None:
        self._new, self._spare = writer.new_blocks, list[dict[str, UnitBlock]]()
        pool = Pool(1, "jacstore-touch")
        self._touched = [pool.submit(writer.new_blocks) for _ in range(count)]
        pool.shutdown(wait=False)

    def keep(self, count: int) -> None:
        """Give up what is touched beyond the first `count`."""
        for future in self._touched[count:]:
            if not future.cancel():
                future.result()
        del self._touched[count:]

    def take(self) -> dict[str, UnitBlock]:
        """Memory for one unit."""
        if self._spare:
            return self._spare.pop()
        return self._touched.pop(0).result() if self._touched else self._new()

    def give(self, blocks: dict[str, UnitBlock]) -> None:
        """Memory of a unit that is written."""
        self._spare.append(blocks)


class Unit:
    """Rows of one unit on the host, filled batch by batch and slice by slice."""

    def __init__(
        self,
        writer: StoreWriter,
        start: int,
        last: int,
        outputs_dtype: str,
        spare: SpareBlocks,
        check: RowCheck | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.writer, self.start, self._spare, self._check = writer, start, spare, check
        # Examples that are compared with plain gradients before the unit is stored.
        self._chosen = check.choose(start, last, seconds) if check else []
        self._examples: dict[int, Any] = {}
        count, k = last - start, writer.store.n_outputs
        self.blocks = spare.take()
        self.norms = np.empty((count, k, len(writer.leaves)))
        self.outputs = np.empty((count, k), outputs_dtype)
        self.inputs = InputsHash()

    def take_inputs(self, a: int, examples: Any) -> None:
        """Take in the inputs of a batch that begins at example `a`, all its rows being there."""
        self.inputs.update(examples)
        count = len(jax.tree_util.tree_leaves(examples)[0])
        for n in self._chosen:
            if a <= n < a + count:
                self._examples[n] = jax.tree_util.tree_map(lambda leaf, at=n - a: np.array(leaf[at]), examples)

    def fill(self, a: int, rows: BatchRows) -> None:
        """Copy the rows of a batch that begins at example `a`."""
        at = slice(a - self.start, a - self.start + len(rows.outputs))
        outputs = slice(rows.first_output, rows.first_output + rows.norms.shape[1])
        dense = [leaf.dense for leaf in self.writer.leaves if leaf.dense]
        for place, values in zip(dense, rows.rows, strict=True):
            self.blocks["rows"].put((at, outputs), values, place.start)
        for operand in self.writer.operands:
            where = (at, outputs) if operand.per_output else (at,)
            self.blocks[operand_array(operand.name)].put(where, rows.factors[operand.name])
        self.norms[at, outputs] = rows.norms
        self.outputs[at] = rows.outputs

    def write(self) -> float:
        """Store the unit; returns the seconds it took."""
        began = time.perf_counter()
        facts = {"inputs": self.inputs.hexdigest()}
        try:
            for n, example in self._examples.items():
                assert self._check is not None
                self._check.compare(n, n - self.start, example, self.blocks)
            self.writer.write_blocks(
                self.start, self.blocks, outputs=self.outputs, norms=self.norms, facts=facts, proven=True
            )
        except JacstoreError:
            raise
        except Exception as error:
            error.add_note(f"while writing the unit of examples {self.start} to {self.start + len(self.norms) - 1}")
            raise
        self._spare.give(self.blocks)
        return time.perf_counter() - began


def refuse_other_inputs(
    writer: StoreWriter, read: Callable[[int, int], Any], sizes: tuple[int, int], memory: int
) -> list[int]:
    """Refuse other inputs than those that finished units were made from; returns the few units that were checked.

    They are chosen anew each time. `sizes` are those of `Problem.bytes_held`, `memory` is that of the build in bytes.
    """
    store, missing = writer.store, set(writer.missing)
    done = [unit for unit in writer.units if store.unit_range(unit) not in missing]
    if not done:
        return []
    at_once = examples_at_once(sizes, memory - writer.files.bytes_held, REHASHED_AT_ONCE)
    chosen = {*done[:1], *done[-1:], *random.sample(done, min(len(done), UNITS_REHASHED - 2))}
    for unit in sorted(chosen):
        start, stop = store.unit_range(unit)
        if hash_inputs(read, start, stop, at_once) != store.unit(unit).inputs:
            raise RequestMismatchError(
                f"{store.path} was built from another request (inputs: examples {start} to {stop - 1} changed); "
                "give the same inputs, choose another --out (out=), or start over with --overwrite (overwrite=True)"
            )
    return sorted(chosen)


class InputsHash:
    """A hash of a unit's inputs that does not depend on how the unit is cut into batches."""

    def __init__(self) -> None:
        self._leaves: list[Any] = []

    def update(self, examples: Any) -> None:
        """Take in the inputs of a batch."""
        leaves = jax.tree_util.tree_leaves(examples)
        self._leaves = self._leaves or [hashlib.blake2b(digest_size=16) for _ in leaves]
        for digest, leaf in zip(self._leaves, leaves, strict=True):
            digest.update(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1).data)

    def hexdigest(self) -> str:
        """The hash of all that was taken in."""
        return hashlib.blake2b(b"".join(d.digest() for d in self._leaves), digest_size=16).hexdigest()


def hash_inputs(read: Callable[[int, int], Any], start: int, stop: int, batch: int) -> str:
    """Hash of examples `start` to `stop - 1`, read a batch at a time."""
    inputs = InputsHash()
    for a in range(start, stop, batch):
        inputs.update(read(a, min(a + batch, stop)))
    return inputs.hexdigest()
