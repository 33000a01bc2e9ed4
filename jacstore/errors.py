"""In: what went wrong. Out: named exceptions, each one line for the user and an exit code for the command line."""

from __future__ import annotations

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


class Refused(JacstoreError):
    """The user must change something: a value, a flag, a file, free space."""


class ProbeFailed(Refused):
    """The function is not a map from (params, one example) to outputs, so it has no per-example Jacobian."""


class Mismatch(Refused):
    """A store or kernel already on disk was made from another request."""


class Locked(Refused):
    """Another live process works on the same units or items."""


class Incomplete(Refused):
    """An input is not finished; the text says how much is missing and which command completes it."""


class NonFinite(Refused):
    """A row holds NaN or infinity."""


class SelectedState(UserWarning):
    """Leaves that look like running statistics are among those that the Jacobian has columns for."""


class Damaged(JacstoreError):
    """Stored bytes are missing or differ from what was recorded; the text names the unit, leaf or tile.

    `piece` is the number of the first wrong piece of a file, where that is known.
    """

    exit_code = 3

    def __init__(self, text: str, piece: int | None = None) -> None:
        super().__init__(text)
        self.piece = piece


class Interrupted(JacstoreError):
    """A signal asked to stop; finished work is kept and the same command continues it."""

    exit_code = 130
