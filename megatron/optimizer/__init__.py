"""From averaged gradients to new weights.

`optimizer` takes the step, by one of the `rules`; `groups` says what is updated alike, `norms`
measures what is clipped, `loss_scale` and `schedule` say what changes over time.
"""
