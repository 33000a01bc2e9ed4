"""Claims about what a kernel answers: equal to dense algebra with J, without J; kept with care; refused in words."""

from __future__ import annotations

import inspect
import math
import shutil
import warnings

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
import sklearn.base
import sklearn.decomposition
import sklearn.kernel_ridge
import sklearn.svm
import zarr
from scipy.special import softmax
from sklearn.datasets import load_digits

import jacstore
import jacstore.inference.linalg.cholesky_eigh
import jacstore.storage.files
from jacstore import KernelFactor, KernelRidge, StoreWriter, block_cg
from jacstore.errors import IncompleteError
from jacstore.inference.factorize import describe_spectrum
from jacstore.inference.kernel_matrix import KernelMatrix
from jacstore.testing import mlp
from support import error, refused

K = 2
METHODS = ("cholesky", "eigh")
ALPHAS = (1e-6, 1e-3, 1.0, 10.0)
# examples, parameters, rank
KINDS = {"wide": (12, 40, 24), "tall": (30, 15, 15), "deficient": (20, 50, 7)}


class Case:
    """J `(R, P)`, J* `(S, P)`, targets, and `C` and `A⁻¹` from the singular vectors of J: no Gram matrix is formed."""

    def __init__(self, kind: str, alpha: float, seed: int = 0) -> None:
        n, p, rank = KINDS[kind]
        draw = np.random.default_rng(seed)
        basis = draw.normal(size=(rank, p))
        self.j, self.other = (draw.normal(size=(size * K, rank)) @ basis for size in (n, 5))
        largest = np.linalg.norm(self.j, 2)
        self.j, self.other = 2 * self.j / largest, 2 * self.other / largest
        self.n, self.p, self.alpha = n, p, alpha
        self.gram, self.cross = self.j @ self.j.T, self.other @ self.j.T
        self.blocks = np.einsum("mkp,mlp->mkl", *[self.other.reshape(5, K, p)] * 2)
        self.y, self.f0 = draw.normal(size=(2, n, K))
        self.f0_cross = draw.normal(size=(5, K))
        u, s, vt = np.linalg.svd(self.j, full_matrices=False)
        self.c = np.eye(len(self.j)) / alpha + (u * (1 / (s**2 + alpha) - 1 / alpha)) @ u.T
        self.a_inverse = np.eye(p) / alpha + (vt.T * (1 / (s**2 + alpha) - 1 / alpha)) @ vt
        self.s2 = s**2

    def factor(self, method: str) -> KernelFactor:
        return KernelFactor(self.gram, self.alpha, method, outputs=K)


@pytest.fixture(params=[(kind, alpha) for kind in KINDS for alpha in ALPHAS], ids=lambda p: f"{p[0]}-{p[1]:g}")
def case(request):
    return Case(*request.param)


def store_of(rows, path=None, dtype="float64"):
    """A store of `(N, K, P)` as it is."""
    n, k, p = rows.shape
    with StoreWriter(path, {"w": (p,)}, n, k, unit_size=4, dtype=dtype, codec="none", memory="200MB") as writer:
        for start, stop in writer.missing:
            writer.write_unit(start, {"w": rows[start:stop]})
    return writer.store


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """Kernels of 12 examples in tiles of 5, in the modes that can be solved, and of 5 others with them."""
    folder, case = tmp_path_factory.mktemp("kernels"), Case("wide", 1e-3)
    store = store_of(case.j.reshape(case.n, K, -1), folder / "run.jac")
    other = store_of(case.other.reshape(5, K, -1), folder / "other.jac")
    for mode in ("full", "trace"):
        jacstore.gram(store, out=folder / f"{mode}.ntk", mode=mode, tile=5)
        jacstore.gram(other, store, folder / f"{mode}-cross.ntk", mode=mode, tile=5)
    jacstore.gram(other, out=folder / "blocks.ntk", mode="blocks")
    jacstore.gram(store, out=folder / "diagonal.ntk", mode="diagonal")
    jacstore.gram(store, out=folder / "float32.ntk", dtype="float32")
    jacstore.gram(store, out=folder / "triangle.ntk", triangle=True, by_leaf=True, tile=5)
    return folder


@pytest.fixture
def kernels(on_disk, tmp_path):
    shutil.copytree(on_disk, tmp_path / "k")
    return tmp_path / "k"


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_solutions_and_diagonals_are_those_of_dense_algebra(case, method):
    factor = case.factor(method)
    assert error(factor.solve(case.y), (case.c @ case.y.ravel()).reshape(case.n, K)) < 1e-8
    assert error(factor.solve(np.eye(len(case.j))), case.c) < 1e-8
    assert error(factor.diag_inv(), np.diagonal(case.c)) < 1e-8
    blocks = case.c.reshape(case.n, K, case.n, K)[np.arange(case.n), :, np.arange(case.n)]
    assert error(factor.diag_inv(blocks=True), blocks) < 1e-8
    smoother = case.j @ case.a_inverse @ case.j.T
    assert error(factor.leverage(), np.diagonal(smoother)) < 1e-8
    assert error(factor.effective_dimension(), np.trace(smoother)) < 1e-8


@pytest.mark.parametrize("method", METHODS)
def test_determinants_are_those_of_dense_algebra(case, method):
    factor = case.factor(method)
    assert error(factor.logdet(), np.linalg.slogdet(case.gram + case.alpha * np.eye(len(case.j)))[1]) < 1e-8
    precision = case.alpha * np.eye(case.p) + case.j.T @ case.j
    assert error(factor.logdet_posterior(case.p), np.linalg.slogdet(precision)[1]) < 1e-8


@pytest.mark.parametrize("method", METHODS)
def test_predictions_are_those_of_the_primal_problem(case, method):
    factor = case.factor(method)
    weights = case.a_inverse @ case.j.T @ (case.y - case.f0).ravel()
    truth = case.f0_cross + (case.other @ weights).reshape(5, K)
    assert error(factor.predict(case.cross, case.y, case.f0, case.f0_cross), truth) < 1e-8
    assert (
        error(factor.predict(case.cross, case.y.ravel(), case.f0.ravel()), truth.ravel() - case.f0_cross.ravel()) < 1e-8
    )
    covariance = (case.other @ case.a_inverse @ case.other.T).reshape(5, K, 5, K)[np.arange(5), :, np.arange(5)]
    assert error(factor.predictive_covariance(case.cross, case.blocks), covariance) < 1e-8


@pytest.mark.parametrize("method", METHODS)
def test_leave_one_out_is_that_of_refits(case, method):
    found = case.factor(method).loo(case.y, case.f0)
    means, covariances = [], []
    for n in range(case.n):
        keep, out = np.delete(np.arange(case.n * K), [n * K, n * K + 1]), slice(n * K, n * K + K)
        j, residual = case.j[keep], np.delete(case.y - case.f0, n, axis=0).ravel()
        u, s, vt = np.linalg.svd(j, full_matrices=False)
        weights = (vt.T * (s / (s**2 + case.alpha))) @ (u.T @ residual)
        means.append(case.f0[n] + case.j[out] @ weights)
        inverse = np.eye(case.p) / case.alpha + (vt.T * (1 / (s**2 + case.alpha) - 1 / case.alpha)) @ vt
        covariances.append(case.j[out] @ inverse @ case.j[out].T + np.eye(K))
    assert error(found.mean, means) < 1e-8
    assert error(found.covariance, covariances) < 1e-8


