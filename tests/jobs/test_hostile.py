"""Whatever stands in a store, a kernel or on the command line: one clear line, and nothing is written elsewhere.

Some hundred mutations are drawn, the same ones every time; `python tests/test_hostile.py` draws thousands of others and
prints how many inputs that were, and how commands on them ended.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import os
import shutil
import stat
import string
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, given, note, settings
from hypothesis import strategies as st

import jacstore
import jacstore.problem.loading
import jacstore.storage.ledger
from helpers_faults import OPTIONS, PROBLEMS, bits, is_right, make, often, quick, ram_folder
from helpers_process import contents, invoke, write_target
from jacstore import gram
from jacstore.base.events import SlabDone
from jacstore.base.limits import LIMITS
from jacstore.base.schema import short_hash
from jacstore.errors import DamagedDataError, IncompleteError, JacstoreError, RequestMismatchError, RunInterruptedError
from jacstore.storage.files import Folder
from jacstore.storage.ledger import Ledger, compare_requested
from jacstore.testing import Counting, Stopping, mlp

# Inputs of each kind and commands that were run on them.
TRIED: Counter[str] = Counter()
PACKAGE = Path(jacstore.__file__).parent
TILE = {"tile": 3}


def drawn(fixed, random):
    """Many examples, each in a folder that the test empties by itself."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    # What is drawn is small already: no time goes into making it smaller.
    phases = [Phase.explicit, Phase.generate]
    return settings(max_examples=often(fixed, random), deadline=None, suppress_health_check=checks, phases=phases)


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick() as patch:
        patch.setattr(LIMITS, "lock_stale_seconds", 0.0)
        yield patch


