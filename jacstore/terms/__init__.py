"""The exact forms in which a row of J can be stored, and products with them.

`term` says what a kind answers, `dense`, `dot`, `conv`, `index` and `gain` are one kind each, and `kinds` the parameter
arrays that they make up. What mixes kinds stands apart: `factor_set` holds what was read of them, `row_products` forms
norms and kernels of pairs, `expand_rows` whole rows, `matrix_products` J V and Jᵀ U, `rounding` what rounding does to
them. NumPy alone: no file is read here and no JAX is imported.
"""

from jacstore.terms.kinds import (
    Constant as Constant,
)
from jacstore.terms.kinds import (
    Conv as Conv,
)
from jacstore.terms.kinds import (
    Dense as Dense,
)
from jacstore.terms.kinds import (
    Dot as Dot,
)
from jacstore.terms.kinds import (
    Factored as Factored,
)
from jacstore.terms.kinds import (
    Gain as Gain,
)
from jacstore.terms.kinds import (
    Index as Index,
)
from jacstore.terms.kinds import (
    Leaf as Leaf,
)
from jacstore.terms.kinds import (
    Operand as Operand,
)
from jacstore.terms.kinds import (
    Term as Term,
)
from jacstore.terms.kinds import (
    Views as Views,
)
from jacstore.terms.kinds import (
    dense_leaves as dense_leaves,
)
from jacstore.terms.kinds import (
    expand as expand,
)
