"""Batches go round the devices of a process; rows do not depend on how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jacstore
from helpers_errors import refusal
from jacstore.base.devices import local_devices

FOUR = """
import json, jax, jax.numpy as jnp, numpy as np, jacstore
draw = np.random.default_rng(0)
X = draw.standard_normal((24, 40)).astype(np.float32)
P = {"v": draw.standard_normal((40, 40)).astype(np.float32) / 40, "w": draw.standard_normal((40, 3)).astype(np.float32)}
calls = []

def network(p, x):
    calls.append(0)
    return jnp.tanh(x @ p["v"]) @ p["w"]

def built(params=P, **options):
    problem = jacstore.Problem(apply=network, params=params, inputs=X)
    return jacstore.build(problem, None, unit_size=6, batch_size=2, **options)

def rows(store):
    return np.asarray(store.array.compute(scheduler="synchronous"))
"""


def on_four_devices(code):
    """What a process with four host devices prints at its end, read as JSON."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", FOUR + code], capture_output=True, text=True, check=False, env={**os.environ, **flags}
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("options", [{}, {"layout": "dense"}, {"dtype": "float64", "output_batch": 2}], ids=str)
def test_rows_are_those_of_one_device_to_the_bit_and_each_device_computes_its_share(options):
    found = on_four_devices(f"""
options = {options!r}
one = built(devices=1, **options)
result = {{"one": one.report["batches_by_device"]}}
for asked in ("all", None, 4, "0,2", [3]):
    store = built(devices=asked, **options)
    same = rows(store).tobytes() == rows(one).tobytes() and store.norms.tobytes() == one.norms.tobytes()
    result[str(asked)] = [store.report["batches_by_device"], same]
print(json.dumps(result))
""")
    assert found.pop("one") == [12]
    four = [[3, 3, 3, 3], True]
    assert found == {"all": four, "None": four, "4": four, "0,2": [[6, 6], True], "[3]": [[12], True]}


def test_a_second_build_on_four_devices_compiles_nothing():
    found = on_four_devices("""
built()
seen = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: seen.append(name) if "backend_compile" in name else None
)
calls.clear()
other = {name: value + 1 for name, value in P.items()}
store = built(other)
print(json.dumps([len(seen), len(calls), store.report["batches_by_device"]]))
""")
    assert found == [0, 1, [3, 3, 3, 3]]


def test_parameters_that_were_placed_on_a_device_stay_there():
    found = on_four_devices("""
placed = jax.device_put(P, jax.devices()[2])
same = rows(built(placed)).tobytes() == rows(built(devices=1)).tobytes()
print(json.dumps([built(placed).report["batches_by_device"], same]))
""")
    assert found == [[12], True]


@pytest.mark.parametrize("asked", ["none", "0", 0, -1, 99, "0,0", "0,99", "", [], [99], 1.5, "1.5", "0,"], ids=str)
def test_devices_that_are_not_there_are_refused_and_named(asked):
    text = refusal(local_devices, asked)
    assert text.startswith("--devices") and "0,2 (devices=)" in text


def test_one_device_is_the_default_of_a_process_with_one():
    assert local_devices() == local_devices("all") == local_devices("1") == jax.local_devices()[:1]


def test_a_build_refuses_a_device_that_is_not_there_before_any_work():
    calls = []
    problem = jacstore.Problem(apply=lambda p, x: calls.append(0) or x * p, params=np.ones(2), inputs=np.ones((3, 2)))
    assert "--devices 77" in refusal(jacstore.build, problem, None, devices=77)
    assert not calls


KERNELS = """
from jacstore.kernels.engines import xla
added = []
real = xla.XlaEngine.add

def counted(self, *given):
    total = real(self, *given)
    added.append(next(iter(given[2].devices())).id)
    return total

xla.XlaEngine.add = counted

def kernel(store, other=None, **options):
    made = jacstore.gram(store, other, engine="xla", memory="200MB", **options)
    return made.report["passes"], np.asarray(made.array.compute(scheduler="synchronous"))

def close(a, b):
    return bool(np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b))
"""


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal", "blocks"])
def test_a_kernel_of_any_number_of_devices_is_that_of_one_and_equal_to_the_bit_for_the_same_number(mode):
    found = on_four_devices(f"""
{KERNELS}
from jacstore.kernels.plan import plan
plan.GramPlan.slabs = lambda self, columns: [(a, min(a + 100, columns[1])) for a in range(*columns, 100)]
store, mode = built(layout="dense"), {mode!r}
one = kernel(store, mode=mode, devices=1)
result = []
for asked in (None, "0,2", [3]):
    added.clear()
    again = [kernel(store, mode=mode, devices=asked) for _ in range(2)]
    shares = [added.count(n) for n in range(4)]
    result.append([again[0][1].tobytes() == again[1][1].tobytes(), close(again[0][1], one[1]), again[0][0], shares])
print(json.dumps([one[0], result]))
""")
    passes, result = found
    for (same, close, read, shares), used in zip(result, (4, 2, 1), strict=True):
        assert same and close and read == passes
        busy = [share for share in shares if share]
        assert len(busy) == used and max(busy) - min(busy) <= 0.1 * sum(busy)


def test_rectangles_factors_and_leaves_on_four_devices_are_those_of_one():
    found = on_four_devices(f"""
{KERNELS}
store = built()
other = jacstore.build(jacstore.Problem(apply=network, params=P, inputs=X[:10] + 1), None)
result = []
for given in ((store,), (store, other)):
    result.append(close(kernel(*given)[1], kernel(*given, devices=1)[1]))
one, four = (jacstore.gram(store, engine="xla", by_leaf=True, devices=n) for n in (1, 4))
for path in one.leaves:
    a, b = (made.leaf_arrays[path].compute(scheduler="synchronous") for made in (four, one))
    result.append(close(a, b))
print(json.dumps(result))
""")
    assert found == [True] * 4


def test_devices_are_refused_with_blas_and_where_they_are_not_there():
    problem = jacstore.Problem(apply=lambda p, x: x * p, params=np.ones(2, np.float32), inputs=np.ones((3, 2)))
    store = jacstore.build(problem, None)
    assert "BLAS uses no device" in refusal(jacstore.gram, store, engine="blas", devices=1)
    assert "--devices 77" in refusal(jacstore.gram, store, engine="xla", devices=77)
