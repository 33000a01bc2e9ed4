"""Predict from two kernels on disk and a file of labels, with the leave-one-out error of the fit."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.cli.reports import PredictReport
from jacstore.errors import InvalidRequestError
from jacstore.inference.kernel_ridge import KernelRidge
from jacstore.kernels.kernel import Kernel, open_kernel
from jacstore.storage.buckets import is_address, located, refuse_unknown
from jacstore.store.reader import open_store


def predict(
    kernel: str,
    cross: str,
    labels: str,
    out: str,
    *,
    alpha: str,
    from_network: bool = False,
    keep: bool = True,
    memory: int | str | None = None,
) -> PredictReport:
    """Fit the labels on `kernel`, write predictions at the rows of `cross` to `out`, and report.

    Parameters
    ----------
    labels
        A .npy file: integer classes `(N,)`, or targets `(N, K)`, `(N,)`.
    out
        A .npy file: predictions `(M, K)`; scores of the classes where labels are classes.
    alpha
        A number, or several separated by commas: then the one with the least squared leave-one-out error is used.
    from_network
        Fit the targets minus the outputs in the store, and add the outputs in the other store.
    keep
        Whether to keep the factorization with the kernel, for the next prediction.
    """
    started = time.perf_counter()
    if not out.endswith(".npy"):
        raise InvalidRequestError(f"--out {out}: allowed is a file that ends in .npy (out=)")
    refuse_unknown(out)
    train, test = open_kernel(kernel), open_kernel(cross)
    given = _load(labels)
    classes = _classes(given, train)
    y = class_targets(given, classes) if classes else given
    f0, f0_cross = (_network(train), _network(test)) if from_network else (None, None)
    alphas = parse_alphas(alpha)
    several = len(alphas) > 1
    model = KernelRidge(
        alphas if several else alphas[0], method="eigh" if several else "cholesky", memory=memory, keep=keep
    ).fit(train, y, f0)
    _save(out, model.predict(test, f0_cross))
    left_out = model.factor_.loo(y, f0).mean
    return PredictReport(
        predictions=out,
        kernel=kernel,
        cross=cross,
        examples=train.plan.rows.n_examples,
        predicted=test.plan.rows.n_examples,
        columns=int(np.prod(left_out.shape[1:])),
        alpha=model.alpha_,
        alphas=alphas,
        from_network=from_network,
        loo_error=float(np.mean(np.square(y - left_out))),
        loo_accuracy=float(np.mean(left_out.argmax(1) == given)) if classes else None,
        factor_reused=model.factor_.reused,
        seconds_total=time.perf_counter() - started,
    )


def parse_alphas(given: str) -> list[float]:
    """`0.1` or `1e-3,1e-2,0.1`."""
    try:
        return [float(word) for word in given.split(",")]
    except ValueError:
        raise InvalidRequestError(
            f"--alpha {given}: allowed are numbers above 0, separated by commas (alpha=)"
        ) from None


def class_targets(labels: np.ndarray, classes: int) -> np.ndarray:
    """Targets `(N, C)` of integer labels `(N,)`: one-hot, less their mean over classes, since a kernel has no bias."""
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= classes:
        raise InvalidRequestError(f"--labels: from {labels.min()} to {labels.max()}; allowed are 0 to {classes - 1}")
    return np.eye(classes)[labels] - 1 / classes


def _classes(labels: np.ndarray, kernel: Kernel) -> int:
    """Number of classes of integer labels `(N,)`: the kernel's outputs if it has several; 0 for targets."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        return 0
    rows = kernel.plan.mode.rows_per_example(kernel.plan.n_outputs)
    return rows if rows > 1 else int(labels.max(initial=0)) + 1


def _load(path: str) -> np.ndarray:
    try:
        found = np.load(_opened(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidRequestError(
            f"--labels {path}: not a readable .npy file ({error}); save it with numpy.save"
        ) from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iufb":
        raise InvalidRequestError(f"--labels {path}: allowed is one array of numbers, saved with numpy.save")
    return found


def _opened(path: str) -> Any:
    """The path of a file, or what is read of an object in a bucket."""
    if not is_address(path):
        return path
    folder, _, name = path.rpartition("/")
    return io.BytesIO(located(folder).read(name))


def _network(kernel: Kernel) -> np.ndarray:
    """Outputs in the store of the kernel's rows `(N, K)`."""
    outputs: np.ndarray = open_store(kernel.store_paths[0]).outputs.astype(np.float64)
    return outputs


def _save(out: str, values: np.ndarray) -> None:
    """Write by rename, or by one put: a reader sees the old file or the new one."""
    if is_address(out):
        body = io.BytesIO()
        np.save(body, values)
        folder, _, name = out.rpartition("/")
        located(folder).write(name, [body.getvalue()])
        return
    path = Path(out)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.save(file, values)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidRequestError(
            f"--out {out} cannot be written ({error.strerror}); give another file (out=)"
        ) from error
