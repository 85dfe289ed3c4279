"""Track the curvature of a small GPT while it learns digit addition, and write the page of the run.

python examples/track_training.py            writes out/track.jsonl and out/track.html
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import curvlens as cl
from curvlens import digits, nets


def main(folder="out", steps=400, width=32, every=20, size=64):
    torch.manual_seed(0)
    net = nets.GPT(digits.VOCABULARY, digits.LENGTH, width, depth=2, heads=2, norm="pre", activation="gelu")
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (steps / 5)))
    held = digits.batches(1, size=8, seed=1)
    folder = Path(folder)
    with cl.Tracker(net, held, optimizer, every=every, clip=1.0, path=folder / "track.jsonl") as tracker:
        for _, (ids, labels) in zip(range(steps), digits.stream(size), strict=False):
            loss = cross_entropy(net(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            tracker.step(loss, norm)
    tracker.to_html(folder / "track.html")
    print(tracker.track)
    print(f"{tracker.pace.share:.0%} of the training time; the page: {folder / 'track.html'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
