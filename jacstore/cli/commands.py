"""The commands: each turns its flags into the same call as from Python; terminal.py does the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from jacstore.cli import text
from jacstore.cli.terminal import Lines, OneLineErrors, Shared, Stop, Words, common, run, with_warnings

# The words of flags. tests/test_cli.py compares them with what the modules allow, which take seconds to import.
DTYPES = Words("float32", "bfloat16", "float16", "float64")
LAYOUTS = Words("auto", "dense", "factored")
CODECS = Words("auto", "none", "lz4", "zstd")
MODES = Words("full", "trace", "diagonal", "blocks")
KERNEL_DTYPES = Words("float64", "float32")
PRECISIONS = Words("float64", "float32", "bf16x9", "bf16x6", "bf16x3", "tf32", "fast")
PRODUCT_PRECISIONS = Words("float64", "float32")
ENGINES = Words("auto", "blas", "xla")
LIKELIHOODS = Words("gaussian", "softmax")
METHODS = Words("auto", "perturb", "cg", "eigh", "lanczos", "ciq-dual", "ciq-primal", "ggn")

# What the same command does after a signal, where it keeps nothing unfinished.
ANEW = "to start over"


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="jacstore")
def main() -> None:
    """Per-example Jacobians computed once, stored, and turned into kernels.

    Running the same command again continues it.
    """


def _starting(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")(command)
    return click.option("--overwrite", is_flag=True, help="Delete what is there and start over.")(command)


def _keeping(command: Callable[..., Any]) -> Callable[..., Any]:
    words = 'Whether to keep the factorization in the folder of KERNEL for later runs; "jacstore clean" removes it.'
    return click.option("--keep/--no-keep", default=True, show_default=True, help=words)(command)


@main.command()
@click.argument("target")
@click.option("--out", required=True, metavar="STORE", help="Folder of the store.")
@click.option("--memory", metavar="SIZE", help="Host memory to use, such as 8GB. [default: half of what is available]")
@click.option("--device-memory", metavar="SIZE", help="Accelerator memory to use. [default: three quarters of it]")
@click.option("--dtype", type=DTYPES, default="float32", show_default=True, help="Type of the stored rows and factors.")
@click.option(
    "--layout", type=LAYOUTS, default="auto", show_default=True, help="Store rows, or factors where possible."
)
@click.option("--batch-size", type=int, metavar="N", help="Examples per device pass. [default: from the memory]")
@click.option("--output-batch", type=int, metavar="N", help="Outputs per device pass. [default: from the memory]")
@click.option(
    "--unit-size", type=int, metavar="N", help="Examples per unit, the part that is resumed. [default: from the memory]"
)
@click.option("--codec", type=CODECS, default="auto", show_default=True, help="Compression. auto measures which pays.")
@click.option("--examples", metavar="A:B", help="Only these examples; they define the N of the store.")
@click.option("--part", metavar="I/N", help="Only part I of N, counted from 1; parts may run anywhere, in any order.")
@click.option("--devices", metavar="all|N|I,J", help="Devices that compute batches in turn. [default: all]")
@click.option("--allow-nonfinite", is_flag=True, help="Store rows that hold NaN or infinity instead of stopping.")
@_starting
@common
def build(shared: Shared, target: str, out: str, dry_run: bool, **options: Any) -> None:
    """Compute the Jacobian rows of TARGET and store them.

    TARGET is path/to/file.py:name or package.module:name, a Problem or a function returning one; name defaults to
    "problem". For PyTorch it is a jacstore.torch.TorchProblem.
    """

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
        import jacstore
        from jacstore.problem.torch_problem import TorchProblem
        from jacstore.rows.build import plan_build

        problem = jacstore.load_target(target)
        if isinstance(problem, TorchProblem):
            return _build_torch(problem, out, dry_run, listener=lines, stop=stop, **options)
        if dry_run:
            del options["allow_nonfinite"]
            return plan_build(problem, out, **options)
        return with_warnings(lambda: jacstore.build(problem, out, listener=lines, stop=stop, **options).report)

    run(work, text.plan_build if dry_run else text.build, shared)


def _build_torch(problem: Any, out: str, dry_run: bool, **options: Any) -> dict[str, Any]:
    """Build from a PyTorch module; that build chooses by itself what the options refused here would set."""
    from jacstore import torch
    from jacstore.errors import InvalidRequestError

    given = {name: options.pop(name) for name in ("device_memory", "output_batch", "codec", "examples", "devices")}
    given |= {"codec": None if given["codec"] in ("auto", "none") else given["codec"], "dry_run": dry_run or None}
    for name, value in given.items():
        if value is not None:
            raise InvalidRequestError(
                f"--{name.replace('_', '-')}: not allowed where TARGET is a TorchProblem; leave it out"
            )
    return torch.build(problem, out=out, **options).report


@main.command()
@click.argument("store")
@click.argument("other", required=False)
@click.option("--out", required=True, metavar="KERNEL", help="Folder of the kernel.")
@click.option(
    "--memory", metavar="SIZE", help="Host memory for all workers together. [default: half of what is available]"
)
@click.option("--device-memory", metavar="SIZE", help="Accelerator memory to use. [default: three quarters of it]")
@click.option(
    "--mode",
    type=MODES,
    default="full",
    show_default=True,
    help="All entries, their sum over outputs, one kernel per output, or each example with itself.",
)
@click.option("--dtype", type=KERNEL_DTYPES, default="float64", show_default=True, help="Type of the stored kernel.")
@click.option(
    "--precision",
    type=PRECISIONS,
    help="Type of the products; bf16x3 to bf16x9 split float32 into bfloat16, fast means 16-bit or TF32. "
    "[default: from the store]",
)
@click.option("--engine", type=ENGINES, default="auto", show_default=True, help="What multiplies: BLAS or JAX's XLA.")
@click.option("--tile", type=int, metavar="N", help="Edge of a kernel tile in examples. [default: from the memory]")
@click.option("--by-leaf", is_flag=True, help="Keep one kernel per parameter leaf.")
@click.option("--triangle", is_flag=True, help="Store only tiles on and above the diagonal.")
@click.option("--exact-diagonal", is_flag=True, help="Put the norms computed before rounding on the diagonal.")
@click.option("--part", metavar="I/N", help="Only part I of N of the items, counted from 1.")
@click.option("--scheduler", default="threads", show_default=True, help="threads, processes or tcp://HOST:PORT.")
@click.option("--workers", type=int, metavar="N", help="Processes to share the work. [default: as many as there are]")
@click.option("--devices", metavar="all|N|I,J", help="Devices that multiply, with --engine xla. [default: all]")
@_starting
@common
def gram(shared: Shared, store: str, other: str | None, out: str, dry_run: bool, **options: Any) -> None:
    """Assemble the kernel J Jᵀ of STORE, or the rectangular kernel between STORE and OTHER."""

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
        from jacstore.kernels import gram as assembly

        if dry_run:
            return assembly.plan_for(store, other, out, **options)
        return assembly.gram(store, other, out, listener=lines, stop=stop, **options).report

    run(work, text.plan_gram if dry_run else text.gram, shared)


@main.command()
@click.argument("path")
@common
def info(shared: Shared, path: str) -> None:
    """Show what a store or kernel holds and whether it is complete.

    Exit code 3 if a record is damaged; the unit or tiles it describes count as missing.
    """

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
        import jacstore

        return jacstore.open(path).info()

    run(work, text.info, shared, judge=text.damaged_records)


@main.command()
@click.argument("kernel")
@common
def clean(shared: Shared, kernel: str) -> None:
    """Remove the factorizations that predict and sample keep in the folder of KERNEL to save time.

    The kernel stays as it is, and what was removed is computed again when it is needed.
    """

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
        import jacstore

        removed = [asdict(kept) for kept in jacstore.clean(kernel)]
        return {"kernel": kernel, "removed": removed, "bytes_freed": sum(kept["bytes"] for kept in removed)}

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

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
        import jacstore

        found = jacstore.verify(path, target, list(store) or None, samples=samples, full=full, memory=memory)
        return found.to_dict()

    run(work, text.verify, shared, judge=text.first_failure, at_once=ANEW)


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

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
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

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
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

    def work(lines: Lines, stop: Stop) -> dict[str, Any]:
        import jacstore
        from jacstore.store.reader import open_store

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

    run(work, text.sample, shared, at_once="to continue")
