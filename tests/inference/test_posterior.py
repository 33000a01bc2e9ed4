"""Claims about posterior samples: their covariance by the sampler's own linear map, passes, keys, resuming, tests."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.special import softmax

import jacstore
from helpers_process import invoke
from jacstore import StoreWriter
from jacstore.errors import (
    DamagedDataError,
    InvalidRequestError,
    LockedError,
    RequestMismatchError,
    RunInterruptedError,
)
from jacstore.inference.linalg.lanczos import largest_eigenvalue, shifted_cg
from jacstore.inference.linalg.quadrature import points, quadrature
from jacstore.inference.noise import BLOCK, KeyedNoise
from jacstore.inference.sampling_methods import Request, by_primal_quadrature
from jacstore.testing import mlp

K = 3
ALPHAS = (1e-6, 1e-3, 0.1, 10.0)
LIKELIHOODS = ("gaussian", "softmax")
# examples, parameters, rank of J
KINDS = {"wide": (8, 60, 24), "tall": (14, 13, 13), "deficient": (12, 50, 7)}
EXACT = ("perturb", "eigh", "ggn")
TIGHT = 1e-10  # wanted error of iterations and quadratures
EPS = 2.0**-52


class Injected:
    """Noise that is given: the columns of the identity, so that the samples are the sampler's matrix."""

    def __init__(self, rows: int, parameters: int) -> None:
        self.n = rows + parameters
        self._parameters = np.eye(parameters, self.n)
        self._rows = np.eye(rows, self.n, parameters)

    def parameters(self, start: int, stop: int) -> np.ndarray:
        return self._parameters[start:stop]

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._rows[start:stop]


def store_of(rows, outputs=None, path=None, dtype="float64"):
    """A store of `(N, K, P)` as it is."""
    n, k, p = rows.shape
    with StoreWriter(path, {"w": (p,)}, n, k, unit_size=4, dtype=dtype, codec="none", memory="500MB") as writer:
        for start, stop in writer.missing:
            given = None if outputs is None else outputs[start:stop]
            writer.write_unit(start, {"w": rows[start:stop]}, outputs=given)
    return writer.store


class Case:
    """J of norm 2 with outputs, its store and kernel, and roots of A from singular vectors: no Gram is formed."""

    def __init__(self, kind, likelihood="gaussian", seed=0, path=None):
        n, self.p, rank = KINDS[kind]
        self.rows, self.likelihood = n * K, likelihood
        draw = np.random.default_rng(seed)
        j = draw.normal(size=(n * K, rank)) @ draw.normal(size=(rank, self.p))
        j *= 2 / np.linalg.norm(j, 2)
        outputs = draw.normal(size=(n, K))
        self.store = store_of(j.reshape(n, K, self.p), outputs, path)
        self.kernel = jacstore.gram(self.store, None if path is None else path.with_suffix(".ntk"))
        if likelihood == "softmax":
            p = softmax(outputs, axis=1)
            roots = np.sqrt(p)[:, :, None] * np.eye(K) - p[:, :, None] * np.sqrt(p)[:, None, :]
            j = np.einsum("nlk,nlp->nkp", roots, j.reshape(n, K, self.p)).reshape(n * K, self.p)
        self.weighted = j
        _, s, vt = np.linalg.svd(j)
        self.vt, self.s2 = vt, np.zeros(self.p)
        self.s2[: len(s)] = s**2

    def power(self, alpha, exponent):
        """`A^exponent`, dense."""
        return (self.vt.T * (self.s2 + alpha) ** exponent) @ self.vt

    def condition(self, alpha):
        return 1 + self.s2.max() / alpha

    def matrix(self, alpha, method, **options):
        """The sampler as a matrix `(P, P + R)`."""
        kernel = None if method in ("ggn", "ciq-primal") else self.kernel
        noise = Injected(self.rows, self.p)
        options = {"alpha": alpha, "likelihood": self.likelihood, "method": method, **options}
        return jacstore.sample_from(noise, self.store, kernel, **options).T


def covariance_errors(case, alpha, found):
    """Relative error of the covariance, and its largest in any direction measured by its own size there."""
    covariance, truth = found @ found.T, case.power(alpha, -1)
    root = case.power(alpha, 0.5)
    whitened = np.linalg.norm(root @ covariance @ root - np.eye(case.p), 2)
    return np.linalg.norm(covariance - truth) / np.linalg.norm(truth), whitened


