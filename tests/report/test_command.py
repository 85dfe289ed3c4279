"""`curvlens analyze`, `compare` and `doctor`: what they write, print and answer, and what they say of wrong input."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from analyses import digit_net, tiny
from curvlens import cli, digits, hessian, nets
from curvlens.report import Report, presets, stages
from curvlens.report.compare import compare
from curvlens.report.data import Finding
from curvlens.sources import own, subject


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to stand in, and presets small enough for a test."""
    monkeypatch.chdir(tmp_path)
    for name in ("quick", "standard"):
        monkeypatch.setitem(presets.PRESETS, name, tiny(dense=600))
    monkeypatch.setattr(own, "trained", partial(own.trained, width=4, steps=3))
    monkeypatch.setattr(own, "SEQUENCES", 6)
    return tmp_path


def save_gpt2(folder, **settings):
    """A small GPT-2 with its tokenizer, which has no padding token, saved with safetensors."""
    from transformers import GPT2Config, GPT2LMHeadModel

    save_tokenizer(folder)
    size = {"vocab_size": 60, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 16, **settings}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **size))
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder):
    """A tokenizer without a padding token, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = "the quick brown fox jumps over the lazy dog and runs away from it again\n" * 4
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=50, special_tokens=["<unk>", "<mask>"])
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", mask_token="<mask>")
    fast.save_pretrained(folder)
    Path("text.txt").write_text(text)


@pytest.fixture
def folder(here):
    save_gpt2(here / "model")
    return here


def run(capsys, *arguments):
    capsys.readouterr()  # of what was saved before
    code = cli.run(["analyze", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


# -- what is done


def test_the_default(here, capsys):
    code, out, err = run(capsys)
    assert code == 0, err
    assert "One-block GPT on digit addition" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out + err
    report = Report.from_json("out/report.json")
    assert report.findings == Report.from_json("out/report.html").findings
    assert all(f.title in " ".join(out.split()) for f in report.findings)
    assert report.meta.optimizer == "AdamW"
    assert any("AdamW" in row.label for row in report.sharpness)
    assert report.meta.dtype == "float64"


def test_json_is_alone_on_stdout_and_quiet_is_quiet(here, capsys):
    code, out, err = run(capsys, "--json", "--quiet", "--out", "a")
    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == "curvlens-report/1"
    assert json.loads(Path("a/report.json").read_text()) == json.loads(out)


def test_figures(here, capsys):
    assert run(capsys, "--figures", "--quiet", "--out", "x/page.html")[0] == 0
    names = {p.name for p in (here / "x/figures").iterdir()}
    assert {"depth-frobenius.svg", "depth-frobenius.png", "depth.csv"} <= names
    assert (here / "x/page.html").exists()


def test_a_hugging_face_folder(folder, capsys):
    code, out, err = run(
        capsys, "--model", "model", "--text", "text.txt", "--sequences", "3", "--preset", "quick"
    )
    assert code == 0, err
    report = Report.from_json("out/report.json")
    assert report.meta.family == "gpt2"
    assert report.meta.scored_tokens == 3 * 15
    assert report.heads is not None
    assert report.complete
    assert "in blocks of 16" in out


SMALL = {
    "vocab_size": 60,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_other_families_saved_with_safetensors(kind, here, capsys):
    import transformers

    name = {"Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}[kind]
    more = {"num_key_value_heads": 1} if kind == "Llama" else {}
    config = getattr(transformers, f"{kind}Config")(**SMALL, max_position_embeddings=16, **more)
    getattr(transformers, name)(config).save_pretrained("model")
    assert (here / "model/model.safetensors").exists()
    save_tokenizer("model")
    code, out, err = run(capsys, "--model", "model", "--text", "text.txt", "--sequences", 3)
    assert code == 0, err
    report = Report.from_json("out/report.json")
    assert report.meta.family == kind.lower()
    assert report.complete
    assert report.heads is not None
    assert report.norms
    if kind == "Bert":
        assert 0 < report.meta.scored_tokens < 3 * 16
        assert "15 % of the tokens are masked" in " ".join(out.split())


def test_a_vit(here, capsys):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **sizes)
    ViTForImageClassification(config).save_pretrained("vit")
    Path("images.py").write_text(
        "import torch\ndef batches():\n    torch.manual_seed(0)\n"
        "    return [{'pixel_values': torch.randn(5, 1, 8, 8), 'labels': torch.arange(5) % 3}]\n"
    )
    code, _, err = run(capsys, "--model", "vit", "--data", "images.py:batches", "--quiet")
    assert code == 0, err
    report = Report.from_json("out/report.json")
    assert (report.meta.family, report.meta.loss, report.complete) == ("vit", "cross-entropy", True)
    code, _, err = run(capsys, "--model", "vit", "--text", "images.py")
    assert code == 2
    assert "expected a tokenizer in 'vit'" in err


def test_half_precision_is_computed_in_float32_and_said(folder, capsys):
    save_gpt2("half").bfloat16().save_pretrained("half")
    code, out, _ = run(capsys, "--model", "half", "--text", "text.txt", "--sequences", 2)
    assert code == 0
    assert "stored in bfloat16, computed in float32" in " ".join(out.split())
    assert Report.from_json("out/report.json").meta.dtype == "float32"


def test_functions_of_ones_own(here, capsys):
    (here / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))\n"
        "    return model, torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def batches():\n    torch.manual_seed(0)\n    return [(torch.randn(5, 3), torch.randn(5, 2))]\n"
        "def wrong():\n    return 3\n"
    )
    for reference in ("mine.py", "mine"):
        code, _, err = run(
            capsys, "--model", f"{reference}:build", "--data", f"{reference}:batches", "--quiet"
        )
        assert code == 0, err
    report = Report.from_json("out/report.json")
    assert report.meta.loss == "mse"
    assert report.sharpness[-1].rate == 0.1
    assert "none knows" not in str(report)
    for arguments, message in (
        (
            ("mine:wrong", "mine:batches"),
            "expected an nn.Module, or .model, optimizer., from 'mine:wrong', got int",
        ),
        (
            ("mine:buidl", "mine:batches"),
            "expected a function 'buidl' in 'mine' .* it has build, batches, wrong",
        ),
        (("nomine:build", "mine:batches"), "expected a module that Python finds from here .* 'nomine'"),
        (("none.py:build", "mine:batches"), "expected a Python file for --model, got no file 'none.py'"),
    ):
        code, out, err = run(capsys, "--model", arguments[0], "--data", arguments[1])
        assert (code, out) == (2, "")
        assert re.fullmatch(f"curvlens: .*{message.replace(', from', ' from')}.*\n", err), err


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "settings", [{}, {"norm": "pre", "tied": True, "bias": True}, {"activation": None, "norm": "post"}]
)
def test_weights_of_own_nets_come_back(suffix, settings, tmp_path):
    from safetensors.torch import save_model

    net = nets.GPT(digits.VOCABULARY, digits.LENGTH, 4, depth=2, heads=2, hidden=6, **settings)
    path = tmp_path / f"net{suffix}"
    if suffix == ".pt":
        torch.save(net.state_dict(), path)
    else:
        save_model(net, str(path))
    again = subject(str(path), net={"heads": 2})
    ids = digits.batches(1, 2)[0][0]
    assert torch.equal(again.model(ids), net(ids))
    assert again.batches[0][0].shape[1] == digits.LENGTH


def test_fail_on_and_strict(here, capsys, monkeypatch):
    from curvlens.report import analyze as module

    code, _, err = run(capsys, "--fail-on", "info", "--quiet")
    assert code == 1
    assert err.startswith("curvlens: --fail-on: ")
    monkeypatch.setattr(
        module, "findings", lambda r: [Finding("even-heads", "info", "even", "", [], "", "", "")]
    )
    assert run(capsys, "--fail-on", "problem,warning", "--quiet")[0] == 0
    assert run(capsys, "--fail-on", "even-heads", "--quiet")[0] == 1
    assert run(capsys, "--strict", "--max-products", 5, "--quiet")[0] == 4
    assert run(capsys, "--max-products", 5, "--quiet")[0] == 0


def test_dry_run(here, capsys):
    code, out, _ = run(capsys, "--dry-run")
    assert code == 0
    assert "Not in it: weights, data" in out
    assert not (here / "out/report.html").exists()
    code, out, _ = run(capsys, "--dry-run", "--json")
    made = json.loads(out)
    assert made["products"] == sum(stage["products"] for stage in made["stages"])
    real = Report.from_json(json.dumps(json.loads(run(capsys, "--json", "--quiet")[1])))
    spent = {stage.name: stage.products for stage in real.stages}
    for stage in made["stages"]:
        if stage["sure"] and stage["name"] != "gains":
            assert stage["products"] == spent[stage["name"]], stage["name"]
    assert made["peak_bytes"] > 0


# -- wrong input: one line that helps, and exit code 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "./nowhere", "--text", "text.txt"], "expected a folder with a Hugging Face model.* no such"),
        (["--model", "empty", "--text", "text.txt"], "expected a folder that save_pretrained wrote"),
        (["--model", "alien", "--text", "text.txt"], "expected a kind of model that transformers knows in 'alien'"),
        (["--model", "model"], "expected --text FILE or --data module:function with the model 'model', got neither"),
        (["--model", "model", "--text", "no.txt"], "expected a text file for --text, got no file 'no.txt'"),
        (["--model", "model", "--text", "short.txt"], "at least one sequence of 16 tokens, got . .* or --length"),
        (["--model", "model", "--text", "bytes.bin"], "expected UTF-8 text in 'bytes.bin', got other bytes at 0"),
        (["--model", "model", "--text", "text.txt", "--length", "17"], "expected --length of at most 16"),
        (["--model", "model", "--text", "text.txt", "--length", "1"], "expected --length of at least 2, got 1"),
        (["--model", "bare", "--text", "text.txt"], "expected a tokenizer in 'bare', got none"),
        (["--model", "small", "--text", "text.txt"], "expected token ids from 0 to 9, .* does the tokenizer belong"),
        (["--model", "nan", "--text", "text.txt"], "expected a finite loss, got NaN or infinity, in the weight"),
        (["--text", "text.txt"], "expected --model with data of your own, got none"),
        (["--model", "weights.pt"], "expected the weights of a curvlens.nets.GPT in 'weights.pt', got others"),
        (["--model", "text.txt"], "expected the weights of a net .* got 'text.txt'"),
        (["--preset", "fast"], "expected a preset of quick, standard, thorough, got 'fast'"),
        (["--fail-on", "doom"], "expected --fail-on problem, warning, notice, info, or findings of .* got 'doom'"),
        (["--device", "cuda:7"], "expected a device that is there, such as cpu or cuda, got 'cuda:7'"),
        (["--dtype", "float16"], "expected --dtype float32 or float64, got 'float16'"),
        (["--out", "text.txt/report.html"], "expected a folder to write to, got .*text.txt"),
        (["--out", "report.pdf"], "expected --out a folder or a page, such as out/report.html, got 'report.pdf'"),
    ],
)  # fmt: skip
def test_wrong_input(arguments, message, folder, capsys):
    if "cuda:7" in arguments and torch.cuda.device_count() > 7:
        pytest.skip("the device is there")
    made = {
        "empty": lambda: Path("empty").mkdir(),
        "alien": lambda: (
            save_gpt2("alien"),
            Path("alien/config.json").write_text('{"model_type": "martian"}'),
        ),
        "bare": lambda: [save_gpt2("bare"), *(p.unlink() for p in Path("bare").glob("tokenizer*"))],
        "small": lambda: save_gpt2("small", vocab_size=10),
        "nan": lambda: _nan(save_gpt2("nan")).save_pretrained("nan"),
        "weights.pt": lambda: torch.save({"w": torch.zeros(2)}, "weights.pt"),
        "short.txt": lambda: Path("short.txt").write_text("the fox"),
        "bytes.bin": lambda: Path("bytes.bin").write_bytes(b"\xff\xfe\x00"),
    }
    for name in set(arguments) & made.keys():
        made[name]()
    code, out, err = run(capsys, *arguments)
    lines = err.splitlines()
    assert (code, out) == (2, ""), err
    assert len(lines) == 1, err
    assert re.match(f"curvlens: .*{message}", lines[0]), err


def _nan(model):
    model.transformer.h[0].attn.c_attn.weight.data[0, 0] = float("nan")
    return model


def test_an_unknown_family_is_said_and_analysed(here, capsys):
    (here / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build(): return nn.Linear(3, 2)\n"
        "def batches(): return (torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))\n"
    )
    code, out, err = run(capsys, "--model", "mine.py:build", "--data", "mine.py:batches")
    assert code == 0, err
    assert "no family of models is known" in " ".join(out.split())


def test_the_hub_out_of_reach(here, capsys, monkeypatch):
    from transformers import AutoConfig

    def unreachable(*_, **options):
        raise OSError("We couldn't connect to the hub\nand so on")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    Path("text.txt").write_text("text")
    code, _, err = run(capsys, "--model", "someone/model", "--text", "text.txt")
    assert code == 2
    assert "there is no folder of this name, and the hub could not be reached" in err
    assert len(err.splitlines()) == 1


# -- what breaks in the middle


@pytest.mark.parametrize("name", [plan.name for plan in stages.STAGES[::3]])
def test_ctrl_c_keeps_the_page(name, here, capsys, monkeypatch):
    def interrupted(measure):
        def wrapped(at):
            signal.raise_signal(signal.SIGINT)
            return measure(at)

        return wrapped

    plans = tuple(p._replace(measure=interrupted(p.measure)) if p.name == name else p for p in stages.STAGES)
    monkeypatch.setattr("curvlens.report.analyze.STAGES", plans)
    code, out, err = run(capsys)
    assert code == 3
    assert re.search(r"curvlens: interrupted: .*; out/report.html has the rest\n$", err)
    assert Report.from_json("out/report.html").stage(name).why == "interrupted"
    assert "not complete" in out


def test_what_cannot_be_printed_does_not_take_the_page_with_it(here, capsys, monkeypatch):
    def gone(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Report, "__str__", gone)
    assert run(capsys)[0] == 3
    assert Report.from_json("out/report.html").findings == Report.from_json("out/report.json").findings


def test_ctrl_c_while_training(here, capsys, monkeypatch):
    def interrupted(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "train", interrupted)
    code, out, err = run(capsys, "--quiet")
    assert (code, out, err) == (3, "", "curvlens: interrupted before it was done\n")


def test_a_stage_that_fails_is_exit_code_3(here, capsys, monkeypatch):
    def broken(at):
        raise RuntimeError("a fault")

    plans = tuple(p._replace(measure=broken) if p.name == "depth" else p for p in stages.STAGES)
    monkeypatch.setattr("curvlens.report.analyze.STAGES", plans)
    code, out, err = run(capsys)
    assert code == 3
    assert "not all could be measured: curvature by depth" in err
    assert "RuntimeError: a fault" in out


def trained_gpt2(decay=False):
    """The saved model again, some steps on, and its AdamW, in groups as the Trainer has them or in one."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained("model")
    plain = [p for n, p in model.named_parameters() if "ln_" not in n and not n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if "ln_" in n or n.endswith("bias")]
    groups = [{"params": plain, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups if decay else model.parameters(), lr=3e-3)
    ids = torch.randint(60, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained("model")
    return model, optimizer


@pytest.mark.parametrize("decay", [False, True])
def test_the_saved_state_of_the_optimizer(decay, folder, capsys):
    """As the optimizer in hand sees it: the same largest eigenvalue of P^-1/2 H P^-1/2, formed here."""
    model, optimizer = trained_gpt2(decay)
    torch.save(optimizer.state_dict(), "optimizer.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "both.pt")
    given = ("--model", "model", "--text", "text.txt", "--sequences", "2", "--dtype", "float64", "--quiet")
    rows = []
    for file in ("optimizer.pt", "both.pt"):
        code, _, err = run(capsys, *given, "--optimizer", file)
        assert code == 0, err
        report = Report.from_json("out/report.json")
        assert report.meta.optimizer == "AdamW"
        rows.append(report.sharpness[-1])
    assert rows[0] == rows[1]
    assert rows[0].rate == 3e-3
    land = subject("model", text="text.txt", sequences=2, dtype="float64").landscape()
    named, P = dict(model.named_parameters()), {}
    for name in land.parameters():
        state = optimizer.state[named[name]]
        corrected = (state["exp_avg_sq"].double() / (1 - 0.999**3)).sqrt()
        P[name] = (1 - 0.9**3) * (corrected + 1e-8)
    scale = land.blocks.from_parameters(P).rsqrt()
    largest = torch.linalg.eigvalsh(scale[:, None] * hessian(land).dense() * scale)[-1].item()
    assert abs(rows[0].value.value - largest) <= max(rows[0].value.stderr, 1e-9 * largest)


def test_an_optimizer_that_does_not_fit(folder, capsys):
    trained_gpt2()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    of_other, fresh = torch.optim.AdamW(other.parameters()), torch.optim.AdamW(trained_gpt2()[0].parameters())
    of_other.step()
    torch.save(of_other.state_dict(), "other.pt")
    torch.save(fresh.state_dict(), "fresh.pt")
    torch.save({"a": torch.zeros(2)}, "none.pt")
    given = ("--model", "model", "--text", "text.txt")
    for arguments, message in (
        ((*given, "--optimizer", "other.pt"), "'other.pt', got none .* does not fit the model's parameters"),
        ((*given, "--optimizer", "fresh.pt"), "'fresh.pt', got none .* the optimizer has not taken a step"),
        ((*given, "--optimizer", "none.pt"), "'none.pt', got none .* no optimizer in the file"),
        ((*given, "--optimizer", "text.txt"), "'text.txt', got what cannot be read as that"),
        (
            (*given, "--optimizer", "no.pt"),
            "expected a file with the state of an optimizer, got no file 'no.pt'",
        ),
        ((*given, "--optimizer", "model"), "no optimizer.pt in the checkpoint"),
        (("--optimizer", "fresh.pt"), "expected --model with --optimizer, got none"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert re.fullmatch(f"curvlens: .*{message}.*\n", err), err


HUNGRY = """
import torch
from torch import nn
class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x) + torch.empty(len(x) - 1, 1 << 50).sum()
def build(): return Hungry()
def large(): return nn.Linear(1 << 25, 1 << 25)
def batches(): return [(torch.ones(4, 3), torch.ones(4, 2))]
"""


def test_out_of_memory_is_one_line_and_its_advice_helps(here, capsys):
    """The allocator itself refuses a petabyte: in the first stage, and while the model is built."""
    Path("hungry.py").write_text(HUNGRY)
    given = ("--model", "hungry.py:build", "--data", "hungry.py:batches", "--quiet")
    code, out, err = run(capsys, *given)
    assert (code, out) == (3, "")
    assert err == (
        "curvlens: expected memory for the loss and its gradient, got too little for 12,582,912.0 GiB more; take "
        "fewer samples at a time (micro_batch=1, or --micro-batch 1), shorter sequences, or float32\n"
    )
    assert run(capsys, *given, "--micro-batch", "1")[0] == 0
    code, out, err = run(capsys, "--model", "hungry.py:large", "--data", "hungry.py:batches", "--quiet")
    assert (code, out) == (3, "")
    assert re.fullmatch(r"curvlens: expected memory for the model and its data, .* 4,194,304.0 GiB .*\n", err)


def test_a_full_disk(here, capsys, monkeypatch):
    """Full at the end: the report goes where there is room. Full while state is kept: the run goes on without."""
    from curvlens.report import files

    real = os.fsync
    full = []

    def fsync(number):
        if full and f"{here}/" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(28, "No space left on device")
        real(number)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    other = here.parent / f"{here.name}-other"
    other.mkdir()
    monkeypatch.setattr(files, "fallback", lambda: other)
    plans = tuple(
        p._replace(measure=lambda at, p=p: full.append(p.name) or p.measure(at)) if p.name == "heads" else p
        for p in stages.STAGES
    )
    monkeypatch.setattr("curvlens.report.analyze.STAGES", plans)
    with pytest.warns(UserWarning, match="the state is not kept in .*: No space left on device"):
        code, out, err = run(capsys, "--resume", "state")
    assert code == 3
    assert re.search(
        "could not write to out: No space left on device; the report is in .*-other instead", err
    )
    report = Report.from_json(other / "report.json")
    assert report.complete
    assert any("state could not be kept in state: No space left" in note for note in report.meta.notes)
    assert "One-block GPT" in out


def test_resume(here, capsys):
    first = run(capsys, "--quiet", "--resume", "state", "--json")
    again = run(capsys, "--quiet", "--resume", "state", "--json")
    a, b = json.loads(first[1]), json.loads(again[1])
    for content in (a, b):
        content["meta"].pop("created"), content["meta"].pop("seconds")
    assert a == b
    code, _, err = run(capsys, "--quiet", "--resume", "state", "--seed", 1)
    assert code == 2
    assert "got one with another seed" in err


# -- compare


@pytest.fixture
def two(here, capsys):
    for seed in (0, 1):
        assert run(capsys, "--quiet", "--seed", seed, "--out", f"run{seed}.html")[0] == 0
    return here


def test_compare(two, capsys):
    assert cli.run(["compare", "run0.html", "run1.json", "--out", "both.html"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "other weights, other data" in out
    assert Path("both.html").read_text().startswith("<!doctype html>")
    assert cli.run(["compare", "run0.json", "run1.json", "--json", "--out", "both.json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == json.loads(Path("both.json").read_text())
    a, b = (Report.from_json(f"run{i}.json") for i in (0, 1))
    for n in made["numbers"]:
        x, y = a.numbers[n["key"]], b.numbers[n["key"]]
        assert n["difference"] == pytest.approx(y.value - x.value)
        if not (x.exact and y.exact) and n["ratio"] is not None:
            error = (0 if x.exact else x.stderr) ** 2 + (0 if y.exact else y.stderr) ** 2
            assert n["ratio"] == pytest.approx((y.value - x.value) / error**0.5)
    assert {f.id for f in a.findings} - {f.id for f in b.findings} == set(made["gone"])


def test_a_report_and_itself(two, capsys):
    made = compare("run0.json", "run0.json")
    assert not any(n.clear for n in made.numbers)
    assert not made.gone
    assert not made.come
    assert "the same weights, the same data" in str(made)
    assert made.names == ("A", "B")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "got no file 'none.json'"),
        ("text.json", "text", "expected the JSON of a report, got text that is none"),
        (
            "old.json",
            '{"schema": "curvlens-report/0"}',
            "expected a report of the schema 'curvlens-report/1'",
        ),
        ("page.html", "<html></html>", "expected a page that holds a report"),
    ],
)
def test_compare_with_what_is_no_report(name, content, message, here, capsys):
    if content is not None:
        Path(name).write_text(content)
    assert cli.run(["compare", name, name]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


# -- doctor


def test_doctor(here, capsys):
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in (
        "python",
        torch.__version__,
        "second derivatives through F.layer_norm are right",
        "attention",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80


def test_doctor_of_a_model(folder, capsys):
    assert cli.run(["doctor", "--model", "model", "--text", "text.txt", "--json"]) == 0
    parts = {part["what"]: part for part in json.loads(capsys.readouterr().out)}
    assert parts["family"]["words"].startswith("gpt2: ")
    assert "1 attention layers of 2 heads" in parts["family"]["words"]
    assert parts["product H"]["words"].startswith("double-backward")
    assert "products" in parts["quick"]["words"]
    assert parts["attention"]["words"].startswith("16 tokens: PyTorch's plain one")


def test_doctor_says_what_does_not_work(here, capsys, monkeypatch):
    from curvlens.report import doctor

    real = torch.func.jvp
    monkeypatch.setattr(torch.func, "jvp", lambda *a: (real(*a)[0], 2 * real(*a)[1]))
    (part,) = doctor.layer_norm_fault()
    assert part.state == "wrong"
    assert "forward over reverse" in part.words
    assert cli.run(["doctor"]) == 1


def test_commands_need_no_torch_for_their_help():
    for name in ("analyze", "compare", "doctor"):
        assert name in {command.__name__ for command in cli.COMMANDS}


def test_digit_net_is_small():
    assert sum(p.numel() for p in digit_net(0).parameters()) <= 600  # so `dense` above makes it exact