@pytest.mark.parametrize("method", METHODS)
def test_generalised_cross_validation_is_its_formula(case, method):
    weights, rows = case.c @ (case.y - case.f0).ravel(), len(case.j)
    truth = (weights @ weights / rows) / (np.trace(case.c) / rows) ** 2
    assert error(case.factor(method).gcv(case.y, case.f0), truth) < 1e-8


def test_a_grid_of_alphas_is_answered_from_one_eigendecomposition(monkeypatch):
    case = Case("tall", 1.0)
    grid = KernelFactor(case.gram, ALPHAS, "eigh", outputs=K)
    monkeypatch.setattr(np.linalg, "eigh", None)
    answers = {
        "solve": lambda f: f.solve(case.y),
        "logdet": lambda f: f.logdet(),
        "logdet_posterior": lambda f: f.logdet_posterior(case.p),
        "diag_inv": lambda f: f.diag_inv(),
        "blocks": lambda f: f.diag_inv(blocks=True),
        "leverage": lambda f: f.leverage(),
        "effective_dimension": lambda f: f.effective_dimension(),
        "gcv": lambda f: f.gcv(case.y),
        "loo": lambda f: f.loo(case.y, case.f0).mean,
        "loo covariance": lambda f: f.loo(case.y).covariance,
        "predict": lambda f: f.predict(case.cross, case.y, case.f0, case.f0_cross),
        "covariance": lambda f: f.predictive_covariance(case.cross, case.blocks),
    }
    for name, answer in answers.items():
        together = answer(grid)
        assert len(together) == len(ALPHAS), name
        for alpha, one in zip(ALPHAS, together, strict=True):
            assert error(answer(grid.at(alpha)), one) < 1e-9, name
    assert np.array_equal(grid.alpha, ALPHAS) and grid.at(0.5).alpha == 0.5
    assert error((grid.eigenvectors * grid.eigenvalues) @ grid.eigenvectors.T, case.gram) < 1e-12


def test_results_have_the_shape_of_what_was_given():
    case = Case("wide", 1e-2)
    factor = case.factor("cholesky")
    for tail in ((), (3,), (3, 2)):
        by_row, by_example = np.ones((24, *tail)), np.ones((12, K, *tail))
        assert factor.solve(by_row).shape == by_row.shape and factor.solve(by_example).shape == by_example.shape
        assert factor.predict(case.cross, by_row).shape == (10, *tail)
        assert factor.predict(case.cross, by_example).shape == (5, K, *tail)
        assert factor.loo(by_example).mean.shape == by_example.shape
        assert error(factor.solve(by_example).reshape(by_row.shape), factor.solve(by_row)) == 0
    assert isinstance(factor.logdet(), float) and isinstance(factor.effective_dimension(), float)
    named = refused(factor.solve, np.ones((12, 3)))
    assert "(12, 3)" in named and "(24, ...)" in named and "(12, 2, ...)" in named
    assert "f0 has shape (24,)" in refused(factor.loo, case.y, np.zeros(24))
    assert "NaN or infinity in row 3" in refused(factor.solve, np.where(np.arange(24) == 3, np.nan, 1.0))


# --- kernels on disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "triangle"])
@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_on_disk_answers_like_its_array_and_without_its_store(name, method, kernels):
    shutil.rmtree(kernels / "run.jac")
    shutil.rmtree(kernels / "other.jac")
    case = Case("wide", 1e-3)
    factor = KernelFactor(kernels / f"{name}.ntk", case.alpha, method)
    dense = case.factor(method)
    assert (factor.n_examples, factor.n_outputs, factor.n_rows) == (12, 2, 24)
    assert error(factor.loo(case.y, case.f0).mean, dense.loo(case.y, case.f0).mean) < 1e-9
    cross, blocks = (jacstore.open(kernels / f) for f in ("full-cross.ntk", "blocks.ntk"))
    assert error(factor.predict(cross, case.y), dense.predict(case.cross, case.y)) < 1e-9
    covariance = dense.predictive_covariance(case.cross, case.blocks)
    assert error(factor.predictive_covariance(cross, blocks), covariance) < 1e-9
    assert error(factor.logdet_posterior(case.p), dense.logdet_posterior(case.p)) < 1e-9


def test_mode_trace_is_the_kernel_of_examples(kernels):
    case = Case("wide", 1e-3)
    rows = case.j.reshape(12, -1)
    factor = KernelFactor(jacstore.open(kernels / "trace.ntk"), 0.1)
    inverse = np.linalg.inv(rows @ rows.T + 0.1 * np.eye(12))
    labels = np.eye(3)[np.arange(12) % 3]
    assert error(factor.solve(labels), inverse @ labels) < 1e-9
    cross = case.other.reshape(5, -1) @ rows.T
    assert error(factor.predict(kernels / "trace-cross.ntk", labels), cross @ inverse @ labels) < 1e-9
    own = np.square(case.other.reshape(5, -1)).sum(1)
    truth = (own - np.einsum("mi,ij,mj->m", cross, inverse, cross)) / 0.1
    found = factor.predictive_covariance(kernels / "trace-cross.ntk", jacstore.open(kernels / "blocks.ntk"))
    assert error(found, truth[:, None, None]) < 1e-9
    assert "mode trace" in refused(factor.logdet_posterior, 40)


def test_tiles_of_a_symmetric_kernel_are_read_once(kernels, monkeypatch):
    kernel, read = jacstore.open(kernels / "full.ntk"), []
    original = jacstore.Kernel.read_tile
    monkeypatch.setattr(
        jacstore.Kernel, "read_tile", lambda self, leaf, i, j: read.append((i, j)) or original(self, leaf, i, j)
    )
    KernelFactor(kernel, 1.0, keep=False)
    assert sorted(read) == [(i, j) for i in range(3) for j in range(i, 3)]


def test_a_lazy_dask_kernel_is_a_kernel():
    case = Case("tall", 1e-2)
    lazy = da.from_array(case.gram, chunks=(7, 9))
    assert error(KernelFactor(lazy, 1e-2, outputs=K).solve(case.y), case.factor("cholesky").solve(case.y)) < 1e-12
    cross = da.from_array(case.cross, chunks=3)
    factor = case.factor("eigh")
    assert error(factor.predict(cross, case.y), factor.predict(case.cross, case.y)) < 1e-12


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_factorization_is_kept_and_used_again(method, kernels, monkeypatch, limits):
    case, path = Case("wide", 1e-3), kernels / "full.ntk"
    limits(kept_square=7)
    first = KernelFactor(path, 1e-3, method)
    monkeypatch.setattr(KernelMatrix, "load", None)
    again = KernelFactor(path, 1e-3, method)
    assert not first.reused and again.reused
    assert again.error == first.error
    assert np.array_equal(first.solve(case.y), again.solve(case.y))
    assert np.array_equal(first.diag_inv(), again.diag_inv())
    if method == "eigh":
        assert KernelFactor(path, [1.0, 2.0], "eigh").reused
        assert np.array_equal(jacstore.spectrum(path)[::-1].clip(0), first.eigenvalues)


