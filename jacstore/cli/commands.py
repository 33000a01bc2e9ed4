"""The commands: each turns its flags into the same call as from Python; `terminal` does the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from jacstore.cli import text
from jacstore.cli.config import configured
from jacstore.cli.flags import flags_of
from jacstore.cli.reports import CleanReport, PredictReport, SampleReport
from jacstore.cli.terminal import (
    Lines,
    OneLineErrors,
    Shared,
    Stop,
    Words,
    WordsOf,
    common,
    interruptible,
    run,
    with_warnings,
)
from jacstore.kernels.plan.options import GramOptions
from jacstore.rows.options import BuildOptions

if TYPE_CHECKING:
    from jacstore.inference.factorize import SpectrumReport
    from jacstore.reporting.listing import Comparison, Listing
    from jacstore.reporting.page import PageReport

# The words of flags whose modules take long to import; tests/cli/test_cli.py compares them with what those allow.
LIKELIHOODS = WordsOf("operators.likelihoods", "LIKELIHOODS")
PRODUCT_PRECISIONS = Words("float64", "float32")
METHODS = Words("auto", "perturb", "cg", "eigh", "lanczos", "ciq-dual", "ciq-primal", "ggn")

# What the same command does after a signal if it keeps no unfinished work.
ANEW = "to start over"


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="jacstore")
def main() -> None:
    """Per-example Jacobians computed once, stored, and turned into kernels.

    Running the same command again continues it.
    """


def _planned(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")(command)


def _keeping(command: Callable[..., Any]) -> Callable[..., Any]:
    words = 'Whether to keep the factorization in the folder of KERNEL for later runs; "jacstore clean" removes it.'
    return click.option("--keep/--no-keep", default=True, show_default=True, help=words)(command)


@main.command()
@click.argument("target")
@click.option("--out", required=True, metavar="STORE", help="Folder of the store.")
@flags_of(BuildOptions)
@_planned
@configured
@common
def build(shared: Shared, target: str, out: str, dry_run: bool, config: dict[str, Any] | None, **options: Any) -> None:
    """Compute the Jacobian rows of TARGET and store them.

    TARGET is path/to/file.py:name or package.module:name, a Problem or a function returning one; name defaults to
    "problem". For PyTorch it is a jacstore.torch.TorchProblem.
    """

    def work(lines: Lines, stop: Stop) -> Any:
        import jacstore
        from jacstore.problem.torch_problem import TorchProblem
        from jacstore.rows.build import plan_build

        problem = _loaded(target, stop)
        if isinstance(problem, TorchProblem):
            return _keep(config, _build_torch(problem, out, dry_run, listener=lines, stop=stop, **options)).built
        if dry_run:
            return plan_build(problem, out, **options)
        store = with_warnings(lambda: jacstore.build(problem, out, listener=lines, stop=stop, **options))
        return _keep(config, store).built

    run(work, text.plan_build if dry_run else text.build, shared)


def _loaded(target: str, stop: Stop) -> Any:
    """The Problem or TorchProblem that a target names."""
    import jacstore

    with stop.unasked():
        return jacstore.load_target(target)


def _build_torch(problem: Any, out: str, dry_run: bool, **options: Any) -> Any:
    from jacstore import torch
    from jacstore.errors import InvalidRequestError

    if dry_run:
        raise InvalidRequestError("--dry-run: not allowed where TARGET is a TorchProblem; leave it out")
    return with_warnings(lambda: torch.build(problem, out=out, **options))


def _keep(config: dict[str, Any] | None, result: Any) -> Any:
    """Keep with a store or kernel what a file of settings asked for; returns it."""
    from jacstore.storage.runs import keep_config

    if config is not None:
        keep_config(result.ledger, config)
    return result


@main.command()
@click.argument("store")
@click.argument("other", required=False)
@click.option("--out", required=True, metavar="KERNEL", help="Folder of the kernel.")
@flags_of(GramOptions)
@_planned
@configured
@common
def gram(
    shared: Shared,
    store: str,
    other: str | None,
    out: str,
    dry_run: bool,
    config: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Assemble the kernel J Jᵀ of STORE, or the rectangular kernel between STORE and OTHER."""

    def work(lines: Lines, stop: Stop) -> Any:
        from jacstore.kernels import gram as assembly

        if dry_run:
            return assembly.plan_for(store, other, out, **options)
        return _keep(config, assembly.gram(store, other, out, listener=lines, stop=stop, **options)).assembled

    run(work, text.plan_gram if dry_run else text.gram, shared)


