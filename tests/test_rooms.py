"""The rooms of the package: what each says of itself, what loads what; pyproject.toml holds which may import which."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jacstore

PACKAGE = Path(jacstore.__file__).parent
ROOT = PACKAGE.parent
DESIGN = ROOT / "docs" / "design.md"
ROOMS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/**/__init__.py"))
# Rooms that read, assemble and answer from what is stored, without the modules that differentiate functions.
NEED_JAX = {
    "jacstore.base.devices",
    "jacstore.kernels.engines.xla",
    "jacstore.operators.autodiff",
    "jacstore.verification.target_checks",
    "jacstore.verification.torch_checks",
    "jacstore.verification.verify",
}
WITHOUT_JAX = [
    found.name
    for room in ("base", "terms", "storage", "store", "kernels", "operators", "inference", "verification", "reporting")
    for found in pkgutil.walk_packages([str(PACKAGE / room)], f"jacstore.{room}.")
    if found.name not in NEED_JAX and not found.ispkg
]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_at_most_twelve_files_and_its_docstring_names_each(room: str) -> None:
    folder = PACKAGE / room
    files = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    inner = sorted(f"{path.parent.name}/" for path in folder.glob("*/__init__.py"))
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = set(re.findall(r"`([\w/]+)`", said))
    assert 2 <= len(files) <= 12
    assert sorted(named) == sorted([*files, *inner])


def test_every_file_begins_with_a_plain_sentence_on_what_it_is_for() -> None:
    files = [path for folder in ("jacstore", "pipelines", "tests") for path in (ROOT / folder).rglob("*.py")]
    said = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    assert [str(path) for path, text in said.items() if text is None] == []
    firsts = {path: text.splitlines()[0] for path, text in said.items() if text}
    assert [str(path) for path, first in firsts.items() if re.match(r"In:|.* Out: ", first)] == []


def test_the_design_text_names_every_room_and_only_what_there_is() -> None:
    prose = re.sub(r"(?s)```.*?```", "", DESIGN.read_text(encoding="utf-8"))
    quoted = set(re.findall(r"`([^`]+)`", prose))
    assert {f"{room}/" for room in ROOMS} <= quoted
    paths = {text for text in quoted if re.fullmatch(r"[\w.-]*/[\w./-]*|\w[\w-]*\.(py|md|toml)", text)}
    assert len(paths) > 50
    assert [path for path in sorted(paths) if not (ROOT / path).exists() and not (PACKAGE / path).exists()] == []
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    known = set(re.findall(r"\w+", source))
    names = {text for text in quoted - paths if re.fullmatch(r"[A-Za-z]\w*(\.\w+)*", text)}
    assert len(names) > 20
    assert [name for name in sorted(names) if name.rpartition(".")[2] not in known] == []


def test_functions_named_like_the_work_of_a_room_stay_functions() -> None:
    extras = re.compile("torch|flax|equinox")
    found = [one.name for one in pkgutil.walk_packages(jacstore.__path__, "jacstore.")]
    names = [name for name in found if not extras.search(name)]
    ran = run(f"""
import importlib, jacstore
for name in {names!r}:
    if not name.endswith("__main__"):
        importlib.import_module(name)
wrong = [name for name in jacstore.__all__ if type(getattr(jacstore, name)) is type(jacstore)]
assert not wrong, wrong
""")
    assert ran.returncode == 0, ran.stderr


def test_what_only_reads_stores_and_kernels_never_loads_jax() -> None:
    assert len(WITHOUT_JAX) > 60
    ran = run(f"import sys, {', '.join(WITHOUT_JAX)}; sys.exit('jax' in sys.modules)")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "script",
    [
        "import jacstore",
        "import jacstore; dir(jacstore)",
        "import jacstore.cli.commands; jacstore.cli.commands.main(['--help'])",
        "import jacstore.cli.commands; jacstore.cli.commands.main(['build', '--help'])",
        "import jacstore.cli.commands; jacstore.cli.commands.main(['gram', '--help'])",
    ],
)
def test_importing_the_package_and_asking_for_help_load_no_heavy_library(script: str) -> None:
    heavy = ("jax", "zarr", "dask", "numpy", "scipy")
    ran = run(f"""
import json, sys
try:
    exec({script!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print("\\n" + json.dumps([name for name in {heavy!r} if name in sys.modules]))
""")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == []
