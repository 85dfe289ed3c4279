"""Real settings: accumulation, clipping, weight decay, groups, frozen layers, adapters, averages, compiled models."""

import itertools

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import curvlens as cl
from curvlens.estimate.sharpness import preconditioner_scale
from training import runs

HELD = list(itertools.islice(runs.data(size=2, seed=9), 1))
QUICK = ("eigenvalues", "optimizer")


def steps(net, optimizer, count=3, micro=1, clip=None, tracker=None):
    for _, batch in zip(range(count), runs.data(size=4), strict=False):
        pieces = zip(batch[0].chunk(micro), batch[1].chunk(micro), strict=True)
        for piece in pieces:
            (runs.loss_of(net, piece) / micro).backward()
        norm = None if clip is None else torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if tracker is not None:
            tracker.step(None, norm)


def track(net, optimizer, **options):
    options = {"path": None, "parts": QUICK, "every": 1, **options}
    return cl.Tracker(net, HELD, optimizer, **options)


def test_accumulation_makes_no_difference():
    found = []
    for micro in (1, 4):
        net = runs.model(width=4, depth=1).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        steps(net, optimizer, micro=micro)
        found.append(track(net, optimizer).measure())
    assert found[0]["lambda_max"]["value"] == pytest.approx(found[1]["lambda_max"]["value"], rel=1e-9)


def test_clipping_moves_the_limit():
    net = runs.model(width=4, depth=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tracker = track(net, optimizer, clip=0.25)
    steps(net, optimizer, 1, clip=0.25, tracker=tracker)
    (norm,) = tracker.track.training("gradient")[1]
    found = tracker.track.measurements[-1]
    assert norm > 0.25
    assert found["clipped"] == pytest.approx(0.25 / norm)
    assert found["preconditioned"]["threshold"] == pytest.approx(20 * norm / 0.25)
    assert found["descent_threshold"] == pytest.approx(20 * norm / 0.25)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_coupled_weight_decay_adds_its_own_curvature(kind):
    found = []
    for w in (0.0, 3.0):
        net = runs.model(width=4, depth=1).double()
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        optimizer = kinds[kind](net.parameters(), lr=1e-2)
        steps(net, optimizer)
        optimizer.param_groups[0]["weight_decay"] = w
        found.append(track(net, optimizer, tol=1e-6).measure())
    assert found[0]["lambda_max"]["value"] == found[1]["lambda_max"]["value"]  # it is not in H
    assert found[1]["decay"] == {"kind": "coupled", "weight": 3.0, "curvature": 3.0}
    more = found[1]["preconditioned"]["value"] - found[0]["preconditioned"]["value"]
    if kind == "sgd":
        assert more == pytest.approx(3.0, rel=1e-6)
    else:  # preconditioned as the loss is
        H = cl.hessian(cl.Landscape(net, HELD))
        S, _, _ = preconditioner_scale(H, optimizer)
        with_decay = H.dense() + 3.0 * torch.eye(len(S), dtype=S.dtype)
        true = torch.linalg.eigvalsh(S[:, None] * with_decay * S)[-1].item()
        assert found[1]["preconditioned"]["value"] == pytest.approx(true, rel=1e-6)
        assert more > 0


@pytest.mark.parametrize("w", [0.0, 1.0])
def test_decoupled_decay_counts_beside_the_limit(w):
    """Adam's step with decoupled decay on `λ/2 x²`, P at one: it grows just above the limit and dies just below."""
    beta, rate = 0.9, 1e-2
    limit = (2 + 2 * beta) / ((1 - beta) * rate) - w * (1 + beta) / (1 - beta)
    for factor, grows in ((1.001, True), (0.999, False)):
        x, m = 1.0, 0.0
        for _ in range(40_000):
            m = beta * m + (1 - beta) * factor * limit * x
            x = (1 - rate * w) * x - rate * m
            if abs(x) > 1e6:
                break
        assert (abs(x) > 1) == grows


def test_groups_frozen_layers_and_what_no_optimizer_holds():
    net = runs.model(width=4).double()
    net.token.weight.requires_grad_(False)
    inner, head = list(net.blocks[1].parameters()), list(net.head.parameters())
    apart = {id(p) for p in (*inner, *head)}
    rest = [p for p in net.parameters() if id(p) not in apart and p.requires_grad]
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.1}, {"params": inner, "lr": 0.01}])
    tracker = track(net, optimizer, tol=1e-6)
    found = tracker.measure()
    names = tracker.track.header["blocks"]
    assert "head" not in names  # trained by nobody
    assert "embed.token" not in names
    land = cl.Landscape(net, HELD)
    blocks = land.blocks.select(*(name for name in land.blocks.names if name != "head"))
    at = land.blocks.positions(blocks)
    H = cl.hessian(land).dense()[at][:, at]
    assert found["lambda_max"]["value"] == pytest.approx(torch.linalg.eigvalsh(H)[-1].item(), rel=1e-6)
    S = torch.cat([torch.full((b.size,), 0.1**0.5 if "layer.1" in b.name else 1.0).double() for b in blocks])
    true = torch.linalg.eigvalsh(S[:, None] * H * S)[-1].item()
    assert found["preconditioned"]["value"] == pytest.approx(true, rel=1e-6)
    assert found["preconditioned"]["threshold"] == pytest.approx(20)
    # thawed in the midst of a run: the record says that other blocks train now, and keeps what was
    optimizer.add_param_group({"params": head, "lr": 0.1})
    again = tracker.measure()
    assert "failed" not in again
    assert "head" in tracker.track.header["blocks"]
    assert len(tracker.track.measurements) == 2


