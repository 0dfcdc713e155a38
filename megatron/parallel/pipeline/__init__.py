"""Pipeline parallelism.

`schedule` lists every stage's operations in order, as data. `check` verifies that a schedule can
run, `simulate` predicts its timing, `draw` draws it, `executor` runs it, `p2p` sends tensors, and
`weight_gradients` defers the products for weight gradients.
"""
