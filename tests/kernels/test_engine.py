"""Claims about engines: BLAS and XLA give the products of float64 in every mode, whatever holds the sums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from threadpoolctl import ThreadpoolController, threadpool_limits

import jacstore
import jacstore.kernels.engines.blas
from jacstore import StoreWriter
from jacstore.base.modes import Mode
from jacstore.base.precision import ROUNDOFF, product_bound
from jacstore.base.threads import blas_threads
from jacstore.cli.text import info as info_text
from jacstore.errors import RequestMismatchError
from jacstore.kernels.context import Work
from jacstore.kernels.engines.blas import LEAST_BLOCKS, LEAST_SPLIT, BlasEngine, _cut, symmetrize
from jacstore.kernels.engines.xla import ALGORITHMS, XlaEngine, resident_bytes
from jacstore.terms import Dot, Leaf
from jacstore.terms.factor_set import FactorSet
from support import computed, refused

quick = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MODES = list(Mode)
MEMORY = "200MB"
# Of a sum of products, in units of sqrt(G_ii G_jj).
LIMIT = {"float64": 1e-14, "float32": 5e-7}


def kernel_of(a, b, mode):
    a, b = a.astype(np.float64), b.astype(np.float64)
    products = np.einsum("ikp,jlp->ikjl", a, b, optimize=True)
    if mode == "full":
        return products.reshape(a.shape[0] * a.shape[1], -1)
    return np.einsum({"trace": "ikjk->ij", "diagonal": "ikjk->kij", "blocks": "ikil->ikl"}[mode], products)


def scale_of(a, b, mode):
    left, right = (np.square(x.astype(np.float64)).sum(-1) for x in (a, b))
    if mode == "full":
        return np.sqrt(np.outer(left.ravel(), right.ravel()))
    if mode == "trace":
        return np.sqrt(np.outer(left.sum(1), right.sum(1)))
    return np.sqrt(np.einsum({"diagonal": "ik,jk->kij", "blocks": "ik,il->ikl"}[mode], left, right))


def error_of(found, a, b, mode):
    """The largest `|Δ_ij| / sqrt(G_ii G_jj)`."""
    assert found.dtype == np.float64
    return float(np.max(np.abs(found - kernel_of(a, b, mode)) / scale_of(a, b, mode)))


def engines(precision):
    """Every engine that forms products of a precision, with the type that its slabs are read into."""
    yield BlasEngine(precision)
    yield XlaEngine(precision, "float32")
    yield XlaEngine(precision, "float32", resident_bytes=0)


def as_read(engine, rows):
    """Rows as a store would read them into the engine's slabs."""
    if engine.slab_dtype == np.uint16:
        return rows.astype(ml_dtypes.bfloat16).view(np.uint16)
    return rows.astype(engine.slab_dtype)


def streamed(engine, mode, a, b, slabs, rows=slice(None), cols=slice(None)):
    """The kernel of examples `rows` of `a` and `cols` of `b`, summed over slabs of columns."""
    mode, rows, cols = Mode(mode), slice(*rows.indices(len(a))), slice(*cols.indices(len(b)))
    shape = mode.shape(rows.stop - rows.start, cols.stop - cols.start, a.shape[1])
    total = engine.zeros(shape)
    for first, last in slabs:
        left = engine.load(as_read(engine, a[:, :, first:last].copy()))
        right = left if a is b else engine.load(as_read(engine, b[:, :, first:last].copy()))
        total = engine.add(mode, total, left, rows, right, cols, slice(0, last - first))
    return engine.fetch(total)


def random_rows(n, k, p, seed=0):
    return np.random.default_rng(seed).normal(size=(n, k, p)).astype(np.float32)


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_every_engine_adds_up_the_products_of_float64(mode, precision):
    a = random_rows(9, 3, 50)
    b = a if mode == "blocks" else random_rows(7, 3, 50, seed=1)
    for engine in engines(precision):
        assert error_of(streamed(engine, mode, a, b, [(0, 25), (25, 50)]), a, b, mode) <= LIMIT[precision]


