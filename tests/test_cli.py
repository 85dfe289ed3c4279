"""The command line: what it prints where, how fast, and its exit codes."""

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

import curvlens
from curvlens import cli, progress
from curvlens.exact import literal
from curvlens.exact.verification import CLAIMS


def command(code, *arguments, **environment):
    """A fresh interpreter that runs `code` with the command line as `sys.argv`."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_help_needs_no_torch_and_is_there_at_once():
    """0.2 s of processor time, which other work on the machine does not change."""
    found = command(
        """
        import sys, time
        from curvlens.cli import run
        code = run(["--help"])
        print(code, time.process_time(), "torch" in sys.modules, "numpy" in sys.modules, file=sys.stderr)
        """
    )
    code, seconds, torch, numpy = found.stderr.split()
    assert (code, torch, numpy) == ("0", "False", "False")
    assert float(seconds) < 0.2
    assert "verify" in found.stdout


def test_package_is_lazy_and_has_its_names():
    found = command(
        """
        import sys
        import curvlens
        assert "torch" not in sys.modules
        assert set(curvlens.__all__) <= set(dir(curvlens))
        from curvlens import losses, hessian
        import curvlens.blocks
        assert "torch" in sys.modules
        assert curvlens.losses is losses
        assert curvlens.exact.SelfAttention
        from curvlens import *
        assert Landscape is curvlens.Landscape
        from curvlens import guards
        assert guards is sys.modules["curvlens.guards"]
        """
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("name", curvlens.__all__)
def test_names_are_what_they_say(name):
    value = getattr(curvlens, name)
    if name in curvlens._HOMES:
        assert value is getattr(importlib.import_module(f"curvlens.{curvlens._HOMES[name]}"), name)
    else:
        assert value is importlib.import_module(f"curvlens.{name}")


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'curvlens' has no attribute 'hessain'"):
        curvlens.hessain  # noqa: B018
    with pytest.raises(ImportError):
        exec("from curvlens import hessain")


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"curvlens {curvlens.__version__}\n"


def test_verify_prints_a_table(capsys):
    assert cli.run(["verify", "--claims", "A Lemma B.2"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^Lemma B\.2 .* ok$", shown.out, re.MULTILINE)
    assert shown.err == ""  # no progress where stderr is no terminal
    assert "\x1b" not in shown.out


def test_verify_json_is_alone_on_stdout(capsys):
    assert cli.run(["verify", "--claims", "Lemma B.*", "--json", "--seed", "3"]) == 0
    shown = capsys.readouterr()
    read = json.loads(shown.out)
    assert (read["passed"], read["seed"], len(read["claims"])) == (True, 3, 3)
    assert shown.err == ""


def test_verify_quiet(capsys, monkeypatch):
    assert cli.run(["verify", "--claims", "A Lemma B.3", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(literal, "shuffle", lambda d, like: literal.eye(d))
    assert cli.run(["verify", "--claims", "A Lemma B.3", "--quiet"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_failed_claim_is_exit_code_1(capsys, monkeypatch):
    right = literal.commutation
    monkeypatch.setattr(literal, "commutation", lambda m, n, like=None: right(n, m, like))
    assert cli.run(["verify", "--claims", "A Theorem 3.2"]) == 1
    assert "1 FAILED: A Theorem 3.2" in capsys.readouterr().out
    assert cli.run(["verify", "--claims", "A Theorem 3.2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--claims", "Theorem 99"], "expected a pattern of claims such as .* got 'Theorem 99'"),
        (["verify", "--seed", "x"], "'--seed'"),
        (["verify", "--what"], "No such option: --what; see 'curvlens verify --help'"),
        (["verfiy"], "No such command 'verfiy'.*; see 'curvlens --help'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert cli.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(f"curvlens: .*{message}.*\n", shown.err)


def test_no_command_shows_the_help(capsys):
    assert cli.run([]) == 2
    shown = capsys.readouterr()
    assert "Usage" in shown.out + shown.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_interrupt_keeps_what_is_done(options, capsys, monkeypatch):
    name = list(CLAIMS)[1]

    def interrupted(draw):
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(CLAIMS, name, replace(CLAIMS[name], checks=interrupted))
    assert cli.run(["verify", *options]) == 3
    shown = capsys.readouterr()
    assert shown.err == f"curvlens: interrupted after 1 of {len(CLAIMS)} claims\n"
    if options:
        read = json.loads(shown.out)
        assert (read["complete"], len(read["claims"])) == (False, 1)
    else:
        assert f"1 claims of {len(CLAIMS)}, interrupted" in shown.out


def test_an_interrupt_before_any_result(capsys, monkeypatch):
    def interrupted(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("curvlens.exact.verification.verify", interrupted)
    assert cli.run(["verify"]) == 3
    assert capsys.readouterr().err.strip() == "curvlens: interrupted before it was done"


def test_what_could_not_be_completed_is_exit_code_3(capsys, monkeypatch):
    def full(*_, **options):
        raise MemoryError("needs 9 TiB, and 1 GiB are free; take a smaller block")

    monkeypatch.setattr("curvlens.exact.verification.verify", full)
    assert cli.run(["verify"]) == 3
    assert capsys.readouterr().err == "curvlens: needs 9 TiB, and 1 GiB are free; take a smaller block\n"

    def broken(*_, **options):
        raise RuntimeError("a fault of our own")

    monkeypatch.setattr("curvlens.exact.verification.verify", broken)
    assert cli.run(["verify"]) == 3
    assert "a fault of our own" in capsys.readouterr().err


def test_progress_is_for_terminals(capsys, monkeypatch):
    """No patience here, so that the bar is there at once: on stderr alone, gone at the end, and not with --quiet."""
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.run(["verify", "--claims", "Lemma B.[23]", "--json"]) == 0
    shown = capsys.readouterr()
    assert "claims" in shown.err
    assert json.loads(shown.out)["passed"]
    assert cli.run(["verify", "--claims", "Lemma B.[23]", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_no_color_is_respected(monkeypatch):
    code = "import sys; from curvlens.cli import run; sys.exit(run(['--help']))"
    color = re.compile("\x1b\\[(\\d+;)*3\\d")
    environment = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert color.search(command(code, **environment).stdout)
    assert not color.search(command(code, NO_COLOR="1", **environment).stdout)


def test_as_a_module():
    found = subprocess.run(
        [sys.executable, "-m", "curvlens.cli", "--version"], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, f"curvlens {curvlens.__version__}\n")
