"""Reports of a verification: each check with its figure, its bound, and where it failed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: `state` ok, failed or skipped; `where` names the first failing place, or says why it was skipped."""

    name: str
    state: str
    figure: float | None = None
    bound: float | None = None
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify` found about a store or kernel.

    Attributes
    ----------
    ok
        Whether no check failed; skipped ones do not count.
    to_recompute
        Units of a store, or tiles of a kernel, that the next build or gram recomputes.
    """

    path: str
    kind: str
    checks: tuple[Check, ...]
    to_recompute: tuple[str, ...]
    seconds_total: float

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """Failed checks, in order."""
        return tuple(check for check in self.checks if check.state == FAILED)

    def check(self, name: str) -> Check:
        """The check with a given name."""
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON; numbers that are not finite become None."""
        return {
            "path": self.path,
            "kind": self.kind,
            "ok": self.ok,
            "checks": [{key: _finite(value) for key, value in asdict(check).items()} for check in self.checks],
            "to_recompute": list(self.to_recompute),
            "seconds_total": self.seconds_total,
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def skipped(name: str, why: str) -> Check:
    """A check that could not be made."""
    return Check(name=name, state=SKIPPED, where=why)


class Tally:
    """Accumulate a check: count faults, or keep the figure that is largest against its bound."""

    def __init__(self, name: str, bound: float = 0.0) -> None:
        self.name, self.bound, self.figure = name, bound, 0.0
        self.where = ""
        self.seen = 0
        self.note = ""

    @property
    def failed(self) -> bool:
        return bool(self.where)

    def fault(self, where: str) -> None:
        """Count one fault; the first is named."""
        self.seen += 1
        self.figure += 1
        self.where = self.where or where

    def see(self, figure: float, bound: float, where: str) -> bool:
        """Take in the figure of a place; return whether it is at most `bound`."""
        fine = figure <= bound  # not for NaN
        # The first failure is kept; until then, the figure that is largest against its bound.
        if not self.where and (not fine or not self.seen or figure * self.bound > self.figure * bound):
            self.figure, self.bound = figure, bound
            self.where = "" if fine else where
        self.seen += 1
        return fine

    def done(self) -> Check:
        state = FAILED if self.failed else OK
        return Check(name=self.name, state=state, figure=self.figure, bound=self.bound, where=self.where or self.note)