class Scene:
    """A store, a finished kernel, one in the middle, and what their readers find; copied anew for every example."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.pristine = folder / "pristine"
        store = make(kind, self.pristine / "run.jac")
        make(kind, self.pristine / "part.jac", part="2/2")
        kernel = gram(self.pristine / "run.jac", self.pristine / "run.ntk", **TILE)
        seen = Stopping(SlabDone, 2)
        with pytest.raises(RunInterruptedError):
            gram(self.pristine / "run.jac", self.pristine / "half.ntk", listener=seen, stop=seen.stop, **TILE)
        gram(self.pristine / "run.jac", self.pristine / "first.ntk", part="1/2", **TILE)
        (self.pristine / "beside").mkdir()
        (self.pristine / "beside" / "mine").write_text("not jacstore's")
        self.truth = {"store": bits(store), "kernel": bits(kernel)}

    def fresh(self):
        """A copy to be hurt."""
        place = self.folder / "work"
        shutil.rmtree(place, ignore_errors=True)
        return Path(shutil.copytree(self.pristine, place, symlinks=True))


@pytest.fixture(scope="module")
def scenes():
    with ram_folder() as folder:
        yield functools.cache(lambda kind: Scene(kind, folder / kind))


def everything(folder):
    """What stands below a folder and when it was written; links are not followed."""
    found = {}
    for where, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(where, name)
            facts = os.lstat(path)
            found[path] = (facts.st_mode, facts.st_ino, 0 if stat.S_ISDIR(facts.st_mode) else facts.st_mtime_ns)
    return found


def command(place, *words, out=None, reads=None):
    """Run a command on what may be anything: one line, a code of the contract, and only its output is changed.

    A reader may leave a note in the ledger of the store that it found damaged.
    """
    before = everything(place)
    result = invoke(*words)
    TRIED[f"{words[0]}: exit code {result.exit_code}"] += 1
    if currently_in_test_context():
        note(f"{words[0]}: {result.exit_code} {result.stderr.strip()}")
    assert result.exit_code in (0, 2, 3), result.stderr
    if result.exit_code:
        # A report stands on stdout even where it says that a check failed.
        assert result.stdout == "" or words[0] in ("verify", "info")
        assert result.stderr.count("\n") == 1, result.stderr
        assert len(result.stderr) < 2000
    for unwanted in ("Traceback", "internal error"):
        assert unwanted not in result.stderr
    after = everything(place)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            path = Path(name)
            suspect = reads is not None and path.parent == reads / "ledger" and "suspect-" in path.name
            assert suspect or (out is not None and path.is_relative_to(out)), path
    return result.exit_code


def build_words(kind, out):
    flags = {**OPTIONS, **PROBLEMS[kind][1]}
    return ("build", "any:target", "--out", out, *(f"--{k.replace('_', '-')}={v}" for k, v in flags.items()))


OUTPUTS = ("run.jac", "part.jac", "run.ntk", "half.ntk", "first.ntk", "new.ntk")


def try_some(scene, place, data, *, made_up):
    """Run commands on a place; unless attributes were made up, what is called done or verified is right."""
    kind, store = scene.kind, place / "run.jac"
    command(place, "info", store)
    command(place, "info", place / "run.ntk", "--json")
    command(place, "info", place / "half.ntk")
    name, words, reads = data.draw(st.sampled_from(OUTPUTS), label="out"), [], None
    out, truth = place / name, scene.truth["store" if name.endswith(".jac") else "kernel"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jacstore.problem.loading, "load_target", lambda text: PROBLEMS[kind][0])
        if data.draw(st.integers(0, 3), label="verify") == 0:
            words, reads = ["verify", out, "--samples", 4], store
        elif name.endswith(".jac"):
            words = build_words(kind, out)
        else:
            part = ["--part", "2/2"] if name == "first.ntk" else []
            words, reads = ["gram", store, "--out", out, "--tile", 3, *part], store
        code = command(place, *words, out=out, reads=reads)
    if code == 0 and not made_up:
        try:
            assert is_right(out, truth)
        except DamagedDataError:
            # A rerun looks at sizes only; verify and every read look at every byte.
            assert words[0] != "verify"
        except IncompleteError:
            # The other part was lost with its records.
            assert words[0] == "gram" and "--part" in words


# --- JSON that says anything ------------------------------------------------------------------------------------------

DEEP = "@deep@"
NASTY = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    63,
    2**31,
    2**53,
    2**63 - 1,
    2**64,
    10**30,
    10**400,
    -(10**30),
    0.5,
    1e308,
    1e-308,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "dense",
    "float64",
    "../../beside/mine",
    "/beside",
    "a/../../b",
    "rows",
    "zarr.json",
    "a\0b",
    "\ud800",
    "n" * 5000,
    "\x1b[31m",
    "two\nlines",
    [],
    [[]],
    {},
    {"a": 1},
    [0],
    [-1, -1],
    [1] * 500,
    [10**18, 10**18],
    [["reshape", [0]]],
    [["transpose", [5, 5]]],
    DEEP,
]


def places(value, here=()):
    """The way to every value of a JSON document."""
    yield here
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*here, key))


def at(value, where):
    for key in where:
        value = value[key]
    return value


def mutate(data, pristine):
    """A document with one to three values replaced, removed, doubled or moved."""
    document = copy.deepcopy(pristine)
    ways = _ways(json.dumps(pristine))
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        *above, key = data.draw(st.sampled_from(ways), label="where")
        kind = data.draw(st.sampled_from(["replace"] * 6 + ["remove", "double", "swap", "add"]), label="kind")
        try:
            parent = at(document, above)
            parent[key]
        except (KeyError, IndexError, TypeError):
            # It went with an earlier change.
            continue
        if kind == "replace" and not isinstance(parent, str):
            # A copy: the next change may be inside it.
            parent[key] = copy.deepcopy(data.draw(st.sampled_from(NASTY), label="value"))
        elif kind == "remove" and not isinstance(parent, str):
            del parent[key]
        elif kind == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == "swap" and not isinstance(parent, str):
            other = at(pristine, data.draw(st.sampled_from(ways), label="other"))
            parent[key] = copy.deepcopy(other)
        elif isinstance(parent, dict):
            parent[data.draw(st.sampled_from(["", "kind", "../x", "mask"]), label="name")] = 1
    return document


@functools.cache
def _ways(text):
    return sorted(filter(None, places(json.loads(text))), key=str)


def text_of(value):
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)


def signed(document):
    """Attributes with their checksum made right, so that what they say is judged and not how."""
    attributes = document["attributes"]
    rest = {key: value for key, value in attributes.items() if key != "checksum"}
    attributes["checksum"] = {"of": sorted(rest), "blake2b": short_hash(rest)}
    return document


def sealed(path, record):
    """A record with its checksum made right, likewise."""
    kind, number = path.stem.rsplit("-", 1)
    root = path.parent.parent
    ledger = jacstore.open(root).ledger if (root / "zarr.json").exists() else Ledger(Folder(root))
    facts = {key: value for key, value in record.items() if key != "seal"}
    record["seal"] = ledger.seal(kind, int(number), facts)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", ["run.jac", "run.ntk", "half.ntk"])
def test_attributes_that_say_anything_are_one_line(kind, name, scenes):
    scene = scenes(kind)
    pristine = json.loads((scene.pristine / name / "zarr.json").read_text())

    @given(data=st.data())
    @drawn(10, 1000)
    def check(data):
        TRIED["inputs: attributes"] += 1
        place = scene.fresh()
        document = {**pristine, "attributes": mutate(data, pristine["attributes"])}
        if isinstance(document["attributes"], dict):
            document = signed(document)
        (place / name / "zarr.json").write_text(text_of(document))
        try_some(scene, place, data, made_up=True)

    check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", [2, 2, 2]),
        ("positions", [3, 1]),
        ("strides", [0, 1]),
        ("padding", [0, 0, 0]),
        ("groups", 3),
        ("spread", []),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(field, value, scenes):
    place = scenes("factored").fresh()
    document = json.loads((place / "run.jac" / "zarr.json").read_text())
    terms = [term for leaf in document["attributes"]["leaves"] for term in leaf["terms"]]
    term = next(term for term in terms if term["kind"] == "conv")
    term[field] = value
    (place / "run.jac" / "zarr.json").write_text(json.dumps(signed(document)))
    for word in ("info", "verify"):
        assert command(place, word, place / "run.jac", reads=place / "run.jac") == 3


@pytest.mark.parametrize("kind", PROBLEMS)
def test_records_that_say_anything_are_one_line_and_nothing_wrong_is_called_done(kind, scenes):
    scene = scenes(kind)
    records = sorted(
        path.relative_to(scene.pristine) for path in scene.pristine.glob("*/ledger/*.json") if path.name != "zarr.json"
    )
    kinds = {path.name.rsplit("-", 1)[0] for path in records}
    assert {"unit", "tiles", "item"} < kinds and any(kind.startswith("checkpoint") for kind in kinds)

    @given(data=st.data())
    @drawn(25, 3000)
    def check(data):
        TRIED["inputs: records"] += 1
        place = scene.fresh()
        path = place / data.draw(st.sampled_from(records), label="record")
        record = mutate(data, json.loads(path.read_text()))
        if isinstance(record, dict):
            sealed(path, record)
        path.write_text(text_of(record))
        try_some(scene, place, data, made_up=False)

    check()


def factor(place):
    return jacstore.KernelFactor(jacstore.open(place / "run.ntk"), 0.1).solve(np.ones((7, 2)))


def normal_matrix(place):
    return jacstore.ggn(place / "run.jac", alpha=0.1, out=place / "run.ggn")


def samples(place):
    return jacstore.sample(place / "run.jac", place / "run.ntk", alpha=0.1, n=2, key=0, out=place / "drawn.npy")


BESIDE = {
    "run.ntk/ledger/factor-cholesky-0000000.json": factor,
    "run.ggn/ledger/done-0000000.json": normal_matrix,
    "run.ggn/ledger/request-0000000.json": normal_matrix,
    "drawn.npy.work/ledger/done-0000000.json": samples,
    "drawn.npy.work/ledger/request-0000000.json": samples,
}


@pytest.mark.filterwarnings("ignore:alpha 0.1 is below the kernel's error")
def test_records_of_what_is_kept_beside_may_say_anything_too(scenes):
    scene = scenes("factored")
    with ram_folder() as folder:
        pristine, work = folder / "pristine", folder / "work"
        for name in ("run.jac", "run.ntk"):
            shutil.copytree(scene.pristine / name, pristine / name)
        truth = {job: job(pristine) for job in (factor, normal_matrix, samples)}

        @given(data=st.data())
        @drawn(40, 2000)
        def check(data):
            TRIED["inputs: records beside"] += 1
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(pristine, work)
            name, job = data.draw(st.sampled_from(sorted(BESIDE.items(), key=str)), label="record")
            record = mutate(data, json.loads((work / name).read_text()))
            if isinstance(record, dict):
                sealed(work / name, record)
            (work / name).write_text(text_of(record))
            try:
                assert np.array_equal(job(work), truth[job])
            except JacstoreError as error:
                assert error.exit_code in (2, 3) and "\n" not in str(error)

        check()


@pytest.mark.parametrize("value", [value for value in NASTY if isinstance(value, str)])
def test_an_error_is_one_printable_line_whatever_it_quotes(value):
    with pytest.raises(RequestMismatchError) as caught:
        compare_requested("k\n.jac", {"alpha": value}, {"alpha": f"not {value}"})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


LOCK = {"host": "here", "boot": "b", "pid": 1, "start": "1", "token": "t", "beat": 0, "first": 0, "last": 9}


@given(data=st.data())
@drawn(30, 1000)
def test_locks_that_say_anything_are_one_line(scenes, data):
    TRIED["inputs: locks"] += 1
    scene = scenes("dense")
    place = scene.fresh()
    lock = LOCK | {"host": data.draw(st.sampled_from([jacstore.base.machine.hostname(), "elsewhere"]))}
    name = data.draw(st.sampled_from(["lock-0000000-0000009", "lock-0000000-9999999999999999999", "lock-x-y", "lock-"]))
    text = data.draw(st.sampled_from([text_of(mutate(data, lock)), "", "{", "[]", "\xff"]))
    for where in ("run.jac", "half.ntk"):
        (place / where / "ledger" / f"{name}.json").write_text(text, encoding="latin-1")
    try_some(scene, place, data, made_up=False)


@given(data=st.data())
@drawn(40, 2000)
def test_torn_and_changed_text_is_one_line(scenes, data):
    TRIED["inputs: torn text"] += 1
    scene = scenes(data.draw(st.sampled_from(sorted(PROBLEMS))))
    place = scene.fresh()
    documents = sorted(path for path in place.rglob("*.json") if path.is_relative_to(place / "run.jac"))
    documents += [place / "run.ntk" / "zarr.json", place / "half.ntk" / "ledger" / "checkpoint-0-0000000.json"]
    path = data.draw(st.sampled_from([path for path in documents if path.exists()]))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(
        data.draw(
            st.sampled_from(
                [
                    whole[:cut],
                    whole[:cut] + b"\xff\xfe" + whole[cut:],
                    whole[:cut] + bytes(100) + whole[cut + 100 :],
                    whole + b"}",
                    b"null",
                    b"[]",
                    b"NaN",
                    b"[" * 100_000,
                    b'{"attributes": ' * 5000,
                    b"9" * 10_000,
                    "\ufeff{}".encode(),
                ]
            )
        )
    )
    try_some(scene, place, data, made_up=False)


@pytest.mark.parametrize("options", [{}, {"mode": "trace"}, {"by_leaf": True}], ids=str)
def test_a_scale_beyond_float32_is_named_by_the_norms(options, scenes):
    place = scenes("factored").fresh()
    document = json.loads((place / "run.jac" / "zarr.json").read_text())
    scaled = [leaf for leaf in document["attributes"]["leaves"] if leaf["terms"][0].get("scale")]
    scaled[-1]["terms"][0]["scale"] = 10**30
    (place / "run.jac" / "zarr.json").write_text(text_of(signed(document)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DamagedDataError, match="is inf, the squared norm"):
            gram(place / "run.jac", out=place / "new.ntk", **options, **TILE)


# --- files, folders and links in the wrong places ---------------------------------------------------------------------


def wrong_thing(path, kind, place):
    """Put something else where a file or folder was."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    outside = place / "beside"
    if kind == "folder":
        path.mkdir()
    elif kind == "full folder":
        path.mkdir()
        (path / "zarr.json").write_text("{}")
    elif kind == "file":
        path.write_text("{}")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        target = {
            "link to a file": outside / "mine",
            "link to a folder": outside,
            "loop": path,
            "dangling": outside / "x",
        }
        path.symlink_to(target[kind])


