"""Verify a store or a kernel: a report of checks, each with its figure and its bound.

Everything is derived afresh, so bytes that were put back right are right again. What is found wrong is marked where the
folder can be written, and the next build or gram recomputes just that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.base import machine
from jacstore.base.options import parse_count
from jacstore.errors import DamagedDataError, InvalidRequestError, JacstoreError
from jacstore.kernels.gram import gram, open_path, require_plan_of
from jacstore.kernels.kernel import Kernel
from jacstore.problem.loading import load_target
from jacstore.problem.problem import Problem
from jacstore.problem.torch_problem import TorchProblem
from jacstore.storage.buckets import normal
from jacstore.storage.runs import keep_run
from jacstore.store.reader import JacobianStore, open_store
from jacstore.verification.kernel_checks import KernelChecks
from jacstore.verification.report import FAILED, OK, Check, Report, Tally, skipped
from jacstore.verification.store_checks import StoreChecks
from jacstore.verification.target_checks import TargetChecks

SAMPLES = 32
EVERY_ENTRY = "every entry in float64"
Stores = JacobianStore | str | Path | Sequence[JacobianStore | str | Path]


def verify(
    path: JacobianStore | Kernel | str | Path,
    problem: Problem | TorchProblem | str | None = None,
    store: Stores | None = None,
    *,
    samples: int = SAMPLES,
    full: bool = False,
    memory: int | str | None = None,
) -> Report:
    """Check a store or a kernel: every byte, and the numbers against what they should be.

    Parameters
    ----------
    path
        A store or kernel, or its path.
    problem
        For a store: the problem (of PyTorch a `TorchProblem`), or a target that names it. Then fingerprint and all
        inputs are compared and rows are recomputed.
    store
        For a kernel: its store, or both of a rectangular one, if they are not where it was assembled from.
    samples
        How many random rows, or kernel entries, are recomputed in float64.
    full
        Every row, with `problem`; every entry of a kernel.
    memory
        Bytes to allocate, such as "8GB"; half of what is available if not given.

    Returns
    -------
    Report
        `.ok`, `.checks`, `.failures`.

    Raises
    ------
    InvalidRequestError
        If there is no store or kernel, or the arguments do not fit it.
    """
    started = time.perf_counter()
    samples = parse_count(samples, "--samples") or SAMPLES
    budget = machine.default_memory(memory)
    found = _afresh(path)
    draw = np.random.default_rng()
    if isinstance(found, JacobianStore):
        if store is not None:
            raise InvalidRequestError(
                "--store: a store is verified by --target (problem=); --store (store=) is for kernels"
            )
        checks, marked = _verify_store(found, problem, samples, full, budget, draw)
    else:
        if problem is not None:
            raise InvalidRequestError(
                "--target: a kernel is verified by its store (--store, store=); verify the store by --target"
            )
        checks, marked = _verify_kernel(found, store, samples, full, budget, draw)
    report = Report(
        path=found.path,
        kind="store" if isinstance(found, JacobianStore) else "kernel",
        checks=tuple(checks),
        to_recompute=tuple(marked),
        seconds_total=time.perf_counter() - started,
    )
    keep_run(found.ledger, "verify", report.to_dict())
    return report


def _afresh(given: JacobianStore | Kernel | str | Path) -> JacobianStore | Kernel:
    """Open the store or kernel anew, since an open one caches records."""
    if isinstance(given, JacobianStore | Kernel):
        return type(given)(given.files, given.path)
    return open_path(given)


def _verify_store(
    store: JacobianStore,
    problem: Problem | TorchProblem | str | None,
    samples: int,
    full: bool,
    memory: int,
    draw: np.random.Generator,
) -> tuple[list[Check], list[str]]:
    target = load_target(problem) if isinstance(problem, str) else problem
    checks = StoreChecks(store, memory)
    found = [checks.records(), checks.checksums(), checks.norms()]
    if target is None:
        found.append(skipped("rows", "no target was given (--target, problem=)"))
    else:
        found += _checks_of(store, target, checks).run(samples, full, draw)
    for unit, as_recorded in checks.bad.items():
        store.mark(unit, wrong=as_recorded)
    for unit in set(store.ledger.done("suspect")) & set(checks.units):
        if not store.must_recompute(unit):
            with contextlib.suppress(OSError, JacstoreError):
                store.ledger.forget("suspect", unit)
    return found, [f"unit {unit}" for unit in sorted(checks.bad)]


def _checks_of(store: JacobianStore, target: Problem | TorchProblem, checks: StoreChecks) -> TargetChecks:
    if isinstance(target, Problem):
        return TargetChecks(store, target, checks)
    from jacstore.verification.torch_checks import TorchChecks

    return TorchChecks(store, target, checks)


def _verify_kernel(
    kernel: Kernel, given: Stores | None, samples: int, full: bool, memory: int, draw: np.random.Generator
) -> tuple[list[Check], list[str]]:
    stores, why = _stores_of(kernel, given)
    checks = KernelChecks(kernel, stores, "needs the store" if stores is None else why.where, memory)
    found = [*checks.run(samples, draw)]
    found.insert(0, Check(name="store", state=FAILED, where=checks.store_fault) if checks.store_fault else why)
    if full:
        found.append(_every_entry(checks, memory))
    for (index, i, j), as_recorded in checks.findings.bad.items():
        kernel.mark(index, i, j, wrong=as_recorded)
    for number in kernel.ledger.done("suspect"):
        with contextlib.suppress(OSError, JacstoreError):
            if not kernel.to_recompute(number):
                kernel.ledger.forget("suspect", number)
    return found, [kernel.named(*at) for at in sorted(checks.findings.bad)]


def _stores_of(kernel: Kernel, given: Stores | None) -> tuple[list[JacobianStore] | None, Check]:
    """The kernel's stores, if they can be opened and still hold what it was assembled from."""
    wanted = [kernel.request.store, *filter(None, [kernel.request.other])]
    places: list[JacobianStore | str | Path] = [*kernel.store_paths]
    if given is not None:
        one = isinstance(given, JacobianStore | str | Path)
        places = [given] if one else list(given)  # type: ignore[arg-type, list-item]
    if len(places) != len(wanted):
        raise InvalidRequestError(f"--store: {len(places)} given, {kernel.path} was made from {len(wanted)} (store=)")
    stores = []
    for place, identity in zip(places, wanted, strict=True):
        try:
            store = _afresh(place) if isinstance(place, JacobianStore) else open_store(normal(place))
            assert isinstance(store, JacobianStore)
            store.require_complete()
            same = store.identity() == identity
        except InvalidRequestError as error:
            if given is not None:
                raise
            return None, skipped("store", f"{error}; if it was moved say where it is (--store, store=)")
        except JacstoreError as error:
            return None, Check(name="store", state=FAILED, where=str(error))
        if not same:
            text = f"{store.path} does not hold what {kernel.path} was assembled from"
            return None, Check(name="store", state=FAILED, where=text)
        stores.append(store)
    try:
        require_plan_of(kernel, stores[0], stores[1] if len(stores) > 1 else None)
    except DamagedDataError as error:
        return None, Check(name="store", state=FAILED, where=str(error))
    return stores, Check(name="store", state=OK, where=", ".join(store.path for store in stores))


def _every_entry(checks: KernelChecks, memory: int) -> Check:
    """Compare all entries with a kernel assembled anew in float64."""
    kernel = checks.kernel
    if checks.stores is None:
        return skipped(EVERY_ENTRY, checks.why)
    other = checks.stores[1] if len(checks.stores) > 1 else None
    tile = kernel.plan.tile
    tally = Tally(EVERY_ENTRY)
    if checks.store_fault:
        return skipped(EVERY_ENTRY, "the store cannot be read")
    options: dict[str, Any] = {"precision": "float64", "engine": "blas", "tile": tile, "memory": memory}
    try:
        again = gram(checks.stores[0], other, None, mode=kernel.mode, by_leaf=bool(kernel.leaves), **options)
    except DamagedDataError as error:
        tally.fault(str(error))
        return tally.done()
    for (index, i, j), figure, bound in checks.differences(again):
        if not tally.see(figure, bound, f"{kernel.path}: {kernel.named(index, i, j)}"):
            checks.findings.bad[index, i, j] = True
    return tally.done()
