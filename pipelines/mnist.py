"""Make what `digits.py` makes from MNIST, an npz file, for a dense or a convolutional network.

The file holds x_train, y_train, x_test, y_test in uint8. For `jacstore build pipelines/mnist.py --out mnist.jac` the
environment says what the flags say here: MNIST_DATA (a path), MNIST_EXAMPLES, MNIST_NET.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import jax
import numpy as np

import common
import jacstore

OUT = Path("mnist-run")
RIDGE = 1e-4


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the pipeline and return the test accuracies."""
    parser = argparse.ArgumentParser(description="Kernel ridge regression on the NTK of a network trained on MNIST.")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="PATH", help="npz with x_train, y_train, x_test, y_test"
    )
    parser.add_argument("--examples", type=int, default=1000, metavar="N", help="to train on (%(default)s)")
    parser.add_argument("--test-examples", type=int, default=1000, metavar="M", help="to test on (%(default)s)")
    parser.add_argument("--net", choices=sorted(NETS), default="mlp", help="(%(default)s)")
    parser.add_argument("--outputs", choices=("all", "sum"), default="all", help="rows for each example (%(default)s)")
    parser.add_argument("--memory", default="8GB", metavar="SIZE", help="for build and gram (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="folder for everything (%(default)s)")
    parser.add_argument(
        "--leave-one-out", type=int, default=0, metavar="N", help="also leave-one-out, against refitting on N examples"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try that it runs")
    options = parser.parse_args(argv)
    if options.small:
        options.examples, options.test_examples = min(options.examples, 30), min(options.test_examples, 20)
    settings = settings_for(options.net, options.examples, small=options.small)
    initial, apply = NETS[options.net]
    return common.run(
        out=options.out,
        settings=settings,
        initial=initial(settings.seed),
        apply=apply,
        data=mnist(options.data, options.examples, options.test_examples),
        outputs=options.outputs,
        memory=options.memory,
        ridge=RIDGE,
        refitted=options.leave_one_out,
    )


def problem() -> jacstore.Problem:
    """Return the problem that the environment describes, with the parameters of an earlier run when there was one."""
    try:
        path = Path(os.environ["MNIST_DATA"])
    except KeyError:
        raise SystemExit(
            "MNIST_DATA is not set: give the path of an npz with x_train, y_train, x_test, y_test"
        ) from None
    net, examples = os.environ.get("MNIST_NET", "mlp"), int(os.environ.get("MNIST_EXAMPLES", "1000"))
    if net not in NETS:
        raise SystemExit(f"MNIST_NET={net}: give one of {', '.join(sorted(NETS))}")
    data, settings = mnist(path, examples, 1), settings_for(net, examples)
    initial, apply = NETS[net]
    params, _ = common.trained(OUT, settings, initial(settings.seed), apply, data)
    return jacstore.Problem(apply=apply, params=params, inputs=data.train)


def settings_for(net: str, examples: int, small: bool = False) -> common.Settings:
    """Return what decides the training: about 3,000 steps, at least two and at most 100 epochs."""
    epochs = 1 if small else max(2, min(100, 96_000 // max(examples, 1)))
    return common.Settings(data="mnist", net=net, examples=examples, epochs=epochs, rate=1e-3)


def mnist(path: Path, examples: int, test_examples: int) -> common.Data:
    """Return the first examples of each part, `(28, 28)` in [0, 1]."""
    if not path.exists():
        raise SystemExit(f"--data {path}: no such file; give an npz with x_train, y_train, x_test, y_test")
    with np.load(path) as file:
        parts = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    for flag, wanted, part in (("--examples", examples, "x_train"), ("--test-examples", test_examples, "x_test")):
        if not 1 <= wanted <= len(parts[part]):
            raise SystemExit(f"{flag} {wanted}: give 1 to {len(parts[part])}")
    return common.Data(
        train=(parts["x_train"][:examples] / 255).astype(np.float32),
        train_labels=parts["y_train"][:examples].astype(np.int64),
        test=(parts["x_test"][:test_examples] / 255).astype(np.float32),
        test_labels=parts["y_test"][:test_examples].astype(np.int64),
    )


def mnist_or_generated(path: Path | None, examples: int, test_examples: int) -> common.Data:
    """Return `mnist` of a file, or without one generated images of the same shape."""
    return common.generated(examples, test_examples) if path is None else mnist(path, examples, test_examples)


def mlp_initial(seed: int) -> common.Params:
    """Return the parameters before training, 269,322 of them."""
    rng = np.random.default_rng(seed)
    return {
        "dense1": common.dense_init(rng, 784, 256),
        "dense2": common.dense_init(rng, 256, 256),
        "dense3": common.dense_init(rng, 256, 10),
    }


def mlp(params: common.Params, image: jax.Array) -> jax.Array:
    """Map one image `(28, 28)` to ten outputs by dense layers of 256 and 256 units."""
    x = jax.nn.relu(common.dense(params["dense1"], image.reshape(-1)))
    x = jax.nn.relu(common.dense(params["dense2"], x))
    return common.dense(params["dense3"], x)


def cnn_initial(seed: int) -> common.Params:
    """Return the parameters before training, 55,338 of them."""
    rng = np.random.default_rng(seed)
    return {
        "conv1": common.conv_init(rng, 1, 16),
        "conv2": common.conv_init(rng, 16, 32),
        "dense1": common.dense_init(rng, 7 * 7 * 32, 32),
        "dense2": common.dense_init(rng, 32, 10),
    }


def cnn(params: common.Params, image: jax.Array) -> jax.Array:
    """Map one image `(28, 28)` to ten outputs by two convolutions, each with pooling, and two dense layers."""
    x = common.pool(jax.nn.relu(common.conv(params["conv1"], image[..., None])))
    x = common.pool(jax.nn.relu(common.conv(params["conv2"], x)))
    x = jax.nn.relu(common.dense(params["dense1"], x.reshape(-1)))
    return common.dense(params["dense2"], x)


NETS = {"mlp": (mlp_initial, mlp), "cnn": (cnn_initial, cnn)}

if __name__ == "__main__":
    common.leave(main)