WRONG = [
    "nothing",
    "folder",
    "full folder",
    "file",
    "pipe",
    "link to a file",
    "link to a folder",
    "loop",
    "dangling",
]


@pytest.mark.timeout(600)
@given(data=st.data())
@drawn(60, 3000)
def test_the_wrong_thing_in_any_place_is_one_line_and_nothing_is_written_outside(scenes, data):
    TRIED["inputs: wrong things in places"] += 1
    scene = scenes(data.draw(st.sampled_from(sorted(PROBLEMS)), label="kind"))
    place = scene.fresh()
    for _ in range(data.draw(st.integers(1, 2), label="things")):
        outputs = [place / name for name in ("run.jac", "part.jac", "run.ntk", "half.ntk", "first.ntk")]
        paths = sorted(path for out in outputs for path in (out, *out.rglob("*")))
        path = data.draw(st.sampled_from([str(path.relative_to(place)) for path in paths]), label="path")
        wrong_thing(place / path, data.draw(st.sampled_from(WRONG), label="thing"), place)
    try_some(scene, place, data, made_up=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["run.jac", "run.ntk"])
def test_nothing_waits_at_a_pipe_in_the_place_of_metadata(name, scenes):
    scene = scenes("dense")
    found = [path.relative_to(scene.pristine) for path in (scene.pristine / name).rglob("zarr.json")]
    assert len(found) >= 3
    for path in found:
        place = scene.fresh()
        wrong_thing(place / path, "pipe", place)
        words = ["gram", place / "run.jac", "--out", place / name, "--tile", 3]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jacstore.problem.loading, "load_target", lambda text: PROBLEMS["dense"][0])
            words = build_words("dense", place / name) if name == "run.jac" else words
            code = command(place, *words, out=place / name, reads=place / "run.jac")
            assert code == 2 or path.parent.name != name
            # Begun anew, the pipe goes with all the rest.
            assert command(place, *words, "--overwrite", out=place / name, reads=place / "run.jac") == 0


