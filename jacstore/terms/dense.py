"""The row itself, stored as it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The row itself: columns `start` to `start + size` of the array `rows` `(N, K, P_dense)`."""

    kind: ClassVar[str] = "dense"
    start: int
    size: int

    @property
    def operands(self) -> tuple[str, ...]:
        return ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, **asdict(self)}
