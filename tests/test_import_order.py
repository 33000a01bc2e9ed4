"""The direction of the data flow: a module imports only from lower floors, and reading a store needs no JAX."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "jacstore"

FLOORS = {
    1: (
        "errors",
        "progress",
        "cgroups",
        "machine",
        "blas_threads",
        "exclusive",
        "leaving",
        "files",
        "report",
        "schema",
        "terminal",
        "threads",
        "wording",
    ),
    2: (
        "blame",
        "pytrees",
        "inputs",
        "parameters",
        "outputs",
        "program",
        "twofold",
        "identity",
        "probes",
        "problem",
        "torch_problem",
        "target",
        "terms",
        "contraction",
        "factors",
        "term_products",
        "likelihoods",
        "steps",
        "expansion",
        "plan",
        "store_plan",
        "footprint",
        "schedule",
        "pieces",
        "views",
        "ledger",
        "devices",
        "bounds",
        "described",
        "rounding",
        "noise",
        "quadrature",
        "shifted",
    ),
    3: (
        "backward",
        "cores",
        "weight_maps",
        "scans",
        "finder",
        "trace",
        "blocks",
        "engine",
        "engine_xla",
        "codec",
        "attributes",
        "hierarchy",
        "store",
        "writer",
        "kernel",
        "kept_arrays",
        "checkpoints",
        "torch_network",
        "torch_calls",
        "torch_composed",
        "torch_layers",
        "panels",
        "streams",
        "torch_terms",
        "sample_files",
        "columns",
    ),
    4: (
        "jacobian",
        "row_check",
        "unit",
        "work",
        "slabs",
        "finish",
        "item",
        "repair",
        "resumption",
        "lazy",
        "cluster",
        "assembly",
        "operators",
        "normal_matrix",
        "dense",
        "factorization",
        "factor_files",
        "factoring",
        "solve",
        "weighting",
        "krylov",
        "regression",
        "attribution",
        "dynamics",
        "norms",
        "products",
        "torch_pass",
        "torch_audit",
        "prediction",
        "inverse_roots",
        "curvature",
    ),
    5: (
        "builder",
        "verification",
        "posterior",
        "torch",
        "store_checks",
        "target_checks",
        "torch_checks",
        "kernel_checks",
        "tile_checks",
        "eigenvalue_checks",
        "goodness",
    ),
    6: ("cli",),
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules}

# What a module may import from its own floor.
NEIGHBOURS = {
    "exclusive": {"machine"},
    "files": {"errors", "exclusive", "leaving", "machine"},
    "machine": {"cgroups", "errors"},
    "schema": {"errors"},
    "terminal": {"errors", "leaving", "progress"},
    "wording": {"machine"},
    "pytrees": {"blame"},
    "inputs": {"blame", "pytrees"},
    "parameters": {"blame", "pytrees"},
    "outputs": {"blame", "parameters", "pytrees"},
    "identity": {"blame", "bounds", "outputs", "parameters", "program", "pytrees"},
    "probes": {"identity", "outputs", "parameters", "program", "twofold"},
    "twofold": {"devices"},
    "problem": {"blame", "identity", "inputs", "outputs", "parameters", "probes", "program", "pytrees", "twofold"},
    "target": {"blame", "problem", "torch_problem"},
    "contraction": {"terms"},
    "factors": {"contraction", "terms"},
    "term_products": {"terms"},
    "steps": {"contraction", "plan", "terms"},
    "footprint": {"plan"},
    "store_plan": {"plan"},
    "schedule": {"footprint", "plan", "store_plan"},
    "expansion": {"plan", "terms"},
    "attributes": {"blocks", "engine"},
    "finder": {"backward", "cores", "weight_maps"},
    "backward": {"scans"},
    "trace": {"backward", "cores", "finder"},
    "store": {"attributes", "blocks", "hierarchy"},
    "writer": {"attributes", "blocks", "hierarchy", "store"},
    "kernel": {"attributes", "hierarchy", "kept_arrays"},
    "torch_layers": {"torch_calls", "torch_composed", "torch_network"},
    "unit": {"jacobian", "row_check"},
    "finish": {"norms", "work"},
    "repair": {"finish", "item", "work"},
    "resumption": {"finish", "item", "work"},
    "cluster": {"item", "work"},
    "assembly": {"cluster", "finish", "lazy", "repair", "resumption", "work"},
    "factoring": {"dense", "factor_files", "factorization"},
    "solve": {"dense", "factoring", "factorization"},
    "weighting": {"dense"},
    "krylov": {"dense"},
    "regression": {"dense", "krylov", "solve"},
    "torch": {"builder"},
    "panels": {"store"},
    "streams": {"panels", "store"},
    "operators": {"lazy"},
    "normal_matrix": {"lazy", "operators"},
    "cli": {""},
    "attribution": {"dense", "factorization", "solve", "weighting"},
    "dynamics": {"dense", "solve"},
    "rounding": {"bounds", "contraction", "terms"},
    "bounds": {"contraction", "terms"},
    "work": {"norms"},
    "item": {"finish", "slabs", "work"},
    "target_checks": {"store_checks"},
    "torch_checks": {"store_checks", "target_checks", "torch"},
    "eigenvalue_checks": {"tile_checks"},
    "kernel_checks": {"eigenvalue_checks", "tile_checks"},
    "verification": {"kernel_checks", "store_checks", "target_checks", "torch_checks"},
    "torch_terms": {"torch_layers", "torch_network", "trace"},
    "torch_pass": {"jacobian"},
    "torch_audit": {"jacobian", "torch_pass"},
    "prediction": {"regression"},
    "inverse_roots": {"dense", "factorization", "krylov", "solve", "weighting"},
    "goodness": {"posterior"},
    "curvature": {"jacobian", "operators"},
}

# (importer, imported) where an import inside a function chooses an optional engine.
CHOICES = {
    (
        "regression",
        "sklearn.utils",
    ),
    (
        "assembly",
        "jacstore.engine_xla",
    ),
    (
        "columns",
        "jacstore.pytrees",
    ),
    (
        "work",
        "jacstore.engine_xla",
    ),
    (
        "operators",
        "jacstore.pytrees",
    ),
    (
        "verification",
        "jacstore.torch_checks",
    ),
}

# `__init__.py` is lazy and `__main__.py` a door: both stand above all floors. `testing.py` may import anything and
# nothing imports it.
LATE_ANYWHERE = {"__init__", "__main__", "cli", "terminal", "testing"}
FREE = {"__init__", "__main__", "testing"}
WITHOUT_JAX = (
    "assembly",
    "attributes",
    "attribution",
    "checkpoints",
    "cluster",
    "columns",
    "dense",
    "described",
    "dynamics",
    "eigenvalue_checks",
    "engine",
    "factor_files",
    "factoring",
    "factorization",
    "files",
    "finish",
    "goodness",
    "hierarchy",
    "inverse_roots",
    "item",
    "kept_arrays",
    "kernel",
    "kernel_checks",
    "krylov",
    "lazy",
    "ledger",
    "noise",
    "norms",
    "operators",
    "panels",
    "pieces",
    "footprint",
    "plan",
    "posterior",
    "prediction",
    "products",
    "quadrature",
    "regression",
    "repair",
    "resumption",
    "rounding",
    "sample_files",
    "schema",
    "shifted",
    "slabs",
    "solve",
    "store",
    "store_checks",
    "streams",
    "terms",
    "tile_checks",
    "weighting",
    "work",
    "writer",
)
PLANNING = ("plan", "store_plan", "footprint", "schedule")
PLAN_MAY = {"__future__", "bisect", "collections.abc", "dataclasses", "itertools", "jacstore.errors", "math", "typing"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, by its full name, and where the statement stands."""

    name: str
    line: int
    late: bool


