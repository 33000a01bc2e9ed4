"""Answer requests for measurements, one JSON object per line from stdin to stdout, with NumPy alone.

The compared tools share this: each runs in an interpreter of its own, which stays alive between rounds, so that a
setting is compiled once. A kernel is made in blocks of examples, those on and above the diagonal only.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Tool(Protocol):
    """A way to a kernel, ready to run: compiled, warmed up."""

    def rows(self, examples: slice) -> Any:
        """What a block of examples brings to its products: its Jacobian, or only its inputs."""

    def product(self, left: Any, right: Any) -> np.ndarray:
        """The block of the kernel `(m, n)` between two blocks of examples."""


def load(path: str) -> tuple[str, dict[str, dict[str, np.ndarray]], np.ndarray]:
    """The name of the network, its parameters by layer and leaf in order, its inputs `(N, ...)`."""
    params: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for name in arrays.files:
            if "/" in name:
                layer, leaf = name.split("/")
                params.setdefault(layer, {})[leaf] = arrays[name]
        return str(arrays["net"]), params, arrays["inputs"]


def blocks_in_order(
    tool: Tool, n: int, block: int, keep: bool
) -> Iterator[tuple[str, float, tuple[slice, slice, np.ndarray] | None]]:
    """Run all steps; yields the kind of each, its seconds and, for a product, its place and value.

    With `keep` the Jacobians of all blocks stay in memory; without, those of two blocks do and others are made again.
    """
    places = [slice(a, min(a + block, n)) for a in range(0, n, block)]
    kept: dict[int, Any] = {}

    def rows(index: int) -> tuple[str, float, None]:
        started = time.perf_counter()
        kept[index] = tool.rows(places[index])
        return "rows", time.perf_counter() - started, None

    for i, left in enumerate(places):
        if i not in kept:
            yield rows(i)
        for j, right in enumerate(places[i:], start=i):
            if j not in kept:
                yield rows(j)
            started = time.perf_counter()
            value = tool.product(kept[i], kept[j])
            yield "product", time.perf_counter() - started, (left, right, value)
            if j != i and not keep:
                del kept[j]
        del kept[i]


def totals(n: int, block: int, keep: bool) -> dict[str, int]:
    """How many steps of each kind there are."""
    count = -(-n // block)
    pairs = count * (count + 1) // 2
    return {"rows": count if keep else pairs, "product": pairs}


def measure(tool: Tool, n: int, request: dict[str, Any]) -> dict[str, Any]:
    """Run steps until all are done or the time is over; then say by how many of how many the rest is extrapolated."""
    block, keep = request["block"], request["way"].endswith("kept")
    kernel = np.full((n, n), np.nan, np.float32)
    seconds, done = {"rows": 0.0, "product": 0.0}, {"rows": 0, "product": 0}
    for kind, took, made in blocks_in_order(tool, n, block, keep):
        seconds[kind] += took
        done[kind] += 1
        if made is not None:
            left, right, value = made
            kernel[left, right] = value
            kernel[right, left] = value.T
        if sum(seconds.values()) > request["seconds"] and done["product"]:
            break
    wanted = totals(n, block, keep)
    np.save(request["kernel"], kernel)
    return {
        "seconds": sum(seconds[kind] / max(done[kind], 1) * wanted[kind] for kind in wanted),
        "seconds_measured": sum(seconds.values()),
        "products_done": done["product"],
        "products": wanted["product"],
    }


def limit_memory(size: int) -> None:
    """Let allocations beyond `size` bytes fail in this process instead of in the whole machine."""
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def forget_peak() -> None:
    """Let the largest resident size begin anew; where the system cannot, it counts from the start of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """Largest resident size since `forget_peak`."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception is what this tool raises when an allocation fails."""
    text = str(error).lower()
    signs = ("resource_exhausted", "resource exhausted", "out of memory", "can't allocate memory", "cannot allocate")
    return isinstance(error, MemoryError) or any(sign in text for sign in signs)


def serve(prepare: Callable[[str, dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer requests until stdin ends. `prepare` turns a request into something that measures it; kept by setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("network", help="npz with parameters and inputs")
    parser.add_argument("--memory", type=int, help="bytes that this process may allocate")
    given = parser.parse_args()
    if given.memory:
        limit_memory(given.memory)
    # Whatever a library prints goes to stderr: stdout holds answers alone.
    answers, sys.stdout = sys.stdout, sys.stderr
    ready: dict[tuple[Any, ...], tuple[Any, float]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        key = (request["way"], request["block"])
        forget_peak()
        try:
            if key not in ready:
                started = time.perf_counter()
                made = prepare(given.network, request)
                ready[key] = made, time.perf_counter() - started
            work, seconds_compile = ready[key]
            answer = {"seconds_compile": seconds_compile, **work(request), "peak_bytes": peak_bytes()}
        # An answer is owed for whatever a tool raises; what it was is in the table.
        except Exception as error:
            answer = {"failed": "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)