@pytest.mark.parametrize("array", ["rows", "outputs", "ledger", "rows/c", "rows/c/1"])
def test_nothing_is_written_through_a_link_that_leads_out(array, scenes):
    scene = scenes("dense")
    place = scene.fresh()
    moved, inside = place / "beside" / "moved", place / "run.jac" / array
    inside.rename(moved)
    inside.symlink_to(moved)
    # Reading through it does no harm.
    assert is_right(place / "run.jac", scene.truth["store"])
    for name in (place / "run.jac" / "ledger").glob("unit-*.json"):
        name.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jacstore.problem.loading, "load_target", lambda text: PROBLEMS["dense"][0])
        before = contents(place / "beside")
        assert command(place, *build_words("dense", place / "run.jac"), out=place / "run.jac") == 2
        assert contents(place / "beside") == before


def test_overwrite_removes_links_and_not_what_they_lead_to(scenes):
    scene = scenes("dense")
    place = scene.fresh()
    (place / "run.jac" / "rows" / "out").symlink_to(place / "beside")
    make("dense", place / "run.jac", overwrite=True)
    assert (place / "beside" / "mine").exists() and is_right(place / "run.jac", scene.truth["store"])


def test_groups_of_others_are_refused(tmp_path):
    import zarr

    zarr.create_group(tmp_path / "group", attributes={"kind": "ours"})
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="float32")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    for name in ("group", "array", "empty", "file", "absent"):
        assert command(tmp_path, "info", tmp_path / name) == 2
        assert command(tmp_path, "gram", tmp_path / name, "--out", tmp_path / "new") == 2


