"""Products of convolutions' factors take memory by what is smaller: patches, pixels, or rows of one example."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from helpers_errors import refusal
from jacstore.problem.problem import Problem, prepare
from jacstore.rows.device_pass import DevicePass
from jacstore.rows.trace.cut import cut_before_products
from jacstore.store.norms import stored_norms
from jacstore.testing import dense_rows

OUTPUTS = 4


def stem(size: int, window: int, width: int, stride: int, n: int = 2, groups: int = 1) -> Problem:
    """One convolution over images of `size` by `size` pixels and a head on the mean over positions."""
    draw = np.random.default_rng(0)
    shape = (width, 4 // groups, window, window)
    params = {"head": draw.normal(size=(width, OUTPUTS)), "kernel": draw.normal(size=shape) / window}
    params = jax.tree_util.tree_map(lambda leaf: leaf.astype(np.float32), params)

    def apply(params, x):
        y = jax.lax.conv_general_dilated(x[None], params["kernel"], (stride,) * 2, "SAME", feature_group_count=groups)
        return jnp.tanh(y[0]).mean((1, 2)) @ params["head"]

    return Problem(apply=apply, params=params, inputs=draw.normal(size=(n, 4, size, size)).astype(np.float32))


def device_pass(problem: Problem, **options: int) -> DevicePass:
    prepared = prepare(problem)
    cut = cut_before_products(prepared, "factored", False)
    assert {leaf.terms[0].kind for leaf in cut.leaves} == {"dot", "conv"}
    return DevicePass(
        prepared, cut, stored_dtype="float32", unit_size=2, **{"budget": 10**9, "batch_size": 1} | options
    )


def test_the_device_pass_of_a_patch_stem_never_holds_products_of_all_pixels() -> None:
    assert device_pass(stem(96, 16, 48, 16)).bytes_needed < 96**4  # a quarter of one such product


@pytest.mark.parametrize(("stride", "groups"), [(8, 1), (8, 2), (4, 1), (1, 1), (1, 4)])
def test_norms_and_blocks_are_those_of_rows_however_they_are_formed(stride: int, groups: int) -> None:
    problem = stem(16, 8, 16, stride, groups=groups)
    store = jacstore.build(problem, None, layout="factored", memory="1GB")
    rows = dense_rows(problem)
    rows = np.asarray(rows, np.float64).reshape(2, OUTPUTS, -1)
    blocks = np.einsum("nkp,nlp->nkl", rows, rows)
    found = jacstore.gram(store, mode="blocks", memory="1GB").array.compute(scheduler="synchronous")
    assert np.abs(found - blocks).max() <= 2e-6 * np.abs(blocks).max()
    norms = np.einsum("nkk->nk", blocks)
    assert np.abs(store.norms.sum(-1) - norms).max() <= 2e-6 * norms.max()
    stored = sum(stored_norms(store, leaf, 0, 2, 10**9) for leaf in store.leaves)
    assert np.abs(stored - norms).max() <= 2e-6 * norms.max()


def test_blocks_of_a_large_image_are_planned_by_the_rows_of_one_example() -> None:
    store = jacstore.build(stem(48, 3, 16, 1), None, layout="factored", memory="2GB")
    kernel = jacstore.gram(store, mode="blocks", memory="200MB")
    assert kernel.plan.memory_bytes < 200_000_000 < 8 * (48 * 48 * OUTPUTS) ** 2


def test_a_pass_that_does_not_fit_is_told_nothing_smaller_than_one() -> None:
    text = refusal(device_pass, stem(32, 16, 8, 16), budget=1000, output_batch=1)
    assert "--batch-size" not in text and "--output-batch" not in text and "--memory" in text
    text = refusal(device_pass, stem(32, 16, 8, 16), budget=1000, output_batch=2, batch_size=2)
    assert "--batch-size" in text and "--output-batch" in text
