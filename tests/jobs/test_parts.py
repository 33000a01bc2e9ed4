"""Parts of one job in processes of their own, as tasks of an array: in any order, twice, killed, with other memory."""

from __future__ import annotations

import random
import time

import pytest

import jacstore
from helpers_process import Command, contents, run_command, write_target

MEMORY = ("200MB", "250MB", "300MB", "400MB", "500MB")


def run_parts(words, rng, *, parts=5, doubles=2, at_once=3):
    """Run all parts, some of them twice and one killed and repeated; returns what was refused."""
    numbers = list(range(1, parts + 1)) + rng.sample(range(1, parts + 1), doubles)
    rng.shuffle(numbers)
    killed = rng.choice(numbers)
    refused, waiting, running = [], [*numbers, killed], []
    while waiting or running:
        while waiting and len(running) < at_once:
            number = waiting.pop(0)
            command = Command(*words, "--part", f"{number}/{parts}", "--memory", rng.choice(MEMORY))
            command.__enter__()
            running.append((number, command))
            if number == killed:
                time.sleep(rng.uniform(0.5, 3))
                command.process.kill()
                killed = None
        number, command = running.pop(0)
        code, _, errors = command.finish()
        command.__exit__(None, None, None)
        if code == 2:
            refused.append(errors)
        else:
            assert code in (0, -9), errors
    return refused


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_parts_in_any_order_twice_and_killed_end_as_one_run(seed, tmp_path):
    rng = random.Random(seed)
    target = write_target(tmp_path)
    whole, out = tmp_path / "whole.jac", tmp_path / "parts.jac"
    build = ("build", f"{target}:problem", "--codec", "none", "--unit-size", 1)
    assert run_command(*build, "--out", whole).returncode == 0
    refused = run_parts((*build, "--out", out), rng)
    assert all("is being worked on by" in text for text in refused), refused
    arrays = ("rows", "factors", "outputs", "norms")
    assert jacstore.open(out).complete and contents(out, *arrays) == contents(whole, *arrays)
    gram = ("gram", whole, "--tile", 3)
    one, many = tmp_path / "one.ntk", tmp_path / "parts.ntk"
    assert run_command(*gram, "--out", one).returncode == 0
    refused = run_parts((*gram, "--out", many), rng)
    assert all("is being worked on by" in text for text in refused), refused
    assert jacstore.open(many).complete
    assert contents(many, "kernel") == contents(one, "kernel")
