import os

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)  # tests run side by side


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
