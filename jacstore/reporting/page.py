"""One HTML file about a store or a kernel, which needs nothing beside itself: no network, no script, no other file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import jacstore
from jacstore.base.machine import format_size
from jacstore.base.schema import Reported
from jacstore.errors import InvalidRequestError
from jacstore.kernels.gram import open_path
from jacstore.kernels.kernel import Kernel
from jacstore.kernels.plan.reports import KernelInfo
from jacstore.reporting.charts import heat_map, histogram, spectrum_chart
from jacstore.reporting.facts import Facts, Sample, read_facts, read_labels
from jacstore.storage.files import refuse_address
from jacstore.store.reader import JacobianStore
from jacstore.store.reports import StoreInfo

LEAVES_SHOWN, OUTLIERS_SHOWN, RUNS_SHOWN, MOST_PIXELS = 20, 3, 10, 160
# Alphas of the effective dimension, in units of the largest eigenvalue.
SHARES = (1e-2, 1e-4, 1e-6)
# A norm is unlikely beyond this many robust standard deviations of the logarithm (Iglewicz and Hoaglin 1993).
UNLIKELY = 3.5

STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #ffffff; --ink: #1c1e21; --soft: #5d636b; --rule: #dddfe2;
  --accent: #2563a8; --pale: #c6d8ec; --mark: #b3521e; --good: #1d7a3e; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1e2125; --ink: #e7e8ea; --soft: #a0a6ae;
  --rule: #363a40; --accent: #7db4ec; --pale: #33506e; --mark: #f0a070; --good: #6cc98c; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
p { margin: 6px 0; } .soft { color: var(--soft); } .small { font-size: 13px; }
.state { display: inline-block; border-radius: 4px; padding: 0 7px; font-size: 13px; border: 1px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; margin: 16px 0; }
.figure { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 9px 12px; }
.figure b { display: block; font-size: 19px; overflow-wrap: anywhere; }
.figure span { color: var(--soft); font-size: 13px; }
.cards { columns: 2 440px; column-gap: 14px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px; margin: 0 0 14px;
  break-inside: avoid; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.path { overflow-wrap: anywhere; min-width: 90px; }
.track { position: relative; height: 11px; min-width: 70px; margin-top: 5px; }
.track i { position: absolute; left: 0; top: 0; bottom: 0; border-radius: 2px; min-width: 2px; }
.track .under { background: var(--pale); } .track .over { background: var(--accent); }
svg { display: block; width: 100%; height: auto; max-width: 620px; margin: 0 auto; }
svg .tick { font-size: 10.5px; fill: var(--soft); } svg .axis { font-size: 11.5px; fill: var(--ink); }
svg .note { font-size: 10.5px; fill: var(--mark); }
svg .grid { stroke: var(--rule); stroke-width: 0.7; } svg .curve { stroke: var(--accent); stroke-width: 2; }
svg .mark { stroke: var(--mark); stroke-width: 1; stroke-dasharray: 4 3; } svg .bar { fill: var(--accent); }
svg .range { stroke: var(--ink); stroke-width: 1.6; } svg .pixels { image-rendering: pixelated; }
details summary { cursor: pointer; } code { font-size: 12.5px; overflow-wrap: anywhere; }
code.flag { white-space: nowrap; }
@media (max-width: 560px) { .sizes :is(th, td):nth-child(2) { display: none; }
  main { padding: 14px 10px 32px; } section { padding: 12px 10px; } }
"""


@dataclass(frozen=True, kw_only=True)
class PageReport(Reported):
    """What `report` wrote: the page's file, its bytes, and the titles of its sections."""

    page: str
    path: str
    kind: str
    bytes: int
    sections: list[str]