@main.command()
@click.argument("path")
@common
def info(shared: Shared, path: str) -> None:
    """Show what a store or kernel holds and whether it is complete.

    Exit code 3 if a record is damaged; the unit or tiles it describes count as missing.
    """

    def work(lines: Lines, stop: Stop) -> Any:
        import jacstore

        return jacstore.open(path).summary()

    run(work, text.info, shared, judge=text.damaged_records)


@main.command(name="ls")
@click.argument("folder", default=".")
@common
def list_(shared: Shared, folder: str) -> None:
    """List the stores and kernels in FOLDER with their sizes and whether they are complete."""

    def work(lines: Lines, stop: Stop) -> Listing:
        from jacstore.reporting.listing import list_folder

        return list_folder(folder)

    run(work, text.listing, shared)


@main.command()
@click.argument("first")
@click.argument("second")
@common
def diff(shared: Shared, first: str, second: str) -> None:
    """Show what two stores, or two kernels, were asked for differently."""

    def work(lines: Lines, stop: Stop) -> Comparison:
        from jacstore.reporting.listing import compare

        return compare(first, second)

    run(work, text.differences, shared)


@main.command()
@click.argument("kernel")
@common
def clean(shared: Shared, kernel: str) -> None:
    """Remove the factorizations that predict and sample keep in the folder of KERNEL to save time.

    The kernel stays as it is, and what was removed is computed again when it is needed.
    """

    def work(lines: Lines, stop: Stop) -> CleanReport:
        import jacstore

        removed = jacstore.clean(kernel)
        return CleanReport(kernel=kernel, removed=removed, bytes_freed=sum(kept.bytes for kept in removed))

    run(work, text.clean, shared)


@main.command()
@click.argument("path")
@click.option("--target", metavar="TARGET", help="What the store was built from, to compare and recompute rows.")
@click.option(
    "--store",
    multiple=True,
    metavar="STORE",
    help="The kernel's store, if it was moved; twice for a rectangular kernel.",
)
@click.option(
    "--samples", type=int, default=32, show_default=True, metavar="N", help="Random rows or entries to recompute."
)
@click.option("--full", is_flag=True, help="Recompute every row (with --target) or every kernel entry.")
@click.option("--memory", metavar="SIZE", help="Host memory to use, such as 8GB. [default: half of what is available]")
@common
def verify(
    shared: Shared,
    path: str,
    target: str | None,
    store: tuple[str, ...],
    samples: int,
    full: bool,
    memory: str | None,
) -> None:
    """Check every byte of a store or kernel, and its numbers against what they should be.

    Exit code 3 if a check fails; the next build or gram then recomputes just what is wrong.
    """

    def work(lines: Lines, stop: Stop) -> Any:
        import jacstore

        # In the main thread, as in `build`: frameworks handle signals when they are imported, which no other may.
        problem = None if target is None else _loaded(target, stop)

        def check(*_: object) -> Any:
            return jacstore.verify(path, problem, list(store) or None, samples=samples, full=full, memory=memory)

        return interruptible(check, lines, stop, ANEW)

    run(work, text.verify, shared, judge=text.first_failure)


@main.command()
@click.argument("path")
@click.option("--out", required=True, metavar="FILE", help="The .html file to write.")
@click.option("--labels", metavar="FILE", help="A .npy file of integers (N,) that order the examples of the heat map.")
@click.option(
    "--store",
    multiple=True,
    metavar="STORE",
    help="The kernel's store, if it was moved; twice for a rectangular kernel.",
)
@click.option("--verify", is_flag=True, help="Verify first; else the page shows what the last verify found.")
@click.option("--memory", metavar="SIZE", help="For --verify, such as 8GB. [default: half of what is available]")
@common
def report(shared: Shared, path: str, out: str, store: tuple[str, ...], **options: Any) -> None:
    """Write one page about a store or kernel, to open in a browser without a network.

    It shows sizes by leaf, the spectrum with effective dimensions, a heat map, norms and outliers, precision, checks,
    and what past runs took.
    """

    def work(lines: Lines, stop: Stop) -> PageReport:
        import jacstore

        return jacstore.report(path, out, store=list(store) or None, **options)

    run(work, text.report, shared, at_once=ANEW)


