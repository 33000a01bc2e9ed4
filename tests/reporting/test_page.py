"""The page about a store or kernel: one file that needs no other, with numbers that are those of the store."""

from __future__ import annotations

import io
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

import jacstore
import jacstore.reporting.facts
from helpers_process import invoke
from jacstore.reporting.charts import colours, png
from jacstore.reporting.facts import read_facts
from jacstore.storage.runs import MOST_KEPT, keep_run, kept_runs
from jacstore.testing import dense_rows, mlp
from support import refused, values

VOID = {"meta", "br", "img"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


class Structure(HTMLParser):
    """Elements that are closed in order, their attributes, and the words between them."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data.strip())


def parsed(path):
    found = Structure()
    found.feed(path.read_text(encoding="utf-8"))
    found.close()
    assert found.open == []
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store of ten examples and kernels of it."""
    where = tmp_path_factory.mktemp("report")
    store = jacstore.build(mlp(10), where / "run.jac", unit_size=4, memory="200MB")
    jacstore.gram(store, where / "run.ntk", memory="200MB", tile=3)
    np.save(where / "labels.npy", np.arange(10) % 3)
    return where


@pytest.mark.parametrize("name", ["run.jac", "run.ntk"])
def test_a_page_is_one_file_that_loads_nothing(name, folder, tmp_path):
    jacstore.report(folder / name, tmp_path / "page.html", labels=folder / "labels.npy")
    found = parsed(tmp_path / "page.html")
    links = [values.get(key, "") for _, values in found.seen for key in ("src", "href")]
    assert all(link.startswith("data:image/png;base64,") for link in links if link)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in found.seen}
    assert "url(" not in (tmp_path / "page.html").read_text() and "@import" not in found.words
    # Every picture says in words what it shows, and the page fits itself to narrow screens.
    assert all(values.get("aria-label") for tag, values in found.seen if tag == "svg")
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in found.seen


def test_a_page_of_a_kernel_has_every_section_and_one_of_a_store_says_what_is_not_shown(folder, tmp_path):
    shown = jacstore.report(folder / "run.ntk", tmp_path / "k.html")
    assert list(shown.sections) == [
        *("Spectrum", "Kernel", "Norms of the rows", "Leaf shares", "Sizes by leaf and term", "Precision"),
        *("Verification", "Plan and what happened", "Runs", "What was asked for"),
    ]
    assert shown.bytes == (tmp_path / "k.html").stat().st_size and shown.kind == "kernel"
    titles = jacstore.report(folder / "run.jac", tmp_path / "s.html").sections
    assert "Not shown" in titles and "Spectrum" not in titles and "Leaf shares" in titles


def test_what_a_page_shows_are_the_numbers_of_the_dense_kernel(folder):
    rows = dense_rows(mlp(10))
    truth = np.einsum("ikp,jlp->ikjl", rows, rows)
    facts = read_facts(jacstore.open(folder / "run.ntk"), None, None)
    sample = facts.sample
    assert sample.whole and sample.rows.tolist() == list(range(10))
    np.testing.assert_allclose(sample.matrix, np.einsum("ikjk->ij", truth), rtol=1e-5, atol=1e-5)
    expected = np.linalg.eigvalsh(truth.reshape(30, 30))[::-1]
    np.testing.assert_allclose(sample.eigenvalues[:20], expected[:20], rtol=1e-4)
    np.testing.assert_allclose(facts.norms, np.sqrt(np.square(rows).sum((1, 2))), rtol=1e-5)
    assert sum(facts.shares.values()) == pytest.approx(1)
    leaves = jacstore.open(folder / "run.jac").leaves
    first = np.square(rows[..., : leaves[0].size]).sum() / np.square(rows).sum()
    assert facts.shares[leaves[0].path] == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("options", [{"mode": "trace"}, {"mode": "diagonal"}, {"by_leaf": True}, {"triangle": True}])