def report(
    path: str | Path | JacobianStore | Kernel,
    out: str | Path,
    *,
    labels: np.ndarray | Sequence[int] | str | Path | None = None,
    store: str | Path | Sequence[str | Path] | None = None,
    verify: bool = False,
    memory: int | str | None = None,
) -> PageReport:
    """Write one HTML page about a store or a kernel: sizes, spectrum, heat map, norms, precision, checks, past runs.

    Parameters
    ----------
    path
        A store or kernel, or its path.
    out
        The file to write, which opens in a browser without a network.
    labels
        Integers `(N,)` of the examples, or a .npy file of them: the heat map is ordered by them.
    store
        Of a kernel: its store, or both of a rectangular one, if they are not where it was assembled from.
    verify
        Whether to verify first; else the page shows what the last `verify` found.
    memory
        For `verify`.

    Returns
    -------
    dict
        The keys of `jacstore report --json`.

    Raises
    ------
    InvalidRequestError
        If there is no store or kernel, labels do not fit, or the page cannot be written.
    """
    refuse_address(str(out))
    found = open_path(path) if isinstance(path, str | Path) else path
    stores = None if store is None else [str(one) for one in ([store] if isinstance(store, str | Path) else store)]
    given = read_labels(labels) if isinstance(labels, str | Path) else labels
    checked = None
    if verify:
        # It loads JAX, which the page itself does not need.
        from jacstore.verification.verify import verify as run_verify

        checked = run_verify(found, store=stores if isinstance(found, Kernel) else None, memory=memory).to_dict()
    facts = read_facts(found, None if given is None else np.asarray(given), stores)
    sections = [title for title, _, _ in _sections(facts, checked)]
    written = _write(out, page(facts, checked))
    kind = "kernel" if isinstance(facts.summary, KernelInfo) else "store"
    return PageReport(page=str(out), path=found.path, kind=kind, bytes=written, sections=sections)


def _write(out: str | Path, text: str) -> int:
    """Write by rename, so that a reader sees the old page or the new one."""
    path = Path(out)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = text.encode()
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidRequestError(
            f"--out {out} cannot be written ({error.strerror}); give another file (out=)"
        ) from error
    return len(data)


# ---------------------------------------------------------------------------------------------------------- the page


def page(facts: Facts, checked: dict[str, Any] | None = None) -> str:
    """The HTML of all that is known; `checked` is a verification of just now."""
    summary = facts.summary
    path = summary.kernel if isinstance(summary, KernelInfo) else summary.store
    kind = "kernel" if isinstance(summary, KernelInfo) else "store"
    state = '<span class="state good">complete</span>'
    if not summary.complete:
        state = '<span class="state bad">incomplete</span>'
    narrow, wide = (
        "".join(
            f"<section><h2>{escape(title)}</h2>{body}</section>"
            for title, body, whole_width in _sections(facts, checked)
            if whole_width == side
        )
        for side in (False, True)
    )
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(os.path.basename(path.rstrip('/')) or path)}: jacstore {kind}</title><style>{STYLE}</style>"
        f"</head><body><main><h1>{escape(path)}</h1>"
        f'<p class="soft">{kind} {state} made by jacstore {escape(str(summary.versions.get("jacstore", "")))}, '
        f"shown {made} by jacstore {jacstore.__version__}</p>"
        f'<div class="figures">{_figures(summary)}</div><div class="cards">{narrow}</div>{wide}'
        f"</main></body></html>\n"
    )


def _figures(summary: StoreInfo | KernelInfo) -> str:
    if isinstance(summary, KernelInfo):
        n, m = summary.examples
        shown = [
            (f"{n:,}" if n == m else f"{n:,} x {m:,}", "examples"),
            (f"{summary.outputs:,}", "outputs"),
            (" x ".join(f"{length:,}" for length in summary.shape), f"kernel, mode {summary.mode}"),
            (format_size(summary.bytes_stored), f"stored, {summary.dtype}"),
            (f"{summary.tiles_done:,} of {summary.tiles_total:,}", "tiles"),
        ]
    else:
        saved = summary.bytes_dense / max(1, summary.bytes_stored)
        shown = [
            (f"{summary.examples:,}", "examples"),
            (f"{summary.outputs:,}", "outputs"),
            (f"{summary.parameters:,}", "parameters"),
            (format_size(summary.bytes_stored), f"stored, {summary.dtype}"),
            (format_size(summary.bytes_dense), f"as float32 rows: {saved:.3g} times as much"),
            (f"{summary.units_done:,} of {summary.units_total:,}", "units"),
        ]
    return "".join(f'<div class="figure"><b>{escape(b)}</b><span>{escape(a)}</span></div>' for b, a in shown)


