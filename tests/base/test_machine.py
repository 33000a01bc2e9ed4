"""Limits that a job or a container sets: found wherever the control groups are mounted, the least of all that hold."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jacstore
import jacstore.base.cgroups
import jacstore.base.threads
import jacstore.inference.factorize
import jacstore.kernels.item
from jacstore.base import machine
from jacstore.base.cgroups import cpu_quota, memory_headroom
from jacstore.testing import mlp

GB = 10**9
V1_NONE = 9223372036854771712
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


class Tree:
    """A root folder with the files by which Linux tells of control groups."""

    def __init__(self, root: Path, groups: str, mounts: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)

    def write(self, name: str, text: object) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(f"{text}\n")

    def v2(self, folder: str, limit: object, usage: int = 0, cache: int = 0, **more: object) -> None:
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", usage)
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 7")
        for name, value in more.items():
            self.write(f"{folder}/{name.replace('_', '.', 1)}", value)

    def v1(self, folder: str, limit: int, usage: int = 0, cache: int = 0, above: int = V1_NONE) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        stat = f"inactive_file 1\nhierarchical_memory_limit {min(limit, above)}\ntotal_inactive_file {cache}"
        self.write(f"{folder}/memory.stat", stat)


def test_version_2_counts_what_cannot_be_reclaimed_against_the_group_s_own_limit(tmp_path):
    tree = Tree(tmp_path, "0::/job\n", V2)
    tree.v2("sys/fs/cgroup/job", 3 * GB, usage=2 * GB, cache=GB // 2)
    assert memory_headroom(tmp_path) == 3 * GB - 2 * GB + GB // 2


@pytest.mark.parametrize("tightest", ["slurm", "slurm/job_7", "slurm/job_7/step_0/task"])
def test_version_2_takes_the_least_of_all_groups_above(tightest, tmp_path):
    tree = Tree(tmp_path, "0::/slurm/job_7/step_0/task\n", V2)
    for name in ("slurm", "slurm/job_7", "slurm/job_7/step_0", "slurm/job_7/step_0/task"):
        tree.v2(f"sys/fs/cgroup/{name}", 3 * GB if name == tightest else "max", usage=GB)
    assert memory_headroom(tmp_path) == 2 * GB


def test_the_least_is_that_of_what_is_left_not_of_the_limits(tmp_path):
    tree = Tree(tmp_path, "0::/all/mine\n", V2)
    tree.v2("sys/fs/cgroup/all", 8 * GB, usage=7 * GB)
    tree.v2("sys/fs/cgroup/all/mine", 3 * GB, usage=GB)
    assert memory_headroom(tmp_path) == GB


def test_the_bound_from_which_version_2_slows_a_group_down_is_a_limit_too(tmp_path):
    Tree(tmp_path, "0::/job\n", V2).v2("sys/fs/cgroup/job", "max", usage=GB, memory_high=2 * GB)
    assert memory_headroom(tmp_path) == GB


def test_version_1_is_found_by_the_controller_s_name(tmp_path):
    tree = Tree(tmp_path, "4:memory:/slurm/job_7/step\n1:cpu,cpuacct:/\n", V1)
    tree.v1("sys/fs/cgroup/memory", V1_NONE, usage=50 * GB)
    tree.v1("sys/fs/cgroup/memory/slurm/job_7", 3 * GB, usage=2 * GB, cache=GB)
    tree.v1("sys/fs/cgroup/memory/slurm/job_7/step", V1_NONE, usage=GB)
    assert memory_headroom(tmp_path) == 2 * GB


def test_version_1_tells_of_limits_above_what_is_mounted(tmp_path):
    mounted = "35 31 0:32 /pod/box /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    tree = Tree(tmp_path, "4:memory:/pod/box\n", mounted)
    tree.v1("sys/fs/cgroup/memory", V1_NONE, usage=GB, above=4 * GB)
    assert memory_headroom(tmp_path) == 3 * GB


def test_a_hybrid_machine_is_asked_in_both_hierarchies(tmp_path):
    tree = Tree(tmp_path, "4:memory:/a\n1:cpu,cpuacct:/\n0::/b\n", HYBRID)
    tree.v1("sys/fs/cgroup/memory/a", 3 * GB)
    tree.write("sys/fs/cgroup/unified/b/cgroup.procs", 1)
    assert memory_headroom(tmp_path) == 3 * GB


@pytest.mark.parametrize(
    ("group", "mount_root"), [("/docker/box", "/docker/box"), ("/", "/"), ("/elsewhere", "/docker/box"), ("/", "/..")]
)
def test_in_a_container_the_mount_point_is_the_group(group, mount_root, tmp_path):
    tree = Tree(tmp_path, f"0::{group}\n", V2.replace(" / /sys", f" {mount_root} /sys"))
    tree.v2("sys/fs/cgroup", 3 * GB, usage=GB)
    assert memory_headroom(tmp_path) == 2 * GB


def test_a_group_inside_a_mounted_group_is_found_below_the_mount_point(tmp_path):
    tree = Tree(tmp_path, "0::/docker/box/inner\n", V2.replace(" / /sys", " /docker/box /sys"))
    tree.v2("sys/fs/cgroup/inner", 3 * GB, usage=GB)
    assert memory_headroom(tmp_path) == 2 * GB


def test_a_mount_point_with_a_space_is_read(tmp_path):
    tree = Tree(tmp_path, "0::/job\n", V2.replace("/sys/fs/cgroup", r"/sys/my\040groups"))
    tree.v2("sys/my groups/job", 3 * GB)
    assert memory_headroom(tmp_path) == 3 * GB


def test_without_a_limit_there_is_none(tmp_path):
    tree = Tree(tmp_path, "0::/job\n", V2)
    tree.v2("sys/fs/cgroup/job", "max", usage=GB)
    tree.write("sys/fs/cgroup/job/cpu.max", "max 100000")
    assert memory_headroom(tmp_path) is None and cpu_quota(tmp_path) is None


@pytest.mark.parametrize("missing", ["proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/job/memory.max"])
def test_missing_files_are_no_limit(missing, tmp_path):
    tree = Tree(tmp_path, "0::/job\n", V2)
    tree.v2("sys/fs/cgroup/job", 3 * GB)
    (tmp_path / missing).unlink()
    assert memory_headroom(tmp_path) is None and cpu_quota(tmp_path) is None


def test_a_limit_counts_where_usage_cannot_be_read_or_is_nonsense(tmp_path):
    tree = Tree(tmp_path, "nonsense\n0::/job\n", "nonsense\n" + V2)
    tree.v2("sys/fs/cgroup/job", 3 * GB, usage=GB)
    (tmp_path / "sys/fs/cgroup/job/memory.stat").write_text("nonsense")
    assert memory_headroom(tmp_path) == 2 * GB
    (tmp_path / "sys/fs/cgroup/job/memory.current").unlink()
    assert memory_headroom(tmp_path) == 3 * GB


def test_a_full_group_leaves_a_byte_so_that_the_refusal_names_the_memory(tmp_path):
    tree = Tree(tmp_path, "0::/job\n", V2)
    tree.v2("sys/fs/cgroup/job", GB, usage=2 * GB)
    assert memory_headroom(tmp_path) == 1


@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [
        ("max 100000", "max 100000", None),
        ("200000 100000", "max 100000", 2),
        ("max 100000", "150000 100000", 2),
        ("400000 100000", "50000 100000", 1),
        ("nonsense", "300000 100000", 3),
    ],
)
def test_the_quota_of_version_2_is_the_least_of_all_groups_rounded_up(own, above, cores, tmp_path):
    tree = Tree(tmp_path, "0::/a/b\n", V2)
    tree.write("sys/fs/cgroup/a/b/cpu.max", own)
    tree.write("sys/fs/cgroup/a/cpu.max", above)
    assert cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(("own", "above", "cores"), [(-1, -1, None), (200000, -1, 2), (-1, 100000, 1)])
def test_the_quota_of_version_1_likewise(own, above, cores, tmp_path):
    tree = Tree(tmp_path, "4:memory:/x\n1:cpu,cpuacct:/a/b\n", V1)
    for folder, quota in (("a/b", own), ("a", above)):
        tree.write(f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_quota_us", quota)
        tree.write(f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_period_us", 100000)
    assert cpu_quota(tmp_path) == cores


def test_the_default_budget_is_half_of_what_the_job_has_left(tmp_path, monkeypatch):
    tree = Tree(tmp_path, "0::/job\n", V2)
    tree.v2("sys/fs/cgroup/job", 30_000_000, usage=10_000_000)
    monkeypatch.setattr(jacstore.base.cgroups, "ROOT", tmp_path)
    assert machine.available_memory() == 20_000_000 and machine.default_memory(None) == 10_000_000


def test_default_threads_are_those_of_the_quota_and_of_the_affinity(tmp_path, monkeypatch):
    tree = Tree(tmp_path, "0::/job\n", V2)
    monkeypatch.setattr(jacstore.base.cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for quota, cores, told in (("max", 8, None), ("250000", 3, 3), ("6400000", 8, None)):
        tree.write("sys/fs/cgroup/job/cpu.max", f"{quota} 100000")
        assert (machine.cores(), machine.limited_cores()) == (cores, told)


def test_a_gram_and_a_factorization_multiply_with_no_more_threads_than_the_quota(tmp_path, monkeypatch):
    tree = Tree(tmp_path, "0::/job\n", V2)
    tree.write("sys/fs/cgroup/job/cpu.max", "100000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    store = jacstore.build(mlp(7), None)
    asked: list[int | None] = []
    real = jacstore.base.threads.blas_threads

    def seen(count: int | None) -> contextlib.AbstractContextManager[None]:
        asked.append(count)
        return real(count)

    for module in (jacstore.kernels.item, jacstore.inference.factorize):
        monkeypatch.setattr(module, "blas_threads", seen)
    for root, wanted in ((tmp_path / "none", {None}), (tmp_path, {1})):
        monkeypatch.setattr(jacstore.base.cgroups, "ROOT", root)
        asked.clear()
        jacstore.KernelFactor(jacstore.gram(store), 1.0)
        jacstore.spectrum(jacstore.gram(store))
        assert len(asked) >= 4 and set(asked) == wanted


@pytest.fixture
def nested_groups():
    """Two control groups of this kernel, the outer with 700 MB, the inner with no limit of its own."""
    outer = Path("/sys/fs/cgroup/memory") / f"jacstore-{os.getpid()}"
    try:
        (outer / "inner").mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text("700000000")
    except OSError as error:
        pytest.skip(f"no control groups of version 1 can be made here: {error}")
    yield outer / "inner"
    (outer / "inner").rmdir()
    outer.rmdir()


def test_a_process_in_a_real_nested_group_sees_the_limit_above_it(nested_groups):
    ask = "from jacstore.base.machine import available_memory, default_memory as d; print(available_memory(), d(None))"
    join = f"echo $$ > {nested_groups}/cgroup.procs && exec {sys.executable} -c '{ask}'"
    ran = subprocess.run(["bash", "-c", join], capture_output=True, text=True, check=True)
    available, budget = map(int, ran.stdout.split())
    assert 500_000_000 < available < 700_000_000
    # The two are asked for one after the other, and what is left changes by some pages.
    assert abs(budget - available // 2) < 20_000_000
