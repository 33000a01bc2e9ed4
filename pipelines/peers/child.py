"""Keep a tool's process alive in its own interpreter, send it settings, and compare the kernels that it answers.

A tool's process stays alive from request to request, so that what it compiled is used again.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jacstore.errors import DamagedDataError

SCRIPTS = Path(__file__).resolve().parent
# Rounding of float32 sums of 10^6 products, in another order in each tool.
TOLERANCE = 4e-6
# A step that does not end, or a program that does not compile, is given up after this many times the limit, but
# not before so many seconds.
GIVE_UP, PATIENCE = 4, 30.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of one tool at one block size; 0 where the tool chooses its own."""

    tool: str
    way: str
    block: int

    def __str__(self) -> str:
        return f"{self.tool} {self.way}" + (f", blocks of {self.block}" if self.block else "")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a setting answered in one round."""

    setting: Setting
    phase: str
    round: int
    answer: dict[str, Any]

    @property
    def seconds(self) -> float:
        return float(self.answer.get("seconds", np.inf))

    @property
    def whole(self) -> bool:
        """Whether every block was computed, so that nothing was extrapolated."""
        return "failed" not in self.answer and self.answer["products_done"] == self.answer["products"]

    @property
    def remark(self) -> str:
        if "failed" in self.answer:
            return str(self.answer["failed"])
        return (
            ""
            if self.whole
            else f"extrapolated from {self.answer['products_done']:.0f} of {self.answer['products']:.0f}"
        )


class Child:
    """A tool in its own interpreter, asked by lines of JSON; started again when it died."""

    def __init__(self, interpreter: str, script: str, network: Path, memory: int, patience: float = PATIENCE) -> None:
        self.command = [interpreter, str(SCRIPTS / script), str(network), "--memory", str(memory)]
        self.patience = patience
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer, or what kept it from coming."""
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        limit = max(self.patience, GIVE_UP * request["seconds"])
        line = ""
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(limit):
                    self.close()
                    return {"failed": f"not one block within {limit:.0f} s"}
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        if line:
            return dict(json.loads(line))
        self.close()
        return {"failed": f"out of memory or crashed (exit status {process.returncode})"}

    def _start(self) -> subprocess.Popen[str]:
        paths = (str(SCRIPTS.parent), str(SCRIPTS.parent.parent), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def check_kernel(kernel: np.ndarray, reference: np.ndarray, name: str) -> tuple[float, int]:
    """The largest `|A_ij - B_ij| / sqrt(B_ii B_jj)` of the entries that were computed, and examples left out of it.

    A ReLU or a maximum that lies at its kink within rounding falls another way in another order of sums, and entries of
    that example move by far more than rounding. Examples are left out, the one with most such entries first, until none
    is left, and counted.

    Raises
    ------
    DamagedDataError
        If more than one example in fifty was left out.
    """
    scale = np.sqrt(np.diag(reference))
    errors = np.nan_to_num(np.abs(kernel - reference) / (scale[:, None] * scale), nan=0.0)
    beyond = errors > TOLERANCE
    kinks = 0
    while beyond.any():
        worst = int(beyond.sum(0).argmax())
        beyond[worst], beyond[:, worst] = False, False
        errors[worst], errors[:, worst] = 0.0, 0.0
        kinks += 1
    largest = float(errors.max())
    if kinks > max(1, len(kernel) // 50):
        raise DamagedDataError(
            f"{name}: kernel differs from jacstore's by more than {TOLERANCE:.0e} of sqrt(G_ii G_jj) in entries of "
            f"{kinks} of {len(kernel)} examples, allowed one in fifty"
        )
    return largest, kinks