def _sections(facts: Facts, checked: dict[str, Any] | None) -> list[tuple[str, str, bool]]:
    """Title, HTML and whether it takes the whole width, of what there is to show."""
    parts: list[tuple[str, str, bool]] = []
    if facts.sample is not None:
        if len(facts.sample.eigenvalues) and facts.sample.eigenvalues[0] > 0:
            parts.append(("Spectrum", _spectrum(facts.sample), False))
        parts.append(("Kernel", _heat_map(facts), False))
    if facts.norms is not None and (facts.norms > 0).any():
        parts.append(("Norms of the rows", _norms(facts), False))
    if facts.shares:
        parts.append(("Leaf shares", _shares(facts.shares), False))
    for store in facts.stores[:1]:
        parts.append(("Sizes by leaf and term", _sizes(store), True))
    parts.append(("Precision", _precision(facts.summary), False))
    parts.append(("Verification", _verification(facts, checked), False))
    parts.append(("Plan and what happened", _plan(facts), False))
    if facts.runs:
        parts.append(("Runs", _runs(facts.runs), True))
    if facts.missing:
        parts.append(("Not shown", "".join(f"<p>{escape(one)}</p>" for one in facts.missing), True))
    parts.append(("What was asked for", _request(facts), True))
    return parts


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), numbers: Iterable[int] = ()) -> str:
    """A table of cells that are HTML already; columns `numbers` stand to the right."""
    right = set(numbers)

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=n' if n in right else ''}>{cell}</{tag}>" for n, cell in enumerate(row))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    top = f"<thead><tr>{cells([escape(word) for word in head], 'th')}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _note(words: str) -> str:
    return f'<p class="soft small">{escape(words)}</p>'


# ------------------------------------------------------------------------------------------------------- its sections


def _spectrum(sample: Sample) -> str:
    values = np.maximum(sample.eigenvalues, 0)
    alphas = [float(values[0]) * share for share in SHARES]
    dimensions = [float((values / (values + alpha)).sum()) for alpha in alphas]
    table = _table(
        [
            (f"{alpha:.3g}", f"{dimension:.4g}", f"{dimension / len(values):.1%}")
            for alpha, dimension in zip(alphas, dimensions, strict=True)
        ],
        ("alpha", "effective dimension", "of all rows"),
        (0, 1, 2),
    )
    condition = f"{values[0] / values[-1]:.2g}" if values[-1] > 0 else "infinite"
    of = "" if sample.whole else f" of the kernel between {len(sample.rows):,} examples drawn at random"
    words = f"{len(values):,} eigenvalues{of}, on logarithmic axes. Largest {values[0]:.4g}, condition {condition}."
    return spectrum_chart(sample.eigenvalues, list(zip(alphas, dimensions, strict=True))) + table + _note(words)


def _heat_map(facts: Facts) -> str:
    sample = facts.sample
    assert sample is not None
    labels, bounds = facts.labels, list[tuple[str, int, int]]()
    square = sample.rows is sample.columns
    rows, columns = (_evenly(len(side)) for side in (sample.rows, sample.columns))
    if labels is not None:
        rows = rows[np.argsort(labels[sample.rows[rows]], kind="stable")]
        columns = rows if square else columns
        ordered = labels[sample.rows[rows]]
        starts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
        bounds = [(str(ordered[a]), a, b) for a, b in itertools.pairwise(starts)]
    values = sample.matrix[np.ix_(rows, columns)]
    if square:
        lengths = np.sqrt(np.maximum(np.diagonal(sample.matrix), 0))[rows]
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = values / lengths[:, None] / lengths[None]
        words = "Cosines between the rows of J, of equal outputs together: K_ij / sqrt(K_ii K_jj)."
    else:
        scaled = values / (np.abs(values[np.isfinite(values)]).max(initial=0) or 1.0)
        words = "Entries divided by the largest."
    shown = f" {len(rows):,} of {len(sample.rows):,} examples" if len(rows) < len(sample.rows) else " All examples"
    if not sample.whole:
        shown = f" {len(rows):,} examples drawn at random"
    order = ", ordered by label." if labels is not None else "; --labels orders them."
    return heat_map(scaled, bounds) + _note(words + shown + order)


