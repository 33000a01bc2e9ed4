"""What `jacstore.` offers: one set of names, said to Python, to editors and to type checkers, and loaded when used."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jacstore

PACKAGE = Path(jacstore.__file__).parent
OTHERS = {"equinox", "flax", "torch"}
MODULES = {"errors", "terms", "testing", *OTHERS}


def names_in_the_stub() -> dict[str, str]:
    """Public names of `__init__.pyi`, each with the statement that it says to give it."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    places = {
        alias.asname or alias.name: f"from {node.module} import {alias.name} as found"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name):
            places[node.targets[0].id] = places.pop(node.value.id)
    return places


def test_the_stub_dir_and_all_offer_the_same_names() -> None:
    stub = set(names_in_the_stub())
    assert stub == {*jacstore.__all__, *MODULES}
    assert {name for name in dir(jacstore) if not name.startswith("_")} == stub
    assert len(jacstore.__all__) == len(set(jacstore.__all__))


@pytest.mark.parametrize("name", sorted(names_in_the_stub()))
def test_every_public_name_is_what_the_stub_says_that_it_is(name: str) -> None:
    if name in OTHERS:
        pytest.importorskip(name)
    given: dict[str, object] = {}
    exec(names_in_the_stub()[name], given)
    assert getattr(jacstore, name) is given["found"]


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    name = "no_such_name"
    with pytest.raises(AttributeError, match="module 'jacstore' has no attribute 'no_such_name'"):
        getattr(jacstore, name)


def test_looking_at_the_names_loads_no_module_of_the_package() -> None:
    code = (
        "import sys, jacstore; dir(jacstore); jacstore.__all__; hasattr(jacstore, 'no_such_name')\n"
        "sys.exit(str([name for name in sys.modules if name.startswith('jacstore.')] or '') or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert ran.returncode == 0, ran.stderr


def test_star_import_needs_no_extra() -> None:
    given: dict[str, object] = {}
    exec("from jacstore import *", given)
    assert set(given) - {"__builtins__"} == set(jacstore.__all__)


def test_the_marker_for_type_checkers_lies_beside_the_stub() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_the_wheel_holds_the_stub_and_the_marker(tmp_path: Path) -> None:
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="builds a wheel")
    (built,) = hatchling.WheelBuilder(str(PACKAGE.parent)).build(directory=str(tmp_path), versions=["standard"])
    held = zipfile.ZipFile(built).namelist()
    assert {"jacstore/py.typed", "jacstore/__init__.pyi", "jacstore/__init__.py"} <= set(held)
