"""In: words on the command line. Out: the same calls as from Python, their reports, and an exit code.

Exit codes: 0 done; 2 the user must change something; 3 data failed a check; 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from jacstore.errors import Damaged, JacstoreError
from jacstore.progress import BatchDone, Event, ItemDone, SlabDone, Started, UnitDone, Waiting

LONGEST_WORD = 400
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")


class _Stop:
    """Remembers a signal; the work asks between its steps. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: str | None = None

    def install(self) -> None:
        for name in SIGNALS:
            if hasattr(signal, name) and threading.current_thread() is threading.main_thread():
                signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def __call__(self) -> bool:
        return self.received is not None


class _Lines:
    """A progress listener: a bar on a terminal, a line every few seconds elsewhere; always on stderr."""

    SECONDS_BETWEEN = 5.0

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.total = self.done = self.small = 0
        self.what = ""
        self.started = self.shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, event: Event) -> None:
        if self.quiet:
            return
        if isinstance(event, Waiting):
            click.echo(event.reason, err=True)
        elif isinstance(event, Started):
            self.what, self.total, self.done = event.what, event.total, event.done
            if sys.stderr.isatty():
                self._open_bar()
        elif isinstance(event, UnitDone | ItemDone):
            self.done += 1
            self.small = 0
        elif isinstance(event, BatchDone):
            self.small += event.examples
        elif isinstance(event, SlabDone):
            self.small = event.slab + 1
        self._show()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self.what, total=self.total, completed=self.done, text="")
        self._bar.start()

    def _show(self) -> None:
        text = f"{self.done} of {self.total} {self.what}"
        if self.small:
            text += f" and {self.small} {'examples' if self.what == 'units' else 'slabs'} of the next"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, text=text)
        elif self.what and time.monotonic() - self.shown > self.SECONDS_BETWEEN:
            self.shown = time.monotonic()
            click.echo(f"{text}, {self.shown - self.started:.0f} s", err=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _OneLine(click.Group):
    """A group whose usage errors are one line, like all others."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            returned = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            click.echo(f"jacstore: {_short(error.format_message())} (jacstore --help lists all)", err=True)
            sys.exit(2)
        except click.Abort:
            sys.exit(130)
        sys.exit(returned if isinstance(returned, int) else 0)


@click.group(cls=_OneLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="jacstore")
def main() -> None:
    """Per-example Jacobians computed once, stored, and turned into kernels.

    Running the same command again continues it.
    """


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there."),
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("--quiet", is_flag=True, help="No progress on stderr."),
    ):
        command = option(command)
    return command


def _starting(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")(command)
    return click.option("--overwrite", is_flag=True, help="Delete what is there and start anew.")(command)


def _run(
    work: Callable[[_Lines, _Stop], dict[str, Any]],
    text: Callable[[dict[str, Any]], str],
    shared: dict[str, Any],
    judge: Callable[[dict[str, Any]], str] = lambda report: "",
) -> None:
    """Do the work, print its report; turn errors, and what `judge` says of it, into one line and an exit code."""
    stop, lines = _Stop(), _Lines(shared["quiet"])
    stop.install()
    try:
        report = work(lines, stop)
        lines.close()
        click.echo(json.dumps(_plain(report)) if shared["as_json"] else text(report))
        if judge(report):
            raise Damaged(judge(report))
    except JacstoreError as error:
        lines.close()
        _fail(error, error.exit_code, shared["debug"], stop)
    except KeyboardInterrupt as error:
        lines.close()
        _fail(error, 130, shared["debug"], stop)
    except BrokenPipeError:
        sys.exit(0)
    except MemoryError as error:
        lines.close()
        given = RuntimeError(f"not enough memory: {error}; give less --memory, smaller tiles or units, or free some")
        _fail(given.with_traceback(error.__traceback__), 2, shared["debug"], stop)
    except Exception as error:
        lines.close()
        if stop():
            _fail(error, 130, shared["debug"], stop)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        problem = RuntimeError(
            f"{type(error).__name__}: {error}{notes}; this is a fault in jacstore or its surroundings"
        )
        _fail(problem.with_traceback(error.__traceback__), 2, shared["debug"], stop)


def _fail(error: BaseException, code: int, debug: bool, stop: _Stop) -> None:
    if debug:
        import traceback

        traceback.print_exception(error)
    message = _short(str(error))
    if code == 130:
        message = f"{stop.received or 'SIGINT'}: {message or 'interrupted'}; to continue: {_command_line()}"
    click.echo(f"jacstore: {message}", err=True)
    sys.exit(code)


def _short(message: str) -> str:
    """One line, in which no word is longer than a long path."""
    words = message.split()
    return " ".join(word if len(word) <= LONGEST_WORD else word[:LONGEST_WORD] + "…" for word in words)


def _command_line() -> str:
    import shlex

    # --overwrite would start anew what is to be continued.
    return "jacstore " + shlex.join(word for word in sys.argv[1:] if word != "--overwrite")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no NumPy numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return value.item()
    return value


@main.command()
@click.argument("target")
@click.option("--out", required=True, metavar="STORE", help="Folder of the store.")
@click.option("--memory", metavar="SIZE", help="Host memory to use, such as 8GB. [default: half of what is available]")
@click.option("--device-memory", metavar="SIZE", help="Accelerator memory to use. [default: three quarters of it]")
@click.option(
    "--dtype", default="float32", show_default=True, help="float32, bfloat16, float16 or float64: what is stored."
)
@click.option("--layout", default="auto", show_default=True, help="auto, dense or factored.")
@click.option("--batch-size", type=int, metavar="N", help="Examples a device pass. [default: from the memory]")
@click.option("--output-batch", type=int, metavar="N", help="Outputs a device pass. [default: from the memory]")
@click.option(
    "--unit-size", type=int, metavar="N", help="Examples a unit, the piece that is resumed. [default: from the memory]"
)
@click.option("--codec", default="auto", show_default=True, help="auto, none, lz4 or zstd.")
@click.option("--examples", metavar="A:B", help="Only these examples; they define the N of the store.")
@click.option("--part", metavar="I/N", help="Only part I of N, counted from 1; parts may run anywhere, in any order.")
@click.option("--allow-nonfinite", is_flag=True, help="Store rows that hold NaN or infinity instead of stopping.")
@_starting
@_common
def build(target: str, out: str, dry_run: bool, as_json: bool, debug: bool, quiet: bool, **options: Any) -> None:
    """Compute the Jacobian rows of TARGET and store them.

    TARGET is path/to/file.py:name or package.module:name, a Problem or a function returning one; name defaults to
    "problem".
    """

    def work(lines: _Lines, stop: _Stop) -> dict[str, Any]:
        import jacstore
        from jacstore.builder import plan_build

        problem = jacstore.load_target(target)
        if dry_run:
            overwrite, allow = options.pop("overwrite"), options.pop("allow_nonfinite")
            del overwrite, allow
            return plan_build(problem, out, **options)
        return jacstore.build(problem, out, listener=lines, stop=stop, **options).report

    _run(work, _text_plan_build if dry_run else _text_build, {"as_json": as_json, "debug": debug, "quiet": quiet})


@main.command()
@click.argument("store")
@click.argument("other", required=False)
@click.option("--out", required=True, metavar="KERNEL", help="Folder of the kernel.")
@click.option(
    "--memory", metavar="SIZE", help="Host memory for all workers together. [default: half of what is available]"
)
@click.option("--device-memory", metavar="SIZE", help="Accelerator memory to use. [default: three quarters of it]")
@click.option("--mode", default="full", show_default=True, help="full, trace (sum over outputs), diagonal or blocks.")
@click.option("--dtype", default="float64", show_default=True, help="float64 or float32: type of the stored kernel.")
@click.option("--precision", help="float64, float32 or fast (16-bit or TF32 products). [default: from the store]")
@click.option("--engine", default="auto", show_default=True, help="auto, blas or xla.")
@click.option("--tile", type=int, metavar="N", help="Edge of a kernel tile in examples. [default: from the memory]")
@click.option("--by-leaf", is_flag=True, help="Keep one kernel for each parameter leaf.")
@click.option("--triangle", is_flag=True, help="Store only tiles on and above the diagonal.")
@click.option("--exact-diagonal", is_flag=True, help="Put norms taken before rounding on the diagonal.")
@click.option("--part", metavar="I/N", help="Only part I of N of the items, counted from 1.")
@click.option("--scheduler", default="threads", show_default=True, help="threads, processes or tcp://HOST:PORT.")
@click.option("--workers", type=int, metavar="N", help="Processes to share the work. [default: as many as there are]")
@_starting
@_common
def gram(
    store: str, other: str | None, out: str, dry_run: bool, as_json: bool, debug: bool, quiet: bool, **options: Any
) -> None:
    """Assemble the kernel J Jᵀ of STORE, or the rectangular kernel between STORE and OTHER."""

    def work(lines: _Lines, stop: _Stop) -> dict[str, Any]:
        from jacstore import assembly

        if dry_run:
            del options["overwrite"]
            return assembly.plan_for(store, other, out, **options)
        return assembly.gram(store, other, out, listener=lines, stop=stop, **options).report

    _run(work, _text_plan_gram if dry_run else _text_gram, {"as_json": as_json, "debug": debug, "quiet": quiet})


@main.command()
@click.argument("path")
@_common
def info(path: str, as_json: bool, debug: bool, quiet: bool) -> None:
    """Say what a store or kernel holds and whether it is complete.

    Exit code 3 if a record is damaged; what it is about counts as missing.
    """

    def work(lines: _Lines, stop: _Stop) -> dict[str, Any]:
        import jacstore

        return jacstore.open(path).info()

    _run(work, _text_info, {"as_json": as_json, "debug": debug, "quiet": quiet}, judge=_damaged_records)


@main.command()
@click.argument("path")
@click.option(
    "--target", metavar="TARGET", help="What a store should be of: compare fingerprint and inputs, recompute rows."
)
@click.option(
    "--store", multiple=True, metavar="STORE", help="A kernel's store, if it was moved; twice for a rectangular one."
)
@click.option(
    "--samples", type=int, default=32, show_default=True, metavar="N", help="Random rows or entries to recompute."
)
@click.option("--full", is_flag=True, help="Recompute every row (with --target), every entry of a kernel.")
@click.option("--memory", metavar="SIZE", help="Host memory to use, such as 8GB. [default: half of what is available]")
@_common
def verify(
    path: str,
    target: str | None,
    store: tuple[str, ...],
    samples: int,
    full: bool,
    memory: str | None,
    as_json: bool,
    debug: bool,
    quiet: bool,
) -> None:
    """Check every byte of a store or kernel, and its numbers against what they should be.

    Exit code 3 if a check fails; the next build or gram then recomputes just what is wrong.
    """

    def work(lines: _Lines, stop: _Stop) -> dict[str, Any]:
        import jacstore

        found = jacstore.verify(path, target, list(store) or None, samples=samples, full=full, memory=memory)
        return found.to_dict()

    _run(work, _text_verify, {"as_json": as_json, "debug": debug, "quiet": quiet}, judge=_first_failure)


@main.command()
@click.argument("kernel")
@click.argument("cross")
@click.option("--labels", required=True, metavar="FILE", help="A .npy file of integer classes (N,) or targets (N, K).")
@click.option(
    "--alpha", required=True, metavar="A[,A...]", help="Added to the diagonal; of several the best by leave-one-out."
)
@click.option("--out", required=True, metavar="FILE", help="The .npy file of predictions to write.")
@click.option(
    "--from-network", is_flag=True, help="Fit what the stored outputs leave of the targets, and add outputs again."
)
@click.option("--memory", metavar="SIZE", help="Memory to use, such as 8GB. [default: half of what is available]")
@_common
def predict(
    kernel: str, cross: str, labels: str, out: str, as_json: bool, debug: bool, quiet: bool, **options: Any
) -> None:
    """Kernel ridge regression: fit labels on KERNEL, predict at other examples.

    KERNEL is that of a store of mode full or trace, CROSS the one between other examples and these, made by
    "jacstore gram OTHER STORE --out CROSS". Predictions of classes are a score for each class.
    """

    def work(lines: _Lines, stop: _Stop) -> dict[str, Any]:
        from jacstore import prediction

        return _with_warnings(lambda: prediction.predict(kernel, cross, labels, out, **options))

    _run(work, _text_predict, {"as_json": as_json, "debug": debug, "quiet": quiet})


@main.command()
@click.argument("kernel")
@click.option("--top", type=int, default=10, show_default=True, metavar="N", help="Eigenvalues to print.")
@click.option(
    "--alpha",
    metavar="A[,A...]",
    help="Where to take the effective dimension. [default: 1e-2, 1e-4, 1e-6 of the largest eigenvalue]",
)
@click.option("--memory", metavar="SIZE", help="Memory to use, such as 8GB. [default: half of what is available]")
@_common
def spectrum(
    kernel: str, top: int, alpha: str | None, memory: str | None, as_json: bool, debug: bool, quiet: bool
) -> None:
    """Eigenvalues of KERNEL, of mode full or trace, and its effective dimension, the sum of lam / (lam + alpha)."""

    def work(lines: _Lines, stop: _Stop) -> dict[str, Any]:
        from jacstore.factoring import describe_spectrum
        from jacstore.prediction import parse_alphas

        alphas = None if alpha is None else parse_alphas(alpha)
        return _with_warnings(lambda: describe_spectrum(kernel, top, alphas, memory))

    _run(work, _text_spectrum, {"as_json": as_json, "debug": debug, "quiet": quiet})


@main.command()
@click.argument("store")
@click.argument("kernel", required=False)
@click.option("--alpha", type=float, required=True, metavar="A", help="Prior precision.")
@click.option("--n", type=int, required=True, metavar="N", help="Number of samples.")
@click.option("--key", type=int, required=True, metavar="KEY", help="Integer that decides the noise.")
@click.option("--out", required=True, metavar="FILE.npy", help="File for the samples (N, P).")
@click.option("--likelihood", default="gaussian", show_default=True, help="gaussian or softmax.")
@click.option("--method", default="auto", show_default=True, help="ggn, perturb, cg, eigh, lanczos, ciq-dual, ...")
@click.option("--error", type=float, metavar="E", help="Wanted relative error of cg, lanczos and ciq. [default: 1e-4]")
@click.option("--q", type=int, metavar="Q", help="Quadrature points of ciq. [default: from the error]")
@click.option("--memory", metavar="SIZE", help="Host memory to use, such as 8GB. [default: half of what is available]")
@click.option("--precision", help="float64 or float32: type of the products with J. [default: from the store]")
@click.option("--overwrite", is_flag=True, help="Delete what is there and start anew.")
@_common
def sample(store: str, kernel: str | None, as_json: bool, debug: bool, quiet: bool, **options: Any) -> None:
    """Draw samples of the Laplace posterior of STORE and its KERNEL, as deviations from the parameters.

    Without KERNEL the store alone is used.
    """

    def work(lines: _Lines, stop: _Stop) -> dict[str, Any]:
        import jacstore
        from jacstore.store import open_store

        started = time.monotonic()
        opened = open_store(store)
        found = jacstore.sample(opened, kernel, listener=lines, stop=stop, **options)
        return {
            "file": options["out"],
            "samples": found.shape[0],
            "parameters": found.shape[1],
            "passes": opened.decoded_bytes_read / opened.bytes_decoded,
            "seconds_total": time.monotonic() - started,
        }

    _run(work, _text_sample, {"as_json": as_json, "debug": debug, "quiet": quiet})


def _with_warnings(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do it; what it warns of is a line each on stderr."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        report = work()
    for warning in caught:
        click.echo(f"jacstore: warning: {warning.message}", err=True)
    return report


def _size(number: float) -> str:
    from jacstore.machine import format_size

    return format_size(number)


def _rows(r: dict[str, Any]) -> str:
    return f"{r['examples']:,} examples x {r['outputs']} outputs x {r['parameters']:,} parameters"


def _text_build(r: dict[str, Any]) -> str:
    state = "complete" if r["complete"] else "part done, others are missing"
    saved = f" in {r['seconds_total']:.1f} s ({r['seconds_compile']:.1f} s compiling)" if r["units_computed"] else ""
    return (
        f"{r['store']}: {_rows(r)}, "
        f"{_size(r['bytes_stored'])} (float32 rows: {_size(r['bytes_dense'])}), {state}\n"
        f"{r['units_computed']} units computed, {r['units_reused']} reused of {r['units_total']}{saved}"
    )


def _text_gram(r: dict[str, Any]) -> str:
    state = "complete" if r["complete"] else "part done, others are missing"
    done = ""
    if r["items_computed"]:
        done = (
            f" in {r['seconds_total']:.1f} s, {r['passes']:.2f} passes over J ({_size(r['bytes_read'])}), "
            f"{r['flops'] / max(r['seconds_compute'], 1e-9) / 1e9:.0f} GFLOP/s with {r['engine']}"
        )
    return (
        f"{r['kernel']}: {r['rows']:,} x {r['columns']:,}, mode {r['mode']}, {state}\n"
        f"{r['tiles_computed']} tiles computed, {r['tiles_reused']} reused of {r['tiles_total']}{done}"
    )


def _text_plan_build(r: dict[str, Any]) -> str:
    verdict = (
        "storing pays" if r["storing_pays"] else "storing does not pay: --out memory:// or jacstore.ntk may be faster"
    )
    return "\n".join(
        [
            f"{_rows(r)} in {r['leaves']} leaves",
            f"to store      {_size(r['bytes_to_store'])} before compression (codec {r['codec']}), "
            f"{_size(r['bytes_free'])} free",
            f"files         {r['files']:,} in {r['units_total']:,} units of {r['unit_size']:,} examples",
            f"device pass   {r['batches']:,} batches of {r['batch_size']} examples x {r['output_batch']} outputs, "
            f"{_size(r['device_pass_bytes'])}",
            f"memory        {_size(r['memory'])}",
            f"expected      {r['expected_seconds_device']:.3g} s device, {r['expected_seconds_write']:.3g} s writing "
            f"at 500 MB/s, {r['expected_seconds_compile']:.3g} s compiling; they overlap",
            *_leaf_lines(r["terms"]),
            f"against it    a kernel without a store computes J {r['recompute_passes']:.1f} times in this memory: "
            f"{r['expected_seconds_recompute']:.3g} s against {r['expected_seconds_store']:.3g} s: {verdict}",
        ]
    )


def _text_plan_gram(r: dict[str, Any]) -> str:
    shape = " x ".join(f"{n:,}" for n in r["shape"])
    return "\n".join(
        [
            f"{shape}, mode {r['mode']}, {r['precision']} products with {r['engine']}",
            f"schedule      {r['schedule']}: {r['passes']:.2f} passes over J, {_size(r['bytes_read'])} read",
            f"to store      {_size(r['bytes_to_store'])} in {r['files']:,} files, {_size(r['bytes_free'])} free",
            f"memory        {_size(r['memory'])}",
            f"work          {r['flops']:.3g} flop in {r['items_total']:,} items, {r['tiles_total']:,} tiles of "
            f"{r['tile']:,} examples, slabs of {r['slab_columns']:,} columns",
            f"expected      {r['expected_seconds']:.3g} s at {r['expected_flops_per_second'] / 1e9:.0f} GFLOP/s; "
            f"a kill loses at most about {r['expected_seconds_lost_by_a_kill']:.3g} s",
        ]
    )


def _text_verify(r: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    width = max(len(check["name"]) for check in r["checks"])
    lines = [f"{'check':{width}}  {'':7}  {'figure':>10}  {'bound':>10}"]
    for check in r["checks"]:
        figure, bound = number(check["figure"]), number(check["bound"])
        lines.append(
            f"{check['name']:{width}}  {check['state']:7}  {figure:>10}  {bound:>10}  {check['where']}".rstrip()
        )
    count = {state: sum(check["state"] == state for check in r["checks"]) for state in ("ok", "failed", "skipped")}
    counts = ", ".join(f"{n} {state}" for state, n in count.items() if n)
    lines.append(f"{r['path']}: {r['kind']}, {counts} in {r['seconds_total']:.1f} s")
    if r["to_recompute"]:
        again = "build" if r["kind"] == "store" else "gram"
        shown = ", ".join(r["to_recompute"][:5]) + (", …" if len(r["to_recompute"]) > 5 else "")
        lines.append(f"running the same {again} again recomputes {shown}")
    return "\n".join(lines)


def _first_failure(r: dict[str, Any]) -> str:
    failed = [check for check in r["checks"] if check["state"] == "failed"]
    return f"{r['path']}: {failed[0]['name']} failed: {failed[0]['where']}" if failed else ""


def _leaf_lines(table: list[dict[str, Any]]) -> list[str]:
    """For each leaf its terms, why these, and what is stored for an example instead of its rows."""
    width = max(len(leaf["path"]) for leaf in table)
    return [
        "leaves: terms, numbers an example against those of rows",
        *(
            f"  {leaf['path']:{width}}  {'x'.join(map(str, leaf['shape'])):>16}  {'+'.join(leaf['terms']):10} "
            f"{leaf['numbers']:>12,} of {leaf['numbers_dense']:>12,}  {leaf['why']}"
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


def _damaged_records(r: dict[str, Any]) -> str:
    of_store = "store" in r
    damaged = r["units_damaged" if of_store else "groups_damaged"]
    if not damaged:
        return ""
    what, path, command = ("unit", r["store"], "build") if of_store else ("group of tiles", r["kernel"], "gram")
    numbers = ", ".join(map(str, damaged[:5])) + (" and others" if len(damaged) > 5 else "")
    return (
        f"{path}: damaged is the record of {what} {numbers}; run the same {command} again to recompute what it is about"
    )


def _text_info(r: dict[str, Any]) -> str:
    if "store" in r:
        lines = [
            f"{r['store']}: store, {_rows(r)}",
            f"{r['dtype']}, codecs {', '.join(r['codecs'])}, {_size(r['bytes_stored'])} "
            f"(float32 rows: {_size(r['bytes_dense'])})",
            f"{'complete' if r['complete'] else 'incomplete'}: {r['units_done']} of {r['units_total']} units",
            f"zero rows: {r['zero_rows']}, examples with NaN or infinity: {len(r['nonfinite_examples'])}",
            _error_line(r["numerics"]),
            *_leaf_lines(r["leaves"]),
        ]
        if r["left_out"]:
            lines += ["left out:", *(f"  {path}  {why}" for path, why in r["left_out"])]
        return "\n".join(lines)
    return "\n".join(
        [
            f"{r['kernel']}: kernel, mode {r['mode']}, {' x '.join(f'{n:,}' for n in r['shape'])}, {r['dtype']}",
            f"{r['precision']} products with {r['engine']}, {r['schedule']}, {_size(r['bytes_stored'])}",
            f"{'complete' if r['complete'] else 'incomplete'}: {r['tiles_done']} of {r['tiles_total']} tiles",
            _error_line(r["numerics"]) + (", exact norms on the diagonal" if r["exact_diagonal"] else ""),
            f"from {', '.join(r['stores'])}",
        ]
    )


def _text_predict(r: dict[str, Any]) -> str:
    chosen = f" (best of {len(r['alphas'])} by leave-one-out)" if len(r["alphas"]) > 1 else ""
    accuracy = "" if r["loo_accuracy"] is None else f", accuracy {r['loo_accuracy']:.1%}"
    return (
        f"{r['predictions']}: {r['predicted']:,} x {r['columns']} predictions from {r['examples']:,} examples, "
        f"alpha {r['alpha']:.4g}{chosen}\n"
        f"leave-one-out: mean squared error {r['loo_error']:.4g}{accuracy}"
    )


def _text_sample(r: dict[str, Any]) -> str:
    return (
        f"{r['file']}: {r['samples']:,} samples of {r['parameters']:,} parameters, {r['passes']:.2f} passes over J "
        f"in {r['seconds_total']:.1f} s"
    )


def _text_spectrum(r: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"{r['kernel']}: {r['rows']:,} rows, trace {r['trace']:.6g}",
            *(f"eigenvalue {n:>5}  {value:.6g}" for n, value in enumerate(r["eigenvalues"], start=1)),
            f"smallest          {r['smallest']:.6g}",
            *(
                f"effective dimension {one['dimension']:.6g} at alpha {one['alpha']:.4g}"
                for one in r["effective_dimension"]
            ),
        ]
    )
