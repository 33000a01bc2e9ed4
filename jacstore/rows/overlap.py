"""How much of a build goes on at the same time, and the memory that each part of it takes.

One unit is filled while another is written, inputs are read ahead, and device passes are begun before the first of them
has ended, as far as the memory allows. The parts are counted in bytes and add up to at most `--memory`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from jacstore.base.budget import Budget

# Batches of inputs that wait for the device, beside one that is computed and one that is read.
READ_AHEAD = 2
# Device passes begun on each device before the first of them is waited for: more than one keeps a second core busy.
IN_FLIGHT = 4
# Batches of rows that an accelerator has brought to the host: one is taken in while the next arrives.
LANDED = 2


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that one of each thing takes.

    Attributes
    ----------
    unit
        Rows and factors of one unit.
    one_pass
        The compiled device pass, on the device that it runs on.
    landed
        Rows of one batch on the host of an accelerator; 0 on a CPU, where `one_pass` counts them.
    batch, chunks
        Inputs of one batch, and whole chunks that inputs are read from.
    checking
        Gradients that rows are compared with.
    held, store
        What a store in RAM holds already, and what it will hold if it stays there; 0 for one on disk.
    """

    unit: int
    one_pass: int
    landed: int
    batch: int
    chunks: int
    checking: int
    held: int = 0
    store: int = 0


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How many units may wait for the disk, device passes be begun, and batches of inputs be read ahead."""

    waiting: int
    depth: int
    reads: int
    parts: Budget

    @property
    def store_limit(self) -> int:
        """Bytes of a store in RAM beyond which it moves to a folder."""
        return self.parts.parts.get("store_in_ram", 0)


def plan_overlap(memory: int, needs: Needs, device_memory: int | None = None, devices: int = 1) -> Overlap | None:
    """The most overlap that fits, or None if nothing does.

    Parameters
    ----------
    device_memory
        Bytes of each accelerator; None on a CPU, where passes take the host's memory.
    devices
        How many devices batches go round.
    """
    # A store in RAM stays there if anything fits beside it. Else it gets what the rest leaves, and moves to a folder.
    for store in sorted({needs.store, needs.held}, reverse=True):
        for units, reads in itertools.product((2, 1), range(READ_AHEAD, -1, -1)):
            parts = {
                # Files of a store in RAM are copied from the unit, up to all of it at once.
                "unit_buffers": (units + (store > needs.held)) * needs.unit,
                "row_check": needs.checking,
                # One batch is computed, one read, `reads` wait.
                "inputs": needs.chunks + (reads + 2) * needs.batch,
                "device_pass": 0 if device_memory is None else LANDED * needs.landed,
            }
            room = Budget(memory).beside(**parts, store_in_ram=store)
            each = max(1, needs.one_pass)
            fits = room // each if device_memory is None else devices * (device_memory // each)
            depth = min(devices * IN_FLIGHT, fits)
            if room >= 0 and depth >= units:
                if device_memory is None:
                    parts["device_pass"] = depth * needs.one_pass
                budget = Budget(memory).split(**parts)
                if needs.store:
                    # Where it is to move, one unit of what is left is for the copies of its files until then.
                    spare = 0 if store > needs.held else needs.unit
                    budget = budget.split(store_in_ram=max(needs.held, budget.left - spare))
                return Overlap(waiting=units - 1, depth=depth, reads=reads, parts=budget)
    return None
