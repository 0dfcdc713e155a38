"""The optimizer, which turns averaged gradients into new weights.

optimizer     the step: unscale, clip, check, update
rules         update rules (AdamW, SGD), their choice, and offloading to the host
muon          Muon, an update rule for matrices
newton_schulz orthogonalization of matrices
update        what an update rule gets and returns
groups        groups of parameters that are updated alike
norms         norms over the whole model
loss_scale    a constant or dynamic loss scale
schedule      learning rate and weight decay by consumed samples
"""
