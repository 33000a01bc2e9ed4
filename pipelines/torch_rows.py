"""PyTorch networks through the on-ramp: bytes stored beside dense rows, examples a second beside torch.func's rows.

    python pipelines/torch_rows.py --examples 512

mlp: 784-1024-1024-512-10. cnn: 3 x 3 convolutions 32-64-128 with batch normalisation and 2 x 2 max-pool on 3 x 32 x 32
images, dense 2048-256-10. text: an embedding of 2,000 words by 64, 64-512-10. All outputs, float32, generated inputs.
torch.func's `vmap(jacrev)` forms rows in memory and stores nothing; it is timed at several batch sizes, the fastest
counts. Some rows of the store are compared with `jacrev` in float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import jacstore.torch
from jacstore.base.machine import format_size
from jacstore.testing import row_error

BATCHES = (1, 4, 16, 64)
ROW_BYTES = 1_000_000_000
COMPARED = 4


class Text(nn.Module):
    """Words looked up, one hidden layer, the mean over positions."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(words, 64), nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.up(self.table(ids))).mean(1))


def network(name: str, examples: int, small: bool) -> tuple[nn.Module, torch.Tensor]:
    """A module in evaluation mode and its inputs."""
    torch.manual_seed(0)
    if name == "text":
        words, width = (100, 32) if small else (2000, 512)
        return Text(words, width).eval(), torch.randint(0, words, (examples, 32))
    if name == "mlp":
        widths = (784, 32, 10) if small else (784, 1024, 1024, 512, 10)
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).eval(), torch.randn(examples, 784)
    channels = (3, 4, 8, 16) if small else (3, 32, 64, 128)
    layers = []
    for a, b in itertools.pairwise(channels):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(channels[-1] * 16, 256), nn.ReLU(), nn.Linear(256, 10)]
    module = nn.Sequential(*layers).eval()
    for layer in module:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    return module, torch.randn(examples, 3, 32, 32)


def jacobian(module: nn.Module, dtype: torch.dtype) -> Any:
    """Rows of a batch by torch.func, as a dict of `(n, K, *shape)`."""
    values = {name: p.detach().to(dtype) for name, p in module.named_parameters()}
    buffers = {name: b.to(dtype) if b.is_floating_point() else b for name, b in module.named_buffers()}

    def one(values: Any, example: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(module, {**values, **buffers}, (example[None],))
        return output[0]

    mapped = torch.func.vmap(torch.func.jacrev(one), (None, 0))
    return lambda x: mapped(values, x.to(dtype) if x.is_floating_point() else x)


def rows_per_second(module: nn.Module, x: torch.Tensor) -> tuple[float, int]:
    """Examples a second of the fastest batch size, and that size; a first batch of each is not timed."""
    rows, best = jacobian(module, torch.float32), (0.0, 1)
    row_bytes = 4 * 10 * sum(p.numel() for p in module.parameters())
    for batch in BATCHES:
        if batch > len(x) or (batch > 1 and batch * row_bytes > ROW_BYTES):
            break
        rows(x[:batch])
        rounds = max(1, min(len(x), 64) // batch)
        started = time.perf_counter()
        for n in range(rounds):
            rows(x[n * batch : (n + 1) * batch])
        best = max(best, (rounds * batch / (time.perf_counter() - started), batch))
    return best


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run and print; returns the figures of each network."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nets", nargs="+", choices=("mlp", "cnn", "text"), default=["mlp", "cnn", "text"])
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--out", type=Path, default=Path("torch-run"))
    parser.add_argument("--small", action="store_true", help="toy sizes")
    given = parser.parse_args(arguments)
    head = f"{'net':5} {'P':>10} {'stored':>10} {'as rows':>10} {'less':>6}"
    print(f"{head} {'ex/s':>8} {'jacrev':>8} {'faster':>7} {'error':>8}")
    table: list[dict[str, Any]] = []
    for name in given.nets:
        module, x = network(name, given.examples, given.small)
        out = given.out / f"{name}.jac"
        shutil.rmtree(out, ignore_errors=True)
        # A first run of a few examples loads what torch loads late.
        jacstore.torch.build(module, x[:2], None, memory=given.memory)
        store = jacstore.torch.build(module, x, out, memory=given.memory)
        report = store.report
        wanted = jacobian(module, torch.float64)(x[:COMPARED])
        truth = np.concatenate([part.flatten(2).numpy() for part in wanted.values()], -1)
        found = store.array[: COMPARED * 10].compute()
        plain, batch = rows_per_second(module, x)
        table.append(
            {
                "net": name,
                "examples": given.examples,
                "parameters": store.n_parameters,
                "bytes_stored": report["bytes_stored"],
                "bytes_dense": report["bytes_dense"],
                "examples_per_second": given.examples / report["seconds_total"],
                "jacrev_per_second": plain,
                "jacrev_batch": batch,
                "largest_row_error": row_error(found, truth),
                "factored": [leaf.path for leaf in store.leaves if leaf.dense is None],
            }
        )
        show(table[-1])
    print(json.dumps(table))
    return table


def show(row: dict[str, Any]) -> None:
    """One line for people."""
    less = row["bytes_dense"] / row["bytes_stored"]
    faster = row["examples_per_second"] / row["jacrev_per_second"]
    print(
        f"{row['net']:5} {row['parameters']:10,} {format_size(row['bytes_stored']):>10} "
        f"{format_size(row['bytes_dense']):>10} {less:5.1f}x {row['examples_per_second']:8.1f} "
        f"{row['jacrev_per_second']:8.1f} {faster:6.1f}x {row['largest_row_error']:8.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