@pytest.fixture(scope="module", params=[(kind, name) for kind in KINDS for name in LIKELIHOODS], ids="-".join)
def case(request):
    return Case(*request.param)


@pytest.fixture(scope="module")
def wide():
    return Case("wide")


def passes(store, call):
    before = store.decoded_bytes_read
    result = call()
    return result, (store.decoded_bytes_read - before) / store.bytes_decoded


# --- covariance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("method", EXACT)
def test_the_covariance_of_exact_samplers_is_the_inverse_of_a(case, alpha, method):
    overall, whitened = covariance_errors(case, alpha, case.matrix(alpha, method))
    assert overall < 1e-8
    assert whitened < max(1e-8, 100 * EPS * case.condition(alpha))


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("method", ["cg", "lanczos", "ciq-dual", "ciq-primal"])
def test_the_covariance_of_iterations_is_the_inverse_of_a_to_the_wanted_error(case, alpha, method):
    overall, whitened = covariance_errors(case, alpha, case.matrix(alpha, method, error=TIGHT))
    # The quadrature's estimate leaves out a factor near 1.
    assert overall < 1e-8 and whitened < max(1e-8, 100 * EPS * case.condition(alpha))


@pytest.mark.parametrize("method", ["cg", "lanczos", "ciq-dual"])
def test_without_a_kernel_the_store_is_streamed_and_the_covariance_is_the_same(wide, method):
    noise = Injected(wide.rows, wide.p)
    found = jacstore.sample_from(noise, wide.store, alpha=0.1, method=method, error=TIGHT).T
    assert max(covariance_errors(wide, 0.1, found)) < 1e-8


@pytest.mark.parametrize("method", ["eigh", "lanczos", "ciq-dual", "ciq-primal"])
def test_inverse_roots_equal_dense_algebra_not_only_their_squares(case, method):
    alpha = 0.01
    found = case.matrix(alpha, method, **({} if method == "eigh" else {"error": TIGHT}))
    truth = case.power(alpha, -0.5)
    assert np.linalg.norm(found[:, : case.p] - truth) < 1e-8 * np.linalg.norm(truth)
    assert not found[:, case.p :].any()


# --- quadrature -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", [1.5, 1e2, 1e6, 1e10])
@pytest.mark.parametrize("q", [1, 2, 4, 8, 12, 20])
def test_the_quadrature_error_is_bounded_by_its_formula(condition, q):
    rule = quadrature(0.1, 0.1 * condition, q)
    values = np.geomspace(0.1, 0.1 * condition, 2000)
    error = np.abs(rule.inverse_root(values) * np.sqrt(values) - 1).max()
    # The formula is the leading term of an asymptotic estimate: it says nothing where it is near 1.
    assert error < 1.2 * rule.error + 1e-13 or rule.error > 0.5
    assert error > rule.error / 100 or error < 1e-11


@pytest.mark.parametrize("error", [1e-1, 1e-3, 1e-8])
@pytest.mark.parametrize("condition", [1e1, 1e6])
def test_points_follow_from_the_wanted_error_and_are_not_too_many(condition, error):
    q = points(1.0, condition, error)
    assert quadrature(1.0, condition, q).error <= error
    assert q == 1 or quadrature(1.0, condition, q - 1).error > error
    assert points(1.0, condition, error, dual=True) >= q + (condition > 100)


def test_a_quadrature_sampler_is_as_wrong_as_its_points_say(case):
    alpha = 1e-3
    for q in (2, 4, 6):
        found = case.matrix(alpha, "ciq-primal", q=q)
        root = case.power(alpha, 0.5) @ found[:, : case.p]
        rule = quadrature(alpha, alpha + case.s2.max(), q)
        assert np.linalg.norm(root - np.eye(case.p), 2) < 1.2 * rule.error + 1e-3


def test_the_solver_for_many_shifts_equals_dense_solves_and_takes_zero_columns():
    draw = np.random.default_rng(0)
    root = draw.normal(size=(30, 40))
    matrix, block = root @ root.T, draw.normal(size=(30, 5))
    block[:, 2] = 0
    shifts, weights = np.array([10.0, 0.5, 2.0, 3000.0]), np.array([1.0, 0.3, 2.0, 7.0])
    solved = shifted_cg(lambda x: matrix @ x, block, shifts, weights, tolerance=1e-12)
    truth = sum(w * np.linalg.solve(matrix + s * np.eye(30), block) for s, w in zip(shifts, weights, strict=True))
    assert np.linalg.norm(solved.value - truth) < 1e-10 * np.linalg.norm(truth)
    assert solved.products < 60 and solved.residuals.max() < 1e-11


