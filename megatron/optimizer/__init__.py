"""The optimizer, which turns averaged gradients into new weights.

optimizer  the step: unscale, clip, check, update; the constant or dynamic loss scale
rules      update rules (AdamW, SGD), their choice, and offloading to the host
packed     moments and master weights in 16 or 8 bits, and Adam on them
averages   moving averages of the weights
muon       Muon, an update rule for matrices, and how it orthogonalizes them
update     what an update rule receives and returns
groups     groups of parameters that are updated in the same way
norms      norms over the whole model
schedule   learning rate and weight decay by consumed samples
"""
