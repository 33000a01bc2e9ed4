"""README and docs say what runs: every Python block, in order, page by page, and every `jacstore` command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from jacstore.cli.commands import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """Language, text and line of the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [(m[1], m[2], text[: m.start()].count("\n") + 1) for m in FENCE.finditer(text)]


def needs(page: Path) -> list[str]:
    """Packages that a page says, in a comment on top, its blocks need."""
    said = re.search(r"<!-- needs: (.*?) -->", page.read_text(encoding="utf-8"))
    return said[1].split() if said else []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("default")
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is installed need not work: compiled parts of two libraries may not fit each other.
    for name in needs(page):
        pytest.importorskip(name, exc_type=Exception)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for language, text, line in blocks(page):
        if language == "python" and "import torch\n" in text and find_spec("torch") is None:
            continue
        if language == "python":
            named = re.match(r"# (\w+\.py)\n", text)
            if named:
                Path(named[1]).write_text(text, encoding="utf-8")
            exec(compile("\n" * line + text, str(page), "exec"), names)
        elif language == "console":
            for command in re.findall(r"^\$ jacstore (.*)$", text, re.M):
                ran = CliRunner().invoke(main, shlex.split(command))
                assert ran.exit_code == 0, f"{page}:{line}: jacstore {command}\n{ran.output}{ran.stderr}"
        elif language == "bash":
            checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
            assert checked.returncode == 0, f"{page}:{line}: {checked.stderr}"
    assert os.getcwd() == str(tmp_path)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    linked += [f"{target}.md" for target in re.findall(r"\{doc\}`([\w/.-]+)`", text)]
    assert [target for target in linked if target and not (page.parent / target).exists()] == []
