"""The optimizer, which computes new weights from averaged gradients.

optimizer  the step: unscale, clip, check, update; the constant or dynamic loss scale
rules      update rules (AdamW, SGD), their choice, and offloading to the host
packed     moments and master weights in 16 or 8 bits, and Adam updates on them
averages   moving averages of the weights
muon       Muon, an update rule for matrices, and their orthogonalization
update     the interface of update rules
groups     groups of parameters that are updated in the same way
norms      norms over the whole model
schedule   learning rate and weight decay by consumed samples
"""
