"""The matrix `alpha I + Jᵀ Λ J` `(P, P)` of a store and a likelihood, summed in one pass that can be resumed.

The matrix to use where P is small and R large: it has P² numbers, whatever N. Rows are formed a few thousand at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from jacstore.base.events import CheckpointDone, Listener, SlabDone, Started, silent
from jacstore.base.limits import LIMITS
from jacstore.base.machine import format_size
from jacstore.base.schema import typed
from jacstore.errors import DamagedDataError, InvalidRequestError, RunInterruptedError
from jacstore.kernels.engines.blas import symmetrize
from jacstore.kernels.lazy import as_store
from jacstore.operators.likelihoods import Weights
from jacstore.operators.stored import JacobianOperator, real_number
from jacstore.operators.streams import Job, chunks, count, stream
from jacstore.storage.checkpoints import Checkpoints
from jacstore.storage.chunks import raw
from jacstore.storage.files import Files, Folder
from jacstore.storage.ledger import FOLDER, Checksum, Ledger, Lock, compare_requested, record_name
from jacstore.store.reader import JacobianStore

MATRIX = "ggn.npy"


def ggn(
    store: JacobianStore | str | Path,
    likelihood: Any = "gaussian",
    alpha: float = 0.0,
    *,
    memory: int | str | None = None,
    out: str | Path | None = None,
    leaves: str | Callable[[str], bool] | None = None,
    examples: Any = None,
    precision: str | None = None,
    overwrite: bool = False,
    listener: Listener = silent,
    stop: Callable[[], bool] | None = None,
) -> np.ndarray:
    """The generalised Gauss-Newton matrix `alpha I + Jᵀ Λ J` `(P, P)`, float64, symmetric to the bit; one pass.

    Parameters
    ----------
    store
        A finished store or its path.
    likelihood
        "gaussian", Λ = I; "softmax", `Λ_i = diag(p_i) - p_i p_iᵀ` at the store's outputs; or Λ itself as
        `JacobianOperator.ggn` takes it.
    alpha
        Prior precision.
    memory
        Bytes to allocate, the matrix included, such as "8GB"; half of what is available if not given.
    out
        Folder for the matrix, `out/ggn.npy`; a rerun continues from its last checkpoint or returns what is finished.
        None for none.
    leaves, examples, precision
        As in `jacstore.operator`.
    overwrite
        Delete what is in `out` and start over.
    listener
        Called with progress events.
    stop
        Asked between chunks; when it says true a checkpoint is written and the sum ends with `RunInterruptedError`.

    Raises
    ------
    InvalidRequestError
        If the matrix does not fit in memory, or `out` holds another one.
    """
    jacobian = JacobianOperator(as_store(store), memory, leaves, examples, precision)
    alpha = real_number(alpha, "alpha")
    weights = jacobian.weights(likelihood)
    plan = _plan(jacobian, weights)
    requested = {
        "store": jacobian.store.identity(),
        "likelihood": likelihood if isinstance(likelihood, str) else _hash(np.asarray(likelihood)),
        "alpha": alpha,
        "precision": str(jacobian.products),
        "leaves": list(jacobian.paths),
        "examples": _hash(jacobian.examples),
    }
    with _opened(out, requested, overwrite, listener) as place:
        if place is not None and place.ledger.done("done"):
            return place.finished()
        checkpoints = None if place is None else Checkpoints(place, 0, [(jacobian.shape[1],) * 2])
        total = _summed(jacobian, weights, plan, checkpoints, listener, stop or (lambda: False))
        symmetrize(total)
        total[np.diag_indices(len(total))] += alpha
        if place is not None and checkpoints is not None:
            place.finish(total)
            checkpoints.clear()
    return total


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Examples whose rows are formed at once, and examples that are read at once."""

    formed: int
    read: int
    ahead: bool


