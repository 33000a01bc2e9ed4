"""Turn an exception of the user's code into one line that says what failed, where, and what to change."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jacstore.errors import InvalidRequestError, JacstoreError

MESSAGE_LENGTH = 300


@contextmanager
def reraise_user_error(what: str, change: str) -> Iterator[None]:
    """Turn an exception of the user's code into one line: what failed, the exception and its place, what to change."""
    try:
        yield
    except JacstoreError:
        raise
    except Exception as error:
        raise InvalidRequestError(f"{what} {error_line(error)}; {change}") from error


def error_line(error: BaseException) -> str:
    """`Type: message (file:line)`, the place being the innermost line of the user's own code, if there is one."""
    text = " ".join(_said(error).split())
    text = text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 1] + "…"
    place = _place(error)
    return f"{kind_of(error)}{': ' if text else ''}{text}{f' ({place})' if place else ''}"


def _said(error: BaseException) -> str:
    """The message of an exception; empty if its `__str__` raises."""
    try:
        return str(error.msg or "") if isinstance(error, SyntaxError) else str(error)
    except Exception:
        return ""


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    tools = [str(Path(inspect.getfile(module)).parent) for module in (jax, np)]
    ours = [str(Path(__file__).parent), *tools]
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]

    def under(frame: traceback.FrameSummary, folders: list[str]) -> bool:
        return any(frame.filename.startswith(folder + os.sep) for folder in folders)

    # Generated code (a dataclass's __init__) and frozen modules are no place that anyone can open.
    generated = ("<string>", "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(generated)]
    frames = [frame for frame in frames if not under(frame, ours)]
    # site-packages lies inside the standard library's folder; a model that is installed there is better than nothing.
    users = [frame for frame in frames if not under(frame, installed + standard)]
    chosen = (users or [frame for frame in frames if under(frame, installed)])[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else ""


def kind_of(value: Any) -> str:
    """The name of its class."""
    return type(value).__name__