@given(
    n=st.integers(1, 8), k=st.integers(1, 3), widths=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data()
)
@quick
def test_blas_multiplies_any_part_of_a_slab(n, k, widths, data):
    mode = data.draw(st.sampled_from(MODES))
    a = random_rows(n, k, sum(widths))
    b = a if mode == "blocks" or data.draw(st.booleans()) else random_rows(n + 1, k, sum(widths), seed=1)
    start = data.draw(st.integers(0, n - 1))
    rows = slice(start, data.draw(st.integers(start + 1, n)))
    cols = rows if mode == "blocks" else slice(0, data.draw(st.integers(1, len(b))))
    ends = np.cumsum([0, *widths])
    found = streamed(BlasEngine("float64"), mode, a, b, list(pairwise(ends)), rows, cols)
    assert error_of(found, a[rows], b[cols], mode) <= 1e-14


@pytest.mark.parametrize("mode", MODES)
def test_columns_inside_a_slab_are_multiplied_alone(mode):
    a = random_rows(5, 2, 30)
    for engine in engines("float64"):
        total = engine.zeros(mode.shape(5, 5, 2))
        operand = engine.load(as_read(engine, a))
        for columns in (slice(3, 11), slice(20, 30)):
            total = engine.add(mode, total, operand, slice(0, 5), operand, slice(0, 5), columns)
        kept = np.concatenate([a[..., 3:11], a[..., 20:30]], -1)
        assert error_of(engine.fetch(total), kept, kept, mode) <= 1e-14


@pytest.mark.parametrize("edge", [13, 68, 10_000])
@pytest.mark.parametrize("mode", [Mode.FULL, Mode.TRACE, Mode.DIAGONAL])
def test_a_diagonal_tile_is_symmetric_to_the_bit(mode, edge, limits):
    limits(slab_block=(edge, edge))
    a, tile = random_rows(70, 2, 32), slice(2, 70)
    for engine in engines("float32"):
        found = streamed(engine, mode, a, a, [(0, 16), (16, 32)], tile, tile)
        upper = np.triu(found).copy()
        symmetric = symmetrize(found)
        np.testing.assert_array_equal(symmetric, np.swapaxes(symmetric, -1, -2))
        np.testing.assert_array_equal(np.triu(symmetric), upper)
        assert error_of(symmetric, a[tile], a[tile], mode) <= LIMIT["float32"]


def test_blocks_of_a_diagonal_tile_are_multiplied_once_and_their_mirrors_not_at_all(monkeypatch, limits):
    limits(slab_block=(10, 10))
    a, engine, shapes = random_rows(70, 1, 32), BlasEngine("float32"), []
    buffers = jacstore.kernels.engines.blas._Buffers
    multiply = buffers.matmul
    monkeypatch.setattr(
        buffers, "matmul", lambda *given: shapes.append((len(given[2]), given[3].shape[1])) or multiply(*given)
    )
    streamed(engine, "full", a, a, [(0, 32)])
    assert shapes == [(10, 10)] * 28
    streamed(engine, "full", a, a.copy(), [(0, 32)])
    assert len(shapes) == 28 + 49


@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (65, 65), (3, 130, 130), (2, 5, 5)])
def test_symmetrize_mirrors_the_upper_half_and_keeps_it(shape):
    tile = np.random.default_rng(0).normal(size=shape)
    upper = np.triu(tile)
    mirrored = symmetrize(tile)
    assert mirrored is tile
    np.testing.assert_array_equal(mirrored, upper + np.swapaxes(np.triu(upper, 1), -1, -2))


def test_float32_products_are_summed_in_float64():
    """One large slab first: small ones after it would vanish in a float32 sum."""
    a = np.concatenate([np.full((1, 1, 1), 4096, np.float32), np.full((1, 1, 1000), 0.5, np.float32)], -1)
    slabs = [(0, 1), *((n, n + 1) for n in range(1, 1001))]
    for engine in (BlasEngine("float32"), XlaEngine("float32", "float32", resident_bytes=0)):
        assert streamed(engine, "full", a, a, slabs).item() == 4096**2 + 250


@pytest.mark.parametrize(("stored", "mode"), [*(("bfloat16", mode) for mode in MODES), ("float16", "full")])
def test_xla_multiplies_16_bit_rows_as_they_are(stored, mode):
    """A product of two 16-bit numbers is exact in float32: the error is that of the sum."""
    narrow = random_rows(6, 2, 40).astype(stored)
    a = narrow.astype(np.float32)
    engine = XlaEngine("float32", stored)
    assert engine.slab_dtype.itemsize == 2
    assert error_of(streamed(engine, mode, a, a, [(0, 20), (20, 40)]), a, a, mode) <= LIMIT["float32"]


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_xla_multiplies_in_float64_whatever_is_stored(stored):
    a = random_rows(6, 2, 40).astype(stored).astype(np.float32)
    engine = XlaEngine("float64", stored)
    assert engine.slab_dtype == np.float64
    assert error_of(streamed(engine, "full", a, a, [(0, 40)]), a, a, "full") <= 1e-14


