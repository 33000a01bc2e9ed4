"""Checks of a store: its records, every byte, and its rows against norms taken before rounding.

Everything is derived afresh; a unit that fails is marked, so that the next build recomputes just that unit.
"""

from __future__ import annotations

import math

import numpy as np

from jacstore.base.budget import VERIFY, Budget
from jacstore.base.precision import norm_bound
from jacstore.errors import DamagedDataError
from jacstore.store.norms import allowance, largest_difference, stored_norms
from jacstore.store.reader import JacobianStore
from jacstore.terms.kinds import Leaf
from jacstore.verification.report import Check, Tally


class StoreChecks:
    """Checks of a store that need nothing but the store.

    Attributes
    ----------
    bad
        Units found wrong so far, whose values are not checked further: True where the bytes match the record, so that
        the record itself or the recorded values are wrong.
    """

    def __init__(self, store: JacobianStore, memory: int) -> None:
        self.store, self.budget = store, Budget(memory).split(**VERIFY)
        self.bad: dict[int, bool] = {}

    @property
    def units(self) -> list[int]:
        """Finished units in which nothing was found wrong."""
        return [unit for unit in self.store.ledger.done("unit") if unit not in self.bad]

    def records(self) -> Check:
        """Check that every unit has a record, and each record against what can be derived from the store."""
        store, tally = self.store, Tally("records")
        done = set(store.ledger.done("unit"))
        for unit in range(store.n_units):
            start, stop = store.unit_range(unit)
            if unit not in done:
                tally.fault(f"unit {unit} (examples {start} to {stop - 1}) has no record; run the same build again")
                continue
            try:
                self._facts(unit)
            except DamagedDataError as error:
                self._wrong(tally, unit, str(error))
        return tally.done()

    def _facts(self, unit: int) -> None:
        """Compare what a record says beside checksums; that it can be this unit's is seen when it is read."""
        record = self.store.unit(unit)
        size = sum(facts[0] for facts in record.files.values())
        if record.bytes != size:
            raise DamagedDataError(f"its record says bytes {record.bytes}, which is {size}")

    def _wrong(self, tally: Tally, unit: int, what: str) -> None:
        start, stop = self.store.unit_range(unit)
        tally.fault(f"unit {unit} (examples {start} to {stop - 1}): {what}; run the same build again to recompute it")
        self.bad[unit] = True

    def checksums(self) -> Check:
        """Check every byte of every file against its unit's record."""
        tally = Tally("checksums")
        for unit in self.units:
            for fault in self.store.faults(unit):
                tally.fault(fault)
                self.bad[unit] = False
        return tally.done()

    def norms(self) -> Check:
        """Compare norms of each leaf's rows, recomputed from the stored numbers, with those taken before rounding."""
        store = self.store
        tally = Tally("norms")
        for unit in self.units:
            start, stop = store.unit_range(unit)
            stored = store.norms_of(start, stop)
            fine = self._zero_rows(tally, unit, stored)
            for index, leaf in enumerate(store.leaves):
                fine &= self._norms_of(tally, unit, leaf, stored[..., index])
            if not fine:
                self.bad[unit] = True
        return tally.done()

    def _zero_rows(self, tally: Tally, unit: int, norms: np.ndarray) -> bool:
        record, start = self.store.unit(unit), self.store.unit_range(unit)[0]
        zero = int(np.sum(norms.sum(-1) == 0))
        with_norms = [start + n for n in np.flatnonzero(~np.isfinite(norms).all((-2, -1)))]
        if record.zero_rows != zero:
            self._wrong(tally, unit, f"its record says {record.zero_rows} zero rows, norms say {zero}")
        elif not set(with_norms) <= set(record.nonfinite_examples):
            self._wrong(tally, unit, f"example {with_norms[0]} is not finite, its record does not say so")
        else:
            return True
        return False

    def _norms_of(self, tally: Tally, unit: int, leaf: Leaf, norms: np.ndarray) -> bool:
        """Compare `(n, K)` squared norms of one leaf."""
        store = self.store
        start, stop = store.unit_range(unit)
        found = stored_norms(store, leaf, start, stop, self.budget["norms"])
        known = set(store.unit(unit).nonfinite_examples)

        def allowed(at: tuple[int, ...]) -> float:
            return math.inf if start + at[0] in known else allowance(store, leaf, start + at[0], at[1])

        bound = norm_bound(store.dtype, store.lowest, not leaf.dense)
        figure, limit, at = largest_difference(found, norms, bound, allowed)
        text = ""
        if at is not None:
            text = (
                f"{store.path}: unit {unit} (examples {start} to {stop - 1}), leaf {leaf.path}: the row of example "
                f"{start + at[0]}, output {at[1]} has squared norm {found[at]:.9g}, {norms[at]:.9g} before rounding; "
                "run the same build again to recompute this unit"
            )
        return tally.see(figure, limit, text)