def test_the_solver_for_many_shifts_says_when_it_did_not_reach_the_tolerance():
    matrix = np.diag(np.geomspace(1, 1e6, 50))
    with pytest.warns(UserWarning, match="wanted 1e-10"):
        shifted_cg(lambda x: matrix @ x, np.ones((50, 1)), np.ones(1), np.ones(1), tolerance=1e-10, max_steps=5)


def test_the_largest_eigenvalue_is_found_closely_and_from_above():
    values = np.geomspace(1e-3, 50, 300)
    found = largest_eigenvalue(lambda x: values[:, None] * x, 300)
    assert 50 * (1 - 1e-12) <= found < 51
    assert largest_eigenvalue(lambda x: 0 * x, 5) == 0
    assert largest_eigenvalue(lambda x: 3 * x, 1) == pytest.approx(3)


# --- passes and choices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 300])
@pytest.mark.parametrize("method", ["perturb", "eigh", "cg", "lanczos", "ciq-dual"])
def test_any_number_of_samples_takes_two_passes_over_j(wide, method, n):
    found, read = passes(
        wide.store, lambda: jacstore.sample(wide.store, wide.kernel, alpha=0.1, n=n, key=1, method=method)
    )
    assert found.shape == (n, wide.p)
    assert read == 2


def test_the_normal_matrix_takes_one_pass(wide):
    _, read = passes(wide.store, lambda: jacstore.sample(wide.store, alpha=0.1, n=50, key=1, method="ggn"))
    assert read == 1


def test_primal_quadrature_takes_one_pass_a_product(wide):
    taken = []
    operator = jacstore.operator(wide.store).ggn()

    def product(block):
        taken.append(block.shape[1])
        return operator.matmat(block)

    v = np.random.default_rng(0).normal(size=(wide.p, 4))
    request = Request(alpha=0.1, method="ciq-primal", error=1e-6, q=None)
    (_, steps), read = passes(wide.store, lambda: by_primal_quadrature(product, v, request))
    assert read == len(taken) and taken.count(4) == steps


@pytest.mark.parametrize(
    ("kind", "given", "memory", "passes_wanted"),
    [
        ("tall", True, "1GB", 1),  # P < R: the matrix A
        ("wide", True, "1GB", 2),  # R < P: the kernel
        ("wide", False, "1GB", 1),  # no kernel
    ],
)
def test_the_way_follows_the_size(kind, given, memory, passes_wanted):
    case = Case(kind)
    kernel = case.kernel if given else None
    _, read = passes(case.store, lambda: jacstore.sample(case.store, kernel, alpha=0.1, n=3, key=0, memory=memory))
    assert read == passes_wanted


def test_what_fits_neither_way_is_iterated():
    store = store_of(np.random.default_rng(0).normal(size=(40, 25, 1100)))
    kernel = jacstore.gram(store)
    budget = store.files.bytes_held + 7_000_000  # A takes 9.7 MB, the kernel 8 MB
    found, read = passes(store, lambda: jacstore.sample(store, kernel, alpha=1.0, n=2, key=0, memory=budget))
    assert read == 2 and found.shape == (2, 1100)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_noise_is_found_by_key_sample_and_place_alone():
    noise = KeyedNoise(key=5, n=3)
    whole = noise.parameters(0, 2 * BLOCK + 10)
    assert np.array_equal(noise.parameters(BLOCK - 3, BLOCK + 7), whole[BLOCK - 3 : BLOCK + 7])
    assert np.array_equal(KeyedNoise(key=5, n=2).parameters(0, 50), whole[:50, :2])
    assert len(np.unique(np.concatenate([whole.ravel(), noise.rows(0, BLOCK).ravel()]))) == whole.size + 3 * BLOCK
    assert not np.isin(KeyedNoise(key=6, n=3).parameters(0, BLOCK), whole).any()
    correlations = np.corrcoef(np.concatenate([whole[:BLOCK], whole[BLOCK : 2 * BLOCK], noise.rows(0, BLOCK)], 1).T)
    assert np.abs(correlations - np.eye(9)).max() < 6 / math.sqrt(BLOCK)


