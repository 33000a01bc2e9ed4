# What the package offers, for type checkers and editors; __init__.py has the same names for Python.
from jacstore import errors as errors
from jacstore import terms as terms
from jacstore import testing as testing
from jacstore import torch as torch
from jacstore.errors import Damaged as Damaged
from jacstore.errors import DamagedDataError as DamagedDataError
from jacstore.errors import Incomplete as Incomplete
from jacstore.errors import IncompleteError as IncompleteError
from jacstore.errors import Interrupted as Interrupted
from jacstore.errors import InvalidFunctionError as InvalidFunctionError
from jacstore.errors import InvalidRequestError as InvalidRequestError
from jacstore.errors import JacstoreError as JacstoreError
from jacstore.errors import Locked as Locked
from jacstore.errors import LockedError as LockedError
from jacstore.errors import Mismatch as Mismatch
from jacstore.errors import NonFinite as NonFinite
from jacstore.errors import NonFiniteError as NonFiniteError
from jacstore.errors import ProbeFailed as ProbeFailed
from jacstore.errors import Refused as Refused
from jacstore.errors import RequestMismatchError as RequestMismatchError
from jacstore.errors import RunInterruptedError as RunInterruptedError
from jacstore.errors import SelectedState as SelectedState
from jacstore.errors import SelectedStateWarning as SelectedStateWarning
from jacstore.in_memory import ntk as ntk
from jacstore.inference.attribution import gradient_dot as gradient_dot
from jacstore.inference.attribution import influence as influence
from jacstore.inference.attribution import loss_gradients as loss_gradients
from jacstore.inference.attribution import top_examples as top_examples
from jacstore.inference.factorize import spectrum as spectrum
from jacstore.inference.gradient_flow import gradient_flow as gradient_flow
from jacstore.inference.kept_factors import clean as clean
from jacstore.inference.kernel_factor import KernelFactor as KernelFactor
from jacstore.inference.kernel_ridge import KernelRidge as KernelRidge
from jacstore.inference.linalg.block_cg import block_cg as block_cg
from jacstore.inference.posterior import sample as sample
from jacstore.inference.posterior import sample_from as sample_from
from jacstore.inference.sample_tests import sample_tests as sample_tests
from jacstore.inference.weighted_kernels import weighted as weighted
from jacstore.inference.weighted_kernels import with_precisions as with_precisions
from jacstore.kernels.gram import gram as gram
from jacstore.kernels.gram import open_path
from jacstore.kernels.kernel import Kernel as Kernel
from jacstore.kernels.lazy import lazy_kernel as lazy_kernel
from jacstore.operators.autodiff import ggn_operator as ggn_operator
from jacstore.operators.autodiff import hvp_operator as hvp_operator
from jacstore.operators.autodiff import jacobian_operator as jacobian_operator
from jacstore.operators.ggn_matrix import ggn as ggn
from jacstore.operators.stored import operator as operator
from jacstore.problem.loading import load_target as load_target
from jacstore.problem.problem import Problem as Problem
from jacstore.rows.build import build as build
from jacstore.store.reader import JacobianStore as JacobianStore
from jacstore.store.writer import StoreWriter as StoreWriter
from jacstore.verification.verify import verify as verify

__version__: str
open = open_path
