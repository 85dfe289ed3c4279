"""What the README shows runs as it stands, and its tree names what is there."""

import re
from pathlib import Path

import pytest
import torch

import curvlens

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def gpt2_folder(tmp_path, monkeypatch):
    """A small GPT-2 with its tokenizer and a text, saved as a user has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    text = "the quick brown fox jumps over the lazy dog and runs away from it again\n" * 3
    (tmp_path / "text.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(
        tmp_path / "gpt2-folder"
    )
    config = GPT2Config(
        vocab_size=60, n_embd=8, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
        initializer_range=0.4,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2-folder")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ten_lines(gpt2_folder, capsys):
    code, more = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.strip().splitlines()) <= 11
    found = {}
    exec(code, found)
    land, model = found["land"], found["model"]
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    exec(more, found)
    assert "layer.1" in capsys.readouterr().out
    assert set(lines) == {
        "layer.0.attn.query", "layer.0.attn.value", "layer.0.attn.query.head.3", "layer.0.attn.value.head.3"
    }  # fmt: skip

    # the same numbers by dense double backward in float64
    from reference import Reference

    exact = model.double()
    plain = Reference(exact, (found["ids"][:, :64],) * 2, "next-token", land.blocks)
    outer = plain.outer()
    functional = plain.hessian() - outer
    for name, numbers in lines.items():
        rows = land.blocks.positions(land.blocks.select(name))
        expected = [m[rows][:, rows].norm().item() for m in (outer, functional)]
        shown = [float(number) for number in numbers.split()]
        assert shown[0] == pytest.approx(expected[0], rel=2e-5)  # float32 arithmetic
        assert shown[1] == pytest.approx(expected[1], rel=2e-5, abs=2e-6 * expected[0])


def test_the_tree_names_every_file():
    tree = README.split("src/curvlens/\n")[1].split("```")[0]
    named = set(re.findall(r"^  ([a-z_]+(?:\.py|/))", tree, re.M))
    package = Path(curvlens.__file__).parent
    there = {p.name + ("/" if p.is_dir() else "") for p in package.iterdir()}
    assert named == there - {"__init__.py", "py.typed", "__pycache__/"}
    for path in re.findall(r"^([a-z]+)/", tree, re.M):
        assert (ROOT / path).is_dir()


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_examples_run(tmp_path, capsys, monkeypatch):
    import runpy

    torch.manual_seed(0)
    demo = runpy.run_path(str(ROOT / "examples/digit_addition.py"))
    demo["main"](width=4, steps=3)
    assert "query, query" in capsys.readouterr().out
    rates = runpy.run_path(str(ROOT / "examples/stable_rate.py"))
    rates["main"](width=4, warmup=3, steps=3)
    assert "critical rate" in capsys.readouterr().out
    tracking = runpy.run_path(str(ROOT / "examples/track_training.py"))
    tracking["main"](tmp_path, steps=4, width=4, every=2, size=4)
    assert "<figure" in (tmp_path / "track.html").read_text()
    pytest.importorskip("matplotlib").use("Agg")
    picture = runpy.run_path(str(ROOT / "examples/block_map.py"))
    picture["main"](str(tmp_path / "map.png"), width=4, steps=3, samples=2)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