@pytest.mark.parametrize("method", EXACT)
def test_samples_depend_on_the_key_and_their_number_alone(wide, method):
    def draw(n, key=3, memory="1GB"):
        return jacstore.sample(wide.store, wide.kernel, alpha=0.1, n=n, key=key, method=method, memory=memory)

    first = draw(4)
    assert np.array_equal(first, draw(4))
    scale = np.linalg.norm(first)
    assert np.linalg.norm(draw(9)[:4] - first) < 1e-12 * scale
    assert np.linalg.norm(draw(4, memory=wide.store.files.bytes_held + 3_000_000) - first) < 1e-12 * scale
    assert np.linalg.norm(draw(4, key=4) - first) > 0.5 * scale


def test_samples_unravel_into_the_parameters_tree():
    problem = mlp(4)
    store = jacstore.build(problem, None, memory="500MB")
    samples = jacstore.sample(store, alpha=1.0, n=5, key=0)
    assert samples.shape == (5, store.n_parameters) and samples.dtype == np.float32
    tree = jacstore.operator(store).unravel(samples.T, like=problem.params)
    assert tree["layer0"]["w"].shape == (5, *problem.params["layer0"]["w"].shape)
    assert np.array_equal(jacstore.operator(store).ravel(tree).T, samples)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path):
    return Case("wide", path=tmp_path / "run.jac")


@pytest.mark.parametrize("method", ["perturb", "ggn"])
def test_finished_samples_are_returned_without_a_pass(on_disk, tmp_path, method):
    options = {"alpha": 0.1, "n": 6, "key": 2, "method": method, "out": tmp_path / "z.npy"}
    first = jacstore.sample(on_disk.store, on_disk.kernel, **options)
    again, read = passes(on_disk.store, lambda: jacstore.sample(on_disk.store, on_disk.kernel, **options))
    assert read == 0
    assert np.array_equal(again, first) and np.array_equal(np.load(tmp_path / "z.npy"), first)
    assert {path.name for path in (tmp_path / "z.npy.work").iterdir()} == {"ledger"}


def test_a_stopped_call_continues_after_its_last_finished_pass(on_disk, tmp_path):
    def draw(stop=None, out=tmp_path / "z.npy"):
        return jacstore.sample(on_disk.store, on_disk.kernel, alpha=0.1, n=6, key=2, out=out, stop=stop)

    asked = []

    def third_time():
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(RunInterruptedError, match="continues after the last finished pass"):
        draw(third_time)
    assert not (tmp_path / "z.npy").exists()
    found, read = passes(on_disk.store, draw)
    assert read == 1
    assert np.array_equal(found, draw(out=None))


def test_a_pass_that_was_damaged_on_disk_is_made_again(on_disk, tmp_path):
    calls = iter([False, False, True])
    with pytest.raises(RunInterruptedError):
        jacstore.sample(
            on_disk.store,
            on_disk.kernel,
            alpha=0.1,
            n=6,
            key=2,
            method="perturb",
            out=tmp_path / "z.npy",
            stop=lambda: next(calls),
        )
    kept = tmp_path / "z.npy.work" / "weights.npy"
    kept.write_bytes(kept.read_bytes()[:-1] + b"\x55")
    found = jacstore.sample(
        on_disk.store, on_disk.kernel, alpha=0.1, n=6, key=2, method="perturb", out=tmp_path / "z.npy"
    )
    assert np.array_equal(
        found, jacstore.sample(on_disk.store, on_disk.kernel, alpha=0.1, n=6, key=2, method="perturb")
    )