def test_another_alpha_needs_another_cholesky_factor(kernels):
    path = kernels / "full.ntk"
    assert not KernelFactor(path, 1e-3).reused
    other = KernelFactor(path, 1e-2)
    assert not other.reused and KernelFactor(path, 1e-2).reused
    assert error(other.logdet(), KernelFactor(path, 1e-2, "eigh").logdet()) < 1e-12


def test_a_factorization_of_other_bytes_is_not_used(kernels):
    path, case = kernels / "full.ntk", Case("wide", 1e-3)
    KernelFactor(path, 1e-3)
    changed = store_of(3 * case.j.reshape(12, K, -1), kernels / "changed.jac")
    held = (
        shutil.copytree(path / "factors", kernels / "held"),
        shutil.copy(path / "ledger/factor-cholesky-0000000.json", kernels),
    )
    jacstore.gram(changed, out=path, overwrite=True, tile=5)
    assert not (path / "factors").exists()
    shutil.copytree(held[0], path / "factors")
    shutil.copy(held[1], path / "ledger")
    factor = KernelFactor(path, 1e-3)
    assert not factor.reused
    assert error(factor.logdet(), np.linalg.slogdet(9 * case.gram + 1e-3 * np.eye(24))[1]) < 1e-9


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40] + b"x" + data[41:], None])
def test_a_damaged_factorization_is_computed_again(damage, kernels):
    path = kernels / "full.ntk"
    first = KernelFactor(path, 1e-3, "eigh")
    file = path / "factors/eigenvectors/c/0/0"
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    again = KernelFactor(path, 1e-3, "eigh")
    assert not again.reused and np.array_equal(again.eigenvectors, first.eigenvectors)
    assert KernelFactor(path, 1e-3, "eigh").reused


@pytest.mark.parametrize("step", ["write", "fsync", "record", "rename"])
def test_a_stop_while_keeping_leaves_nothing_that_counts(step, kernels, monkeypatch):
    path = kernels / "full.ntk"
    KernelFactor(path, 1.0)

    def stop(at, name):
        if at == step and "factor" in name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jacstore.storage.files, "before_step", stop)
        with pytest.raises(KeyboardInterrupt):
            KernelFactor(path, 1e-3)
    factor = KernelFactor(path, 1e-3)
    assert not factor.reused and error(factor.logdet(), Case("wide", 1e-3).factor("eigh").logdet()) < 1e-9
    assert KernelFactor(path, 1e-3).reused
    assert [p.name for p in (path / "ledger").iterdir() if p.suffix == ".tmp"] == []


def test_a_kept_factor_is_plain_zarr_and_disturbs_neither_gram_nor_readers(kernels):
    path = kernels / "full.ntk"
    factor = KernelFactor(path, 1e-3, "eigh")
    KernelFactor(path, 1e-3)
    group = zarr.open_group(path, mode="r")
    assert np.array_equal(group["factors/eigenvectors"][...], factor.eigenvectors)
    upper = group["factors/cholesky"][...]
    assert error(upper.T @ upper, Case("wide", 1).gram + 1e-3 * np.eye(24)) < 1e-12
    assert sorted(name for name, _ in group.members()) == ["factors", "kernel", "ledger"]
    report = jacstore.gram(kernels / "run.jac", out=path, tile=5).report
    assert report["tiles_computed"] == 0 and KernelFactor(path, 1e-3).reused
    before = sorted(path.rglob("*"))
    KernelFactor(path, 0.5, keep=False)
    assert sorted(path.rglob("*")) == before


def test_a_kernel_in_memory_keeps_nothing():
    case = Case("wide", 1e-3)
    kernel = jacstore.gram(store_of(case.j.reshape(12, K, -1)))
    assert error(KernelFactor(kernel, 1e-3).solve(case.y), case.factor("cholesky").solve(case.y)) < 1e-9
    assert not KernelFactor(kernel, 1e-3).reused


# --- refusals and warnings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, -1.0, np.nan, np.inf, [], [1.0, 0.0], [[1.0]]])
def test_an_alpha_that_is_not_above_zero_is_refused(alpha):
    assert "allowed are numbers above 0 (alpha=)" in refused(KernelFactor, np.eye(3), alpha, "eigh")


def test_several_alphas_need_eigh():
    assert 'method="eigh"' in refused(KernelFactor, np.eye(3), [1.0, 2.0])
    assert "cholesky, eigh" in refused(KernelFactor, np.eye(3), 1.0, "lu")
    factor = KernelFactor(np.eye(3), 1.0)
    assert 'method="eigh"' in refused(factor.at, 2.0)
    assert 'method="eigh"' in refused(lambda: factor.eigenvalues)


def test_what_is_no_symmetric_kernel_is_refused(kernels):
    case = Case("wide", 1.0)
    assert "rectangular (10, 24)" in refused(KernelFactor, kernels / "full-cross.ntk", 1.0)
    assert "mode diagonal; allowed are full and trace" in refused(KernelFactor, kernels / "diagonal.ntk", 1.0)
    assert "rectangular" in refused(KernelFactor, case.cross, 1.0)
    assert "not symmetric" in refused(KernelFactor, np.triu(case.gram), 1.0)
    assert "not a multiple of 5 outputs" in refused(KernelFactor, case.gram, 1.0, outputs=5)
    assert "a real matrix" in refused(KernelFactor, np.ones(3), 1.0)
    assert "a real matrix" in refused(KernelFactor, case.gram * 1j, 1.0)
    assert "has 2 row(s) per example" in refused(KernelFactor, kernels / "full.ntk", 1.0, outputs=3)
    (kernels / "full.ntk/ledger/tiles-0000000.json").unlink()
    assert "missing" in refused(KernelFactor, kernels / "full.ntk", 1.0, error=IncompleteError)


def test_a_row_that_is_not_finite_is_named():
    gram = Case("wide", 1.0).gram.copy()
    gram[7, 2] = gram[2, 7] = np.nan
    assert "row 2 (example 1, output 0)" in refused(KernelFactor, gram, 1.0, outputs=K)