def test_a_sample_of_any_mode_is_the_kernel_between_these_examples(options, folder, tmp_path, limits):
    kernel = jacstore.gram(folder / "run.jac", tmp_path / "k", memory="200MB", tile=3, **options)
    k = 1 if "mode" in options else 3
    limits(report_rows=6 * k)
    sample = read_facts(kernel, None, None).sample
    rows = sample.rows
    assert len(rows) == 6 and not sample.whole
    whole = values(kernel)
    whole = {"trace": lambda: whole, "diagonal": lambda: whole.sum(0)}.get(
        kernel.mode, lambda: np.einsum("ikjk->ij", whole.reshape(10, 3, 10, 3))
    )()
    np.testing.assert_allclose(sample.matrix, whole[np.ix_(rows, rows)], rtol=1e-12)


def test_kernels_between_two_stores_blocks_and_kernels_without_their_store_have_pages(folder, tmp_path):
    other = jacstore.build(mlp(4, seed=0), tmp_path / "other.jac", memory="200MB")
    jacstore.gram(folder / "run.jac", other, tmp_path / "cross", memory="200MB")
    titles = jacstore.report(tmp_path / "cross", tmp_path / "c.html", labels=np.arange(10)).sections
    assert "Kernel" in titles and "Spectrum" not in titles
    jacstore.gram(folder / "run.jac", tmp_path / "blocks", memory="200MB", mode="blocks")
    titles = jacstore.report(tmp_path / "blocks", tmp_path / "b.html").sections
    assert "Not shown" in titles and "Kernel" not in titles
    shutil.copytree(folder / "run.ntk", tmp_path / "moved" / "run.ntk")
    titles = jacstore.report(tmp_path / "moved" / "run.ntk", tmp_path / "m.html").sections
    assert "Not shown" in titles and "Spectrum" in titles and "Leaf shares" not in titles
    again = jacstore.report(tmp_path / "moved" / "run.ntk", tmp_path / "m.html", store=folder / "run.jac")
    assert "Leaf shares" in again.sections


def test_an_incomplete_store_and_a_kernel_of_zeros_have_pages(tmp_path):
    jacstore.build(mlp(10), tmp_path / "half.jac", unit_size=4, part="1/2", memory="200MB")
    jacstore.report(tmp_path / "half.jac", tmp_path / "half.html")
    assert "incomplete" in parsed(tmp_path / "half.html").words
    with jacstore.StoreWriter(tmp_path / "zero.jac", {"w": (3,)}, 4, 1, unit_size=4, memory="200MB") as writer:
        writer.write_unit(0, {"w": np.zeros((4, 1, 3), np.float32)})
    jacstore.gram(tmp_path / "zero.jac", tmp_path / "zero.ntk", memory="200MB")
    titles = jacstore.report(tmp_path / "zero.ntk", tmp_path / "zero.html").sections
    assert "Kernel" in titles and "Spectrum" not in titles and "Norms of the rows" not in titles


def test_verify_puts_its_checks_on_the_page_and_the_last_one_stays(folder, tmp_path):
    shutil.copytree(folder / "run.jac", tmp_path / "run.jac")
    jacstore.report(tmp_path / "run.jac", tmp_path / "page.html")
    assert any("Not verified yet" in word for word in parsed(tmp_path / "page.html").words)
    jacstore.report(tmp_path / "run.jac", tmp_path / "page.html", verify=True)
    assert any("Verified just now" in word for word in parsed(tmp_path / "page.html").words)
    jacstore.report(tmp_path / "run.jac", tmp_path / "page.html")
    words = parsed(tmp_path / "page.html").words
    assert {"checksums", "ok"} <= set(words) and any(word.startswith("Verified 20") for word in words)


def test_names_of_leaves_and_paths_are_words_and_no_markup(tmp_path):
    path = tmp_path / "<img src=x> & co.jac"
    with jacstore.StoreWriter(path, {"<b>w</b>": (3,)}, 4, 1, unit_size=4, memory="200MB") as writer:
        writer.write_unit(0, {"<b>w</b>": np.ones((4, 1, 3), np.float32)})
    jacstore.report(path, tmp_path / "page.html")
    found = parsed(tmp_path / "page.html")
    assert not {"img", "script"} & {tag for tag, _ in found.seen} and "<b>w</b>" in found.words


# --- past runs --------------------------------------------------------------------------------------------------------


