"""Each finding: a model that triggers it, one that does not, and that errors keep it from being said."""

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import nn

from analyses import tiny
from curvlens import Landscape, digits, nets
from curvlens.report import findings as rooms
from curvlens.report.analyze import analyze
from curvlens.report.data import SEVERITIES, BoundRow, Number, Sharpness
from curvlens.report.findings import findings, thresholds
from curvlens.report.findings.amounts import Amount
from report import synthetic


def gpt(scales=(), **settings):
    """The papers' net with some of its weights scaled."""
    model = nets.GPT(digits.VOCABULARY, digits.LENGTH, **{"width": 4, "heads": 2, **settings})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for key, factor in dict(scales).items():
                if key in name:
                    parameter.mul_(factor)
    return model


def one_dead_head():
    model = gpt(heads=4)
    with torch.no_grad():
        model.blocks[0].attn.W_O[:1] = 0
    return model


def logistic(inputs, targets):
    """Softmax regression: convex, without any layer."""
    torch.manual_seed(0)
    return nn.Linear(inputs.shape[1], 1 + max(targets), bias=False), (inputs, torch.tensor(targets))


def nearly_alike():
    torch.manual_seed(1)
    return 1 + 1e-3 * torch.randn(4, 600)


def regression():
    torch.manual_seed(0)
    return nets.LinearMLP([3, 3, 2]), (torch.randn(9, 3), torch.randn(9, 2))


MODELS = {
    "convex, even data": lambda: logistic(torch.eye(32), [i % 3 for i in range(32)]),
    "convex, data alike": lambda: logistic(nearly_alike(), [0, 1, 0, 1]),
    "two linear layers": regression,
    "as drawn": gpt,
    "large queries and keys": lambda: gpt({"W_Q": 20.0, "W_K": 20.0}),
    "no queries": lambda: gpt({"W_Q": 0.0}),
    "a dead head": one_dead_head,
    "two layers, pre-norm": lambda: gpt(norm="pre", depth=2),
    "small embeddings, pre-norm": lambda: gpt({"token": 0.02, "position": 0.02}, norm="pre"),
    "tiny embeddings, pre-norm": lambda: gpt({"token": 0.002, "position": 0.002}, norm="pre"),
    "small late layers": lambda: gpt(
        {"blocks.0": 2.0, "blocks.1": 0.5, "blocks.2": 0.1}, depth=3, norm="post"
    ),
    "large layers": lambda: gpt({"W_": 2.0}, depth=3),
}


@lru_cache(None)
def report(name, rate=None):
    made = MODELS[name]()
    model, data = made if isinstance(made, tuple) else (made, digits.batches(1, 8))
    loss = {"Linear": "cross-entropy", "LinearMLP": "mse"}.get(type(model).__name__, "next-token")
    land = Landscape(model, data, loss, dtype=torch.float64)
    optimizer = None if rate is None else torch.optim.SGD(model.parameters(), lr=rate)
    return analyze(land, tiny(dense=5000), optimizer=optimizer, progress=False)


CASES = {
    "ill-conditioned": ("convex, data alike", "convex, even data"),
    "negative-curvature": ("as drawn", "convex, even data"),
    "concave-along-gradient": ("small embeddings, pre-norm", "as drawn"),
    "gauss-newton-misleads": ("as drawn", "convex, even data"),
    "gauss-newton-serves": ("convex, even data", "as drawn"),
    "gradient-in-sharp-directions": ("as drawn", "large queries and keys"),
    "varies-over-layers": ("large layers", "two layers, pre-norm"),
    "grows-with-depth": ("small late layers", "large layers"),
    "query-key-against-value": ("as drawn", "large queries and keys"),
    "sharpest-block": ("large queries and keys", "as drawn"),
    "unlike-spectra": ("two linear layers", "as drawn"),
    "saturated-heads": ("large queries and keys", "as drawn"),
    "even-heads": ("no queries", "large queries and keys"),
    "idle-heads": ("a dead head", "as drawn"),
    "sharpening-norm": ("small embeddings, pre-norm", "two layers, pre-norm"),
    "epsilon-bound-norm": ("small embeddings, pre-norm", "two layers, pre-norm"),
    "created-curvature": ("two layers, pre-norm", "as drawn"),
    "amplified-curvature": ("tiny embeddings, pre-norm", "two layers, pre-norm"),
    "noisy-data": ("as drawn", "convex, data alike"),
    "loose-bounds": ("as drawn", "two linear layers"),
}


def told(r, name):
    return next((f for f in r.findings if f.id == name), None)


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_triggers_it_and_one_that_does_not(name):
    yes, no = (report(model) for model in CASES[name])
    found = told(yes, name)
    assert found is not None
    for words in (found.title, found.text, found.uncertainty, found.action, found.source, *found.evidence):
        assert words
        assert "nan" not in words.lower().split()
    assert found.evidence
    assert told(no, name) is None


