"""A small residual network for small images: a 3 x 3 stem, one basic block per width, average pooling.

With the default widths 16, 32, 64 it has 78 thousand parameters and a step on 64 digits takes 9 ms on one CPU core. Its
results vary little with the seed, so it is the model for tight comparisons of precision; and it has BatchNorm,
whose statistics are the first thing that a careless half-precision run ruins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from mprun.errors import ConfigError


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm and a shortcut: y = relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)).

    Args:
        width_in: channels of the input.
        width: channels of the output.
        stride: 2 halves both sides of the image. The shortcut is the identity where shapes allow, else a 1 x 1
            convolution with BatchNorm.
    """

    def __init__(self, width_in: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                OrderedDict(conv=nn.Conv2d(width_in, width, 1, stride=stride, bias=False), norm=nn.BatchNorm2d(width))
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, width_in, H, W) to (B, width, H / stride, W / stride)."""
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, blocks, average, linear; see :func:`resnet`."""

    def __init__(self, channels: int, num_classes: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            OrderedDict(conv=nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), norm=nn.BatchNorm2d(widths[0]))
        )
        pairs = zip([widths[0], *widths], widths, strict=False)
        self.blocks = nn.Sequential(*(BasicBlock(a, b, stride=1 if i == 0 else 2) for i, (a, b) in enumerate(pairs)))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # keeps the variance through ReLU; torch's default shrinks it
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        x = self.blocks(functional.relu(self.stem(x)))
        logits: Tensor = self.head(self.dropout(x.mean(dim=(2, 3))))
        return logits


def resnet(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int] = (16, 32, 64),
    dropout: float = 0.0,
    bn_momentum: float = 0.1,
) -> nn.Module:
    """Build the model, float32 on the CPU.

    Args:
        input_shape: (C, H, W).
        num_classes: size of the output.
        widths: channels of each block; every block but the first halves the image.
        dropout: before the last layer.
        bn_momentum: what a batch weighs in BatchNorm's running mean and variance, from 0 to 1 (torch's meaning).

    Raises:
        ConfigError: inputs that are no images, no widths, a momentum that is no weight.
    """
    if len(input_shape) != 3:
        raise ConfigError(f"the resnet takes images (C, H, W), not inputs of shape {tuple(input_shape)}")
    if not widths or min(widths) < 1:
        raise ConfigError(f"model.kwargs.widths={list(widths)} must be positive numbers of channels, as in [16,32,64]")
    if not 0 <= bn_momentum <= 1:
        raise ConfigError(f"model.kwargs.bn_momentum={bn_momentum} must be from 0 to 1")
    model = ResNet(input_shape[0], num_classes, widths, dropout)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = bn_momentum
    return model