def test_runs_that_did_something_are_kept_with_what_they_took(folder, tmp_path):
    runs = kept_runs(jacstore.open(folder / "run.jac").ledger) + kept_runs(jacstore.open(folder / "run.ntk").ledger)
    assert [run["command"] for run in runs] == ["build", "gram"]
    assert all(run["seconds_total"] > 0 and run["memory"] == 200_000_000 and run["peak_rss"] > 0 for run in runs)
    before = sorted(path.name for path in (folder / "run.ntk" / "ledger").iterdir())
    jacstore.gram(folder / "run.jac", folder / "run.ntk", memory="200MB", tile=3)
    assert sorted(path.name for path in (folder / "run.ntk" / "ledger").iterdir()) == before


def test_only_the_last_runs_are_kept_and_damaged_ones_are_left_out(folder, tmp_path):
    shutil.copytree(folder / "run.jac", tmp_path / "run.jac")
    store = jacstore.open(tmp_path / "run.jac")
    for number in range(MOST_KEPT + 3):
        keep_run(store.ledger, "build", {"number": number})
    assert [run["number"] for run in kept_runs(store.ledger)] == list(range(3, MOST_KEPT + 3))
    damaged = next((tmp_path / "run.jac" / "ledger").glob("run-*.json"))
    damaged.write_bytes(b"{")
    assert len(kept_runs(store.ledger)) == MOST_KEPT - 1
    assert jacstore.report(store, tmp_path / "page.html").kind == "store"


# --- refusals and the command -----------------------------------------------------------------------------------------


def test_labels_that_do_not_fit_and_pages_that_cannot_be_written_are_refused(folder, tmp_path):
    kernel = folder / "run.ntk"
    out = tmp_path / "page.html"
    assert "--labels: shape (3,)" in refused(jacstore.report, kernel, out, labels=[1, 2, 3])
    assert "type float64; allowed are 10 integers" in refused(jacstore.report, kernel, out, labels=np.ones(10))
    assert "not a readable .npy file" in refused(jacstore.report, kernel, out, labels=tmp_path / "none.npy")
    assert "cannot be written" in refused(jacstore.report, kernel, tmp_path / "none" / "page.html")
    assert "page.html" not in {path.name for path in tmp_path.iterdir()}


def test_the_command_writes_the_same_page_and_says_what_is_on_it(folder, tmp_path):
    words = ("report", str(folder / "run.ntk"), "--out", str(tmp_path / "page.html"))
    ran = invoke(*words, "--labels", str(folder / "labels.npy"))
    assert ran.exit_code == 0, ran.stderr
    assert ran.stdout.startswith(f"{tmp_path / 'page.html'}: ") and "Spectrum, Kernel" in ran.stdout
    assert invoke(*words[:2], "--out", str(tmp_path / "no" / "p.html")).exit_code == 2


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_png_holds_the_colours_of_the_numbers():
    pixels = colours(np.array([[-1.0, 0.0, 1.0], [np.nan, 2.0, -3.0]]))
    assert (pixels[0, 2] == pixels[1, 1]).all() and (pixels[0, 0] == pixels[1, 2]).all()
    assert pixels[1, 0].tolist() == [128, 128, 128]
    data = png(pixels)
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and struct.unpack(">II", data[16:24]) == (3, 2)
    image = pytest.importorskip("PIL.Image")
    np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(data))), pixels)
    assert zlib.crc32(data[12:29]) == struct.unpack(">I", data[29:33])[0]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_the_page_without_anything_beyond_its_width(width, folder, tmp_path):
    jacstore.report(folder / "run.ntk", tmp_path / "page.html", labels=folder / "labels.npy")
    width_and_charts = "document.documentElement.scrollWidth + ' ' + document.querySelectorAll('svg').length"
    measure = f"<script>document.title = {width_and_charts}</script>"
    page = (tmp_path / "page.html").read_text(encoding="utf-8").replace("</body>", f"{measure}</body>")
    (tmp_path / "measured.html").write_text(page, encoding="utf-8")
    # As root a browser has no sandbox; a window of less than 500 is not to be had without a screen.
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    sized = [f"--window-size={width},900", "--dump-dom", (tmp_path / "measured.html").as_uri()]
    ran = subprocess.run([*command, *sized], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>(\d+) (\d+)</title>", ran.stdout)
    assert found is not None and int(found[1]) <= width and int(found[2]) == 3