def _plan(jacobian: JacobianOperator, weights: Weights) -> _Plan:
    p, k, item = jacobian.shape[1], jacobian.store.n_outputs, jacobian.products.itemsize
    unit = jacobian.store.unit_size
    read = sum(panel.numbers for panel in jacobian.panels) * item * unit
    room = jacobian.room(8 * p * p + item * p * min(p, LIMITS.ggn_columns))
    # Rows, their products with Λ, and one leaf's rows while they are formed; Λ that is not the identity is applied in
    # float64, with a term of as many numbers beside it.
    row_bytes = (3 * item if weights.identity else 2 * item + 16) * p * k
    if row_bytes + read > room:
        needed = jacobian.memory - room + row_bytes + read
        raise InvalidRequestError(
            f"--memory {jacobian.memory:,}: the matrix of {p:,} x {p:,} takes {format_size(8 * p * p)}, to sum "
            f"it {format_size(needed)}; give more (memory=), choose leaves (leaves=), or use operator(store).ggn()"
        )
    ahead = 2 * read + 64 * row_bytes <= room
    formed = max(1, min(LIMITS.ggn_rows // k, (room - (1 + ahead) * read) // row_bytes))
    return _Plan(formed=formed, read=unit, ahead=ahead)


def _summed(
    jacobian: JacobianOperator,
    weights: Weights,
    plan: _Plan,
    checkpoints: Checkpoints | None,
    listener: Listener,
    stop: Callable[[], bool],
) -> np.ndarray:
    """The upper half of Jᵀ Λ J, from the last checkpoint on."""
    store = jacobian.store
    done, totals = checkpoints.load(store.n_examples) if checkpoints else (0, [])
    total = totals[0] if totals else np.zeros((jacobian.shape[1],) * 2)
    found = chunks(jacobian.examples, store.n_examples, plan.read)
    jobs = [Job(panels=jacobian.panels, chunk=chunk) for chunk in found if chunk.stop > done]
    listener(Started(what="items", total=len(found), done=len(found) - len(jobs)))
    with contextlib.closing(stream(store, jobs, jacobian.products, plan.ahead)) as streamed:
        for index, (job, held) in enumerate(streamed, start=len(found) - len(jobs)):
            if stop():
                if checkpoints:
                    checkpoints.save(done, [total])
                raise RunInterruptedError(
                    f"interrupted at example {done} of {store.n_examples}; run the same call again"
                )
            for rows, part in _formed(jacobian, weights, job, held, plan.formed):
                _add(total, rows, part)
            done = job.chunk.stop
            listener(SlabDone(item=0, slab=index, bytes_read=sum(v.nbytes for part in held for v in part.values())))
            if checkpoints and checkpoints.due() and index + 1 < len(found):
                checkpoints.save(done, [total])
                listener(CheckpointDone(item=0, slab=index + 1))
    return total


def _formed(
    jacobian: JacobianOperator, weights: Weights, job: Job, held: list[Any], size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows `(r, P)` and Λ times them, a few examples at a time."""
    where = job.chunk.where
    numbers = np.arange(where.start, where.stop) if isinstance(where, slice) else where
    for a in range(0, count(job), size):
        at = slice(a, min(a + size, count(job)))
        rows = np.zeros((at.stop - at.start, jacobian.store.n_outputs, jacobian.shape[1]), jacobian.products)
        for panel, part in zip(jacobian.panels, held, strict=True):
            panel.rows({name: values[at] for name, values in part.items()}, rows)
        weighted = weights.times(rows, numbers[at])
        yield rows.reshape(-1, rows.shape[-1]), weighted.astype(rows.dtype, copy=False).reshape(-1, rows.shape[-1])


def _add(total: np.ndarray, rows: np.ndarray, weighted: np.ndarray) -> None:
    """Add to the upper half of `total`, a block of columns at a time."""
    for a in range(0, len(total), LIMITS.ggn_columns):
        b = min(a + LIMITS.ggn_columns, len(total))
        total[:b, a:b] += np.matmul(rows[:, :b].T, weighted[:, a:b])


def _hash(values: np.ndarray) -> str:
    digest = hashlib.blake2b(f"{values.dtype} {values.shape}".encode(), digest_size=16)
    digest.update(raw(np.ascontiguousarray(values)))
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------- on disk


class _Place:
    """The folder of a matrix: `ggn.npy`, which a record makes finished, and checkpoints until then."""

    def __init__(self, folder: Folder, where: str) -> None:
        self.folder, self.where = folder, where
        self.files: Files = folder
        self.ledger = Ledger(folder)

    def finish(self, total: np.ndarray) -> None:
        """Write the matrix and mark it as finished."""
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(total))
        self.folder.write(MATRIX, [header.getvalue(), raw(total)])
        self.folder.sync_folders([MATRIX])
        self.ledger.record("done", 0, {"crc32c": crc32c(raw(total))})

    def finished(self) -> np.ndarray:
        """The finished matrix, checked."""
        try:
            with self.folder.open(MATRIX) as file:
                total: np.ndarray = np.load(file, allow_pickle=False)
            intact = crc32c(raw(total)) == typed(Checksum, self.ledger.read("done", 0)).crc32c
        except InvalidRequestError:
            raise
        except (DamagedDataError, OSError, EOFError, ValueError, MemoryError):
            intact = False
        if not intact:
            raise DamagedDataError(
                f"{self.where}: {MATRIX} is missing or damaged; compute it again with overwrite=True"
            )
        return total


@contextlib.contextmanager
def _opened(
    out: str | Path | None, requested: dict[str, Any], overwrite: bool, listener: Listener
) -> Iterator[_Place | None]:
    """The folder to work in, locked, begun with the same request; None without one."""
    if out is None:
        yield None
        return
    folder = Folder(out)
    names = {entry.name for entry in os.scandir(folder.root)} if folder.root.is_dir() else set()
    foreign = sorted(names - {MATRIX, FOLDER, "checkpoints"})
    if foreign or folder.root.is_file():
        what = f"holds {foreign[0]!r}" if foreign else "is a file"
        raise InvalidRequestError(f"{out} {what}; give a folder that is new or empty (out=)")
    with Lock(folder, 0, 0, listener):
        place = _Place(folder, str(out))
        if overwrite:
            # The request goes last: sums that another one left must not be taken for this one's.
            folder.remove(record_name("done", 0))
            Checkpoints(place, 0, []).clear()
            for name in (MATRIX, record_name("request", 0)):
                folder.remove(name)
        if not place.ledger.done("request"):
            place.ledger.record("request", 0, requested)
        compare_requested(str(out), place.ledger.read("request", 0), requested)
        yield place
        with contextlib.suppress(OSError):
            folder.remove_folder("checkpoints")
