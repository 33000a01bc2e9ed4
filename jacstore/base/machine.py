"""Facts about the machine and this process (memory, disk, cores), and sizes such as "8GB" read and printed."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

from jacstore.base import cgroups
from jacstore.base.budget import DEFAULT, Budget
from jacstore.errors import InvalidRequestError

UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    UNITS[_letter] = UNITS[_letter + "B"] = 1000**_power
    UNITS[_letter + "IB"] = 1024**_power


def parse_size(given: int | str | None, flag: str) -> int | None:
    """Bytes of `8GB`, `500MiB`, `1e9` or an integer; None stays None.

    Raises
    ------
    InvalidRequestError
        If it is not a size, or not above zero.
    """
    if given is None:
        return None
    matched = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", str(given))
    keyword = flag.lstrip("-").replace("-", "_")
    if matched is None or matched[2].upper() not in UNITS:
        raise InvalidRequestError(
            f"{flag} {given}: not a size; allowed are bytes with a unit such as 8GB or 500MiB ({keyword}=)"
        )
    exact = float(matched[1]) * UNITS[matched[2].upper()]
    size = int(exact) if exact < 2**63 else 0
    if size <= 0:
        raise InvalidRequestError(
            f"{flag} {given}: must be above 0, below 2**63; allowed are sizes such as 8GB ({keyword}=)"
        )
    return size


def format_size(size: float) -> str:
    """Print bytes in decimal units with three figures: 286 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def cores() -> int:
    """Cores that this process may use, within the CPU quota of its job or container."""
    quota = cgroups.cpu_quota()
    return visible_cores() if quota is None else min(visible_cores(), quota)


def visible_cores() -> int:
    """Cores that this process may run on, whatever the CPU quota of its job or container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limited_cores() -> int | None:
    """`cores()` where a quota makes them fewer than libraries that count cores themselves would use; else None."""
    return cores() if cores() < visible_cores() else None


def available_memory() -> int:
    """Bytes that can be allocated now, within the limits of a job or container."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            available = int(fields["MemAvailable"].split()[0]) * 1024
    left = cgroups.memory_headroom()
    return max(1, available if left is None else min(available, left))


def default_memory(given: int | str | None) -> int:
    """The host budget in bytes: `--memory`, or half of what is available."""
    return parse_size(given, "--memory") or Budget(available_memory()).split(**DEFAULT)["host"]


def free_disk(path: str | Path) -> int:
    """Free bytes of the disk that holds `path` or will hold it."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def peak_rss() -> int:
    """Largest resident size of this process so far, in bytes."""
    # Linux counts in kilobytes, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def hostname() -> str:
    """This machine's name."""
    return socket.gethostname()


def boot_id() -> str:
    """An identifier that changes with every boot, so that a process id from before a reboot is not trusted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_space() -> str:
    """The namespace that process ids of this process belong to; empty where a system has only one.

    Containers of one machine share its boot, and with the host's network its name, while their process ids are theirs.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def this_process() -> dict[str, Any]:
    """What names this process among all that ever ran, on whatever machine."""
    pid = os.getpid()
    place = {"host": hostname(), "boot": boot_id(), "space": process_space()}
    return {**place, "pid": pid, "start": process_start(pid)}


def is_alive(host: str, boot: str, space: str | None, pid: int, start: str | None) -> bool | None:
    """Whether a process still runs; None where that cannot be judged from here.

    A machine of the same name that booted otherwise may be another one, made of the same image. Earlier versions of
    jacstore do not name the namespace (`space` None); it is taken to be this one.
    """
    if (host, boot) != (hostname(), boot_id()) or space not in (None, process_space()):
        return None
    started = process_start(pid)
    return started is not None and started == start


def process_start(pid: int) -> str | None:
    """When process `pid` started, in its own units; None if it is not running.

    A process id is reused; a process id with a start time is not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        return _alive_without_proc(pid)
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _alive_without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"
