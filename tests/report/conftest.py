import pytest
import torch

from analyses import digit_net, tiny
from curvlens import Landscape, digits
from curvlens.report.analyze import analyze


@pytest.fixture(scope="session")
def land():
    """Uneven batches, in float64."""
    (a, b) = digits.batches(2, 4)
    return Landscape(digit_net(), [a, (b[0][:3], b[1][:3])], dtype=torch.float64)


@pytest.fixture(scope="session")
def exact_report(land):
    return analyze(land, tiny(dense=5000), progress=False)


@pytest.fixture(scope="session")
def estimated_report(land):
    return analyze(land, tiny(traces=24), progress=False)
