"""Named exceptions, each with one line for the user and an exit code for the command line."""

from __future__ import annotations

from typing import Any

LONGEST_WORD = 400


def one_line(text: str) -> str:
    """One printable line, in which no word is longer than a long path."""
    return printable(" ".join(w if len(w) <= LONGEST_WORD else w[:LONGEST_WORD] + "…" for w in text.split()))


def printable(line: str) -> str:
    """A line in which what would steer a terminal is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class JacstoreError(Exception):
    """Base of every error that jacstore raises on purpose; its text is one printable line, whatever it quotes."""

    exit_code = 2

    def __init__(self, text: str = "") -> None:
        super().__init__(one_line(text))

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes send errors by pickle, which would call __init__ with the finished text alone.
        return _without_init, (type(self), self.args), self.__dict__


def _without_init(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    # The memory of an OSError is laid out otherwise, so it alone can make one.
    error = OSError.__new__(kind) if issubclass(kind, OSError) else Exception.__new__(kind)
    error.args = args
    return error


class InvalidRequestError(JacstoreError, ValueError):
    """The user must change something: a value, a flag, a file, free space."""


class InvalidFunctionError(InvalidRequestError):
    """The function does not map (params, one example) to outputs, so it has no per-example Jacobian."""


class RequestMismatchError(InvalidRequestError):
    """The store or kernel on disk was made from another request."""


class LockedError(InvalidRequestError, BlockingIOError):
    """Another live process works on the same units or items."""


class IncompleteError(InvalidRequestError):
    """An input is not finished; the text says how much is missing and which command completes it."""


class NonFiniteError(InvalidRequestError):
    """A row holds NaN or infinity."""


class SelectedStateWarning(UserWarning):
    """Leaves that look like running statistics are among those that the Jacobian has columns for."""


class DamagedDataError(JacstoreError, OSError):
    """Stored bytes are missing or differ from what was recorded; the text names the unit, leaf or tile.

    `piece` is the number of the first wrong piece of a file, where that is known.
    """

    exit_code = 3

    def __init__(self, text: str = "", piece: int | None = None) -> None:
        super().__init__(text)
        self.piece = piece


class RunInterruptedError(JacstoreError):
    """A signal asked to stop; finished work is kept and the same command continues it."""

    exit_code = 130


# Names of before, for code that catches them.
Refused = InvalidRequestError
ProbeFailed = InvalidFunctionError
Mismatch = RequestMismatchError
Locked = LockedError
Incomplete = IncompleteError
NonFinite = NonFiniteError
SelectedState = SelectedStateWarning
Damaged = DamagedDataError
Interrupted = RunInterruptedError