def test_a_cross_kernel_of_another_store_or_the_wrong_way_round_is_refused(kernels):
    factor, y = KernelFactor(kernels / "full.ntk", 1.0), np.ones(24)
    own = jacstore.gram(kernels / "other.jac", out=kernels / "own.ntk")
    assert "gram(other_store, store)" in refused(factor.predict, own, y)
    assert "gram(other_store, store)" in refused(factor.predict, kernels / "trace-cross.ntk", y)
    changed = store_of(np.ones((12, K, 40)), kernels / "changed.jac")
    cross = jacstore.gram(kernels / "other.jac", changed, kernels / "changed-cross.ntk")
    assert "made from another store" in refused(factor.predict, cross, y)
    assert error(factor.predict(kernels / "full.ntk", y), Case("wide", 1).gram @ factor.solve(y)) < 1e-9
    blocks = jacstore.open(kernels / "trace.ntk")
    assert "--mode blocks" in refused(factor.predictive_covariance, kernels / "full-cross.ntk", blocks)
    assert "blocks has shape (4, 2, 2)" in refused(
        factor.predictive_covariance, kernels / "full-cross.ntk", np.ones((4, 2, 2))
    )


def test_a_replaced_diagonal_is_refused_where_the_kernel_must_be_that_of_the_stored_rows(kernels, monkeypatch):
    monkeypatch.setattr(jacstore.Kernel, "exact_diagonal", True, raising=False)
    factor = KernelFactor(kernels / "full.ntk", 1.0)
    assert "diagonal" in refused(factor.logdet_posterior, 40)
    assert np.isfinite(factor.logdet())


@pytest.mark.parametrize(("method", "needs"), [("cholesky", "4.61 kB"), ("eigh", "23 kB")])
def test_memory_is_checked_before_anything_is_read(method, needs, kernels, monkeypatch):
    monkeypatch.setattr(KernelMatrix, "load", None)
    line = refused(KernelFactor, kernels / "full.ntk", 1.0, method, memory="4kB")
    assert f"takes {needs}" in line and "4 kB" in line and "memory=" in line
    assert not (kernels / "full.ntk" / "factors").exists()
    assert "takes 9.22 kB" in refused(jacstore.spectrum, kernels / "full.ntk", memory="4kB")


def test_room_on_disk_is_checked_before_the_work(kernels, monkeypatch):
    monkeypatch.setattr(KernelMatrix, "load", None)
    monkeypatch.setattr("jacstore.base.machine.free_disk", lambda path: 100)
    line = refused(KernelFactor, kernels / "full.ntk", 1.0)
    assert "100 B free" in line and "keep=False" in line


