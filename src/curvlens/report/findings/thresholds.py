"""Every threshold of a finding, with its reason. Only what the numbers cross by `CLEAR` errors is told."""

CLEAR = 2.0  # standard errors (or residuals, of eigenvalues): 95 % of a normal error

# -- the spectrum
ILL_CONDITIONED = (
    1e3  # largest eigenvalue over the mean one: the step that the sharpest direction allows is 1/1000 of
)
# what the mean direction could take
EARLY = 3.0  # times worse in the first third of the layers than in the last
NEGATIVE_SHARE = 0.02  # of the sum of |λ|: below, damping as small as rounding in float32 hides it
NEGATIVE_EDGE = 0.05  # |λ_min| over λ_max: a saddle whose descent direction is as steep as 1/20 of the walls
FUNCTIONAL_SHARE = 0.3  # ‖H_f‖_F over ‖H‖_F: a Gauss-Newton step is then wrong by a third of its length or so
FUNCTIONAL_SMALL = 0.05  # below, Gauss-Newton and Hessian are the same to one digit
IN_SHARP_DIRECTIONS = 0.5  # of the squared gradient: most of a step moves along the walls of the valley

# -- layers and blocks
BETWEEN_LAYERS = (
    10.0  # largest over smallest norm of a layer's Hessian: one learning rate is wrong by ten for one
)
WITH_DEPTH = 3.0  # the last third of the layers over the first, at a rank correlation of at least `ORDERED`
ORDERED = 0.7
DISPARITY = 10.0  # value over query-key norm: the order of magnitude that paper A's Figure 1 shows
ONE_BLOCK = 0.5  # of the sharpest eigenvector's square in one group
UNLIKE = 0.35  # mean Jensen-Shannon divergence in nats, half of its limit ln 2

# -- attention
IDLE = 1e-3  # a head's functional norm over that of the model's median head
SATURATED = 0.1  # entropy over that of even attention: queries look at one token
EVEN = 0.99  # the same: queries look at all tokens alike

# -- through the depth
SHARPENING_NORM = 10.0  # γ / σ: curvature above the norm reaches its input up to a hundredfold
EPSILON = 0.1  # of the variance that a norm divides by
CREATED = 1.0  # created over passed curvature
AMPLIFIED = 10.0  # curvature at a sublayer's start over that at its end

# -- the step
BEYOND = 1.0  # sharpness over the threshold of stability
NEAR = 0.8  # where progressive sharpening settles in practice, it oscillates about 1

# -- trust
NOISY = 0.2  # relative error of a number by the choice of the data
LOOSE = 1e3  # a certified bound over the true norm
