# What the package offers, for type checkers and editors; __init__.py has the same names for Python.
from jacstore import errors as errors
from jacstore import terms as terms
from jacstore import testing as testing
from jacstore import torch as torch
from jacstore.assembly import gram as gram
from jacstore.assembly import open_path
from jacstore.attribution import gradient_dot as gradient_dot
from jacstore.attribution import influence as influence
from jacstore.attribution import loss_gradients as loss_gradients
from jacstore.attribution import top_examples as top_examples
from jacstore.builder import build as build
from jacstore.curvature import ggn_operator as ggn_operator
from jacstore.curvature import hvp_operator as hvp_operator
from jacstore.curvature import jacobian_operator as jacobian_operator
from jacstore.dynamics import gradient_flow as gradient_flow
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
from jacstore.factor_files import clean as clean
from jacstore.factoring import spectrum as spectrum
from jacstore.goodness import sample_tests as sample_tests
from jacstore.in_memory import ntk as ntk
from jacstore.kernel import Kernel as Kernel
from jacstore.krylov import block_cg as block_cg
from jacstore.lazy import lazy_kernel as lazy_kernel
from jacstore.normal_matrix import ggn as ggn
from jacstore.operators import operator as operator
from jacstore.posterior import sample as sample
from jacstore.posterior import sample_from as sample_from
from jacstore.problem import Problem as Problem
from jacstore.regression import KernelRidge as KernelRidge
from jacstore.solve import KernelFactor as KernelFactor
from jacstore.store import JacobianStore as JacobianStore
from jacstore.target import load_target as load_target
from jacstore.verification import verify as verify
from jacstore.weighting import weighted as weighted
from jacstore.weighting import with_precisions as with_precisions
from jacstore.writer import StoreWriter as StoreWriter

__version__: str
open = open_path
