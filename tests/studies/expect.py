"""What the smoke run of every study gives, stored: `python tests/studies/expect.py NAME …` writes it anew.

The tolerance and its reason, in the same file, are written by hand.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from curvlens import studies

FOLDER = Path(__file__).parent / "expected"
EXACT = {
    "tolerance": 1e-6,
    "reason": "closed forms in float64; machines add in another order, and small terms of large sums lose digits",
}


def found(made):
    """What is compared: our number of every finding, and whether it holds."""
    return {finding.what: [finding.ours, finding.outcome] for finding in made.findings}


def store(name):
    path = FOLDER / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else EXACT
    with tempfile.TemporaryDirectory() as folder:
        made = studies.reproduce(name, "smoke", out=folder, figure=False)
    content = {"tolerance": kept["tolerance"], "reason": kept["reason"], "found": found(made)}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(made)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        store(name)