@main.command()
@click.argument("kernel")
@click.argument("cross")
@click.option("--labels", required=True, metavar="FILE", help="A .npy file of integer classes (N,) or targets (N, K).")
@click.option(
    "--alpha",
    required=True,
    metavar="A[,A...]",
    help="Added to the diagonal; of several, the best by leave-one-out.",
)
@click.option("--out", required=True, metavar="FILE", help="The .npy file of predictions to write.")
@click.option(
    "--from-network", is_flag=True, help="Fit the targets minus the stored network outputs, and add the outputs back."
)
@_keeping
@click.option("--memory", metavar="SIZE", help="Memory to use, such as 8GB. [default: half of what is available]")
@common
def predict(shared: Shared, kernel: str, cross: str, labels: str, out: str, **options: Any) -> None:
    """Kernel ridge regression: fit labels on KERNEL, predict at other examples.

    KERNEL has mode full or trace. CROSS is the kernel between other examples and those of KERNEL, made by
    "jacstore gram OTHER STORE --out CROSS". For integer classes the predictions are one score per class.
    """

    def work(lines: Lines, stop: Stop) -> PredictReport:
        from jacstore.cli import predict as prediction

        return with_warnings(lambda: prediction.predict(kernel, cross, labels, out, **options))

    run(work, text.predict, shared, at_once=ANEW)


@main.command()
@click.argument("kernel")
@click.option("--top", type=int, default=10, show_default=True, metavar="N", help="Eigenvalues to print.")
@click.option(
    "--alpha",
    metavar="A[,A...]",
    help="Alphas at which to print the effective dimension. [default: 1e-2, 1e-4, 1e-6 of the largest eigenvalue]",
)
@click.option("--memory", metavar="SIZE", help="Memory to use, such as 8GB. [default: half of what is available]")
@common
def spectrum(shared: Shared, kernel: str, top: int, alpha: str | None, memory: str | None) -> None:
    """Print eigenvalues of KERNEL (mode full or trace) and its effective dimension, the sum of lam / (lam + alpha)."""

    def work(lines: Lines, stop: Stop) -> SpectrumReport:
        from jacstore.cli.predict import parse_alphas
        from jacstore.inference.factorize import describe_spectrum

        alphas = None if alpha is None else parse_alphas(alpha)
        return with_warnings(lambda: describe_spectrum(kernel, top, alphas, memory))

    run(work, text.spectrum, shared, at_once=ANEW)


@main.command()
@click.argument("store")
@click.argument("kernel", required=False)
@click.option("--alpha", type=float, required=True, metavar="A", help="Prior precision.")
@click.option("--n", type=int, required=True, metavar="N", help="Number of samples.")
@click.option("--key", type=int, required=True, metavar="KEY", help="Integer seed of the noise.")
@click.option("--out", required=True, metavar="FILE.npy", help="File for the samples (N, P).")
@click.option("--likelihood", type=LIKELIHOODS, default="gaussian", show_default=True, help="Likelihood of the data.")
@click.option("--method", type=METHODS, default="auto", show_default=True, help="How the samples are computed.")
@click.option("--error", type=float, metavar="E", help="Target relative error of cg, lanczos and ciq. [default: 1e-4]")
@click.option("--q", type=int, metavar="Q", help="Quadrature points of ciq. [default: from the error]")
@click.option("--memory", metavar="SIZE", help="Host memory to use, such as 8GB. [default: half of what is available]")
@click.option("--precision", type=PRODUCT_PRECISIONS, help="Type of the products with J. [default: from the store]")
@_keeping
@click.option("--overwrite", is_flag=True, help="Delete what is there and start over.")
@common
def sample(shared: Shared, store: str, kernel: str | None, **options: Any) -> None:
    """Draw samples of the Laplace posterior of STORE and its KERNEL, as deviations from the parameters.

    Without KERNEL only the store is used.
    """

    def work(lines: Lines, stop: Stop) -> SampleReport:
        import jacstore
        from jacstore.store.reader import open_store

        started = time.monotonic()
        opened = open_store(store)
        found = jacstore.sample(opened, kernel, listener=lines, stop=stop, **options)
        return SampleReport(
            file=options["out"],
            samples=found.shape[0],
            parameters=found.shape[1],
            passes=opened.decoded_bytes_read / opened.bytes_decoded,
            seconds_total=time.monotonic() - started,
        )

    run(work, text.sample, shared, at_once="to continue")