@pytest.mark.parametrize("name", ["run.jac", "run.ntk"])
def test_a_newer_format_is_refused_and_both_versions_are_named(name, scenes):
    place = scenes("dense").fresh()
    document = json.loads((place / name / "zarr.json").read_text())
    document["attributes"]["format_version"] = 12
    (place / name / "zarr.json").write_text(json.dumps(signed(document)))
    result = invoke("info", place / name)
    assert result.exit_code == 2 and "format version 12" in result.stderr and "reads up to 1" in result.stderr


def aged(path):
    """As an earlier version wrote it: records have no seals."""
    document = json.loads((path / "zarr.json").read_text())
    assert document["attributes"].pop("sealed") is True
    (path / "zarr.json").write_text(json.dumps(signed(document)))
    for record in (path / "ledger").glob("*-*.json"):
        facts = json.loads(record.read_text())
        assert facts.pop("seal")
        record.write_text(json.dumps(facts))


@pytest.mark.parametrize("kind", PROBLEMS)
def test_what_an_earlier_version_wrote_is_read_verified_and_continued(kind, scenes):
    scene = scenes(kind)
    place = scene.fresh()
    for name in ("run.jac", "part.jac", "run.ntk", "half.ntk"):
        aged(place / name)
    assert is_right(place / "run.jac", scene.truth["store"], verified=True)
    assert is_right(place / "run.ntk", scene.truth["kernel"], verified=True)
    assert make(kind, place / "part.jac").report["units_reused"] == 2
    seen = Counting()
    assert gram(place / "run.jac", place / "half.ntk", listener=seen, **TILE).complete
    assert min(event.slab for event in seen.of(SlabDone)) >= 1
    assert is_right(place / "part.jac", scene.truth["store"], verified=True)
    assert is_right(place / "half.ntk", scene.truth["kernel"], verified=True)


