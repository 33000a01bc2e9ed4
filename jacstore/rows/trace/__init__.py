"""JAX: where in the backward pass rows of a parameter are formed, and the factors that they are formed from.

`backward` opens the program of one example's gradient, `find_terms` walks from each parameter's gradient to the
product that forms it (`scans`: in loops, `weight_maps`: through linear maps, `gains`: up to constant ones),
`candidates` are exact terms of one parameter, `cut` chooses among them and makes the function that returns factors.
"""
