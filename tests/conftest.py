import os
import signal

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Triton's own functions are interpreted or compiled as this says when it is first imported, by whatever test that is
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # tests run side by side
# a shell that starts the tests in the background has Ctrl-C ignored; the tests of interruption need it
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run all slow tests, not every fourth of them")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--run-slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    left_out = set(slow) - set(slow[::4])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