# --- records of something else ----------------------------------------------------------------------------------------


def test_a_record_of_another_store_is_not_taken(scenes, tmp_path):
    scene = scenes("dense")
    place = scene.fresh()
    other = jacstore.build(mlp(7, seed=1), tmp_path / "other.jac", **OPTIONS, layout="dense")
    assert other.layouts == jacstore.open(place / "run.jac").layouts
    # Its bytes come along, so that every checksum is right.
    for name in other.record(1)["files"]:
        shutil.copy(tmp_path / "other.jac" / name, place / "run.jac" / name)
    shutil.copy(tmp_path / "other.jac" / "ledger/unit-0000001.json", place / "run.jac" / "ledger")
    assert command(place, "info", place / "run.jac") == 3
    assert command(place, "gram", place / "run.jac", "--out", place / "new", reads=place / "run.jac") == 3
    store = make("dense", place / "run.jac")
    assert store.report["units_computed"] == 1 and is_right(place / "run.jac", scene.truth["store"])


@pytest.mark.parametrize(("name", "record"), [("run.jac", "unit"), ("run.ntk", "tiles")])
def test_a_record_beyond_the_last_counts_for_nothing(name, record, scenes):
    place = scenes("dense").fresh()
    ledger = place / name / "ledger"
    last = sorted(ledger.glob(f"{record}-*.json"))[-1]
    for beyond in (f"{record}-0000077.json", f"{record}-77.json", f"{record}-²222222.json"):
        shutil.copy(last, ledger / beyond)
    assert jacstore.open(place / name).complete
    last.unlink()
    assert not jacstore.open(place / name).complete
    assert '"complete": false' in invoke("info", place / name, "--json").stdout


