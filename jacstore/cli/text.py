"""Format reports as the text that the command line prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jacstore.base.limits import UNLIMITED
from jacstore.base.machine import format_size
from jacstore.cli.reports import CleanReport, PredictReport, SampleReport
from jacstore.kernels.plan.reports import GramForecast, GramReport, KernelInfo
from jacstore.rows.reports import BuildForecast, BuildReport
from jacstore.store.reports import LeafFacts, StoreInfo

if TYPE_CHECKING:
    from jacstore.inference.factorize import SpectrumReport
    from jacstore.reporting.listing import Comparison, Listing
    from jacstore.reporting.page import PageReport
    from jacstore.storage.kept_arrays import KeptFactorization
    from jacstore.verification.report import Report

PATHS_SHOWN, VALUE_SHOWN = 5, 60


def _rows(r: StoreInfo | BuildReport | BuildForecast) -> str:
    return f"{r.examples:,} examples x {r.outputs} outputs x {r.parameters:,} parameters"


def _shape(r: KernelInfo | GramReport | GramForecast) -> str:
    return " x ".join(f"{n:,}" for n in r.shape)


def _continued(begun: bool, where: str, done: int, total: int, what: str) -> list[str]:
    """A line on the finished work that a run would continue, if there is any."""
    return [f"continues {where}: {done:,} of {total:,} {what} done"] * begun


def _memory(r: BuildForecast | GramForecast) -> str:
    """What a plan takes and, by name, what for."""
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in r.memory_parts.items() if size)
    return f"memory        {format_size(r.memory)}" + (f": {parts}" if parts else "")


def build(r: BuildReport) -> str:
    state = "complete" if r.complete else "part done, others are missing"
    compiling = f" ({r.seconds_compile:.1f} s compiling)" if r.seconds_compile else ""
    saved = f" in {r.seconds_total:.1f} s{compiling}" if r.units_computed else ""
    return (
        f"{r.store}: {_rows(r)}, "
        f"{format_size(r.bytes_stored)} (float32 rows: {format_size(r.bytes_dense)}), {state}\n"
        f"{r.units_computed} units computed, {r.units_reused} reused of {r.units_total}{saved}"
        + "".join(f"\n{line}" for line in [*zero_leaves(r.zero_leaves), *_requests(r.requests)])
    )


def _requests(made: Mapping[str, int]) -> list[str]:
    """A line on requests to buckets, if there are any."""
    if not made:
        return []
    each = ", ".join(f"{number:,} {kind}" for kind, number in sorted(made.items()))
    return [f"requests      {sum(made.values()):,}: {each}"]


def _free(size: int) -> str:
    return "no limit" if size == UNLIMITED else f"{format_size(size)} free"


def zero_leaves(paths: Sequence[str]) -> list[str]:
    """A line on leaves whose part of every row is zero, if there are any."""
    if not paths:
        return []
    named = ", ".join(paths[:PATHS_SHOWN]) + (" and others" if len(paths) > PATHS_SHOWN else "")
    return [f"zero for every example: {named}; if they are state or unused, leave them out with select="]


def gram(r: GramReport) -> str:
    state = "complete" if r.complete else "part done, others are missing"
    done = ""
    if r.items_computed:
        done = (
            f" in {r.seconds_total:.1f} s, {r.passes:.2f} passes over J ({format_size(r.bytes_read)}), "
            f"{r.flops / max(r.seconds_compute, 1e-9) / 1e9:.0f} GFLOP/s with {r.engine}"
        )
    return (
        f"{r.kernel}: {_shape(r)}, mode {r.mode}, {state}\n"
        f"{r.tiles_computed} tiles computed, {r.tiles_reused} reused of {r.tiles_total}{done}"
        + "".join(f"\n{line}" for line in _requests(r.requests))
    )


def plan_build(r: BuildForecast) -> str:
    return "\n".join(
        [
            *_continued(r.begun, r.store, r.units_done, r.units_total, "units"),
            f"{_rows(r)} in {r.leaves} leaves",
            f"to store      {format_size(r.bytes_to_store)} before compression (codec {r.codec}), "
            f"{_free(r.bytes_free)}",
            f"files         {r.files:,} in {r.units_total:,} units of {r.unit_size:,} examples",
            f"device pass   {r.batches:,} batches of {r.batch_size} examples x {r.output_batch} outputs, "
            f"{format_size(r.device_pass_bytes)}",
            *_requests(r.expected_requests),
            _memory(r),
            f"expected      {r.expected_seconds_device:.3g} s device, {r.expected_seconds_write:.3g} s writing "
            f"at 500 MB/s, {r.expected_seconds_compile:.3g} s compiling; they overlap",
            *_leaf_lines(r.terms),
            f"against it    a kernel without a store computes J {r.recompute_passes:.1f} times in this memory: "
            f"{r.expected_seconds_recompute:.3g} s against {r.expected_seconds_store:.3g} s: {_verdict(r)}",
        ]
    )


def _verdict(r: BuildForecast) -> str:
    """Whether storing pays for one kernel, and what to do instead if not."""
    if r.storing_pays:
        return "storing pays"
    if r.recompute_passes > 1:
        # A store in RAM would move to a temporary folder, which is storing again.
        return "storing does not pay for one kernel, and RAM does not hold J: give more --memory (memory=)"
    return (
        "storing does not pay for one kernel alone: keep J in RAM with jacstore.build(problem, None), or call "
        "jacstore.ntk; a store serves every later kernel, and other processes"
    )


def plan_gram(r: GramForecast) -> str:
    return "\n".join(
        [
            *_continued(r.begun, r.kernel, r.tiles_done, r.tiles_total, "tiles"),
            f"{_shape(r)}, mode {r.mode}, {r.precision} products with {r.engine}",
            f"schedule      {r.schedule}: {r.passes:.2f} passes over J, {format_size(r.bytes_read)} read",
            f"to store      {format_size(r.bytes_to_store)} in {r.files:,} files, {_free(r.bytes_free)}",
            *_requests(r.expected_requests),
            _memory(r),
            f"work          {r.flops:.3g} flop in {r.items_total:,} items, {r.tiles_total:,} tiles of "
            f"{r.tile:,} examples, slabs of {r.slab_columns:,} columns",
            f"expected      {r.expected_seconds:.3g} s at {r.expected_flops_per_second / 1e9:.0f} GFLOP/s; "
            f"a kill loses at most about {r.expected_seconds_lost_by_a_kill:.3g} s",
        ]
    )


def verify(r: Report) -> str:
    def number(value: float | None) -> str:
        return f"{value:.3g}" if value is not None and math.isfinite(value) else ""

    width = max(len(check.name) for check in r.checks)
    lines = [f"{'check':{width}}  {'':7}  {'figure':>10}  {'bound':>10}"]
    for check in r.checks:
        figure, bound = number(check.figure), number(check.bound)
        lines.append(f"{check.name:{width}}  {check.state:7}  {figure:>10}  {bound:>10}  {check.where}".rstrip())
    count = {state: sum(check.state == state for check in r.checks) for state in ("ok", "failed", "skipped")}
    counts = ", ".join(f"{n} {state}" for state, n in count.items() if n)
    lines.append(f"{r.path}: {r.kind}, {counts} in {r.seconds_total:.1f} s")
    if count["skipped"]:
        left_out = [check.name for check in r.checks if check.state == "skipped"]
        lines.append(f"not checked: {', '.join(left_out)}")
    if r.to_recompute:
        again = "build" if r.kind == "store" else "gram"
        shown = ", ".join(r.to_recompute[:5]) + (", …" if len(r.to_recompute) > 5 else "")
        lines.append(f"running the same {again} again recomputes {shown}")
    return "\n".join(lines)


def first_failure(r: Report) -> str:
    return "".join(f"{r.path}: {check.name} failed: {check.where}" for check in r.failures[:1])


def _leaf_lines(table: Sequence[LeafFacts]) -> list[str]:
    """For each leaf its terms, the reason, and the numbers stored per example instead of its rows."""
    width = max(len(leaf.path) for leaf in table)
    return [
        "leaves: terms, numbers stored per example, of those that rows would take",
        *(
            f"  {leaf.path:{width}}  {'x'.join(map(str, leaf.shape)):>16}  {'+'.join(leaf.terms):10} "
            f"{leaf.numbers:>12,} of {leaf.numbers_dense:>12,}  {leaf.why}"
            for leaf in table
        ),
    ]


def _error_line(n: dict[str, Any]) -> str:
    """Errors of kernel entries relative to sqrt(G_ii G_jj), of storage or of the whole kernel."""
    if "expected_error" not in n:
        return "errors unknown"
    measured = "" if n["measured_error"] is None else f"{n['measured_error']:.1e} on the diagonal, "
    return (
        f"error of kernel entries: {measured}{n['expected_error']:.1e} expected at most, "
        f"{n['worst_case']:.1e} in the worst case; {n.get('device', 'rows from outside')}"
    )


def damaged_records(r: StoreInfo | KernelInfo) -> str:
    if isinstance(r, KernelInfo):
        return _damaged(r.kernel, "group of tiles", r.groups_damaged, "gram")
    return _damaged(r.store, "unit", r.units_damaged, "build")


def _damaged(path: str, what: str, damaged: Sequence[int], command: str) -> str:
    if not damaged:
        return ""
    numbers = ", ".join(map(str, damaged[:5])) + (" and others" if len(damaged) > 5 else "")
    return f"{path}: the record of {what} {numbers} is damaged; run the same {command} again to recompute it"


def info(r: StoreInfo | KernelInfo) -> str:
    if isinstance(r, StoreInfo):
        lines = [
            f"{r.store}: store, {_rows(r)}",
            f"{r.dtype}, codecs {', '.join(r.codecs)}, {format_size(r.bytes_stored)} "
            f"(float32 rows: {format_size(r.bytes_dense)})",
            f"{'complete' if r.complete else 'incomplete'}: {r.units_done} of {r.units_total} units",
            f"zero rows: {r.zero_rows}, examples with NaN or infinity: {len(r.nonfinite_examples)}",
            *zero_leaves(r.zero_leaves),
            _error_line(r.numerics),
            *_leaf_lines(r.leaves),
        ]
        if r.left_out:
            lines += ["left out:", *(f"  {path}  {why}" for path, why in r.left_out)]
        return "\n".join(lines)
    return "\n".join(
        [
            f"{r.kernel}: kernel, mode {r.mode}, {_shape(r)}, {r.dtype}",
            f"{r.precision} products with {r.engine}, {r.schedule}, {format_size(r.bytes_stored)}",
            f"{'complete' if r.complete else 'incomplete'}: {r.tiles_done} of {r.tiles_total} tiles",
            _error_line(r.numerics) + (", exact norms on the diagonal" if r.exact_diagonal else ""),
            f"from {', '.join(r.stores)}",
            *(f"kept beside it: {_kept(kept)}" for kept in r.kept),
        ]
    )


def listing(r: Listing) -> str:
    """A line for each, in columns as wide as their widest entry; the state, which may be long, comes last."""
    rows = [
        (
            one.path,
            one.kind or "?",
            " x ".join(f"{n:,}" for n in one.shape),
            one.detail,
            format_size(one.bytes_stored) if one.kind else "",
            one.state,
        )
        for one in r.found
    ]
    if not rows:
        return f"{r.folder}: no stores and no kernels"
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(f"{cell:{width}}" for cell, width in zip(row[:5], widths, strict=True)), row[5]]) for row in rows
    )


def differences(r: Comparison) -> str:
    if r.same:
        return f"{r.first} and {r.second}: asked for the same"
    said = [(one.field, *(_value(getattr(one, side)) for side in ("first", "second"))) for one in r.differences]
    width = max(len(field) for field, _, _ in said)
    return "\n".join(
        [
            f"{r.kind}s {r.first} and {r.second} differ in what was asked for",
            *(f"  {field:{width}}  {before} -> {now}" for field, before, now in said),
        ]
    )


def _value(given: Any) -> str:
    words = "not given" if given is None else str(given)
    return words if len(words) <= VALUE_SHOWN else words[: VALUE_SHOWN - 1] + "…"


def report(r: PageReport) -> str:
    return f"{r.page}: {format_size(r.bytes)} about the {r.kind} {r.path}: {', '.join(r.sections)}"


def clean(r: CleanReport) -> str:
    if not r.removed:
        return f"{r.kernel}: nothing is kept beside it"
    return "\n".join(f"{r.kernel}: removed {_kept(kept)}" for kept in r.removed)


def _kept(kept: KeptFactorization) -> str:
    what = {"cholesky": "Cholesky factor", "eigh": "eigendecomposition"}[kept.method]
    alpha = "" if kept.alpha is None else f", alpha {kept.alpha:.4g}"
    state = "" if kept.usable else ", computed from earlier contents of the kernel"
    return f"{what}{alpha}, {format_size(kept.bytes)}{state}"


def predict(r: PredictReport) -> str:
    chosen = f" (best of {len(r.alphas)} by leave-one-out)" if len(r.alphas) > 1 else ""
    accuracy = "" if r.loo_accuracy is None else f", accuracy {r.loo_accuracy:.1%}"
    return (
        f"{r.predictions}: {r.predicted:,} x {r.columns} predictions from {r.examples:,} examples, "
        f"alpha {r.alpha:.4g}{chosen}\n"
        f"leave-one-out: mean squared error {r.loo_error:.4g}{accuracy}"
    )


def sample(r: SampleReport) -> str:
    return (
        f"{r.file}: {r.samples:,} samples of {r.parameters:,} parameters, {r.passes:.2f} passes over J "
        f"in {r.seconds_total:.1f} s"
    )


def spectrum(r: SpectrumReport) -> str:
    return "\n".join(
        [
            f"{r.kernel}: {r.rows:,} rows, trace {r.trace:.6g}",
            *(f"eigenvalue {n:>5}  {value:.6g}" for n, value in enumerate(r.eigenvalues, start=1)),
            f"smallest          {r.smallest:.6g}",
            *(f"effective dimension {one.dimension:.6g} at alpha {one.alpha:.4g}" for one in r.effective_dimension),
        ]
    )
