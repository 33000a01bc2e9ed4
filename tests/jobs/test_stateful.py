"""Built, killed, resumed, damaged, read, begun anew, in parts and in any order: the promise holds at every moment.

What is called done is right, what is not right is named, and what was computed is kept. Three hundred histories are
drawn by default; `python tests/test_stateful.py --histories 5000` draws others and prints what happened in them.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import jacstore
import jacstore.storage.checkpoints
import jacstore.storage.ledger
from helpers_faults import Knife, bits, is_right, make, often, quick, ram_folder
from jacstore import gram
from jacstore.base.limits import LIMITS
from jacstore.errors import DamagedDataError, IncompleteError, InvalidRequestError

HAPPENED: Counter[str] = Counter()
TRUTHS: dict[tuple[str, int], dict[str, dict[str, bytes]]] = {}
# Three examples, two units; kernels of three tiles.
STORE = {"examples": "0:3"}
KERNEL = {"tile": 2}
# Never, at the start, somewhere in the middle, or near the end of the longest run.
KILLS = st.one_of(st.just(0), st.integers(1, 60))
DAMAGES = ("flip", "tear", "remove", "swap", "zeros", "lengthen")


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with prepared():
        yield


@contextlib.contextmanager
def prepared():
    with quick() as patch:
        # A checkpoint is due after every slab; a lock of another host is not waited for.
        patch.setattr(LIMITS, "checkpoint_share", 1e9)
        patch.setattr(LIMITS, "lock_stale_seconds", 0.0)
        yield


class Promise(RuleBasedStateMachine):
    """One store and one kernel of it, and what was done to them."""

    def __init__(self):
        super().__init__()
        self.scratch = ram_folder()
        self.place = self.scratch.__enter__()
        self.store, self.kernel = self.place / "run.jac", self.place / "run.ntk"
        self.damaged = {"store": False, "kernel": False}
        self.parts = 1

    def teardown(self):
        """Whatever happened, the same commands lead to what is right."""
        try:
            # Sizes are looked at anyway; of a changed byte a check leaves a note.
            if self.damaged["store"]:
                self.verify("store")
            store = make(self.kind, self.store, **STORE)
            assert store.complete and is_right(self.store, self.truth("store"))
            self.damaged["store"] = False
            if self.damaged["kernel"]:
                self.verify("kernel")
            self.finish_kernel()
            assert is_right(self.kernel, self.truth("kernel"))
            HAPPENED["histories"] += 1
        finally:
            self.scratch.__exit__(None, None, None)

    def finish_kernel(self):
        """All parts; partial sums that turn out to be damaged are named, and computed by the next run."""
        for _ in range(4):
            with contextlib.suppress(DamagedDataError):
                for number in range(1, self.parts + 1):
                    kernel = gram(self.store, self.kernel, part=(number, self.parts), **KERNEL)
                if kernel.complete:
                    return

    @initialize(
        kind=st.sampled_from(["dense", "factored"]), parts=st.sampled_from([1, 1, 2]), at=KILLS, power_cut=st.booleans()
    )
    def begin(self, kind, parts, at, power_cut):
        self.kind, self.parts = kind, parts
        self.build(None, at, power_cut)

    @rule(part=st.sampled_from([None, None, "1/2", "2/2"]), at=KILLS, power_cut=st.booleans())
    def build(self, part, at, power_cut):
        before = self.units_done()
        knife = Knife(at, power_cut)
        store = knife.run(lambda: make(self.kind, self.store, part=part, **STORE), self.store)
        HAPPENED["builds killed" if store is None else "builds"] += 1
        if store is None:
            return
        if part is None:
            assert store.complete
            if not self.damaged["store"]:
                assert store.report["units_reused"] == before
            with contextlib.suppress(DamagedDataError):
                self.damaged["store"] = not is_right(self.store, self.truth("store"))

    @precondition(lambda self: self.store.exists())
    @rule(number=st.sampled_from([1, 2]), at=KILLS, power_cut=st.booleans())
    def gram(self, number, at, power_cut):
        knife = Knife(at, power_cut)
        part = (min(number, self.parts), self.parts)
        try:
            kernel = knife.run(lambda: gram(self.store, self.kernel, part=part, **KERNEL), self.kernel)
        except (IncompleteError, InvalidRequestError, DamagedDataError) as error:
            self.judge_refusal(error)
            return
        HAPPENED["grams killed" if kernel is None else "grams"] += 1
        assert kernel is None or kernel.complete or self.parts == 2

    def judge_refusal(self, error):
        """A gram stops only for want of a store, or because something is damaged and says so."""
        assert "\n" not in str(error)
        HAPPENED["grams refused"] += 1
        if isinstance(error, DamagedDataError):
            assert self.damaged["store"] or self.damaged["kernel"]
        elif self.store.exists() and (self.store / "zarr.json").exists():
            assert not jacstore.open(self.store).complete

    @precondition(lambda self: self.store.exists())
    @rule(at=KILLS, power_cut=st.booleans())
    def overwrite(self, at, power_cut):
        knife = Knife(at, power_cut)
        store = knife.run(lambda: make(self.kind, self.store, overwrite=True, **STORE), self.store)
        HAPPENED["overwritten" if store else "overwriting killed"] += 1
        if store:
            self.damaged["store"] = False
            assert store.report["units_reused"] == 0 and store.complete

    @precondition(lambda self: self.files(self.store) or self.files(self.kernel))
    @rule(
        what=st.sampled_from(["store", "store", "kernel"]), damage=st.sampled_from(DAMAGES), seed=st.integers(0, 2**16)
    )
    def damage(self, what, damage, seed):
        files = self.files(self.store if what == "store" else self.kernel)
        if not files:
            return
        draw = random.Random(seed)
        path, other = draw.choice(files), draw.choice(files)
        data = path.read_bytes()
        if damage == "flip" and data:
            place = draw.randrange(len(data))
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        elif damage == "tear" and data:
            path.write_bytes(data[: draw.randrange(len(data))])
        elif damage == "swap":
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        elif damage == "remove":
            path.unlink()
        else:
            path.write_bytes(bytes(len(data)) if damage == "zeros" else data + b"x")
        self.damaged[what] = True
        HAPPENED[f"damaged: {damage}"] += 1

    @precondition(lambda self: self.store.exists())
    @rule(what=st.sampled_from(["store", "kernel"]))
    def read(self, what):
        self.look(self.store if what == "store" else self.kernel)

    @precondition(lambda self: self.store.exists())
    @rule(what=st.sampled_from(["store", "kernel"]))
    def verify(self, what):
        """What verify calls right is right, and what nothing was done to it calls right."""
        path = self.store if what == "store" else self.kernel
        if not (path / "zarr.json").exists():
            return
        ok = jacstore.verify(path, samples=2).ok
        complete = jacstore.open(path).complete
        HAPPENED["verified" if ok else "not verified"] += 1
        if ok:
            assert complete and is_right(path, self.truth(what))
        elif complete:
            assert self.damaged["store"] or self.damaged[what]

    def look(self, path):
        """Read everything: it is right, or what is wrong is named, and only where something is."""
        what = "store" if path == self.store else "kernel"
        if not (path / "zarr.json").exists():
            return
        try:
            opened = jacstore.open(path)
            complete = opened.info()["complete"]
            found = bits(opened)
        except DamagedDataError as error:
            assert self.damaged[what] and "\n" not in str(error)
            HAPPENED["damage named"] += 1
        except IncompleteError:
            HAPPENED["incomplete"] += 1
        else:
            assert complete and found == self.truth(what)
            HAPPENED["right"] += 1

    def files(self, path):
        """What may be damaged: arrays, records, checkpoints, partial sums."""
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.exists() else []
        return [file for file in files if not file.name.startswith(".") and file.name != "zarr.json"]

    def units_done(self):
        if not (self.store / "zarr.json").exists():
            return 0
        return len(jacstore.open(self.store).ledger.done("unit"))

    def truth(self, what):
        """What nobody disturbed holds; the order of sums depends on the number of parts."""
        key = (self.kind, self.parts)
        if key not in TRUTHS:
            with ram_folder() as folder:
                store = make(self.kind, folder / "run.jac", **STORE)
                for number in range(1, self.parts + 1):
                    kernel = gram(store, folder / "run.ntk", part=(number, self.parts), **KERNEL)
                TRUTHS[key] = {"store": bits(store), "kernel": bits(kernel)}
        return TRUTHS[key][what]


def histories(count, **more):
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(
        max_examples=count, stateful_step_count=4, deadline=None, suppress_health_check=checks,
        phases=[Phase.generate], **more,
    )  # fmt: skip


def test_the_promise_holds_whatever_happens():
    run_state_machine_as_test(Promise, settings=histories(often(300, 3000)))


# --- by hand ----------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=5000)
    given = parser.parse_args()
    try:
        with prepared():
            run_state_machine_as_test(Promise, settings=histories(given.histories, derandomize=False, database=None))
    finally:
        # Also of those that were interrupted.
        for what, count in sorted(HAPPENED.items()):
            print(f"{count:>8,}  {what}")


if __name__ == "__main__":
    main()
