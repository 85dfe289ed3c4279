"""Every study in its smallest form, against what it gave before."""

import json
import math
import sys
from pathlib import Path

import pytest

from curvlens import studies

sys.path.insert(0, str(Path(__file__).parent))
from expect import FOLDER, found


@pytest.mark.parametrize("name", studies.names())
def test_smoke(name, tmp_path):
    expected = json.loads((FOLDER / f"{name}.json").read_text())
    made = studies.reproduce(name, "smoke", out=tmp_path)
    got = found(made)
    assert got.keys() == expected["found"].keys()
    for what, (value, outcome) in expected["found"].items():
        assert math.isclose(got[what][0], value, rel_tol=expected["tolerance"], abs_tol=1e-12), what
        assert got[what][1] == outcome, what
    assert expected["reason"]
    assert (made.folder / "figure.png").stat().st_size > 2000
    # what is read again is the same result
    assert studies.read(made.folder / "result.json").findings == made.findings
    assert made.verdict in str(made)
