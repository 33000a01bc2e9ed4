"""Batches go round the devices of a process; rows do not depend on how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers_errors import refusal

import jacstore
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
