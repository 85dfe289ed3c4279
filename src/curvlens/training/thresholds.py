"""Every threshold of a finding or an event of training, with its reason. Ratios are sharpness over its limit.

They were chosen on the runs of `tests/training/test_findings.py`; how they do on others is in
`benchmarks/training_findings.md`.
"""

# -- the rate
BEYOND = 2.0  # a ratio that, three measurements in a row, is beyond the edge: there noise shakes it between 0.7 and 1.6
FAR = 10.0  # a ratio that is so at once: a step along the sharpest direction grows 19 times
EARLY = 0.15  # of the run is its early phase,
WARM_UPS = 3  # or so many warm-ups, where they are longer
FIRST = 5  # steps of an adaptive optimizer whose P is of a few gradients; four times that is early in any run
LATER = 0.5  # of the peak rate: measurements after the early phase at less than that say nothing of the peak

# -- blocks
ORDERS = 500.0  # between the curvature of blocks: nearly three orders, as no healthy run came to

# -- spikes
JUMP = 1.25  # of the norm of a block's weights between two measurements,
APART = 2.0  # and so many times the jump of the next block, in e-folds: one that stands out
CONCENTRATED = 0.5  # of the square of the sharpest direction in one block: most of it
WINDOW, NEAR, LEAST = 24, 9, 12  # losses whose noise is known, those nearest; fewer than LEAST say nothing
SPREADS, RISE = 8.0, 0.15  # how far above their median a spike is: in their noise, and of their size

# -- events
SHARPENING = 2.0  # how far λ_max must rise above its lowest value to be called progressive sharpening
EDGE = (0.7, 1.6)  # ratios between which a run sits at its edge; minibatches shake it
AGREE = 3  # measurements that must agree, here and on a rate beyond the edge