def _evenly(count: int) -> np.ndarray:
    """At most as many numbers as the picture has pixels, spread over all."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_PIXELS)).round().astype(int))


def _norms(facts: Facts) -> str:
    norms = facts.norms
    assert norms is not None
    positive = norms > 0
    logs = np.log(norms[positive])
    median = float(np.exp(np.median(logs)))
    # 1.4826: of a normal distribution, the standard deviation in units of the median absolute deviation.
    spread = max(1.4826 * float(np.median(np.abs(logs - np.median(logs)))), 1e-12)
    limits = [median * float(np.exp(sign * UNLIKELY * spread)) for sign in (-1, 1)]
    outside = np.flatnonzero(positive & ((norms < limits[0]) | (norms > limits[1])))
    order = np.argsort(norms, kind="stable")
    zero = int((~positive).sum())
    head = ["example", "norm", "of the median", *(["label"] if facts.labels is not None else [])]

    def rows(chosen: np.ndarray) -> list[list[str]]:
        return [
            [
                f"{n:,}{' *' if n in outside else ''}",
                f"{norms[n]:.4g}",
                f"{norms[n] / median:.3g}",
                *([] if facts.labels is None else [str(facts.labels[n])]),
            ]
            for n in chosen.tolist()
        ]

    shown = min(OUTLIERS_SHOWN, len(norms) // 2)
    extremes = [*order[-shown:][::-1], *order[:shown][::-1]] if shown else order
    words = (
        f"Of each example, all outputs together. Median {median:.4g}; {len(outside):,} outliers (*), more than "
        f"{UNLIKELY} robust standard deviations of the logarithm away"
    )
    words += f"; {zero:,} examples whose rows are zero or not finite." if zero else "."
    return histogram(norms, "norm", limits) + _table(rows(np.asarray(extremes)), head, (0, 1, 2, 3)) + _note(words)


def _bar(over: float, under: float = 0.0) -> str:
    """A bar of a share of the width, before a paler one."""
    parts = [("under", under), ("over", over)] if under else [("over", over)]
    drawn = "".join(f'<i class="{kind}" style="width:{100 * share:.2f}%"></i>' for kind, share in parts if share)
    return f'<div class="track">{drawn}</div>'


def _shares(shares: dict[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    shown, rest = ordered[:LEAVES_SHOWN], ordered[LEAVES_SHOWN:]
    if rest:
        shown = [*shown, (f"{len(rest)} other leaves", sum(share for _, share in rest))]
    largest = max((share for _, share in shown), default=0.0) or 1.0
    rows = [(f'<span class="path">{escape(path)}</span>', _bar(s / largest), f"{s:.1%}") for path, s in shown]
    return _table(rows, ("leaf", "", "share"), (2,)) + _note(
        "Share of each leaf in the trace of the kernel: the sum of its squared row norms, of all."
    )


def _sizes(store: JacobianStore) -> str:
    leaves = sorted(store.summary().leaves, key=lambda leaf: -leaf.numbers_dense)
    shown, rest = leaves[:LEAVES_SHOWN], leaves[LEAVES_SHOWN:]
    largest = max((leaf.numbers_dense for leaf in leaves), default=1) or 1
    rows = [
        (
            f'<span class="path">{escape(leaf.path)}</span>',
            escape(" x ".join(map(str, leaf.shape)) or "scalar"),
            escape("+".join(leaf.terms)),
            _bar(min(1.0, leaf.numbers / largest), leaf.numbers_dense / largest),
            f"{leaf.numbers:,}",
            f"{leaf.numbers_dense:,}",
        )
        for leaf in shown
    ]
    if rest:
        stored, dense = sum(leaf.numbers for leaf in rest), sum(leaf.numbers_dense for leaf in rest)
        rows.append((f"{len(rest)} other leaves", "", "", "", f"{stored:,}", f"{dense:,}"))
    head = ("leaf", "shape", "terms", "", "stored", "as rows")
    return f'<div class="sizes">{_table(rows, head, (4, 5))}</div>' + _note(
        "Numbers per example: dark what is stored, pale what rows would take. A factor that several leaves share is "
        "counted with the largest of them."
    )


def _precision(summary: StoreInfo | KernelInfo) -> str:
    numerics = summary.numerics
    rows = [("stored", summary.dtype), ("codecs", ", ".join(summary.codecs))]
    if isinstance(summary, KernelInfo):
        rows += [("products", f"{summary.precision} with {summary.engine}"), ("schedule", summary.schedule)]
        rows += [("diagonal", "exact norms")] if summary.exact_diagonal else []
    rows += [(key, str(numerics[key])) for key in ("computed", "lowest", "sums", "device") if numerics.get(key)]
    for key, words in (
        ("measured_error", "error measured on the diagonal"),
        ("expected_error", "error expected at most"),
        ("worst_case", "error in the worst case"),
    ):
        if numerics.get(key) is not None:
            rows.append((words, f"{numerics[key]:.1e}"))
    return _table([(escape(name), escape(value)) for name, value in rows]) + _note(
        "Errors are those of kernel entries, relative to sqrt(G_ii G_jj)."
    )


def _verification(facts: Facts, checked: dict[str, Any] | None) -> str:
    summary = facts.summary
    path = summary.kernel if isinstance(summary, KernelInfo) else summary.store
    kept = [run for run in facts.runs if run["command"] == "verify" and run["of"] == path]
    last = checked or (kept[-1] if kept else None)
    if last is None:
        command = f"<code>jacstore verify {escape(path)}</code>"
        return f'<p>Not verified yet: {command}, or <code class="flag">--verify</code> here.</p>'
    colour = {"ok": "good", "failed": "bad"}
    rows = [
        (
            escape(check["name"]),
            f'<span class="{colour.get(check["state"], "soft")}">{escape(check["state"])}</span>',
            "" if check["figure"] is None else f"{check['figure']:.2g}",
            "" if check["bound"] is None else f"{check['bound']:.2g}",
        )
        for check in last["checks"]
    ]
    failures = [check["where"] for check in last["checks"] if check["state"] == "failed"]
    when = "just now" if checked else _when(last["ended"])
    return (
        _table(rows, ("check", "", "figure", "bound"), (2, 3))
        + "".join(f'<p class="bad small">{escape(where)}</p>' for where in failures)
        + _note(f"Verified {when}, in {last['seconds_total']:.3g} s.")
    )


def _plan(facts: Facts) -> str:
    """The last build and gram: what was planned or allowed, and what it took."""
    rows = []
    last = {run["command"]: run for run in facts.runs if run["command"] in ("build", "gram")}
    if "build" in last:
        run = last["build"]
        rows += [
            ("bytes", f"{format_size(run['bytes_dense'])} as rows", f"{format_size(run['bytes_stored'])} stored"),
            ("memory of build", *_memory(run)),
        ]
    if "gram" in last:
        run = last["gram"]
        rate = run["flops"] / max(run["seconds_compute"], 1e-9) / 1e9
        rows += [
            ("passes over J", f"{run['expected_passes']:.2f}", f"{run['passes']:.2f}"),
            ("tiles", f"{run['tiles_total']:,}", f"{run['tiles_computed']:,} computed, {run['tiles_reused']:,} reused"),
            ("memory of gram", *_memory(run)),
            ("products", f"{run['flops']:.3g} flop", f"{rate:.3g} GFLOP/s with {run['engine']}"),
        ]
    if not rows:
        return "<p>No run has left its report here: earlier versions kept none.</p>"
    return _table([tuple(map(escape, row)) for row in rows], ("", "planned or allowed", "happened")) + _note(
        "Of the last build and gram; memory is what jacstore may allocate, the peak is that of the whole process."
    )


def _memory(run: dict[str, Any]) -> tuple[str, str]:
    return format_size(run.get("memory") or 0) + " to allocate", f"{format_size(run['peak_rss'])} at the peak"


def _when(ended: float) -> str:
    return datetime.fromtimestamp(ended, UTC).strftime("%Y-%m-%d %H:%M UTC")


# What takes the time of a run, in the order of the work.
SECONDS = {
    "build": ("seconds_compile", "seconds_device", "seconds_write", "seconds_audit"),
    "gram": ("seconds_read", "seconds_compute", "seconds_write"),
}


def _runs(runs: list[dict[str, Any]]) -> str:
    rows = []
    for run in runs[-RUNS_SHOWN:][::-1]:
        command = run["command"]
        parts = [(name, run[name]) for name in SECONDS.get(command, ()) if run.get(name)]
        spent = ", ".join(f"{name.removeprefix('seconds_')} {seconds:.3g} s" for name, seconds in parts)
        what = {
            "build": lambda r: f"{r['units_computed']:,} of {r['units_total']:,} units computed",
            "gram": lambda r: f"{r['tiles_computed']:,} of {r['tiles_total']:,} tiles computed",
            "verify": lambda r: "all checks passed" if r["ok"] else "a check failed",
        }.get(command, lambda r: "")(run)
        rows.append(
            tuple(
                escape(cell)
                for cell in (
                    _when(run["ended"]),
                    f"{command} {run['of']}",
                    what,
                    f"{run['seconds_total']:.3g} s",
                    spent,
                )
            )
        )
    return _table(rows, ("ended", "command", "did", "took", "of which"), (3,)) + _note(
        "Parts of the time overlap and may add up to more than the whole."
    )


def _request(facts: Facts) -> str:
    summary = facts.summary

    def said(value: Any) -> str:
        words = ", ".join(f"{key}: {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)
        return words if len(words) <= 300 else words[:299] + "…"

    rows = [(escape(key), f"<code>{escape(said(value))}</code>") for key, value in summary.fingerprint.items()]
    rows += [(f"--config: {escape(key)}", f"<code>{escape(said(one))}</code>") for key, one in facts.config.items()]
    rows += [(f"version of {escape(key)}", f"<code>{escape(value)}</code>") for key, value in summary.versions.items()]
    return (
        f"<details><summary>The request, by which a rerun is compared, and versions</summary>{_table(rows)}</details>"
    )
