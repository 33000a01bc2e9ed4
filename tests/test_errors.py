"""Named errors: what they are to `except`, across processes, and inside handlers for errors of the operating system."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import jacstore
from jacstore import errors
from jacstore.errors import (
    DamagedDataError,
    IncompleteError,
    InvalidFunctionError,
    InvalidRequestError,
    JacstoreError,
    LockedError,
    NonFiniteError,
    RequestMismatchError,
    RunInterruptedError,
    SelectedStateWarning,
)
from jacstore.storage import ledger, sample_files, zarr_group
from jacstore.storage.files import Folder
from jacstore.storage.ledger import Lock
from jacstore.verification.store_checks import StoreChecks

OLD_NAMES = {
    "Refused": InvalidRequestError,
    "ProbeFailed": InvalidFunctionError,
    "Mismatch": RequestMismatchError,
    "Locked": LockedError,
    "Incomplete": IncompleteError,
    "NonFinite": NonFiniteError,
    "SelectedState": SelectedStateWarning,
    "Damaged": DamagedDataError,
    "Interrupted": RunInterruptedError,
}
PUBLIC = sorted({error for error in OLD_NAMES.values() if issubclass(error, JacstoreError)}, key=lambda e: e.__name__)


def every_error() -> list[type[JacstoreError]]:
    """All classes of errors in the package, those inside of it among them."""
    for module in pkgutil.walk_packages(jacstore.__path__, "jacstore."):
        # Libraries that are extras need not be installed.
        if module.name != "jacstore.__main__" and not re.search("torch|flax|equinox", module.name):
            importlib.import_module(module.name)
    found, todo = [], [JacstoreError]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return found


def raised(kind: type[JacstoreError]) -> None:
    raise kind("rows of unit 3 and ‘layer/0’")


@pytest.mark.parametrize("old", sorted(OLD_NAMES))
def test_the_old_name_of_an_error_is_the_same_class_and_both_are_exported(old: str) -> None:
    new = OLD_NAMES[old]
    assert getattr(errors, old) is getattr(errors, new.__name__) is new
    assert getattr(jacstore, old) is getattr(jacstore, new.__name__) is new


def test_the_name_of_every_error_ends_in_error_or_warning() -> None:
    defined = [
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == "jacstore.errors"
    ]
    assert [kind.__name__ for kind in defined if not kind.__name__.endswith(("Error", "Warning"))] == []


@pytest.mark.parametrize(
    ("kind", "bases", "code"),
    [
        (InvalidRequestError, (ValueError,), 2),
        (InvalidFunctionError, (InvalidRequestError, ValueError), 2),
        (RequestMismatchError, (InvalidRequestError, ValueError), 2),
        (LockedError, (InvalidRequestError, ValueError, BlockingIOError, OSError), 2),
        (IncompleteError, (InvalidRequestError, ValueError), 2),
        (NonFiniteError, (InvalidRequestError, ValueError), 2),
        (DamagedDataError, (OSError,), 3),
        (RunInterruptedError, (), 130),
    ],
)
def test_an_error_is_caught_by_the_builtin_that_a_caller_expects(
    kind: type[JacstoreError], bases: tuple[type[Exception], ...], code: int
) -> None:
    for base in (JacstoreError, *bases):
        with pytest.raises(base, match="rows of unit 3"):
            raised(kind)
    assert kind.exit_code == code


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_text_and_its_fields_through_pickle_and_copy(kind: type[JacstoreError]) -> None:
    error = errors._without_init(kind, ())
    JacstoreError.__init__(error, "a.b: 2 files\nare missing")
    error.example = 5  # type: ignore[attr-defined]
    error.add_note("in unit 3")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert str(other) == str(error) == "a.b: 2 files are missing"
        assert other.args == error.args
        assert vars(other) == vars(error) == {"example": 5, "__notes__": ["in unit 3"]}


def test_damaged_data_keeps_the_number_of_its_piece_through_pickle() -> None:
    found = pickle.loads(pickle.dumps(DamagedDataError("rows/c/0 differs", 7)))
    assert (str(found), found.piece, found.errno, found.filename) == ("rows/c/0 differs", 7, None, None)


def test_an_error_from_a_worker_process_says_what_it_said_there() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for kind in PUBLIC:
            with pytest.raises(kind) as caught:
                pool.submit(raised, kind).result()
            assert str(caught.value) == "rows of unit 3 and ‘layer/0’"


@pytest.mark.parametrize("kind", PUBLIC)
def test_an_error_while_buffers_of_a_file_are_made_stays_as_it_is(tmp_path: Path, kind: type[JacstoreError]) -> None:
    def buffers():
        yield b"first"
        raised(kind)

    with pytest.raises(kind, match=r"^rows of unit 3"):
        Folder(tmp_path).write("rows", buffers())


@pytest.mark.parametrize("kind", PUBLIC)
def test_an_error_while_spans_of_a_file_are_made_stays_as_it_is(tmp_path: Path, kind: type[JacstoreError]) -> None:
    (tmp_path / "rows").write_bytes(b"some")

    def spans():
        yield 0, memoryview(bytearray(2))
        raised(kind)

    with pytest.raises(kind, match=r"^rows of unit 3"):
        Folder(tmp_path).read_into("rows", spans())


def test_a_file_that_ends_too_early_is_said_to_end_too_early(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"some")
    with pytest.raises(DamagedDataError, match=r"^rows ends at byte 4, before what was recorded$"):
        Folder(tmp_path).read_into("rows", [(0, memoryview(bytearray(9)))])


def lock_of_another_process(folder: Folder) -> subprocess.Popen[bytes]:
    """A process that holds a lock until its input is closed."""
    code = (
        "import sys; from jacstore.storage.files import Folder; from jacstore.storage.ledger import Lock\n"
        f"with Lock(Folder({str(folder.root)!r}), 0, 9, print): print(flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


def test_what_another_process_holds_is_locked_and_not_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    holder = lock_of_another_process(folder)
    try:
        with pytest.raises(LockedError, match="is being worked on by process"), Lock(folder, 0, 9, print):
            pass
        overwriting = zarr_group.creating(folder, "run.jac", [], True, print)
        with pytest.raises(LockedError, match="is being worked on by process"), overwriting:
            pass
    finally:
        holder.communicate(b"")


@pytest.mark.parametrize("kind", PUBLIC)
def test_an_error_while_a_lock_is_claimed_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[JacstoreError]
) -> None:
    monkeypatch.setattr(ledger.Lock, "_try_claim", lambda self: raised(kind))
    with pytest.raises(kind, match=r"^rows of unit 3"), Lock(Folder(tmp_path), 0, 9, print):
        pass


@pytest.mark.parametrize("kind", PUBLIC)
def test_an_error_while_a_folder_is_cleared_or_its_arrays_made_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[JacstoreError]
) -> None:
    monkeypatch.setattr(zarr_group, "_refuse_foreign", lambda *_: raised(kind))
    with (
        pytest.raises(kind, match=r"^rows of unit 3"),
        zarr_group.creating(Folder(tmp_path), "run.jac", [], False, print),
    ):
        pass
    monkeypatch.setattr(Folder, "size", lambda *_: raised(kind))
    with pytest.raises(kind, match=r"^rows of unit 3"):
        zarr_group.create(Folder(tmp_path), [], {})
    with pytest.raises(kind, match=r"^rows of unit 3"):
        zarr_group.add(Folder(tmp_path), "kept", [])


@pytest.mark.parametrize("kind", PUBLIC)
def test_an_array_kept_beside_a_store_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[JacstoreError]
) -> None:
    monkeypatch.setattr(Folder, "open", lambda *_: raised(kind))
    with pytest.raises(kind, match=r"^rows of unit 3"):
        sample_files._checked(Folder(tmp_path), "noise.npy", 0)


def test_a_matrix_or_a_record_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        return params["w"] @ x

    problem = jacstore.Problem(
        apply=small, params={"w": np.ones((2, 3), np.float32)}, inputs=np.ones((4, 3), np.float32)
    )
    store = jacstore.build(problem, tmp_path / "run.jac", memory="50MB")
    jacstore.ggn(store, "gaussian", alpha=0.1, out=tmp_path / "run.ggn")
    monkeypatch.setattr(Folder, "open", lambda *_: raised(InvalidRequestError))
    with pytest.raises(InvalidRequestError, match=r"^rows of unit 3"):
        jacstore.ggn(store, "gaussian", alpha=0.1, out=tmp_path / "run.ggn")
    monkeypatch.undo()
    monkeypatch.setattr(type(store), "unit", lambda *_: raised(InvalidRequestError))
    with pytest.raises(InvalidRequestError, match=r"^rows of unit 3"):
        StoreChecks(store, 2**30).records()