def test_adapters():
    peft = pytest.importorskip("peft")
    from training.test_hugging_face import HELD as IDS
    from training.test_hugging_face import small_gpt2

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    model = peft.get_peft_model(small_gpt2(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model(**IDS[0], labels=IDS[0]["input_ids"]).loss.backward()
    optimizer.step()
    tracker = cl.Tracker(model, IDS, optimizer, path=None, tol=1e-4, loss="next-token")
    found = tracker.measure()
    assert tracker.track.header["parameters"] == sum(p.numel() for p in trained)
    assert set(found.get("failed", {})) <= {"heads", "depth"}
    H = cl.hessian(cl.Landscape(model.eval(), IDS, "next-token", dtype=torch.float64)).dense()
    assert found["lambda_max"]["value"] == pytest.approx(torch.linalg.eigvalsh(H)[-1].item(), rel=1e-3)
    assert found["preconditioned"]["value"] > 0


def test_averaged_weights():
    net = runs.model(width=4, depth=1).double()
    average = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    tracker = track(net, optimizer, averaged=average, tol=1e-6)
    for _ in range(2):
        steps(net, optimizer, 2)
        average.update_parameters(net)
    found = tracker.measure()
    land = cl.Landscape(average.module, HELD)
    true = torch.linalg.eigvalsh(cl.hessian(land).dense())[-1].item()
    assert found["averaged"]["loss"] == pytest.approx(land.value().item(), rel=1e-12)
    assert found["averaged"]["lambda_max"]["value"] == pytest.approx(true, rel=1e-6)
    assert found["averaged"]["loss"] != found["loss"]
    assert found["loss"] == pytest.approx(cl.Landscape(net, HELD).value().item(), rel=1e-12)


def test_wrapped_and_half_precision_models():
    net = runs.model(width=4, depth=1)
    expected = track(net, None).measure()["lambda_max"]["value"]
    assert track(torch.nn.DataParallel(net), None).measure()["lambda_max"]["value"] == expected
    assert track(torch.compile(net), None).measure()["lambda_max"]["value"] == expected
    net.compile()
    cover = net._compiled_call_impl
    assert track(net, None).measure()["lambda_max"]["value"] == expected
    assert net._compiled_call_impl is cover
    tracker = track(runs.model(width=4, depth=1).bfloat16(), None)
    assert tracker.measure()["lambda_max"]["value"] == pytest.approx(expected, rel=0.1)  # of rounded weights
    assert tracker.track.header["dtype"] == "float32"
