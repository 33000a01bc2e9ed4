"""What a report shows of a store or a kernel: sizes, shares, norms, a sample of entries, eigenvalues, past runs.

Of a large kernel some examples are drawn; whatever is shown of them says so. Tiles are read one after the other, so
memory holds one tile and the sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.base.limits import LIMITS
from jacstore.errors import InvalidRequestError, JacstoreError
from jacstore.kernels.kernel import Kernel
from jacstore.storage.runs import kept_config, kept_runs
from jacstore.store.reader import JacobianStore, open_store

# What the page shows of a run.
SAID = {
    "build": {"units_computed", "units_total", "bytes_dense", "bytes_stored", "memory", "peak_rss", "seconds_total"},
    "gram": {"tiles_computed", "tiles_reused", "tiles_total", "passes", "expected_passes", "flops", "engine", "memory"}
    | {"peak_rss", "seconds_compute", "seconds_total"},
    "verify": {"ok", "checks", "seconds_total"},
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Entries of a kernel between some examples.

    Attributes
    ----------
    rows, columns
        Numbers of the examples along each side, ascending.
    matrix
        `(n, m)`, added up over equal outputs.
    eigenvalues
        Of all products of these examples, descending; empty for a kernel between two stores.
    whole
        Whether these are all examples.
    """

    rows: np.ndarray
    columns: np.ndarray
    matrix: np.ndarray
    eigenvalues: np.ndarray
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the page shows.

    Attributes
    ----------
    summary
        What `jacstore info` says.
    stores
        The store, or those of the kernel that could be opened.
    shares
        Of each leaf, the share of the sum of all squared norms.
    norms
        Norm of the rows of each example `(N,)`: of all outputs together.
    labels
        Of the examples `(N,)`, where given.
    runs
        Reports of past runs, the oldest first.
    config
        What a file of settings asked for.
    missing
        Why something is not shown.
    """

    summary: Any
    stores: list[JacobianStore]
    shares: dict[str, float]
    norms: np.ndarray | None
    sample: Sample | None
    labels: np.ndarray | None
    runs: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def read_facts(found: JacobianStore | Kernel, labels: np.ndarray | None, stores: Sequence[str] | None) -> Facts:
    """Read what the page shows; what cannot be read is named in `missing`."""
    missing: list[str] = []
    opened = [found] if isinstance(found, JacobianStore) else _stores_of(found, stores, missing)
    rows = opened[0] if opened and opened[0].complete else None
    shares, norms = ({}, None) if rows is None else _norms(rows)
    sample = None
    if isinstance(found, JacobianStore):
        if not found.complete:
            missing.append(
                f"The store is incomplete: norms and leaf shares are shown once all units are there ({found})."
            )
        missing.append("Spectrum and heat map are those of a kernel: report the kernel that gram assembles.")
    elif found.complete:
        sample = _sample(found)
        if sample is None:
            missing.append(f"Mode {found.mode} has no pairs of examples, so there is no heat map and no spectrum.")
    else:
        missing.append("The kernel is incomplete: spectrum and heat map are shown once all tiles are there.")
    kept = [{**run, "of": one.path} for one in (*opened, found) for run in kept_runs(one.ledger)]
    # Another version may have said less.
    runs = [run for run in kept if run.keys() >= SAID.get(run.get("command", ""), set())]
    runs = list({(run["of"], run["ended"]): run for run in runs}.values())
    return Facts(
        summary=found.summary(),
        stores=opened,
        shares=shares,
        norms=norms,
        sample=sample,
        labels=_checked(labels, found),
        runs=sorted(runs, key=lambda run: run["ended"]),
        config=kept_config(found.ledger),
        missing=missing,
    )


def read_labels(path: str | Path) -> np.ndarray:
    """Integer labels `(N,)` from a .npy file."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidRequestError(
            f"--labels {path}: not a readable .npy file ({error}); save integers with numpy.save (labels=)"
        ) from error
    if not isinstance(found, np.ndarray):
        raise InvalidRequestError(f"--labels {path}: allowed is one array of integers, saved with numpy.save (labels=)")
    return found


