"""The lowest versions that are tested are those that pyproject.toml declares."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def test_the_constraints_of_the_lowest_round_are_the_floors_of_pyproject():
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    floors = {}
    for need in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        name, extras, version = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?>=([\d.]+)", need).groups()
        floors[name] = version
        # Dask and its extra are released together.
        floors |= {extra: version for extra in (extras or "").split(",") if extra == "distributed"}
    tested = dict(line.split("==") for line in (HERE / ".ci/lowest.txt").read_text().split())
    assert tested == floors
