"""Handwritten digits, 8 × 8, as scikit-learn ships them, and three small nets that read them.

They stand where the papers use MNIST: a ViT of `nets.Block`s over 16 patches, an MLP and a CNN, of like size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlens import nets

CLASSES, SIDE, PATCH = 10, 8, 2
KINDS = ("ViT", "MLP", "CNN")


def handwritten(seed: int = 0) -> tuple[Tensor, Tensor]:
    """All 1797 images `[n, 8, 8]`, from 0 to 1 in float64, and their classes, in an order drawn with this seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "expected scikit-learn for its handwritten digits, got none: pip install 'curvlens[studies]'"
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    return torch.from_numpy(data.images)[order] / 16, torch.from_numpy(data.target)[order]


class ViT(nn.Module):
    """`[n, 8, 8] -> [n, 10]`: patches of 2 × 2, pre-norm blocks without a mask, the mean over patches, a head."""

    def __init__(self, width: int = 16, depth: int = 1, heads: int = 2):
        super().__init__()
        self.patch = nn.Linear(PATCH**2, width)
        self.position = nn.Parameter(torch.empty((SIDE // PATCH) ** 2, width))
        self.blocks = nn.ModuleList(
            nets.Block(
                nets.SelfAttention(width, heads, causal=False),
                nets.MLP(width, 4 * width, "gelu"),
                width,
                "pre",
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images[:, None], PATCH, stride=PATCH).mT
        x = self.patch(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class MLP(nn.Sequential):
    """`[n, 8, 8] -> [n, 10]`: four layers with GELU."""

    def __init__(self, width: int = 24):
        super().__init__(
            nn.Flatten(),
            nn.Linear(SIDE**2, width), nn.GELU(),
            nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, CLASSES),
        )  # fmt: skip


class CNN(nn.Sequential):
    """`[n, 8, 8] -> [n, 10]`: three convolutions of 3 × 3 with GELU, pooling, a head."""

    def __init__(self, channels: int = 12):
        super().__init__(
            nn.Unflatten(1, (1, SIDE)),
            nn.Conv2d(1, channels, 3, padding=1), nn.GELU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.GELU(), nn.AvgPool2d(2),
            nn.Conv2d(channels, channels, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(4 * channels, CLASSES),
        )  # fmt: skip


def classifier(kind: str, seed: int, device: str = "cpu", **size: int) -> nn.Module:
    """A float64 net, its weights drawn from `N(0, 1 / fan-in)` with this seed; biases 0, norms 1."""
    net = {"ViT": ViT, "MLP": MLP, "CNN": CNN}[kind](**size).to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            # the package's own weights are [in, out], torch's [out, in, …]
            inner = parameter.shape[0] if ".W_" in name else parameter[0].numel()
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(draw * inner**-0.5)
    return net.to(device)


def train(
    net: nn.Module, images: Tensor, classes: Tensor, steps: int, optimizer: torch.optim.Optimizer, seed: int
) -> list[float]:
    """Steps on batches of 64, drawn with this seed; the loss before each."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), generator=generator).to(images.device)
        loss = F.cross_entropy(net(images[chosen]), classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
