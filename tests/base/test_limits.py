"""What tests change of jacstore's limits stands in one value."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from helpers_limits import limited
from jacstore.base.limits import LIMITS, Limits

TESTS = Path(__file__).parent.parent
# No limits: the flag of direct writing, where control groups are mounted, and the version of a hash.
NO_LIMITS = {"DIRECT", "ROOT", "VERSION"}
PATCHED = re.compile(r"""(?:setattr|patch)\(\s*(?:["']jacstore[\w.]*\.|\w[\w.]*,\s*["'])([A-Z][A-Z_0-9]+)["']""")
ASSIGNED = re.compile(r"^\s*\w+(?:\.\w+)+\.([A-Z][A-Z_0-9]+) =", re.M)


def test_tests_change_fields_of_limits_and_no_constants_of_modules():
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py") if path != Path(__file__)}
    found = {name for text in texts.values() for name in (*PATCHED.findall(text), *ASSIGNED.findall(text))}
    assert found == NO_LIMITS
    assert PATCHED.findall('monkeypatch.setattr(jacstore.rows.build, "LONG_RUN", 1)') == ["LONG_RUN"]
    assert PATCHED.findall('mock.patch("jacstore.rows.trace.cut.SMALLEST", 0)') == ["SMALLEST"]


def test_limits_are_as_before_after_a_test_that_changed_them(limits):
    before = LIMITS.slab_columns
    limits(slab_columns=7, piece_columns=(1, 1))
    with pytest.raises(ZeroDivisionError), limited(slab_columns=3):
        assert LIMITS.slab_columns == 3 and LIMITS.piece_columns == (1, 1)
        raise ZeroDivisionError
    assert LIMITS.slab_columns == 7 != before


def test_a_limit_that_does_not_exist_cannot_be_set():
    with pytest.raises(AttributeError), limited(slab_colums=7):
        pass
    assert Limits() == LIMITS and len(fields(Limits)) > 20