def test_rows_beyond_32_bits_are_refused_only_where_lapack_counts_in_them(monkeypatch, limits):
    limits(lapack_32_bit_rows=20)
    gram = Case("wide", 1.0).gram
    assert KernelFactor(gram, 1.0, "eigh").n_rows == 24  # NumPy's own wheels count in 64 bits
    monkeypatch.setattr(jacstore.inference.linalg.cholesky_eigh, "_numpy_counts_in_64_bits", lambda: False)
    for call in (lambda: KernelFactor(gram, 1.0, "eigh"), lambda: jacstore.spectrum(gram)):
        line = refused(call)
        assert "24 rows" in line and "32 bits" in line and 'method="cholesky"' in line
    assert KernelFactor(gram, 1.0).n_rows == 24


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 24, 29])
def test_large_kernels_are_factorized_block_by_block_like_small_ones(rows, limits):
    # LAPACK itself ends the process beyond about 15,000 rows on two cores.
    limits(cholesky_rows=4, cholesky_columns=6)
    factors = np.random.default_rng(rows).normal(size=(rows, 40))
    matrix = factors @ factors.T
    upper, failed = jacstore.inference.linalg.cholesky_eigh.cholesky(matrix.copy(), 0.5)
    assert not failed
    assert error(np.triu(upper), np.linalg.cholesky(matrix + 0.5 * np.eye(rows)).T) < 1e-14
    for bad in {0, rows // 2, rows - 1}:
        spoiled = matrix.copy()
        spoiled[bad, bad] = -1e6
        assert jacstore.inference.linalg.cholesky_eigh.cholesky(spoiled, 0.5)[1] == bad + 1


@pytest.mark.parametrize("rows", [1, 4, 5, 11, 24])
def test_scipy_which_holds_back_signals_gets_only_blocks(rows, monkeypatch, limits):
    limits(cholesky_rows=4, cholesky_columns=6)
    seen = set()

    def watched(module, name):
        real = getattr(module, name)

        def call(*args, **options):
            arrays = [value for value in args if isinstance(value, np.ndarray)]
            seen.update((name, max(value.shape) <= 6 and min(value.shape) <= 4) for value in arrays)
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    for module in (jacstore.inference.linalg.cholesky_eigh.lapack, jacstore.inference.linalg.cholesky_eigh.blas):
        for name in [name for name in dir(module) if name.startswith("d") and callable(getattr(module, name))]:
            watched(module, name)
    factors = np.random.default_rng(rows).normal(size=(rows, 40))
    matrix, right = factors @ factors.T, np.random.default_rng(9).normal(size=(rows, 9))
    factor = KernelFactor(matrix, 0.5)
    inverse = np.linalg.inv(matrix + 0.5 * np.eye(rows))
    assert error(factor.solve(right), inverse @ right) < 1e-12
    assert error(factor.diag_inv(), np.diagonal(inverse)) < 1e-12
    upper = np.linalg.cholesky(matrix + 0.5 * np.eye(rows)).T
    spoiled = upper + np.tril(np.full((rows, rows), np.nan), -1)
    assert (
        error(jacstore.inference.linalg.cholesky_eigh.solve_upper(spoiled, right), np.linalg.solve(upper, right))
        < 1e-12
    )
    assert seen and all(small for _, small in seen), sorted(seen)


@pytest.mark.slow
def test_sixteen_thousand_rows_are_factorized():
    rows = 16_000
    matrix = np.full((rows, rows), 1 / rows)
    matrix[np.diag_indices(rows)] += 1
    factor = KernelFactor(matrix, 1.0, memory="8GB")
    assert factor.logdet() == pytest.approx((rows - 1) * math.log(2) + math.log(3), rel=1e-12)


def test_a_singular_kernel_is_named_by_the_row_at_which_it_fails():
    rows = np.random.default_rng(0).normal(size=(6, 4))
    rows[4] = rows[1]
    line = refused(KernelFactor, rows @ rows.T - 1e-12 * np.eye(6), 1e-18)
    assert "not positive definite" in line and "example 4" in line and "alpha 1e-18" in line and 'method="eigh"' in line


def test_alpha_below_the_error_of_the_kernel_is_said_with_its_figures(kernels):
    path = kernels / "float32.ntk"
    norm = np.linalg.norm(Case("wide", 1).gram)
    with pytest.warns(UserWarning, match=r"alpha 1e-09 is below the kernel's error: .* \(u ‖G‖_F\)") as caught:
        factor = KernelFactor(path, 1e-9, "eigh")
    assert f"{2.0**-24 * norm:.2g}" in str(caught[0].message)
    assert factor.error == pytest.approx(2.0**-24 * norm, rel=1e-6)
    with pytest.warns(UserWarning, match="alpha 1e-10"):
        factor.at([1.0, 1e-10])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KernelFactor(path, 1e-4)
        KernelFactor(kernels / "full.ntk", 1e-9, "eigh")


def test_a_kernel_that_is_not_positive_semidefinite_is_said():
    gram = Case("tall", 1).gram - 0.1 * np.eye(60)
    with pytest.warns(UserWarning, match=r"smallest eigenvalue of the kernel is -0.1, taken as 0"):
        factor = KernelFactor(gram, 1.0, "eigh")
    assert factor.eigenvalues.min() == 0
    assert "not positive definite" in refused(KernelFactor, gram, 1e-3)


# --- conjugate gradients ---------------------------------------------------------------------------------------------


class Counted:
    """A matrix that counts how often it is multiplied."""

    def __init__(self, matrix):
        self.matrix, self.shape, self.passes = matrix, matrix.shape, 0

    def matmat(self, block):
        self.passes += 1
        return self.matrix @ block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_conjugate_gradients_reach_the_dense_solution_in_one_pass_a_step(kind, alpha):
    case = Case(kind, alpha)
    matrix = Counted(case.gram)
    y = np.random.default_rng(1).normal(size=(len(case.j), 4))
    found = block_cg(matrix, y, alpha=alpha, tolerance=1e-9)
    assert found.converged and found.reason.startswith("converged: the largest true relative residual is ")
    assert matrix.passes == found.stats.passes and found.stats.steps <= found.stats.passes <= found.stats.steps + 2
    residual = np.linalg.norm(y - case.gram @ found.value - alpha * found.value, axis=0) / np.linalg.norm(y, axis=0)
    assert np.all(residual <= 1e-9) and np.all(found.stats.residuals <= 1e-9)
    assert error(found.value, case.c @ y) < 1e-8


def test_right_hand_sides_share_passes():
    case = Case("tall", 1e-3)
    y = np.random.default_rng(1).normal(size=(60, 15))
    together = block_cg(case.gram, y, alpha=1e-3).stats
    alone = [block_cg(case.gram, column, alpha=1e-3).stats for column in y.T]
    assert together.passes < min(stats.passes for stats in alone)
    # 15 directions are all that a kernel of rank 15 has, and one more step serves its null space.
    assert together.steps <= 3


def test_dependent_zero_and_tiny_right_hand_sides_are_solved_too():
    case = Case("wide", 1e-2)
    y = np.random.default_rng(1).normal(size=(24, 6))
    y[:, 1], y[:, 2], y[:, 3] = y[:, 0], 0, y[:, 4] - y[:, 5]
    y[:, 5] *= 1e-200
    found = block_cg(case.gram, y, alpha=1e-2)
    assert found.converged and found.stats.directions <= 4
    for column, truth in zip(found.value.T, (case.c @ y).T, strict=True):
        assert np.linalg.norm(column - truth) <= 1e-7 * np.linalg.norm(truth)
    zero = block_cg(case.gram, np.zeros(24), alpha=1e-2)
    assert zero.converged and not zero.value.any() and zero.stats.passes == 0 and "zero" in zero.reason
    whole = block_cg(case.gram, np.eye(24), alpha=1e-2)
    assert error(whole.value, case.c) < 1e-7 and whole.stats.steps <= 2
    more = block_cg(case.gram, np.eye(24, 30), alpha=1e-2)
    assert error(more.value[:, :24], case.c) < 1e-7 and more.stats.directions <= 24


def test_a_kernel_on_disk_is_streamed_once_a_step(kernels, monkeypatch):
    case, read = Case("wide", 1e-3), []
    original = jacstore.Kernel.read_tile
    monkeypatch.setattr(
        jacstore.Kernel, "read_tile", lambda self, leaf, i, j: read.append((i, j)) or original(self, leaf, i, j)
    )
    found = block_cg(kernels / "full.ntk", case.y, alpha=1e-3)
    assert error(found.value, (case.c @ case.y.ravel()).reshape(12, K)) < 1e-7
    assert len(read) == 6 * found.stats.passes


@pytest.mark.parametrize("deficient", [False, True])
def test_a_preconditioner_that_is_the_inverse_needs_a_step_or_two(deficient):
    case = Case("wide", 1e-4)
    y = np.random.default_rng(1).normal(size=(24, 3))
    if deficient:
        y[:, 2] = y[:, 1]
    exact = block_cg(case.gram, y, alpha=1e-4, preconditioner=lambda block: case.c @ block)
    assert exact.converged and exact.stats.steps <= 2
    same = block_cg(case.gram, y, alpha=1e-4, preconditioner=Counted(np.eye(24)))
    assert same.converged and same.stats.steps == block_cg(case.gram, y, alpha=1e-4).stats.steps
    assert error(same.value, case.c @ y) < 1e-7
    assert "function or an object with matmat" in refused(block_cg, case.gram, y, preconditioner=3)


def test_why_an_iteration_stopped_is_said_in_words():
    case = Case("wide", 1e-6)
    y = np.random.default_rng(1).normal(size=24)
    with pytest.warns(UserWarning, match="stopped at max_steps=3: raise it"):
        found = block_cg(case.gram, y, alpha=1e-6, max_steps=3)
    assert not found.converged and found.stats.steps == 3 and found.stats.passes == 4
    with pytest.warns(UserWarning, match="not positive definite: the smallest curvature of a direction is -1"):
        block_cg(-case.gram, y, alpha=1e-6)
    with pytest.warns(UserWarning, match="stagnated: .* wanted 1e-17; rounding allows no better"):
        found = block_cg(case.gram, y, alpha=1e-6, tolerance=1e-17)
    assert found.stats.residuals.max() < 1e-9
    with pytest.warns(UserWarning, match="holds NaN or infinity"):
        block_cg(Counted(case.gram * np.nan), y)


def test_requests_that_cannot_be_iterated_are_refused(kernels):
    case = Case("wide", 1.0)
    assert "one number of at least 0" in refused(block_cg, case.gram, np.ones(24), alpha=-1)
    assert "0 < tolerance < 1" in refused(block_cg, case.gram, np.ones(24), tolerance=0)
    assert "max_steps >= 1" in refused(block_cg, case.gram, np.ones(24), max_steps=0)
    assert "rectangular" in refused(block_cg, kernels / "full-cross.ntk", np.ones(24))
    assert "(10, 24)" in refused(block_cg, Counted(case.cross), np.ones(24))
    assert block_cg(case.gram, case.y, alpha=1.0, outputs=K).value.shape == (12, K)


# --- regression -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """200 digits and 60 others under a small network, two of its outputs: kernels on disk, outputs, labels."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    stores = []
    for name, span in (("run", slice(0, 200)), ("other", slice(200, 260))):
        problem = mlp(1, sizes=(64, 16, 10), inputs=images[span], outputs=[0, 1])
        stores.append(jacstore.build(problem, folder / f"{name}.jac", codec="none", memory="500MB"))
    for mode in ("full", "trace"):
        jacstore.gram(stores[0], out=folder / f"{mode}.ntk", mode=mode, memory="500MB")
        jacstore.gram(stores[1], stores[0], folder / f"{mode}-cross.ntk", mode=mode, memory="500MB")
    return folder, labels[:200], [store.outputs.astype(np.float64) for store in stores]


@pytest.mark.parametrize("mode", ["full", "trace"])
def test_leave_one_out_of_200_digits_equals_brute_force_and_reads_no_rows(mode, digits):
    folder, labels, (f0, _) = digits
    alpha, k = 1e-2, 2 if mode == "full" else 1
    y = np.eye(10)[labels][:, :2]
    for path in ("run.jac", "other.jac"):
        (folder / path).rename(folder / f"{path}.away")
    try:
        factor = KernelFactor(folder / f"{mode}.ntk", alpha)
        found = factor.loo(y, f0)
    finally:
        for path in ("run.jac", "other.jac"):
            (folder / f"{path}.away").rename(folder / path)
    gram = np.asarray(jacstore.open(folder / f"{mode}.ntk").array)
    residual = (y - f0).reshape(200 * k, -1)
    means, covariances = [], []
    for n in range(200):
        out = np.arange(n * k, n * k + k)
        keep = np.delete(np.arange(200 * k), out)
        cross = gram[np.ix_(keep, out)]
        sides = np.concatenate([residual[keep], cross], 1)
        solved = np.linalg.solve(gram[np.ix_(keep, keep)] + alpha * np.eye(len(keep)), sides)
        means.append((cross.T @ solved[:, :-k]).ravel())
        left = gram[np.ix_(out, out)] - cross.T @ solved[:, -k:]
        covariances.append(left / alpha + np.eye(k))
    assert error(found.mean, f0 + np.stack(means)) < 1e-8
    assert error(found.covariance, covariances) < 1e-8


def test_scikit_learn_takes_the_same_kernels_as_precomputed(digits):
    folder, labels, _ = digits
    train, cross = (np.asarray(jacstore.open(folder / f"trace{end}.ntk").array) for end in ("", "-cross"))
    y = np.eye(10)[labels] - 0.1
    ours = jacstore.KernelRidge(0.1).fit(folder / "trace.ntk", y)
    theirs = sklearn.kernel_ridge.KernelRidge(alpha=0.1, kernel="precomputed").fit(train, y)
    assert error(ours.dual_coef_, theirs.dual_coef_) < 1e-8
    predicted = ours.predict(folder / "trace-cross.ntk")
    assert error(predicted, theirs.predict(cross)) < 1e-8
    truth = np.eye(10)[load_digits(return_X_y=True)[1][200:260]]
    assert ours.score(folder / "trace-cross.ntk", truth) == pytest.approx(theirs.score(cross, truth), rel=1e-9)
    right = np.argmax(truth, 1)
    assert np.mean(np.argmax(predicted, 1) == right) > 0.7
    machine = sklearn.svm.SVC(kernel="precomputed").fit(train, labels)
    assert machine.score(cross, right) > 0.7
    components = sklearn.decomposition.KernelPCA(3, kernel="precomputed").fit(train)
    assert components.transform(cross).shape == (60, 3)


@pytest.mark.parametrize("method", ["cholesky", "eigh", "cg"])
def test_ridge_regression_around_a_network_in_mode_full(method, digits):
    folder, labels, (f0, f0_cross) = digits
    y = np.eye(10)[labels][:, :2]
    model = jacstore.KernelRidge(1.0, method=method, tolerance=1e-10).fit(folder / "full.ntk", y, f0)
    gram, cross = (np.asarray(jacstore.open(folder / f"full{end}.ntk").array) for end in ("", "-cross"))
    weights = np.linalg.solve(gram + 1.0 * np.eye(400), (y - f0).ravel())
    truth = f0_cross + (cross @ weights).reshape(60, 2)
    assert error(model.predict(folder / "full-cross.ntk", f0_cross), truth) < 1e-8
    assert error(model.predict(folder / "full-cross.ntk", f0=0), truth - f0_cross) < 1e-8
    assert "give f0 at these examples too" in refused(model.predict, folder / "full-cross.ntk")
    assert (model.factor_ is None) == (method == "cg")


def test_of_several_alphas_the_one_with_the_least_left_out_error_is_taken(digits):
    folder, labels, (f0, _) = digits
    y, alphas = np.eye(10)[labels][:, :2], [1e-3, 0.1, 10.0, 1000.0]
    model = jacstore.KernelRidge(alphas, method="eigh").fit(folder / "full.ntk", y, f0)
    errors = [np.mean((y - KernelFactor(folder / "full.ntk", a, keep=False).loo(y, f0).mean) ** 2) for a in alphas]
    assert error(model.loo_errors_, errors) < 1e-6
    assert model.alpha_ == alphas[int(np.argmin(errors))] and min(errors) < errors[0]
    single = jacstore.KernelRidge(model.alpha_).fit(folder / "full.ntk", y, f0)
    assert error(model.dual_coef_, single.dual_coef_) < 1e-8


def test_ridge_regression_keeps_to_the_manner_of_scikit_learn():
    case = Case("wide", 0.1)
    model = jacstore.KernelRidge(0.1, outputs=K)
    copy = sklearn.base.clone(model)
    assert copy is not model and copy.get_params() == model.get_params()
    assert copy.set_params(alpha=2.0) is copy and copy.alpha == 2.0 and model.alpha == 0.1
    assert "allowed are alpha, method" in refused(copy.set_params, gamma=1)
    assert "call fit(kernel, y) first" in refused(model.predict, case.cross)
    assert "cholesky, eigh, cg" in refused(copy.set_params(method="lu").fit, case.gram, case.y)
    assert model.fit(case.gram, case.y) is model
    assert error(model.predict(case.cross), case.factor("eigh").predict(case.cross, case.y)) < 1e-9


# --- weighting --------------------------------------------------------------------------------------------------------


def test_a_softmax_weighted_kernel_is_that_of_the_generalised_gauss_newton_matrix(kernels):
    case = Case("wide", 0.3)
    outputs = np.random.default_rng(5).normal(size=(12, K)) * 3
    p = softmax(outputs, 1)
    middle = np.zeros((24, 24))
    for n in range(12):
        middle[n * K : n * K + K, n * K : n * K + K] = np.diag(p[n]) - np.outer(p[n], p[n])
    precision = 0.3 * np.eye(case.p) + case.j.T @ middle @ case.j
    kernel = jacstore.open(kernels / "full.ntk")
    lazy = jacstore.weighted(kernel, outputs)
    assert isinstance(lazy, da.Array) and lazy.chunks == kernel.array.chunks
    factor = KernelFactor(lazy, 0.3, "eigh", outputs=K)
    assert error(factor.logdet_posterior(case.p), np.linalg.slogdet(precision)[1]) < 1e-10
    cross = jacstore.weighted(jacstore.open(kernels / "full-cross.ntk"), outputs, sides="columns")
    truth = (case.other @ np.linalg.solve(precision, case.other.T)).reshape(5, K, 5, K)
    found = factor.predictive_covariance(cross, jacstore.open(kernels / "blocks.ntk"))
    assert error(found, truth[np.arange(5), :, np.arange(5)]) < 1e-9
    transposed = jacstore.weighted(case.cross.T, outputs, sides="rows")
    assert error(transposed, np.asarray(cross).T) < 1e-12
    assert error(jacstore.weighted(da.from_array(case.gram, chunks=7), outputs), lazy) < 1e-12


PRECISIONS = {"a": 0.3, "b": 5.0, "b/w": 0.02}


def by_leaf(folder, mode="full", other=False):
    """Rows `(12, K, 66)` and `(5, K, 66)`, and a kernel of leaves a, b/v and b/w apart."""
    rows = np.random.default_rng(3).normal(size=(17, K, 66))
    stores = []
    for name, part in (("run", rows[:12]), ("other", rows[12:])):
        sizes = {"a": (6,), "b/v": (20,), "b/w": (40,)}
        with StoreWriter(folder / f"{name}.jac", sizes, len(part), K, dtype="float64", codec="none") as writer:
            for start, stop in writer.missing:
                parts = np.split(part[start:stop], [6, 26], axis=-1)
                writer.write_unit(start, dict(zip(sizes, parts, strict=True)))
        stores.append(writer.store)
    out = folder / f"{mode}-{other}.ntk"
    if other:
        kernel = jacstore.gram(stores[1], None if mode == "blocks" else stores[0], out, mode=mode, tile=5, by_leaf=True)
    else:
        kernel = jacstore.gram(stores[0], out=out, mode=mode, tile=5, by_leaf=True)
    return rows[:12].reshape(-1, 66), rows[12:].reshape(-1, 66), kernel


def test_prior_precisions_by_group_of_leaves_give_the_posterior_of_dense_algebra(tmp_path):
    j, others, kernel = by_leaf(tmp_path)
    pi = np.repeat([0.3, 5.0, 0.02], [6, 20, 40])
    precision = np.diag(pi) + j.T @ j
    lazy = jacstore.with_precisions(kernel, PRECISIONS)
    assert isinstance(lazy, da.Array) and error(lazy, (j / pi) @ j.T) < 1e-13
    factor = KernelFactor(lazy, 1.0, outputs=K)
    assert error(np.log(pi).sum() + factor.logdet(), np.linalg.slogdet(precision)[1]) < 1e-10
    (tmp_path / "cross").mkdir()
    *_, cross = by_leaf(tmp_path / "cross", other=True)
    (tmp_path / "blocks").mkdir()
    *_, blocks = by_leaf(tmp_path / "blocks", "blocks", other=True)
    found = factor.predictive_covariance(*(jacstore.with_precisions(given, PRECISIONS) for given in (cross, blocks)))
    truth = (others @ np.linalg.solve(precision, others.T)).reshape(5, K, 5, K)
    assert error(found, truth[np.arange(5), :, np.arange(5)]) < 1e-8
    y = np.random.default_rng(4).normal(size=(24,))
    weights = np.linalg.solve(precision, j.T @ y)
    assert error(factor.predict(jacstore.with_precisions(cross, PRECISIONS), y), others @ weights) < 1e-8
    middle = jacstore.weighted(lazy, np.zeros((12, K)))
    assert middle.shape == (24, 24)


def test_prior_precisions_that_fit_no_leaves_are_refused(tmp_path, kernels):
    *_, kernel = by_leaf(tmp_path)
    same = jacstore.with_precisions(str(tmp_path / "full-False.ntk"), {"a": 1, "b": 1})
    assert error(same, kernel.array) < 1e-14
    assert "b/v, b/w" in refused(jacstore.with_precisions, kernel, {"a": 1.0})
    assert "no leaf begins so" in refused(jacstore.with_precisions, kernel, {"a": 1.0, "b": 1.0, "b/x": 1.0})
    assert "above 0" in refused(jacstore.with_precisions, kernel, {"a": 0.0, "b": 1.0})
    assert "--by-leaf" in refused(jacstore.with_precisions, kernels / "full.ntk", {"w": 1.0})


def test_a_gaussian_weight_changes_nothing_and_wrong_requests_are_refused(kernels):
    kernel, outputs = jacstore.open(kernels / "full.ntk"), np.zeros((12, K))
    same = jacstore.weighted(kernel, outputs, likelihood="gaussian")
    assert np.array_equal(np.asarray(same), np.asarray(kernel.array))
    assert "gaussian, softmax" in refused(jacstore.weighted, kernel, outputs, "no-such-likelihood")
    assert "both, columns, rows" in refused(jacstore.weighted, kernel, outputs, sides="left")
    assert "12 examples x 2" in refused(jacstore.weighted, kernels / "full-cross.ntk", outputs)
    assert "mode trace" in refused(jacstore.weighted, jacstore.open(kernels / "trace.ntk"), outputs)
    assert "finite numbers (N, K)" in refused(jacstore.weighted, kernel, outputs.ravel())


def test_what_is_known_of_a_kernel_goes_with_what_is_made_of_it(tmp_path):
    rows = np.random.default_rng(0).normal(size=(6, 2, 30)).astype(np.float32)
    store = store_of(rows, dtype="float32")
    kernel = jacstore.gram(store, None, exact_diagonal=True, by_leaf=True)
    plain = jacstore.gram(store, None)
    expected = KernelFactor(plain, 1.0).error
    weighted = jacstore.weighted(plain, np.zeros((6, 2)), "gaussian")
    for made in (weighted, jacstore.lazy_kernel(store), jacstore.with_precisions(kernel, {"w": 1.0})):
        factor = KernelFactor(made, 1.0, outputs=2)
        assert 0.3 * expected < factor.error < 3 * expected
        with pytest.warns(UserWarning, match="below the kernel's error"):
            KernelFactor(made, expected / 1e3, "eigh", outputs=2)
    for made in (jacstore.with_precisions(kernel, {"w": 1.0}), jacstore.weighted(kernel, np.zeros((6, 2)), "gaussian")):
        assert "diagonal" in refused(KernelFactor(made, 1.0, outputs=2).logdet_posterior, 30)


def test_a_factor_shares_nothing_with_its_caller():
    case, alphas = Case("wide", 1.0), np.array([0.1, 1.0])
    factor, grid = case.factor("cholesky"), KernelFactor(case.gram, alphas, "eigh", outputs=2)
    before, solved = factor.effective_dimension(), grid.solve(case.y)
    for blocks in (False, True):
        found = factor.diag_inv(blocks)
        found[...] = 0
    alphas[:] = 100
    assert factor.effective_dimension() == before
    np.testing.assert_array_equal(grid.solve(case.y), solved)


def test_nan_fails_a_factorization_and_complex_targets_are_refused():
    matrix = np.eye(12)
    matrix[5, 5] = np.nan
    assert jacstore.inference.linalg.cholesky_eigh.cholesky(matrix, 0.0)[1] == 6
    case = Case("wide", 1.0)
    assert "complex" in refused(case.factor("cholesky").solve, 1j * np.asarray(case.y))


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_right_hand_sides_of_any_size_are_solved(size):
    assert block_cg(2 * np.eye(4), np.full(4, size), alpha=0.0).value == pytest.approx(np.full(4, size / 2))


def test_a_constant_output_and_a_kernel_of_zeros_are_no_division_by_zero(tmp_path):
    model = KernelRidge(1e-9).fit(np.eye(3), np.array([[1.0, 2], [1, 3], [1, 4]]))
    assert model.score(np.eye(3), np.array([[5.0, 2], [5, 3], [5, 4]])) == pytest.approx(0.5, abs=1e-6)
    assert KernelRidge(1.0).fit(np.eye(2), np.zeros(2)).score(np.eye(2), np.zeros(2)) == 1.0
    store = store_of(np.zeros((3, 1, 2)), tmp_path / "s")
    jacstore.gram(store, None, tmp_path / "k")
    assert describe_spectrum(str(tmp_path / "k"), 2, None, None).effective_dimension == []


# --- arguments of other kinds -----------------------------------------------------------------------------------------


def test_a_kernel_may_be_given_by_its_path_wherever_one_is_taken(kernels):
    factor = KernelFactor(kernels / "full.ntk", 0.1)
    cross, blocks = kernels / "full-cross.ntk", kernels / "blocks.ntk"
    found = factor.predictive_covariance(cross, blocks)
    assert np.array_equal(found, factor.predictive_covariance(jacstore.open(cross), jacstore.open(blocks)))
    jacobian = jacstore.operator(kernels / "run.jac")
    v = np.arange(float(jacobian.shape[0]))
    assert error(jacobian.gram(kernels / "full.ntk").matvec(v), jacobian.gram().matvec(v)) < 1e-12


def test_nan_names_the_example_that_it_comes_from():
    matrix = np.eye(12)
    matrix[7], matrix[:, 7] = np.nan, np.nan
    assert "row 7 (example 3, output 1)" in refused(KernelFactor, matrix, 0.1, outputs=2)


@pytest.mark.parametrize("alpha", ["much", None, [], [[1.0]], {}, 1 + 1j])
def test_an_alpha_that_is_none_is_refused(alpha):
    assert "--alpha" in refused(KernelFactor, np.eye(3), alpha, "eigh")


@pytest.mark.parametrize("times", [[], None, "soon", [[1.0]], [-1.0], [np.nan]])
def test_times_that_are_none_are_refused(times):
    factor = KernelFactor(np.eye(3), 0.1, "eigh")
    assert "times=" in refused(jacstore.gradient_flow, factor, times, np.ones(3))


def test_blocks_of_outputs_are_not_summed_unless_the_kernel_is():
    one = KernelFactor(np.eye(4), 0.1)
    assert "blocks has shape (2, 3, 3)" in refused(one.predictive_covariance, np.ones((2, 4)), np.ones((2, 3, 3)))


def test_a_second_fit_forgets_the_errors_of_the_first():
    model = jacstore.KernelRidge([0.1, 1.0], method="eigh").fit(np.eye(3), np.ones(3))
    assert model.loo_errors_.shape == (2,)
    assert not hasattr(model.set_params(alpha=0.1).fit(np.eye(3), np.ones(3)), "loo_errors_")


@pytest.mark.parametrize("k", [2.5, 0, 4, True, "two", None])
def test_a_number_of_examples_that_is_none_is_refused(k):
    assert f"k={k} " in refused(jacstore.top_examples, np.ones((2, 3)), k)


def test_a_search_over_alphas_by_scikit_learn_is_the_one_over_its_own_estimator():
    pytest.importorskip("sklearn")
    from sklearn.base import clone, is_regressor
    from sklearn.kernel_ridge import KernelRidge as Theirs
    from sklearn.model_selection import GridSearchCV, cross_val_score

    draw = np.random.default_rng(0)
    rows, y = draw.standard_normal((30, 8)), draw.standard_normal((30, 2))
    gram, grid = rows @ rows.T, {"alpha": [1e-2, 1.0, 100.0]}
    assert is_regressor(KernelRidge()) and clone(KernelRidge(0.3)).alpha == 0.3
    ours, theirs = (
        GridSearchCV(model, grid, cv=3).fit(gram, y) for model in (KernelRidge(), Theirs(kernel="precomputed"))
    )
    assert ours.best_params_ == theirs.best_params_
    np.testing.assert_allclose(ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"], rtol=1e-9)
    np.testing.assert_allclose(
        cross_val_score(KernelRidge(1.0), gram, y, cv=3),
        cross_val_score(Theirs(alpha=1.0, kernel="precomputed"), gram, y, cv=3),
        rtol=1e-9,
    )


# Checks of scikit-learn that KernelRidge cannot pass, and why.
NOT_FOR_KERNELS = {
    "check_estimators_unfitted": "the error is jacstore's own, for scikit-learn need not be installed",
    "check_estimators_nan_inf": "gives a matrix of features, not a kernel: it is refused as it is not square",
    "check_positive_only_tag_during_fit": "makes a kernel of random numbers that is not positive definite",
    "check_estimators_dtypes": "rounds a kernel to integers, which leaves it not positive definite",
    "check_complex_data": "wants scikit-learn's words; a complex kernel is refused in jacstore's",
    "check_dtype_object": "gives a kernel of Python objects; kernels are arrays of numbers",
    "check_estimators_empty_data_messages": "wants scikit-learn's words; an empty kernel is refused in jacstore's",
    "check_n_features_in_after_fitting": "wants scikit-learn's words; other columns are refused in jacstore's",
    "check_fit2d_predict1d": "wants scikit-learn's words; one row without its axis is refused in jacstore's",
}


def test_kernel_ridge_passes_every_check_of_scikit_learn_but_those_that_are_listed_with_a_reason():
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    if "expected_failed_checks" not in inspect.signature(checks.check_estimator).parameters:
        pytest.skip("scikit-learn lists no expected failures before version 1.6")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checks.check_estimator(
            KernelRidge(), on_skip=None, on_fail=None, expected_failed_checks=NOT_FOR_KERNELS
        )
    state = {status: {one["check_name"] for one in found if one["status"] == status} for status in ("passed", "xfail")}
    assert [one["check_name"] for one in found if one["status"] == "failed"] == []
    assert state["xfail"] == set(NOT_FOR_KERNELS) and len(state["passed"]) > 35


def test_a_sparse_kernel_and_targets_that_are_missing_are_refused():
    assert "sparse matrices are not supported" in refused(KernelRidge().fit, scipy.sparse.eye(3), np.ones(3))
    assert "the target y is None" in refused(KernelRidge().fit, np.eye(3), None)
    assert KernelRidge(method="cg").fit(np.eye(3), np.ones(3)).n_features_in_ == 3
