"""The kernel along training: `jacstore.ntk` at each checkpoint of the digits network, beside the bare arithmetic.

    python pipelines/training.py --checkpoints 20 --csv training.csv --figure training.png

The same function is differentiated again and again with other parameters, so that nothing may be compiled after the
first checkpoint; compilations are counted. The bare pass is `jax.jit(jax.vmap(jax.jacrev(apply)))` of the same examples
in one batch and one matrix product of its rows. Both are timed at every checkpoint, one after the other, and compared
entry by entry. The figure shows how far the kernel has moved from the first one, and the training error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import common
import digits
import jacstore
from common import table, write_csv

EPOCHS_BETWEEN = 3


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Seconds of both ways at one checkpoint, compilations of jacstore's, and what the kernel looks like."""

    epochs: int
    seconds_ntk: float
    seconds_bare: float
    compilations: int
    largest_difference: float
    moved: float
    squared_error: float


def counted(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float, int]:
    """What the work returns, its seconds, and how many programs XLA compiled meanwhile."""
    seen: list[str] = []

    def listen(name: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in name:
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    started = time.perf_counter()
    try:
        found = work()
        return found, time.perf_counter() - started, len(seen)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def bare_kernel(inputs: np.ndarray) -> Callable[[Any], np.ndarray]:
    """Rows of all examples in one batch, and their product."""
    rows = jax.jit(jax.vmap(jax.jacrev(digits.apply), (None, 0)))

    def kernel(params: Any) -> np.ndarray:
        leaves = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(rows(params, inputs))]
        flat = np.concatenate([leaf.reshape(leaf.shape[0] * leaf.shape[1], -1) for leaf in leaves], 1)
        return np.asarray(flat @ flat.T)

    return kernel


def squared_error(params: Any, data: common.Data) -> float:
    """The mean over training examples of what the training makes small."""
    outputs = jax.vmap(digits.apply, (None, 0))(params, data.train)
    return float(jnp.mean(jnp.sum((outputs - common.one_hot(data.train_labels, data.classes)) ** 2, -1)))


def main(arguments: list[str] | None = None) -> list[Checkpoint]:
    """Run and print; returns a line for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args(arguments)
    data = digits.digits(given.examples, 1)
    settings = replace(digits.settings_for(given.examples), epochs=EPOCHS_BETWEEN)
    params = digits.initial(settings.seed)
    bare, first = bare_kernel(data.train), None
    lines: list[Checkpoint] = []
    for number in range(given.checkpoints):
        if number:
            params = common.train(params, digits.apply, data, settings)
        kernel, seconds, compilations = counted(
            partial(jacstore.ntk, digits.apply, params, data.train, memory=given.memory)
        )
        other, bare_seconds, _ = counted(partial(bare, params))
        first = kernel if first is None else first
        lines.append(
            Checkpoint(
                epochs=number * EPOCHS_BETWEEN,
                seconds_ntk=seconds,
                seconds_bare=bare_seconds,
                compilations=compilations,
                largest_difference=float(abs(kernel - other).max() / abs(other).max()),
                moved=float(np.linalg.norm(kernel - first) / np.linalg.norm(first)),
                squared_error=squared_error(params, data),
            )
        )
    cells = [tuple(asdict(lines[0])), *(tuple(f"{n:.3g}" for n in asdict(line).values()) for line in lines)]
    table(f"The kernel of {given.examples} digits, 10 outputs, along training", cells)
    later = lines[1:] or lines
    ntk, least = (statistics.median(getattr(line, f"seconds_{way}") for line in later) for way in ("ntk", "bare"))
    print(f"\nmedians after the first checkpoint: ntk {ntk:.3f} s, bare {least:.3f} s, ratio {ntk / least:.2f}")
    if given.csv:
        write_csv(given.csv, lines)
    if given.figure:
        draw(lines, given.figure)
    return lines


def draw(lines: list[Checkpoint], path: Path) -> None:
    """How far the kernel moved, and the error, by epochs of training."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    epochs = [line.epochs for line in lines]
    axes.plot(epochs, [line.moved for line in lines], "o-", label="distance from the first kernel, relative")
    axes.plot(epochs, [line.squared_error for line in lines], "s--", label="mean squared error")
    axes.set_xlabel("epochs")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    common.leave(main)