def _checked(labels: np.ndarray | None, found: JacobianStore | Kernel) -> np.ndarray | None:
    if labels is None:
        return None
    labels = np.asarray(labels)
    examples = found.n_examples if isinstance(found, JacobianStore) else found.plan.rows.n_examples
    if labels.shape != (examples,) or labels.dtype.kind not in "iub":
        raise InvalidRequestError(
            f"--labels: shape {labels.shape} and type {labels.dtype}; allowed are {examples} integers, one per example "
            "(labels=)"
        )
    return labels.astype(np.int64)


def _stores_of(kernel: Kernel, given: Sequence[str] | None, missing: list[str]) -> list[JacobianStore]:
    """Stores of a kernel, in order; the page does without those that are not there."""
    found = []
    for path in given or kernel.store_paths:
        try:
            found.append(open_store(str(path)))
        except (JacstoreError, OSError) as error:
            if given:
                raise
            missing.append(
                f"The store {path} cannot be opened: {error}. Leaf shares and norms come from it; give --store."
            )
            break
    return found


def _norms(store: JacobianStore) -> tuple[dict[str, float], np.ndarray]:
    """Share of each leaf in the squared norms, and the norm of each example."""
    per_leaf, per_example = np.zeros(len(store.leaves)), np.empty(store.n_examples)
    for start in range(0, store.n_examples, store.unit_size):
        stop = min(start + store.unit_size, store.n_examples)
        squares = np.nan_to_num(store.norms_of(start, stop), nan=0.0, posinf=0.0)
        per_leaf += squares.sum((0, 1))
        per_example[start:stop] = np.sqrt(squares.sum((1, 2)))
    total = per_leaf.sum() or 1.0
    return {leaf.path: float(part / total) for leaf, part in zip(store.leaves, per_leaf, strict=True)}, per_example


def _sample(kernel: Kernel) -> Sample | None:
    mode, plan = kernel.plan.mode, kernel.plan
    if mode.within_examples:
        return None
    most = max(2, LIMITS.report_rows // mode.rows_per_example(plan.n_outputs))
    n, m = plan.rows.n_examples, plan.cols.n_examples
    draw = np.random.default_rng(0)
    rows = np.sort(draw.choice(n, min(n, most), replace=False))
    columns = rows if plan.symmetric else np.sort(draw.choice(m, min(m, most), replace=False))
    products = _entries(kernel, rows, columns)
    eigenvalues = np.empty(0)
    if plan.symmetric:
        square = products.reshape(products.shape[0] * products.shape[1], -1)
        with contextlib.suppress(np.linalg.LinAlgError):
            eigenvalues = np.linalg.eigvalsh((square + square.T) / 2)[::-1]
    matrix = np.einsum("nkmk->nm", products)
    return Sample(
        rows=rows, columns=columns, matrix=matrix, eigenvalues=eigenvalues, whole=len(rows) == n and len(columns) == m
    )


def _entries(kernel: Kernel, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Products between examples `(n, K, m, K)`, or `(n, 1, m, 1)` of modes that hold none between outputs."""
    mode, plan = kernel.plan.mode, kernel.plan
    k = mode.rows_per_example(plan.n_outputs)
    out = np.zeros((len(rows), k, len(columns), k))
    for i in range(plan.grid[0]):
        a, b = plan.rows.examples(plan.tile, i, i + 1)
        down = np.flatnonzero((rows >= a) & (rows < b))
        for j in range(plan.grid[1]):
            c, d = plan.cols.examples(plan.tile, j, j + 1)
            across = np.flatnonzero((columns >= c) & (columns < d))
            if not len(down) or not len(across):
                continue
            for index in range(len(kernel.layouts)):
                tile = mode.by_example(kernel.read_tile(index, i, j), k)
                picked = tile[rows[down] - a][:, :, columns[across] - c]
                out[down[0] : down[-1] + 1, :, across[0] : across[-1] + 1] += picked
    return out