def test_a_lock_whose_owner_has_no_start_is_taken_over(scenes):
    scene = scenes("dense")
    place = scene.fresh()
    owner = LOCK | {
        "host": jacstore.base.machine.hostname(),
        "boot": jacstore.base.machine.boot_id(),
        "pid": 2**40,
        "start": None,
    }
    (place / "part.jac/ledger/lock-0000000-0000003.json").write_text(json.dumps(owner))
    make("dense", place / "part.jac")
    assert is_right(place / "part.jac", scene.truth["store"])


def test_an_item_that_left_nothing_is_computed_again(scenes):
    scene = scenes("dense")
    place = scene.fresh()
    for path in (place / "run.ntk" / "ledger").glob("tiles-*.json"):
        path.unlink()
    kernel = gram(place / "run.jac", place / "run.ntk", **TILE)
    assert kernel.report["tiles_computed"] == 6 and is_right(place / "run.ntk", scene.truth["kernel"])


# --- words on the command line ----------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.text(max_size=20),
    st.text(string.digits + ":/.-+eE_xKMGTiB ", max_size=12),
    st.sampled_from(
        [
            "",
            "0",
            "-1",
            "1e400",
            "9" * 400,
            "1" * 5000,
            "nan",
            "inf",
            "1:2:3",
            "::",
            "1/0",
            "0/0",
            "3/2",
            "1/9" + "9" * 30,
            "-1:3",
            "3:1",
            "1:99999999999999999999",
            "1e3:2e3",
            "١:٢",
            "1_0:2",
            "0x1:3",
            "..",
            "/",
            "/dev/null",
            "a\0b",
            "\ud800",
            "x" * 5000,
            "1/1000000000",
            "٣GB",
            "1GB2",
            "1e19",
            "0.0000001",
            "1" + "0" * 18,
            "--debug",
            "%s%n",
            "$(true)",
        ]
    ),
)


@given(data=st.data())
@drawn(60, 3000)
def test_flags_that_say_anything_are_one_line(scenes, data):
    TRIED["inputs: flags"] += 1
    scene = scenes("dense")
    place = scene.fresh()
    name = data.draw(st.sampled_from(["build", "gram"]), label="command")
    flags = {
        "build": ["examples", "part", "memory", "device-memory", "unit-size", "batch-size", "output-batch", "dtype"],
        "gram": ["part", "memory", "device-memory", "tile", "mode", "precision", "engine", "workers", "dtype"],
    }
    chosen = data.draw(st.lists(st.sampled_from(flags[name]), min_size=1, max_size=2, unique=True), label="flags")
    words = [f"--{flag}={data.draw(WORDS, label=flag)}" for flag in chosen]
    first = "any:target" if name == "build" else place / "run.jac"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jacstore.problem.loading, "load_target", lambda text: PROBLEMS["dense"][0])
        more = ("--codec", "none", "--layout", "dense") if name == "build" else ()
        command(place, name, first, "--out", place / "new", *more, *words, out=place / "new")


@pytest.mark.parametrize("name", ["build", "gram"])
def test_more_parts_than_there_can_be_items_are_refused_at_once(name, scenes):
    place = scenes("dense").fresh()
    first = place / "run.jac" if name == "gram" else "any:target"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jacstore.problem.loading, "load_target", lambda text: PROBLEMS["dense"][0])
        for parts in (10_001, 10**9, 10**18):
            result = invoke(name, first, "--out", place / "new", "--part", f"1/{parts}")
            assert result.exit_code == 2 and f"--part 1/{parts}: at most 10,000 parts" in result.stderr
        assert not (place / "new").exists()
        assert command(place, name, first, "--out", place / "new", "--part", "9999/10000", out=place / "new") == 0


