"""Time the kernel of a network, given as npz, by jacstore's build and gram from end to end, as `serve` describes.

The kernel ends as a NumPy array. "disk" writes store and kernel to a temporary folder and reads the kernel back.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from serve import load, serve

import headline
import jacstore


def prepare(network: str, request: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    net, params, inputs = load(network)
    apply = {"mlp": headline.mlp, "cnn": headline.cnn}[net]
    problem = jacstore.Problem(apply=apply, params=params, inputs=inputs, outputs="sum")

    def run(request: dict[str, Any]) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix="jacstore-peers-"))
        places = (folder / "store.jac", folder / "kernel.ntk") if request["way"] == "disk" else (None, None)
        try:
            started = time.perf_counter()
            store = jacstore.build(problem, places[0], memory=request["memory"])
            built = time.perf_counter()
            gram = jacstore.gram(store, out=places[1], memory=request["memory"], dtype="float32")
            kernel = gram.array.compute(scheduler="synchronous")
            seconds = time.perf_counter() - started
        finally:
            shutil.rmtree(folder)
        np.save(request["kernel"], kernel)
        compiling = store.report["seconds_compile"]
        return {
            "seconds": seconds - compiling,
            "seconds_measured": seconds,
            "seconds_compile": compiling,
            "seconds_build": built - started - compiling,
            "products_done": gram.report["tiles_computed"],
            "products": gram.report["tiles_total"],
        }

    return run


if __name__ == "__main__":
    serve(prepare)