def modules() -> list[str]:
    """Return the names of the package's modules that exist, `sub.module` for one in a folder."""
    return sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))


def imports(source: str) -> list[Import]:
    """Return every import of a module's source, those inside functions marked `late`."""
    found: list[Import] = []

    def visit(node: ast.AST, late: bool) -> None:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                names = origins(child)
            found.extend(Import(name=name, line=child.lineno, late=late) for name in names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, late or inside)

    visit(ast.parse(source), False)
    return found


def origins(node: ast.ImportFrom) -> list[str]:
    """Return the modules that a `from` statement imports: `from jacstore import plan` is `jacstore.plan`."""
    base = node.module or ""
    if node.level:
        base = f"jacstore.{base}".rstrip(".")
    return [f"jacstore.{alias.name}" for alias in node.names] if base == "jacstore" else [base]


def of(module: str) -> list[Import]:
    """Return the imports of one module of the package, none where it does not exist."""
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    return imports(path.read_text(encoding="utf-8")) if path.exists() else []


def inner(name: str) -> str | None:
    """Return the module inside the package that a full name means; an empty text is the package itself."""
    return name.removeprefix("jacstore").removeprefix(".") if name.partition(".")[0] == "jacstore" else None


def breaks_floors(module: str, found: Import) -> bool:
    """Say whether an import goes to the same or a higher floor without leave."""
    target = inner(found.name)
    if target is None or target in NEIGHBOURS.get(module, ()):
        return False
    return FLOOR.get(target, 99) >= FLOOR[module]


