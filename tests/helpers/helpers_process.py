"""Real processes for the tests: the command line run, started, watched and signalled; targets that can be held up."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from click.testing import CliRunner, Result

HERE = Path(__file__).resolve().parent
SECONDS = 120
MAIN = "from jacstore.cli.commands import main; main()"
# The kernel of one item, held up at the slab that begins at or after column `LATCH_COLUMN`.
LATCHED = "import helpers_process; helpers_process.hold_reads(); from jacstore.cli.commands import main; main()"
# Eigenvalues that never come.
LATCHED_LINALG = "import helpers_process; helpers_process.hold_linalg(); from jacstore.cli.commands import main; main()"
# All of the command line with many small slabs and a checkpoint after each.
TINY_SLABS = 14

TARGET = '''
"""Ten examples of a small network; `held` cannot be read beyond example 5 before the file `go` is there."""

import dataclasses
import time
from pathlib import Path

import numpy as np

from jacstore.testing import mlp

HERE = Path(__file__).resolve().parent


class Held:
    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        if i > 5:
            (HERE / "reached").touch()
            while not (HERE / "go").exists():
                time.sleep(0.005)
        return self.inputs[i]


problem = mlp(10)
held = mlp(10, inputs=Held(problem.inputs))
other_weights = mlp(10, seed=1)
other_inputs = mlp(10, inputs=problem.inputs + 1)
'''


def write_target(folder: Path) -> Path:
    """A file with the problems of `TARGET`."""
    path = folder / "net.py"
    path.write_text(TARGET)
    return path


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the tests importable and warnings as errors."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error", **changes}


def run_command(*words: object, code: str = MAIN, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, to its end."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=SECONDS, env=environment(**changes)
    )


class Command:
    """The command line running in a process of its own; leaving the block ends the process."""

    def __init__(self, *words: object, code: str = MAIN, prefix: Sequence[str] = (), **changes: str) -> None:
        command = [*prefix, sys.executable, "-c", code, *map(str, words)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(**changes))

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return once the condition holds; it must do so while the process lives."""
        until = time.monotonic() + SECONDS
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the command ended first, with {self.process.returncode}: {self.finish()}")
            assert time.monotonic() < until, "the command has not come so far"
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        """Send a signal and return once the process has taken it."""
        os.kill(self.process.pid, number)
        self.wait_for(lambda: not self._pending(number))

    def _pending(self, number: int) -> bool:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
        return any(mask >> (number - 1) & 1 for mask in masks)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once the process has ended by itself."""
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


def invoke(*words: object) -> Result:
    """Run the command line in this process; its signal handlers are taken away again."""
    # Only here, so that a child which imports this module stays light.
    from jacstore.cli.commands import main
    from jacstore.cli.terminal import SIGNALS

    handlers = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    argv, sys.argv = sys.argv, ["jacstore", *map(str, words)]
    try:
        return runner().invoke(main, [*map(str, words)])
    finally:
        sys.argv = argv
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)


def runner() -> CliRunner:
    """One that tells stdout and stderr apart, as all do from click 8.2 on."""
    if "mix_stderr" in inspect.signature(CliRunner).parameters:
        return CliRunner(mix_stderr=False)  # type: ignore[call-arg]
    return CliRunner()


def hold_reads() -> None:
    """Make reading of rows wait for `LATCH/go` from column `LATCH_COLUMN` on, and leave `LATCH/reached-PID`."""
    from jacstore.base.limits import LIMITS
    from jacstore.store.reader import JacobianStore

    LIMITS.slab_columns = TINY_SLABS
    latch, column = Path(os.environ["LATCH"]), int(os.environ["LATCH_COLUMN"])
    read = JacobianStore.read

    def held(self, array, start, stop, first, last, out):
        if first >= column:
            (latch / f"reached-{os.getpid()}").touch()
            while not (latch / "go").exists():
                time.sleep(0.005)
        return read(self, array, start, stop, first, last, out)

    JacobianStore.read = held


def hold_linalg() -> None:
    """Make eigenvalues take forever, all of it in LAPACK, and leave `LATCH/reached-PID`."""
    import numpy as np

    def endless(real):
        def held(matrix):
            (Path(os.environ["LATCH"]) / f"reached-{os.getpid()}").touch()
            while True:
                real(np.eye(300))

        return held

    np.linalg.eigh, np.linalg.eigvalsh = endless(np.linalg.eigh), endless(np.linalg.eigvalsh)


def contents(folder: Path, *below: str) -> dict[str, bytes]:
    """Bytes of every file below a folder, or below some of its subfolders, by relative path."""
    roots = [folder / name for name in below] or [folder]
    return {str(p.relative_to(folder)): p.read_bytes() for root in roots for p in root.rglob("*") if p.is_file()}