@pytest.mark.parametrize("mode", MODES)
def test_fast_products_are_those_of_rows_rounded_to_bfloat16(mode):
    """On a CPU: the rounding of both rows, at most 2 * 2^-9 of each term, and no more than float32 on top."""
    a = random_rows(6, 2, 40)
    rounded = a.astype(ml_dtypes.bfloat16).astype(np.float32)
    found = streamed(XlaEngine("fast", "float32"), mode, a, a, [(0, 20), (20, 40)])
    assert error_of(found, rounded, rounded, mode) <= LIMIT["float32"]
    assert error_of(found, a, a, mode) <= 2 * 2**-8


ON_CPU = ("bf16x6", "bf16x3")


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_products_of_a_named_algorithm_are_within_its_recorded_bound(mode, stored, precision):
    a = random_rows(6, 2, 40).astype(stored).astype(np.float32)
    engine = XlaEngine(precision, stored)
    assert engine.rounded_to == precision
    bound = 4 * ROUNDOFF[precision] + product_bound(precision, "xla", 40)
    assert error_of(streamed(engine, mode, a, a, [(0, 20), (20, 40)]), a, a, mode) <= bound


@pytest.mark.parametrize("precision", sorted(ALGORITHMS))
def test_a_precision_is_refused_where_the_device_has_no_such_products_and_those_that_it_has_are_named(precision):
    if precision in ON_CPU:
        assert XlaEngine(precision, "float32").precision == precision
        return
    text = refused(XlaEngine, precision, "float32")
    assert text.startswith(f"--precision {precision}: cpu (cpu) has no such products")
    assert "float64, float32, bf16x6, bf16x3, fast (precision=)" in text


@pytest.mark.parametrize("precision", ["tf32", "bf16x9"])
def test_a_kernel_of_an_unsupported_precision_is_refused_before_anything_is_written(precision, tmp_path):
    run = store_of(random_rows(6, 2, 40))
    assert "has no such products" in refused(jacstore.gram, run, None, tmp_path / "k", precision=precision)
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize("precision", ON_CPU)
def test_a_kernel_records_a_named_precision_with_its_error_and_info_shows_it(precision):
    rows = random_rows(6, 2, 40)
    kernel = jacstore.gram(store_of(rows), None, None, precision=precision)
    exact = jacstore.gram(store_of(rows), None, None, precision="float32", engine="xla")
    found = kernel.info()
    assert (found["precision"], found["engine"], found["numerics"]["rounded_to"]) == (precision, "xla", precision)
    assert found["numerics"]["expected_error"] > exact.info()["numerics"]["expected_error"]
    assert f"{precision} products with xla" in info_text(kernel.summary())
    assert error_of(computed(kernel.array), rows, rows, "full") <= found["numerics"]["expected_error"]


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("mode", MODES)
def test_factors_are_multiplied_in_a_named_precision_too(mode, precision):
    draw = np.random.default_rng(0)
    operands = {
        "a": draw.standard_normal((4, 1, 3, 5)).astype(np.float32),
        "d": draw.standard_normal((4, 2, 1, 3, 6)).astype(np.float32),
    }
    leaf = Leaf(
        path="w", shape=(5, 6), dtype="float32", offset=0, terms=(Dot(inputs="a", cotangents="d", scale=1.0, views=()),)
    )
    rows = np.einsum("ngti,nkgtj->nkij", operands["a"], operands["d"]).reshape(4, 2, 30)
    engine = XlaEngine(precision, "float32")
    factors = engine.load_factors(FactorSet([leaf], operands))
    total = engine.zeros(mode.shape(4, 4, 2))
    found = engine.fetch(engine.add_factors(mode, total, factors, slice(0, 4), factors, slice(0, 4)))
    assert error_of(found, rows, rows, mode) <= 16 * ROUNDOFF[precision] + 2e-6


@pytest.mark.parametrize("precision", sorted(ALGORITHMS))
def test_blas_refuses_precisions_of_devices(precision):
    run = store_of(random_rows(3, 2, 8))
    assert "BLAS has no such products" in refused(jacstore.gram, run, None, None, engine="blas", precision=precision)