def test_the_idle_head_is_the_dead_one():
    assert "layer.0.attn head 0" in told(report("a dead head"), "idle-heads").text


def test_learning_rates():
    """Gradient descent is stable below 2 / λ_max."""
    largest = 2 / report("as drawn").numbers["lambda_max"].value
    for share, name in (
        (1.05, "learning-rate-beyond-threshold"),
        (0.9, "learning-rate-near-threshold"),
        (0.5, None),
    ):
        told_here = [
            f for f in report("as drawn", share * largest).findings if f.id.startswith("learning-rate")
        ]
        assert [f.id for f in told_here] == [name] * (name is not None)
    assert report("as drawn", 1.05 * largest).findings[0].severity == "problem"


def test_unfinished():
    model = gpt()
    land = Landscape(model, digits.batches(1, 8), dtype=torch.float64)
    short = analyze(land, tiny(), max_products=8, progress=False)
    evidence = told(short, "unfinished").evidence
    assert sum("not begun: the budget was used up" in line for line in evidence) == 1  # once, for all of them
    assert any("map of all pairs, curvature by depth" in line for line in evidence)
    assert told(report("as drawn"), "unfinished") is None


def test_the_first_layers_are_worst_conditioned():
    """With a norm at the end of each block, the layer with small weights has the worst conditioned queries and keys."""
    found = {}
    for name, scales in (("early", (0.1, 0.5, 2.0)), ("late", (2.0, 0.5, 0.1))):
        model = gpt({f"blocks.{i}": scale for i, scale in enumerate(scales)}, depth=3, norm="post")
        land = Landscape(model, digits.batches(1, 8), "next-token", dtype=torch.float64)
        skipped = ("heads", "norms", "depth", "gains", "sharpness", "noise", "bounds")
        made = analyze(land, tiny(dense=5000, spectra=24), progress=False, skip=skipped)
        found[name] = told(made, "ill-conditioned-early")
    assert found["late"] is None
    assert found["early"] is not None
    assert all(name.startswith("layer.0") for name in found["early"].blocks)


def test_every_rule_has_its_case():
    here = {
        "learning-rate-beyond-threshold",
        "learning-rate-near-threshold",
        "unfinished",
        "ill-conditioned-early",
    }
    count = len(CASES) + len(here)
    assert len(rooms.RULES) == count
    assert not here & set(CASES)
    assert set(rooms.NAMES) == here | set(CASES)


# -- errors


def with_numbers(**numbers):
    return replace(
        synthetic.nothing(), numbers={k.replace("__", "."): v for k, v in numbers.items()}, stages=[]
    )


@pytest.mark.parametrize(
    ("error", "said"), [(0.05, True), (0.2, False), (math.nan, False), (math.inf, False)]
)
def test_what_the_error_leaves_open_is_not_said(error, said):
    """‖H_f‖ is 0.5 of ‖H‖, and 0.3 the threshold: 4 and 1 standard errors away, or an unknown number of them."""
    r = with_numbers(frobenius__H_f=Number("", 0.5, error, False), frobenius__H=Number("", 1.0))
    assert ([f.id for f in findings(r)] == ["gauss-newton-misleads"]) is said


def test_a_threshold_is_crossed_by_two_errors():
    def beyond(error):
        row = Sharpness("as Adam sees it", Number("", 40.0, error, False), 38.0, "38/η", 1.0, 0.95)
        return [f.id for f in findings(replace(with_numbers(), sharpness=[row]))]

    assert beyond(0.9) == ["learning-rate-beyond-threshold"]
    assert beyond(1.1) == ["learning-rate-near-threshold"]
    assert beyond(6.0) == []


def test_nothing_measured_nothing_said():
    assert [f.id for f in findings(synthetic.nothing())] == ["unfinished"]
    assert findings(with_numbers()) == []


def test_the_gravest_come_first():
    ranks = [SEVERITIES.index(f.severity) for f in report("small embeddings, pre-norm").findings]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) > 2


def test_bounds_near_the_truth_are_not_loose():
    rows = [BoundRow("a", "a", 1.0, 1.0, thresholds.LOOSE * factor, 1.0) for factor in (0.9, 1.1)]
    assert findings(replace(with_numbers(), bounds=rows[:1])) == []
    assert [f.id for f in findings(replace(with_numbers(), bounds=rows))] == ["loose-bounds"]


def test_ratios_of_amounts():
    x = Amount(2.0, 0.1) / Amount(4.0, 0.4)
    assert x.value == pytest.approx(0.5)
    assert x.error == pytest.approx(0.5 * math.hypot(0.05, 0.1))
    assert (Amount(0.0, 0.1) / Amount(2.0)).error == pytest.approx(0.05)
    assert not Amount(math.nan).above(0)
    assert not (Amount(1.0) / Amount(0.0, 1.0)).below(5)