def test_another_request_foreign_files_and_damage_are_refused(on_disk, tmp_path):
    out = tmp_path / "z.npy"

    def draw(**options):
        return jacstore.sample(on_disk.store, on_disk.kernel, **{"alpha": 0.1, "n": 6, "key": 2, "out": out, **options})

    first = draw()
    with pytest.raises(RequestMismatchError, match=r"alpha: 0\.1 -> 0\.2"):
        draw(alpha=0.2)
    with pytest.raises(RequestMismatchError, match="key: 2 -> 3"):
        draw(key=3)
    assert np.array_equal(draw(overwrite=True), first)
    whole = out.read_bytes()
    out.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedDataError, match="overwrite"):
        draw()
    (tmp_path / "other.npy").write_bytes(b"mine")
    with pytest.raises(InvalidRequestError, match="not written by this"):
        draw(out=tmp_path / "other.npy")
    with pytest.raises(InvalidRequestError, match=r"ends in \.npy"):
        draw(out=tmp_path / "folder")
    with jacstore.storage.sample_files.kept_in(tmp_path / "y.npy", {}, False, print, None), pytest.raises(LockedError):
        draw(out=tmp_path / "y.npy")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_kernel_with_a_replaced_diagonal_or_of_another_store_is_refused(wide):
    kernel = jacstore.gram(wide.store, exact_diagonal=True)
    for call in (
        lambda: jacstore.sample(wide.store, kernel, alpha=0.1, n=2, key=0),
        lambda: jacstore.sample_tests(np.zeros((2, wide.p)), wide.store, kernel, 0.1),
    ):
        with pytest.raises(InvalidRequestError, match="replaced by exact norms"):
            call()
    with pytest.raises(RequestMismatchError, match="not the kernel of"):
        jacstore.sample(Case("wide", seed=1).store, wide.kernel, alpha=0.1, n=2, key=0)
    with pytest.raises(InvalidRequestError, match="mode trace"):
        jacstore.sample(wide.store, jacstore.gram(wide.store, mode="trace"), alpha=0.1, n=2, key=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "magic"}, "--method magic"),
        ({"alpha": 0.0}, "--alpha 0.0"),
        ({"alpha": math.nan}, "--alpha nan"),
        ({"n": 0}, "--n 0"),
        ({"key": -1}, "--key -1"),
        ({"key": 1.5}, "--key 1.5"),
        ({"error": 2.0, "method": "cg"}, "--error 2.0"),
        ({"error": 0.1, "q": 3, "method": "ciq-dual"}, "exclude each other"),
        ({"q": 3}, "--q: method auto has no quadrature points"),
        ({"q": 3, "method": "cg"}, "--q: method cg"),
        ({"error": 0.1, "method": "perturb"}, "--error: method perturb is exact"),
        ({"likelihood": np.ones(3)}, "--likelihood ndarray"),
        ({"alpha": "much"}, "--alpha much"),
        ({"q": 0, "method": "ciq-dual"}, "q=0"),
        ({"likelihood": "no-such-likelihood"}, "no-such-likelihood"),
        ({"kernel": None, "method": "perturb"}, "needs the kernel"),
        ({"n": 10**7, "memory": "200MB"}, "draw fewer"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(wide, options, said):
    asked = {"kernel": wide.kernel, "alpha": 0.1, "n": 2, "key": 0, **options}
    with pytest.raises(InvalidRequestError) as caught:
        jacstore.sample(wide.store, **asked)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_noise_of_ones_own_needs_alpha_and_takes_no_key(wide):
    for options in ({}, {"alpha": 1.0, "key": 3}):
        with pytest.raises(InvalidRequestError, match="needed is alpha"):
            jacstore.sample_from(Injected(wide.rows, wide.p), wide.store, **options)


# --- tests of samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("kind", KINDS)
def test_right_samples_pass_and_samples_of_another_alpha_do_not(kind, likelihood):
    case = Case(kind, likelihood)
    options = {"alpha": 0.1, "likelihood": likelihood}
    samples = jacstore.sample(case.store, case.kernel, n=400, key=1, **options)
    found = jacstore.sample_tests(samples, case.store, case.kernel, **options)
    assert found.rank == np.linalg.matrix_rank(case.weighted)
    assert min(found.p_values.values()) > 0.01
    assert ("null" in found.p_values) == (found.rank < case.p)
    wrong = jacstore.sample_tests(samples, case.store, case.kernel, alpha=0.2, likelihood=likelihood)
    assert min(wrong.p_values.values()) < 1e-3


def test_tests_take_one_pass_and_are_the_quantities_of_dense_algebra(wide):
    samples = jacstore.sample(wide.store, wide.kernel, alpha=0.1, n=30, key=1)
    found, read = passes(wide.store, lambda: jacstore.sample_tests(samples, wide.store, wide.kernel, 0.1))
    assert read == 1
    distances = np.einsum("ip,pq,iq->i", samples, wide.power(0.1, 1), samples)
    np.testing.assert_allclose(found.full.found, np.sort(distances), rtol=1e-9)
    parts = np.square(samples @ wide.vt.T) * (wide.s2 + 0.1)
    np.testing.assert_allclose(found.data.found, np.sort(parts[:, :24].sum(1)), rtol=1e-8)
    np.testing.assert_allclose(found.null.found, np.sort(parts[:, 24:].sum(1)), rtol=1e-8)
    assert np.all(np.diff(found.full.expected) > 0)


def test_two_percent_too_much_in_the_data_space_passes_the_full_test_and_not_the_sharper_one():
    rank, p, alpha = 600, 15_000, 0.1
    draw = np.random.default_rng(0)
    j = draw.standard_normal((rank, p), np.float32)
    store = store_of(j.reshape(rank // K, K, p), dtype="float32")
    kernel = jacstore.gram(store)
    samples = jacstore.sample(store, kernel, alpha=alpha, n=200, key=0)
    right = jacstore.sample_tests(samples, store, kernel, alpha)
    assert right.rank == rank and min(right.p_values.values()) > 0.05
    weights = np.linalg.solve(kernel.array.compute(), j @ samples.T.astype(np.float64))
    wrong = samples + 0.02 * (j.T @ weights).T
    found = jacstore.sample_tests(wrong, store, kernel, alpha)
    assert found.full.p_value > 0.05
    assert found.data.p_value < 1e-10 and found.pooled.p_value < 1e-3
    assert found.null.p_value > 0.05


# --- command line -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_samples_that_python_returns(on_disk, tmp_path):
    out = tmp_path / "z.npy"
    words = ("sample", str(tmp_path / "run.jac"), str(tmp_path / "run.ntk"), "--alpha", "0.1", "--n", "5", "--key", "9")
    done = invoke(*words, "--out", str(out), "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["samples"], report["parameters"], report["passes"]) == (5, on_disk.p, 2)
    assert np.array_equal(np.load(out), jacstore.sample(on_disk.store, on_disk.kernel, alpha=0.1, n=5, key=9))
    again = invoke(*words, "--out", str(out), "--json")
    assert json.loads(again.stdout)["passes"] == 0
    refused = invoke(*words[:-1], "8", "--out", str(out))
    assert refused.exit_code == 2 and "key: 9 -> 8" in refused.stderr


def test_softmax_samples_of_a_float32_kernel_pass_and_its_rank_is_not_that_of_rounding():
    draw = np.random.default_rng(3)
    n, k, p = 60, 3, 24
    store = store_of(draw.normal(size=(n, k, p)).astype(np.float32), draw.normal(size=(n, k)), dtype="float32")
    kernel = jacstore.gram(store, None)
    for likelihood in ("gaussian", "softmax"):
        drawn = jacstore.sample(store, kernel, alpha=0.1, n=200, key=1, likelihood=likelihood, method="ggn")
        found = jacstore.sample_tests(drawn, store, kernel, 0.1, likelihood=likelihood)
        assert found.rank <= p and min(found.p_values.values()) > 1e-3


@pytest.mark.parametrize("method", ["ggn", "cg", "perturb"])
def test_a_store_with_nan_has_no_posterior(method):
    rows = np.random.default_rng(0).normal(size=(4, 2, 6))
    rows[2, 1, 3] = np.nan
    options = {"unit_size": 4, "dtype": "float64", "codec": "none", "memory": "500MB", "allow_nonfinite": True}
    with StoreWriter(None, {"w": (6,)}, 4, 2, **options) as writer:
        writer.write_unit(0, {"w": rows})
    with pytest.raises(InvalidRequestError, match="example 2"):
        jacstore.sample(writer.store, None, alpha=0.1, n=3, key=0, method=method)


@pytest.mark.parametrize("condition", [1e9, 1e12, 1e16, 1e20])
@pytest.mark.parametrize("wanted", [1e-4, 1e-8])
def test_a_quadrature_keeps_its_digits_however_wide_the_spectrum(condition, wanted):
    rule = quadrature(1.0, condition, error=wanted)
    values = np.geomspace(1, condition, 2001)
    assert np.abs(rule.inverse_root(values) * np.sqrt(values) - 1).max() <= 1.1 * wanted
