"""A run that is killed leaves whole files only, and is gone on with."""

import json
import subprocess
import sys
import time

from curvlens import studies

RUN = "import sys; from curvlens import studies; studies.reproduce('A-norm', 'smoke', out=sys.argv[1], figure=False)"


def test_killed(tmp_path):
    whole = studies.reproduce("A-norm", "smoke", out=tmp_path / "whole", figure=False)
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "killed")])
    try:
        until = time.monotonic() + 60
        while not list((tmp_path / "killed").rglob("repeat-*.json")) and time.monotonic() < until:
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    left = {path: json.loads(path.read_text()) for path in (tmp_path / "killed").rglob("repeat-*.json")}
    assert left
    assert not list((tmp_path / "killed").rglob("result.json"))
    made = studies.reproduce("A-norm", "smoke", out=tmp_path / "killed", figure=False)
    for path, content in left.items():
        assert json.loads(path.read_text()) == content  # with its seconds: not measured again
    for a, b in zip(made.findings, whole.findings, strict=True):
        # another number of threads adds in another order
        assert abs(a.ours - b.ours) <= 1e-6 * max(1, abs(b.ours))