def test_float16_rows_overflow_in_no_sum():
    """Entries of 100, P = 1,000: the diagonal is 1e7, and a float16 sum would end at 65,504."""
    a = np.full((2, 1, 1000), 100, np.float16)
    for engine in (XlaEngine("float32", "float16"), XlaEngine("fast", "float16")):
        found = streamed(engine, "full", a, a, [(0, 1000)])
        np.testing.assert_allclose(found, 1e7, rtol=1e-6)


@pytest.mark.parametrize("resident", [None, 0, 10**6])
def test_sums_are_fetched_and_restored_unchanged(resident):
    total = np.random.default_rng(0).normal(size=(4, 4))
    for engine in (BlasEngine("float32"), XlaEngine("float32", "float32", resident)):
        np.testing.assert_array_equal(engine.fetch(engine.restore(total.copy())), total)


def test_sums_stay_on_the_device_up_to_their_share():
    engine = XlaEngine("float32", "float32", resident_bytes=8 * 16)
    kinds = [isinstance(engine.zeros((4, 4)), np.ndarray) for _ in range(2)]
    assert kinds == [False, True]


def test_the_host_buffer_of_a_slab_may_be_used_again():
    a = random_rows(4, 2, 10)
    engine = XlaEngine("float32", "float32")
    buffer = a.copy()
    operand = engine.load(buffer)
    buffer[:] = np.nan
    total = engine.add(Mode.FULL, engine.zeros((8, 8)), operand, slice(0, 4), operand, slice(0, 4), slice(0, 10))
    assert error_of(engine.fetch(total), a, a, "full") <= LIMIT["float32"]


def test_a_cpu_keeps_sums_without_a_limit_unless_one_is_given():
    assert resident_bytes(None) is None
    assert resident_bytes(1000) == 500


def test_the_users_64_bit_setting_is_left_alone():
    streamed(XlaEngine("float64", "float64"), "full", random_rows(2, 1, 3), random_rows(2, 1, 3), [(0, 3)])
    assert not jax.config.jax_enable_x64


# --- through gram -----------------------------------------------------------------------------------------------------


def store_of(rows, unit_size=4, **options):
    n, k, p = rows.shape
    with StoreWriter(
        None, {"w": (p,)}, n, k, **{"unit_size": unit_size, "memory": MEMORY, "codec": "lz4"} | options
    ) as writer:
        for start, stop in writer.missing:
            writer.write_unit(start, {"w": rows[start:stop]})
    return writer.store


@pytest.mark.parametrize(
    ("engine", "dtype", "device_memory"),
    [
        *(("blas", dtype, None) for dtype in ("float32", "bfloat16", "float16", "float64")),
        ("xla", "float32", None),
        ("xla", "float32", 1),
        ("xla", "bfloat16", None),
        ("xla", "float64", None),
    ],
)
def test_gram_is_the_same_with_every_engine(engine, dtype, device_memory):
    # XLA compiles for every shape of a tile: here there is one.
    a = random_rows(8 if engine == "xla" else 11, 2, 60)
    stored = a.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    store = store_of(a, dtype=dtype)
    for mode in MODES:
        kernel = jacstore.gram(store, mode=mode, engine=engine, tile=4, memory=MEMORY, device_memory=device_memory)
        assert kernel.report["engine"] == engine
        precision = "float64" if dtype == "float64" else "float32"
        assert error_of(computed(kernel.array), stored, stored, mode) <= LIMIT[precision]


def test_fast_needs_xla_and_is_chosen_with_it():
    store = store_of(random_rows(5, 2, 20))
    assert jacstore.gram(store, precision="fast", memory=MEMORY).report["engine"] == "xla"
    assert "--engine xla" in refused(jacstore.gram, store, precision="fast", engine="blas", memory=MEMORY)


# --- without files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_lazy_kernel_is_the_stored_one(mode):
    a = random_rows(11, 3, 40)
    store = store_of(a, dtype="float64")
    lazy = jacstore.lazy_kernel(store, mode, tile=4)
    assert lazy.dtype == np.float64
    assert error_of(computed(lazy), a, a, mode) <= 1e-14
    index = tuple(slice(1, None, 2) for _ in lazy.shape)
    np.testing.assert_allclose(computed(lazy[index]), computed(lazy)[index], rtol=1e-12, atol=0)