def place(module: str, found: Import) -> str:
    return f"jacstore/{module.replace('.', '/')}.py:{found.line} imports {found.name}"


def test_every_module_has_a_floor() -> None:
    assert [module for module in modules() if module not in FLOOR and module not in FREE] == []


@pytest.mark.parametrize("module", [module for module in modules() if module in FLOOR])
def test_a_module_imports_only_from_lower_floors(module: str) -> None:
    assert [place(module, found) for found in of(module) if breaks_floors(module, found)] == []


def test_leave_on_one_floor_is_used_and_goes_in_one_direction() -> None:
    used = {(module, inner(found.name)) for module in modules() for found in of(module)}
    granted = {(module, target) for module, targets in NEIGHBOURS.items() for target in targets}
    assert granted - used == set()
    assert {pair for pair in granted if pair[1] and FLOOR[pair[0]] != FLOOR[pair[1]]} == set()
    list(TopologicalSorter(NEIGHBOURS).static_order())  # raises CycleError


@pytest.mark.parametrize("module", [module for module in modules() if module not in LATE_ANYWHERE])
def test_imports_stand_inside_functions_only_where_an_optional_engine_is_chosen(module: str) -> None:
    late = [found for found in of(module) if found.late and (module, found.name) not in CHOICES]
    assert [place(module, found) for found in late] == []


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_what_only_reads_a_store_never_imports_jax(module: str) -> None:
    assert [place(module, found) for found in of(module) if found.name.partition(".")[0] in {"jax", "jaxlib"}] == []


def reached(module: str) -> set[str]:
    """Return the modules of the package that importing one loads, itself among them."""
    found, todo = set(), [module]
    while todo:
        current = todo.pop()
        found.add(current)
        early = {inner(one.name) for one in of(current) if not one.late}
        todo += [target for target in early if target and target not in found]
    return found


def test_assembling_a_kernel_never_needs_the_problem() -> None:
    about_problems = {"blame", "pytrees", "inputs", "parameters", "outputs", "identity", "probes", "problem", "target"}
    about_problems.add("program")
    assert reached("assembly") & about_problems == set()


def test_a_process_that_assembles_never_loads_jax() -> None:
    code = f"import sys, jacstore.{', jacstore.'.join(WITHOUT_JAX)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PACKAGE.parent).returncode == 0


def test_torch_is_imported_only_by_its_own_modules() -> None:
    users = {module for module in modules() for found in of(module) if found.name.partition(".")[0] == "torch"}
    assert users == {
        "torch",
        "torch_calls",
        "torch_composed",
        "torch_checks",
        "torch_layers",
        "torch_network",
        "torch_pass",
        "torch_terms",
    }


@pytest.mark.parametrize("module", PLANNING)
def test_a_plan_is_arithmetic_alone(module: str) -> None:
    allowed = PLAN_MAY | {f"jacstore.{other}" for other in PLANNING}
    assert [place(module, found) for found in of(module) if found.name not in allowed] == []


def test_nothing_imports_the_testing_module() -> None:
    users = [place(module, found) for module in modules() for found in of(module) if inner(found.name) == "testing"]
    assert users == []


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from jacstore import assembly", "jacstore.assembly"),
        ("from jacstore.assembly import run", "jacstore.assembly"),
        ("import jacstore.assembly as a", "jacstore.assembly"),
        ("from .assembly import run", "jacstore.assembly"),
        ("from . import assembly", "jacstore.assembly"),
        ("def f():\n    import jacstore.assembly", "jacstore.assembly"),
        ("if True:\n    from jacstore import assembly", "jacstore.assembly"),
        ("from jacstore import build", "jacstore.build"),
        ("import jacstore", "jacstore"),
    ],
)
def test_every_spelling_of_an_upward_import_is_seen(statement: str, name: str) -> None:
    (found,) = imports(statement)
    assert found.name == name
    assert found.late == statement.startswith("def")
    assert breaks_floors("store", found)


@pytest.mark.parametrize(
    "script",
    [
        "import jacstore",
        "import jacstore; dir(jacstore)",
        "import jacstore.cli; jacstore.cli.main(['--help'])",
        "import jacstore.cli; jacstore.cli.main(['build', '--help'])",
        "import jacstore.cli; jacstore.cli.main(['gram', '--help'])",
    ],
)
def test_importing_the_package_and_asking_for_help_load_no_heavy_library(script: str) -> None:
    heavy = ("jax", "zarr", "dask", "numpy", "scipy")
    code = f"""
import json, sys
try:
    exec({script!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print("\\n" + json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == []
