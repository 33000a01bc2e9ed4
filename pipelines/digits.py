"""Build a network's store and its NTK on scikit-learn's digits, 8 x 8 pixels, and predict with kernel regression.

Run `python pipelines/digits.py`; run it again and everything is reused. `jacstore build pipelines/digits.py --out
digits.jac` stores the same Jacobian from the command line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
from sklearn.datasets import load_digits

import common
import jacstore

OUT = Path("digits-run")
TEST = 597
RIDGE = 1e-4


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the pipeline and return the test accuracies."""
    parser = argparse.ArgumentParser(description="Kernel ridge regression on the NTK of a network trained on digits.")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="folder for everything (%(default)s)")
    parser.add_argument(
        "--examples", type=int, default=500, metavar="N", help="to train on, at most 1200 (%(default)s)"
    )
    parser.add_argument("--memory", default="2GB", metavar="SIZE", help="for build and gram (%(default)s)")
    parser.add_argument(
        "--leave-one-out", type=int, default=0, metavar="N", help="also leave-one-out, against refitting on N examples"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try that it runs")
    options = parser.parse_args(argv)
    if options.small:
        options.examples = min(options.examples, 40)
    settings = settings_for(options.examples, small=options.small)
    return common.run(
        out=options.out,
        settings=settings,
        initial=initial(settings.seed),
        apply=apply,
        data=digits(options.examples, 20 if options.small else TEST),
        outputs="all",
        memory=options.memory,
        ridge=RIDGE,
        refitted=options.leave_one_out,
    )


def problem() -> jacstore.Problem:
    """Return the problem that `main` builds, with the parameters of an earlier run when there was one."""
    data, settings = digits(500, TEST), settings_for(500)
    params, _ = common.trained(OUT, settings, initial(settings.seed), apply, data)
    return jacstore.Problem(apply=apply, params=params, inputs=data.train)


def settings_for(examples: int, small: bool = False) -> common.Settings:
    """Return what decides the training."""
    return common.Settings(data="digits", net="cnn", examples=examples, epochs=3 if small else 60)


def digits(examples: int, test: int) -> common.Data:
    """Return `examples` and `test` digits `(8, 8)` in [0, 1], drawn from disjoint parts of a fixed permutation."""
    images, labels = load_digits(return_X_y=True)
    most = len(images) - TEST
    if not 2 <= examples <= most:
        raise SystemExit(f"--examples {examples}: give 2 to {most}")
    order = np.random.default_rng(0).permutation(len(images))
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    kept, held_out = order[:examples], order[most : most + test]
    return common.Data(
        train=images[kept], train_labels=labels[kept], test=images[held_out], test_labels=labels[held_out]
    )


def initial(seed: int) -> common.Params:
    """Return the parameters before training, 18,346 of them."""
    rng = np.random.default_rng(seed)
    return {
        "conv1": common.conv_init(rng, 1, 8),
        "conv2": common.conv_init(rng, 8, 16),
        "dense1": common.dense_init(rng, 256, 64),
        "dense2": common.dense_init(rng, 64, 10),
    }


def apply(params: common.Params, image: jax.Array) -> jax.Array:
    """Map one image `(8, 8)` to ten outputs."""
    x = jax.nn.relu(common.conv(params["conv1"], image[..., None]))
    x = common.pool(jax.nn.relu(common.conv(params["conv2"], x)))
    x = jax.nn.relu(common.dense(params["dense1"], x.reshape(-1)))
    return common.dense(params["dense2"], x)


if __name__ == "__main__":
    common.leave(main)