@given(mode=st.sampled_from(MODES), tile=st.integers(1, 12), data=st.data())
@quick
def test_any_slice_of_a_lazy_kernel_is_that_of_the_whole(mode, tile, data):
    a, b = random_rows(7, 2, 9), random_rows(5, 2, 9, seed=1)
    other = None if mode == "blocks" or data.draw(st.booleans()) else store_of(b, dtype="float64", unit_size=2)
    lazy = jacstore.lazy_kernel(store_of(a, dtype="float64"), mode, other, tile=tile)
    truth = kernel_of(a, a if other is None else b, mode)
    assert lazy.shape == truth.shape
    index = tuple(data.draw(st.slices(size)) for size in truth.shape)
    found = computed(lazy[index])
    assert found.shape == truth[index].shape
    assert np.abs(found - truth[index]).max(initial=0) <= 1e-13 * np.abs(truth).max()


def test_a_tile_of_a_lazy_kernel_reads_its_own_units_alone():
    store = store_of(random_rows(12, 2, 40), dtype="float64")
    lazy = jacstore.lazy_kernel(store, tile=4)
    assert store.decoded_bytes_read == 0
    computed(lazy[:8, 16:24])
    assert store.decoded_bytes_read == 2 * (4 * 2 * 40 * 8)


def test_lazy_kernels_of_other_settings_have_other_names():
    a, b = store_of(random_rows(5, 2, 9)), store_of(random_rows(5, 2, 9, seed=1))
    made = [
        jacstore.lazy_kernel(a),
        jacstore.lazy_kernel(b),
        jacstore.lazy_kernel(a, "trace"),
        jacstore.lazy_kernel(a, other=b),
        jacstore.lazy_kernel(a, precision="float64"),
    ]
    assert len({array.name for array in made}) == len(made)
    assert jacstore.lazy_kernel(a).name == made[0].name


def test_a_lazy_kernel_between_two_networks_is_refused():
    a, b = random_rows(5, 2, 9), random_rows(5, 3, 9)
    assert "outputs" in refused(jacstore.lazy_kernel, store_of(a), "full", store_of(b), error=RequestMismatchError)
    assert "takes one store" in refused(jacstore.lazy_kernel, store_of(a), "blocks", store_of(a))
    assert "allowed are full, trace" in refused(jacstore.lazy_kernel, store_of(a), "half")


def test_a_lazy_kernel_in_tiles_of_no_example_is_refused():
    refused(jacstore.lazy_kernel, store_of(random_rows(5, 2, 9)), tile=0)


