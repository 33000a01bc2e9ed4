"""Load the `Problem` or `TorchProblem` that `path/to/file.py:name` or `package.module:name` names."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jacstore.errors import InvalidRequestError, JacstoreError
from jacstore.problem.problem import Problem
from jacstore.problem.torch_problem import TorchProblem
from jacstore.problem.user_errors import error_line

DEFAULT_NAME = "problem"


def load_target(text: str) -> Problem | TorchProblem:
    """Load a `Problem` or `TorchProblem`, or call the function without arguments that returns one.

    Parameters
    ----------
    text
        `path/to/file.py:name` or `package.module:name`; `name` defaults to `problem`. The file's folder, or the
        current one for a module, is importable while loading.

    Raises
    ------
    InvalidRequestError
        If the file, module or name is missing, is no Problem, or raises; the text names file and line.
    """
    where, name = _parts(text)
    is_file = where.endswith(".py") or os.sep in where
    path = Path(where).absolute()
    # Path.is_file raises for a name that is too long.
    if is_file and not os.path.isfile(path):
        raise InvalidRequestError(f"target {text!r}: there is no file {where}; {_ALLOWED}")
    with _importable(path.parent if is_file else Path.cwd()), _naming(text):
        module = _run_file(path) if is_file else _import(where, text)
        return _problem(module, name, text)


_ALLOWED = "allowed are path/to/file.py:name and package.module:name; change TARGET"


def _parts(text: str) -> tuple[str, str]:
    where, colon, name = text.rpartition(":")
    if not colon or os.sep in name or name.endswith(".py"):
        where, name = text, DEFAULT_NAME
    if not where or not name.isidentifier():
        raise InvalidRequestError(f"target {text!r} names nothing; {_ALLOWED}")
    return where, name


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _naming(text: str) -> Iterator[None]:
    """Turn an exception inside the target into one line with its place."""
    try:
        yield
    except _Wrong as error:
        raise InvalidRequestError(str(error)) from error.__cause__
    except (Exception, SystemExit) as error:
        raise InvalidRequestError(f"target {text!r} raised {error_line(error)}; change that line, or TARGET") from error


class _Wrong(JacstoreError):
    """What `load_target` itself objects to, apart from an InvalidRequestError raised by the user's lines."""


def _run_file(path: Path) -> ModuleType:
    # Not through the import system: its cached bytecode is keyed by whole seconds and size, and a target that was
    # edited within one second would run as it was before.
    name = "target_" + re.sub(r"\W", "_", path.stem)
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(name: str, text: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only this module or a package above it; a missing import inside the module is the module's own error.
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise _Wrong(f"target {text!r}: there is no module {error.name}; {_ALLOWED}") from error
        raise


def _problem(module: ModuleType, name: str, text: str) -> Problem | TorchProblem:
    if not hasattr(module, name):
        found = [key for key, value in vars(module).items() if _is_candidate(value, module)]
        there = f"it has {', '.join(found)}" if found else "it has no Problem and no function"
        raise _Wrong(f"target {text!r}: there is no name {name} in {module.__file__}; {there}; change TARGET")
    value = getattr(module, name)
    if not isinstance(value, Problem | TorchProblem) and callable(value):
        if _needs_arguments(value):
            raise _Wrong(f"target {text!r} needs arguments; a function without any is allowed; change TARGET")
        value = value()
    if not isinstance(value, Problem | TorchProblem):
        raise _Wrong(
            f"target {text!r} is a {type(value).__name__}; it has to be a jacstore.Problem (of PyTorch a "
            "jacstore.torch.TorchProblem) or a function that returns one; change TARGET"
        )
    return value


def _is_candidate(value: Any, module: ModuleType) -> bool:
    return isinstance(value, Problem | TorchProblem) or (
        inspect.isfunction(value) and value.__module__ == module.__name__
    )


def _needs_arguments(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False
