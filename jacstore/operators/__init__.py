"""Products with J, J Jᵀ and Jᵀ Λ J.

`stored` multiplies by streaming a store (`panels`, `streams`, `parameter_columns`), `likelihoods` give Λ,
`ggn_matrix` forms Jᵀ Λ J, and `autodiff` multiplies by differentiating the user's function, without a store.
"""
