"""Read from Linux control groups which memory and cores a job or container leaves to this process.

A process is in one group of each hierarchy. Every group above that one may set a limit too, so the least of all counts.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

# Where `/proc`, and what is mounted, is looked for.
ROOT = Path("/")


def memory_headroom(root: Path | None = None) -> int | None:
    """Bytes that all groups of this process leave to it, at least 1; None without a limit."""
    found = [*_each(root, "memory", _memory_v1), *_each(root, "", _memory_v2)]
    return max(1, int(min(found))) if found else None


def cpu_quota(root: Path | None = None) -> int | None:
    """Cores whose time all groups of this process leave to it, rounded up; None without a limit."""
    found = [*_each(root, "cpu", _cores_v1), *_each(root, "", _cores_v2)]
    return max(1, math.ceil(min(found))) if found else None


def _each(root: Path | None, controller: str, read: Callable[[Path], float | None]) -> list[int | float]:
    """What the groups of one hierarchy say, those that set no limit left out."""
    found = [read(folder) for folder in _folders(ROOT if root is None else root, controller)]
    return [limit for limit in found if limit is not None]


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and of those above it, as far as they are mounted; controller "" is version 2."""
    group = _group(root, controller)
    if group is None:
        return
    for above, point in _mounts(root, controller):
        inside = PurePosixPath()
        # In a container the group may be named as the host names it while it is the mount point itself.
        if group.is_relative_to(above) and ".." not in group.parts:
            inside = group.relative_to(above)
        for folder in (inside, *inside.parents):
            yield root / point.relative_to("/") / folder


def _group(root: Path, controller: str) -> PurePosixPath | None:
    """Name of this process's group, from lines such as `4:cpu,cpuacct:/job` and `0::/job`."""
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3 and controller in fields[1].split(",") and fields[2].startswith("/"):
            return PurePosixPath(fields[2])
    return None


def _mounts(root: Path, controller: str) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Which group of a hierarchy is mounted, and where; proc(5) says how the lines are made."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        fields, kinds = mount.split(), system.split()
        if len(fields) < 5 or len(kinds) < 3 or not fields[4].startswith("/"):
            continue
        wanted = kinds[0] == "cgroup" and controller in kinds[2].split(",") if controller else kinds[0] == "cgroup2"
        if wanted:
            yield PurePosixPath(_unescaped(fields[3])), PurePosixPath(_unescaped(fields[4]))


def _unescaped(text: str) -> str:
    """A path in which a space is written as a backslash and 040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _memory_v2(folder: Path) -> int | None:
    # Above memory.high a process is not killed but slowed down until it gives memory back.
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    return _left(limits, _number(folder / "memory.current"), _stat(folder).get("inactive_file"))


def _memory_v1(folder: Path) -> int | None:
    stat = _stat(folder)
    # Groups above what is mounted are seen only here.
    limits = [_number(folder / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
    return _left(limits, _number(folder / "memory.usage_in_bytes"), stat.get("total_inactive_file"))


def _left(limits: list[int | None], usage: int | None, cache: int | None) -> int | None:
    """Page cache counts as usage, but what of it has not been used lately is given back when asked for."""
    found = [limit for limit in limits if limit is not None]
    return min(found) - max(0, (usage or 0) - (cache or 0)) if found else None


def _cores_v2(folder: Path) -> float | None:
    words = next(iter(_lines(folder / "cpu.max")), "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and all(word.isdecimal() for word in words) else None


def _cores_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _stat(folder: Path) -> dict[str, int]:
    pairs = [line.split() for line in _lines(folder / "memory.stat")]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """A file of one number; None where it says `max` or -1, or cannot be read."""
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().splitlines()
    return []