def network(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


PARAMS = {"w": random_rows(4, 1, 6)[:, 0] / 2, "v": random_rows(6, 1, 3)[:, 0] / 2}
X, Y = random_rows(5, 1, 4, seed=2)[:, 0], random_rows(4, 1, 4, seed=3)[:, 0]


def jacobian(x):
    with jax.enable_x64(True):
        leaves = jax.jit(jax.vmap(jax.jacrev(network), (None, 0)))(
            {k: v.astype(np.float64) for k, v in PARAMS.items()}, x.astype(np.float64)
        )
    return np.concatenate([np.asarray(leaves[k]).reshape(len(x), 3, -1) for k in sorted(leaves)], -1)


def test_ntk_is_the_kernel_of_the_jacobian_in_memory():
    a, b = jacobian(X), jacobian(Y)
    for mode, dtype, limit in (("full", "float64", 1e-13), ("trace", "float32", 2e-6)):
        found = jacstore.ntk(network, PARAMS, X, mode=mode, dtype=dtype, memory=MEMORY)
        assert isinstance(found, np.ndarray)
        assert error_of(found, a, a, mode) <= limit
    assert error_of(jacstore.ntk(network, PARAMS, X, Y, dtype="float64", memory=MEMORY), a, b, "full") <= 1e-13
    chosen = jacstore.ntk(network, PARAMS, X, outputs=[2], select="^v$", dtype="float64", memory=MEMORY)
    kept = a[:, 2:3, :18]
    assert error_of(chosen, kept, kept, "full") <= 1e-13


def test_ntk_takes_networks_with_more_columns_than_a_piece():
    params, x = {"w": random_rows(100, 1, 60)[:, 0]}, random_rows(4, 1, 100)[:, 0]
    found = jacstore.ntk(lambda p, x: (x @ p["w"]).sum()[None], params, x, dtype="float64", memory=MEMORY)
    np.testing.assert_allclose(found, 60 * x.astype(np.float64) @ x.T.astype(np.float64), rtol=1e-12)


def test_limits_of_blas_threads_hold_whichever_thread_asks_and_leave_nothing_behind():
    libraries = [x for x in ThreadpoolController().lib_controllers if x.user_api == "blas"]

    def counts():
        return {library.get_num_threads() for library in libraries}

    with threadpool_limits(2, "blas"):
        pass
    before = counts()
    entered, leave = [Event(), Event()], [Event(), Event()]

    def hold(n):
        with blas_threads(n + 1):
            entered[n].set()
            assert leave[n].wait(20)

    with ThreadPoolExecutor(2) as pool:
        # One thread lives on and has set a limit; another one comes and goes meanwhile.
        slow = pool.submit(hold, 1)
        assert entered[1].wait(20)
        quick = pool.submit(hold, 0)
        assert entered[0].wait(20) and counts() == {1}
        with blas_threads(3):
            assert counts() == {1}
        leave[0].set()
        quick.result()
        assert counts() <= {1, 2}
        with blas_threads(1):
            assert counts() == {1}
        leave[1].set()
        slow.result()
    assert counts() == before


@pytest.mark.parametrize(("name", "kept"), [("blas", True), ("xla", False)])
def test_each_item_has_the_memory_of_a_device_to_itself_and_blas_keeps_its_buffers(name, kept):
    with StoreWriter(None, {"w": (3,)}, 4, 1, unit_size=4) as writer:
        writer.write_unit(0, {"w": np.ones((4, 1, 3), np.float32)})
    kernel = jacstore.gram(writer.store, engine=name)
    work = Work(rows=writer.store, cols=None, kernel=kernel, threads=None, device_memory=10**6)
    assert (work.engine() is work.engine()) == kept


def simple_factors(n, outputs=1, widths=((61, 40), (33, 10)), dtype="float32", seed=0):
    """Factors of dense layers for n examples, and the rows that they stand for."""
    rng = np.random.default_rng(seed)
    operands, leaves, rows = {}, [], []
    for number, (inside, outside) in enumerate(widths):
        x = rng.standard_normal((n, 1, 1, inside)).astype(dtype)
        d = rng.standard_normal((n, outputs, 1, 1, outside)).astype(dtype)
        operands |= {f"x{number}": x, f"d{number}": d}
        shape = (inside, outside)
        term = Dot(inputs=f"x{number}", cotangents=f"d{number}", scale=1.0, views=())
        leaves.append(Leaf(path=str(number), shape=shape, dtype=dtype, offset=0, terms=(term,)))
        rows.append(np.einsum("ni,nko->nkio", x[:, 0, 0], d[:, :, 0, 0].astype(float)).reshape(n, outputs, -1))
    return FactorSet(leaves, operands), np.concatenate(rows, -1)


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.TRACE, Mode.DIAGONAL])
@pytest.mark.parametrize("outputs", [1, 3])
def test_tiles_from_factors_have_the_same_bits_with_any_number_of_threads(mode, outputs):
    n = 700
    factors, rows = simple_factors(n, outputs)
    expected = kernel_of(rows, rows, mode)
    for one, other in ((slice(0, n), slice(0, n)), (slice(0, 333), slice(333, n))):
        found = []
        for threads in (1, 2, 3, 16):
            total = np.zeros(mode.shape(one.stop - one.start, other.stop - other.start, outputs))
            tile = BlasEngine("float32", threads).add_factors(mode, total, factors, one, factors, other)
            found.append(symmetrize(tile) if one == other else tile)
        assert all(np.array_equal(found[0], tile) for tile in found)
        if mode == "full":
            a, b = (slice(s.start * outputs, s.stop * outputs) for s in (one, other))
            want = expected[a, b]
        else:
            want = expected[..., one, other]
        assert np.abs(found[0] - want).max() <= 1e-6 * expected.max()


@pytest.mark.parametrize("size", [(1, 1), (100, 2000), (129, 130), (2000, 2000), (2000, 3), (4097, 511)])
def test_a_tile_is_cut_into_enough_blocks_for_many_threads_unless_they_would_be_small(size):
    (m, n), most = size, (500, 2000)
    down, along = _cut(m, n, most)
    assert 1 <= down <= min(m, most[0]) and 1 <= along <= min(n, most[1])
    assert -(-m // down) * -(-n // along) >= LEAST_BLOCKS or max(down, along) <= LEAST_SPLIT