@given(text=st.one_of(WORDS, st.builds("{}:{}".format, WORDS, WORDS)))
@drawn(100, 3000)
def test_targets_that_say_anything_are_one_line(text, tmp_path_factory):
    TRIED["inputs: targets"] += 1
    folder = tmp_path_factory.mktemp("targets")
    text = text if not text.startswith("-") else "x" + text
    assert command(folder, "build", text, "--out", folder / "new") == 2


@pytest.mark.parametrize(
    "line",
    [
        "raise SystemExit(0)",
        "raise SystemExit('two\\nlines')",
        "raise RecursionError",
        "raise SyntaxError",
        "raise MemoryError",
        "raise ExceptionGroup('several', [ValueError(1)])",
        "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "def problem(): return problem",
        "problem = type('Odd', (), {'__getattr__': lambda self, name: 1 / 0})()",
        "class problem:\n    def __init__(self): raise ValueError('no')",
        "\0",
        "\udc80",
        "x = (",
        "import no_such_module_at_all",
    ],
)
def test_targets_that_do_anything_are_one_line(line, tmp_path):
    path = write_target(tmp_path)
    path.write_bytes(line.encode("utf-8", "surrogateescape"))
    assert command(tmp_path, "build", path, "--out", tmp_path / "new") == 2


@pytest.mark.parametrize("text", ["a" * 5000 + ".py:x", "/" + "a" * 5000 + ":x", "b" * 300 + "/c.py", "\ud800.py"])
def test_targets_that_no_file_can_be_called_are_one_line(text, tmp_path):
    assert command(tmp_path, "build", text, "--out", tmp_path / "new") == 2


@pytest.mark.parametrize("text", ["\ud800", "a" * 300, "a/" * 3000])
def test_paths_that_no_folder_can_be_called_are_one_line(text, scenes):
    place = scenes("dense").fresh()
    assert command(place, "info", text) == 2
    assert command(place, "gram", place / "run.jac", "--out", text) == 2
    assert command(place, "gram", text, "--out", place / "new") == 2


@given(text=WORDS)
@drawn(40, 1000)
def test_paths_that_say_anything_are_one_line(text, scenes):
    TRIED["inputs: paths"] += 1
    place = scenes("dense").fresh()
    text = f"./{text}" if text.startswith("-") else text
    here = os.getcwd()
    os.chdir(place / "beside")
    try:
        command(place, "info", text)
        (place / "empty").mkdir()
        os.chdir(place / "empty")
        if not os.path.isabs(text) and ".." not in text:
            command(place, "gram", place / "run.jac", "--out", text, out=place / "empty")
    finally:
        os.chdir(here)


# --- nothing stored is executed ---------------------------------------------------------------------------------------

LOADERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}


def test_the_package_never_loads_code_from_data():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call):
                # The target is the user's own program; nothing else is run.
                assert ast.unparse(node.func) not in ("eval", "exec", "compile") or path.name == "loading.py", path
                # NumPy would unpickle arrays of objects if it were asked to.
                said = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "allow_pickle"]
                assert said == (["False"] if ast.unparse(node.func) == "np.load" else []), path
            assert not {name.split(".")[0] for name in names} & LOADERS, path


# --- by hand ----------------------------------------------------------------------------------------------------------


def main():
    code = pytest.main([__file__, "--hypothesis-profile", "random", "-q", "-p", "no:randomly"])
    tried = sys.modules["tests.jobs.test_hostile"].TRIED
    for what, count in sorted(tried.items()):
        print(f"{count:>8,}  {what}")
    return code


if __name__ == "__main__":
    sys.exit(main())
