"""Settings of a test run: the same examples in every run, and programs that are compiled once.

A landing is judged alike twice; `--hypothesis-profile random` explores.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from helpers_limits import limited

# Workers side by side share the cores: more BLAS threads than cores wait for each other, spinning.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("fixed", derandomize=True, database=None)
settings.register_profile("random", derandomize=False)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers and the commands that tests start take over what one of them has compiled."""
    if hasattr(config, "workerinput"):
        return
    compiled = tempfile.TemporaryDirectory(prefix="jacstore-compiled-", ignore_cleanup_errors=True)
    config.add_cleanup(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture
def limits() -> Iterator[Callable[..., None]]:
    """Give fields of `LIMITS` other values for the length of a test: `limits(slab_columns=14)`."""
    with contextlib.ExitStack() as stack:
        yield lambda **changes: stack.enter_context(limited(**changes))


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Let no test use the programs that another one left in the process."""
    yield
    if "jacstore.problem.program" in sys.modules:
        sys.modules["jacstore.problem.program"].forget()
