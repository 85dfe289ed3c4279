"""Every numbered statement of both papers, closed form against autodiff.

"Paper A" is *What Does It Mean to Be a Transformer? Insights from a Theoretical Hessian Analysis* (Ormaniec, Dangel,
Singh, ICLR 2025), "paper B" *Closing the Curvature Gap: Full Transformer Hessians and Their Implications for Scaling
Laws* (Petrov, Kiselev, Meshkov, Grabovoy, arXiv 2510.16927).
"""

# The order of import is that of the table.
from curvlens.exact.verification import attention  # noqa: F401, I001
from curvlens.exact.verification import growth, design, heads, appendix, transformer, convergence  # noqa: F401
from curvlens.exact.verification.claims import CLAIMS, Claim, Outcome
from curvlens.exact.verification.run import Verification, Verified, verify

__all__ = ["CLAIMS", "Claim", "Outcome", "Verification", "Verified", "verify"]
