"""Leaves stored by factors: which terms each kind of layer gets, and that rows and kernels are those of jacrev."""

from __future__ import annotations

import json
import math

import dask.array as da
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jacstore
from jacstore import Problem
from jacstore.base.modes import Mode
from jacstore.base.schema import typed
from jacstore.errors import InvalidRequestError
from jacstore.kernels.plan.rates import Rates
from jacstore.problem.problem import precision_context, prepare
from jacstore.rows.device_pass import DevicePass
from jacstore.rows.trace.cut import cut_before_products
from jacstore.terms import Conv, Leaf, Operand
from jacstore.terms.expand_rows import expanded_slabs
from jacstore.terms.factor_set import FactorSet
from jacstore.terms.row_products import products
from jacstore.terms.term import positions_first
from support import terms_of, three


@pytest.fixture(autouse=True)
def _small_leaves_count(limits):
    limits(smallest_factored=0)


class Draw:
    """Normal numbers, scaled so that outputs stay of order one."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape):
        return self.rng.standard_normal(shape) / math.sqrt(max(1, shape[0]))


def normal(*shape):
    return np.random.default_rng(7).standard_normal(shape)


def mlp(draw):
    params = [(draw(20, 30), draw(30)), (draw(30, 24), draw(24)), (draw(24, 3), draw(3))]

    def apply(params, x):
        for n, (w, b) in enumerate(params):
            x = (jax.nn.gelu(x) if n else x) @ w + b
        return x

    return apply, params, normal(4, 20)


def ntk_parameterisation(draw):
    params = [(draw(20, 30), draw(30)), (draw(30, 3), draw(3))]

    def apply(params, x):
        for n, (w, b) in enumerate(params):
            x = (jax.nn.relu(x) if n else x) @ (w / jnp.sqrt(w.shape[0])) + 0.1 * b
        return x

    return apply, params, normal(4, 20)


def experts(draw):
    params = {"a": draw(3, 4, 12), "b": draw(3, 12, 9)}

    def apply(params, x):
        return three(jnp.einsum("etk,ekd->etd", jnp.tanh(jnp.einsum("td,edk->etk", x, params["a"])), params["b"]))

    return apply, params, normal(4, 2, 4)


def tied_weights(draw):
    params = {"w": draw(16, 16), "b": draw(16)}

    def apply(params, x):
        return three(jnp.tanh(x @ params["w"] + params["b"]) @ params["w"] + params["b"])

    return apply, params, normal(4, 16)


def bias_shared_by_experts(draw):
    """One bias of a layer whose entries stand side by side, and of experts that each have their own."""
    params = {"w": draw(5, 12), "v": draw(3, 4, 4), "b": draw(12)}

    def apply(params, x):
        each = jnp.tanh(x @ params["w"] + params["b"]).reshape(2, 3, 4).transpose(1, 0, 2)
        return three(jnp.einsum("etd,edf->etf", each, params["v"]) + params["b"].reshape(3, 1, 4))

    return apply, params, normal(4, 2, 5)


def filter_on_one_and_two_images(draw):
    def apply(params, x):
        def layer(images):
            return jax.lax.conv_general_dilated(
                images, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        y = jnp.tanh(layer(x[None]))[0]
        return three(layer(jnp.stack([y, 2 * y])))

    return apply, {"w": draw(3, 3, 16, 16)}, normal(3, 3, 3, 16)


def embedding(draw):
    params = {"table": draw(50, 6), "w": draw(6, 8)}
    return (
        lambda params, ids: three(jnp.tanh(params["table"][ids]) @ params["w"]),
        params,
        np.random.default_rng(0).integers(-2, 60, (4, 5)),
    )


def tied_embedding(draw):
    params = {"table": draw(60, 6)}

    def apply(params, ids):
        return three(jnp.tanh(params["table"][ids]).sum(0) @ params["table"].T)

    return apply, params, np.random.default_rng(0).integers(0, 60, (4, 5))


def attention(draw, remat=False):
    d, heads, k = 16, 4, 8
    params = {
        "norm": {"scale": draw(d), "shift": draw(d)},
        **{name: draw(d, heads, k) for name in ("q", "k", "v")},
        "out": draw(heads, k, d),
        "up": (draw(d, 40), draw(40)),
        "down": draw(40, d),
    }

    def block(p, x):
        mean, spread = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
        h = (x - mean) / (spread + 1e-3) * p["norm"]["scale"] + p["norm"]["shift"]
        q, k, v = (jnp.einsum("td,dhk->thk", h, p[name]) for name in ("q", "k", "v"))
        weights = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k) / math.sqrt(8))
        x = x + jnp.einsum("thk,hkd->td", jnp.einsum("hts,shk->thk", weights, v), p["out"])
        return jax.nn.gelu(x @ p["up"][0] + p["up"][1]) @ p["down"]

    wrapped = jax.checkpoint(block) if remat else jax.jit(block)
    return (lambda params, x: three(wrapped(params, x))), params, normal(3, 4, d)


def gru(draw):
    params = {"w": draw(4, 6), "u": draw(6, 6), "b": draw(6), "out": draw(6, 9)}

    def apply(params, x):
        def step(h, x):
            h = jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"])
            return h, h

        return three(jax.lax.scan(step, jnp.zeros(6), x)[0] @ params["out"])

    return apply, params, normal(4, 5, 4)


def tied_conv(draw):
    """One filter used twice, so that products of rows pair unlike images."""

    def layer(x, w):
        return jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]

    def apply(w, x):
        return three(layer(jnp.tanh(layer(x, w)), w))

    return apply, draw(3, 3, 16, 16), normal(4, 2, 2, 16)


def conv(size, kernel, channels, *, stride=1, padding="SAME", dilation=1, spread=1, groups=1, pool=False):
    """A convolution with a bias; `size` is the image, `kernel` the window, channels in and out."""
    axes = "HWD"[: len(size)]

    def made(draw):
        params = {"w": draw(*kernel, channels[0] // groups, channels[1]), "b": draw(channels[1])}

        def apply(params, x):
            y = jax.lax.conv_general_dilated(
                x[None],
                params["w"],
                (stride,) * len(size),
                padding,
                lhs_dilation=(spread,) * len(size),
                rhs_dilation=(dilation,) * len(size),
                dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
                feature_group_count=groups,
            )
            y = jax.nn.relu(y + params["b"])
            if pool:
                window = (1, *[2] * len(size), 1)
                y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "VALID")
            return three(y)

        return apply, params, normal(3, *size, channels[0])

    return made


# For each network the terms of its leaves, in tree order, K = 3.
NETWORKS = {
    "mlp": (mlp, "dot dot dot dot dot dot"),
    "ntk parameterisation": (ntk_parameterisation, "dot dot dot dot"),
    "experts, einsum with a batch": (experts, "dot dot"),
    "tied weights": (tied_weights, "dot+dot dot+dot"),
    "bias shared by experts": (bias_shared_by_experts, "dense dot dot"),
    "filter on one and two images": (filter_on_one_and_two_images, "dense"),
    "embedding, ids out of bounds": (embedding, "index dense"),
    "tied embedding": (tied_embedding, "dot+index"),
    "attention": (attention, "dot dot dense dense dot dot dot dot dot"),
    "attention under remat": (lambda draw: attention(draw, remat=True), "dot dot dense dense dot dot dot dot dot"),
    "gru by scan": (gru, "dense dot dense dense"),
    "conv 1-D": (conv((9,), (3,), (6, 32), stride=2), "dot conv"),
    "conv 2-D with max-pool": (conv((4, 4), (3, 3), (8, 16), pool=True), "dot conv"),
    "conv, stride and dilation": (conv((7, 8), (3, 2), (8, 24), stride=2, padding="VALID", dilation=2), "dot conv"),
    "conv, uneven padding": (conv((4, 4), (3, 3), (8, 16), padding=((2, 1), (-1, 2))), "dot conv"),
    "conv, groups": (conv((4, 4), (3, 3), (8, 16), groups=2, stride=2), "dot conv"),
    "conv, pixels apart": (conv((2, 2), (3, 3), (8, 24), spread=2, padding=((2, 1), (1, 2))), "dot conv"),
    "conv 3-D": (conv((3, 2, 3), (2, 2, 2), (6, 16), stride=2), "dot conv"),
    "conv, used twice": (tied_conv, "conv+conv"),
    "conv, early": (conv((12, 12), (3, 3), (2, 3)), "dense dense"),
}


def tiny(name, **fields):
    apply, params, inputs = NETWORKS[name][0](Draw())
    return Problem(apply=apply, params=params, inputs=inputs, **fields)


def truth(problem):
    """Rows `(N, K, P)` by one jacrev an example, in float64."""
    prepared = prepare(problem, float64=True)
    with precision_context(True):
        jacobian = jax.jit(
            lambda example: jax.jacrev(lambda leaves: prepared.function(leaves, prepared.rest, example))(
                prepared.selected
            )
        )
        examples = prepared.read(0, prepared.n_examples)
        rows = [jacobian(jax.tree_util.tree_map(lambda leaf, n=n: leaf[n], examples)) for n in range(len(examples))]
    return np.stack([np.concatenate([np.reshape(leaf, (prepared.n_outputs, -1)) for leaf in row], -1) for row in rows])


def between(rows, mode):
    equation = {"full": "ikp,jlp->ikjl", "trace": "ikp,jkp->ij", "diagonal": "ikp,jkp->kij", "blocks": "ikp,ilp->ikl"}
    found = np.einsum(equation[mode], rows, rows)
    size = rows.shape[0] * rows.shape[1]
    return found.reshape(size, size) if mode == "full" else found


def assert_kernels(store, rows, limit, **options):
    scale = np.square(rows).sum(-1).max() * (rows.shape[1] if options.get("mode") == "trace" else 1)
    kernel = jacstore.gram(store, **options)
    found = kernel.array.compute(scheduler="synchronous")
    assert np.abs(found - between(rows, options.get("mode", "full"))).max() <= limit * scale
    return kernel


@pytest.mark.parametrize("outputs", ["all", pytest.param("sum", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_and_kernels_are_those_of_jacrev(name, outputs):
    problem = tiny(name, outputs=outputs)
    rows = truth(problem)
    store = jacstore.build(problem, None, dtype="float64")
    if outputs == "all":
        assert terms_of(store) == NETWORKS[name][1]
    found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
    assert np.linalg.norm(found - rows) <= 1e-12 * np.linalg.norm(rows)
    np.testing.assert_allclose(store.norms.sum(-1), np.square(rows).sum(-1), rtol=1e-12)
    kernel = assert_kernels(store, rows, 1e-12)
    assert kernel.report["passes"] == 1


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "experts, einsum with a batch",
        "tied weights",
        "tied embedding",
        pytest.param("conv, groups", marks=pytest.mark.slow),
    ],
)
def test_every_mode_with_every_engine(name):
    problem = tiny(name)
    rows = truth(problem)
    store = jacstore.build(problem, None, dtype="float64", layout="factored", unit_size=2)
    for mode in ("full", "trace", "diagonal", "blocks"):
        assert_kernels(store, rows, 1e-12, mode=mode, tile=2)
    assert_kernels(store, rows, 1e-12, tile=2, engine="xla", mode="trace")


@pytest.mark.parametrize("name", ["mlp", "tied embedding", "conv 2-D with max-pool"])
def test_leaf_kernels_add_up_and_rectangles_are_cut_from_the_square(name):
    problem = tiny(name)
    rows = truth(problem)
    store = jacstore.build(problem, None, dtype="float64")
    kernels = jacstore.gram(store, by_leaf=True, tile=2).leaf_arrays
    starts = [leaf.offset for leaf in store.leaves]
    for n, leaf in enumerate(store.leaves):
        part = rows[..., starts[n] : starts[n] + leaf.size]
        found = kernels[leaf.path].compute(scheduler="synchronous")
        np.testing.assert_allclose(found, between(part, "full"), atol=1e-12 * np.square(rows).sum(-1).max())
    first = jacstore.build(problem, None, dtype="float64", examples=(0, 2))
    dense = jacstore.build(problem, None, dtype="float64", layout="dense")
    whole = between(rows, "full")[: 2 * rows.shape[1]]
    for other in (store, dense):
        found = jacstore.gram(first, other).array.compute(scheduler="synchronous")
        np.testing.assert_allclose(found, whole, atol=1e-12 * np.abs(whole).max())
    lazy = jacstore.lazy_kernel(store, tile=2).compute(scheduler="synchronous")
    np.testing.assert_allclose(lazy, between(rows, "full"), atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("mode", ["full", "trace", "diagonal", "blocks"])
def test_a_lazy_tile_reads_the_factors_of_its_examples_once_and_forms_no_rows_of_dense_layers(mode, monkeypatch):
    problem = tiny("mlp")
    store = jacstore.build(problem, None, dtype="float64", layout="factored", unit_size=2)
    monkeypatch.setattr("jacstore.store.reader.expand", None)
    lazy = jacstore.lazy_kernel(store, mode, tile=2)
    assert store.decoded_bytes_read == 0
    at = {"full": (0, 1), "trace": (0, 1), "diagonal": (0, 0, 1), "blocks": (0, 0, 0)}[mode]
    found = lazy.blocks[at].compute(scheduler="synchronous")
    assert store.decoded_bytes_read == store.bytes_decoded / (2 if mode == "blocks" else 1)
    expected = between(truth(problem), mode)
    expected = da.from_array(expected, lazy.chunks).blocks[at].compute(scheduler="synchronous")
    np.testing.assert_allclose(found, expected, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("bfloat16", 8e-3)])
def test_narrow_types_hold_their_bounds(dtype, limit):
    for name in ("mlp", "conv 2-D with max-pool", "tied embedding"):
        problem = tiny(name)
        rows = truth(problem)
        store = jacstore.build(problem, None, dtype=dtype)
        found = store.array.compute(scheduler="synchronous").reshape(rows.shape)
        assert np.linalg.norm(found - rows) <= limit * np.linalg.norm(rows)


def test_an_expanded_convolution_gives_the_kernel_of_an_implicit_one(monkeypatch):
    problem = tiny("conv 2-D with max-pool")
    rows = truth(problem)
    store = jacstore.build(problem, None, dtype="float64")
    kernels = []
    for weight in (0, 10**6):
        rates = Rates(elementwise=weight)
        monkeypatch.setattr("jacstore.kernels.gram.measured_rates", lambda rates=rates: rates)
        kernel = assert_kernels(store, rows, 1e-12, tile=2)
        kernels.append([step.expanded for step in kernel.plan.steps])
        # What decided is kept with the kernel and told.
        assert kernel.report["rates"] == kernel.info()["numerics"]["rates"] == rates.to_dict()
    assert kernels[0] == [()] and 1 in kernels[1][0]


def test_factors_are_stored_once_and_rows_come_back_without_the_model(tmp_path):
    problem = tiny("attention")
    store = jacstore.build(problem, tmp_path / "run.jac", dtype="float64", unit_size=2)
    assert len([o for o in store.operands if o.role == "inputs"]) == 4  # q, k, v share theirs
    assert jacstore.build(problem, tmp_path / "run.jac", dtype="float64").report["units_computed"] == 0
    again = jacstore.open(tmp_path / "run.jac")
    rows = truth(problem)
    np.testing.assert_allclose(
        again.array.compute(scheduler="synchronous"), rows.reshape(-1, rows.shape[-1]), atol=1e-12
    )
    table = {entry["path"]: entry for entry in again.info()["leaves"]}
    assert table["q"]["numbers"] < table["q"]["numbers_dense"] == 3 * 16 * 4 * 8
    assert json.dumps(table)


def test_a_writer_takes_factors(tmp_path):
    source = jacstore.build(tiny("mlp"), None, dtype="float64", unit_size=2)
    leaves, operands = source.leaves, source.operands
    with jacstore.StoreWriter(
        tmp_path / "w.jac", leaves, 4, 3, operands=operands, dtype="float64", unit_size=2
    ) as writer:
        for start, stop in writer.missing:
            held = {o.name: source.read_operand(o.name, start, stop) for o in operands}
            rows, given = {}, set()
            for leaf in leaves:
                rows[leaf.path] = {name: held[name] for name in leaf.operands if name not in given}
                given.update(leaf.operands)
            with pytest.raises(InvalidRequestError, match="operand"):
                writer.write_unit(start, {})
            writer.write_unit(start, rows)
    np.testing.assert_array_equal(writer.store.array.compute(), source.array.compute())
    np.testing.assert_allclose(writer.store.norms, source.norms, rtol=1e-12)


def test_the_device_pass_never_forms_the_product():
    wide = Problem(
        apply=lambda params, x: jnp.tanh(x @ params["w"]) @ params["v"],
        params={"w": np.zeros((512, 2048), np.float32), "v": np.ones((2048, 1), np.float32)},
        inputs=np.ones((8, 512), np.float32),
    )
    prepared = prepare(wide)
    needed = {}
    for layout in ("auto", "dense"):
        cut = cut_before_products(prepared, layout, float64=False)
        passes = DevicePass(prepared, cut, stored_dtype="float32", budget=2**33, unit_size=8, batch_size=8)
        needed[layout] = passes.bytes_needed
    assert needed["dense"] > 8 * 512 * 2048 * 4 > 4 * (needed["auto"] - 512 * 2048 * 4)


@pytest.mark.parametrize("name", NETWORKS)
def test_products_of_terms_are_those_of_the_rows_that_they_stand_for(name):
    # Without the plan, which would choose to form the rows of small convolutions.
    store = jacstore.build(tiny(name), None, dtype="float64", layout="factored")
    rows = store.array.compute(scheduler="synchronous").reshape(store.n_examples, store.n_outputs, -1)
    for leaf in store.leaves:
        if not leaf.operands:
            continue
        ranges = (0, 2), (1, store.n_examples)
        left, right = ({o: store.read_operand(o, a, b) for o in leaf.operands} for a, b in ranges)
        one, other = (rows[a:b, :, leaf.offset : leaf.offset + leaf.size] for a, b in ranges)
        full = np.einsum("ikp,jlp->ikjl", one, other)
        limit = 1e-12 * np.abs(full).max()
        np.testing.assert_allclose(products(leaf, left, right, Mode.FULL), full, atol=limit)
        trace = np.einsum("ikjk->ij", full)
        np.testing.assert_allclose(products(leaf, left, right, Mode.TRACE)[:, 0, :, 0], trace, atol=4 * limit)
        np.testing.assert_allclose(products(leaf, left, right, Mode.DIAGONAL), np.einsum("ikjk->kij", full), atol=limit)


@pytest.mark.parametrize("name", [name for name in NETWORKS if "conv" in name or name in ("attention", "tied weights")])
def test_rows_in_slabs_of_any_width_are_the_rows(name, limits):
    limits(expanded_bytes=1, slab_columns=1, expanded_channels=5)
    store = jacstore.build(tiny(name), None, dtype="float64", layout="factored")
    rows = store.array.compute(scheduler="synchronous").reshape(store.n_examples, store.n_outputs, -1)
    for leaf in (leaf for leaf in store.leaves if leaf.operands and all(term.in_slabs for term in leaf.factored)):
        held = {o: store.read_operand(o, 0, store.n_examples) for o in leaf.operands}
        one = rows[..., leaf.offset : leaf.offset + leaf.size]
        truth = np.einsum("ikp,jlp->ikjl", one, one)
        # Single columns, a few, and all at once, in some tens of slabs at most.
        for width in (max(1, leaf.size // 40), 7 + leaf.size // 13, 10**6):
            slabs = [slab for (slab,) in expanded_slabs(leaf, [held], width, patches_kept=False)]
            assert sum(slab.shape[2] for slab in slabs) == leaf.size
            found = sum(np.einsum("ikp,jlp->ikjl", slab, slab) for slab in slabs)
            np.testing.assert_allclose(found, truth, atol=1e-12 * np.abs(truth).max())


def test_patches_are_cut_once_however_many_slabs_there_are(monkeypatch, limits):
    limits(slab_columns=1)
    store = jacstore.build(tiny("conv 2-D with max-pool"), None, layout="factored")
    leaf = next(leaf for leaf in store.leaves if leaf.terms[0].kind == "conv")
    held = {o: store.read_operand(o, 0, store.n_examples) for o in leaf.operands}
    cut, some_inputs = [], Conv.some_inputs

    def counted(self, *given):
        found = some_inputs(self, *given)
        cut.append(found.size)
        return found

    monkeypatch.setattr(Conv, "some_inputs", counted)
    slabs = list(expanded_slabs(leaf, [held], 48, patches_kept=False))
    assert len(slabs) == leaf.size // 48
    assert sum(cut) == store.n_examples * 4 * 4 * 9 * 8


def test_products_of_biases_with_many_positions_are_those_of_their_sums():
    store = jacstore.build(tiny("conv 2-D with max-pool"), None, layout="factored")
    held = {o.name: store.read_operand(o.name, 0, 2) for o in store.operands}
    factors = FactorSet(store.leaves, held)
    assert [leaf.path for leaf in factors.others] == ["w"]
    ((inputs, sums),) = factors.simple
    assert inputs is None and sums.shape == (2, store.n_outputs, 16)


def test_products_of_positions_are_one_large_product_whose_runs_of_examples_are_whole():
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(3, 5, 4)), draw.normal(size=(2, 7, 4))
    found = positions_first(a, b, np)
    np.testing.assert_allclose(found, np.einsum("tnc,smc->tsnm", a, b), rtol=1e-12, atol=1e-12)
    assert found.transpose(0, 2, 1, 3).flags.c_contiguous


def test_products_of_terms_are_those_of_numpy_and_jax_alike():
    store = jacstore.build(tiny("conv, groups"), None, dtype="float64")
    leaf = next(leaf for leaf in store.leaves if leaf.terms[0].kind == "conv")
    held = {name: store.read_operand(name, 0, 3) for name in leaf.operands}
    with jax.enable_x64(True):
        for mode in (Mode.FULL, Mode.TRACE, Mode.DIAGONAL):
            np.testing.assert_allclose(
                products(leaf, held, held, mode, jnp), products(leaf, held, held, mode), rtol=1e-12
            )


def test_leaves_and_operands_are_the_same_after_json():
    store = jacstore.build(tiny("conv 3-D"), None, dtype="float64")
    assert tuple(typed(Leaf, json.loads(json.dumps(leaf.to_dict()))) for leaf in store.leaves) == store.leaves
    assert tuple(typed(Operand, json.loads(json.dumps(o.to_dict()))) for o in store.operands) == store.operands
