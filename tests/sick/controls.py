"""Healthy controls: ordinary models, and some that come near a limit and stay below it. The lab must find nothing in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sick.cases import BF16, FP16, LM, MASTER, REGRESSION, Control
from tests.sick.layers import Attention
from tests.sick.models import WIDTH


class GroupConv(nn.Module):
    """Convolutions with GroupNorm."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(input_shape[0], 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An embedding, ``cell`` (LSTM or GRU) over the tokens, a linear layer for the next one."""

    def __init__(self, num_classes: int, cell: str = "LSTM") -> None:
        super().__init__()
        self.table = nn.Embedding(num_classes, WIDTH)
        self.rnn = getattr(nn, cell)(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(ids))[0])  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """16 numbers through 4; with ``tied`` the decoder is the encoder's transpose."""

    def __init__(self, input_shape: Sequence[int], tied: bool = False) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(input_shape[0], WIDTH), nn.Linear(WIDTH, 4)
        self.back = None if tied else nn.Linear(4, input_shape[0])

    def forward(self, x: Tensor) -> Tensor:
        code = self.inner(F.gelu(self.outer(x)))
        if self.back is not None:
            return self.back(code)  # type: ignore[no-any-return]
        return F.linear(F.linear(code, self.inner.weight.t()), self.outer.weight.t())


class Mixture(nn.Module):
    """Three experts, each with dropout, weighted by a softmax gate."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.gate = nn.Linear(input_shape[0], 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(input_shape[0], WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, num_classes))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(weights.unsqueeze(1)).sum(-1)


class Masked(nn.Module):
    """Attention in which padding is -inf, or the lowest number of the format."""

    def __init__(self, num_classes: int, mask: str = "inf", vocab: int = 16) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(vocab, WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(WIDTH, mask=mask)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head((x + self.attn(self.norm(x), ids == 0)).mean(1))  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """A frozen random layer with a frozen BatchNorm, and a trained layer on top."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(input_shape[0], 32), nn.BatchNorm1d(32), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(32, num_classes)
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """torch's own transformer encoder."""

    def __init__(self, num_classes: int, vocab: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.table(ids)).mean(1))  # type: ignore[no-any-return]


class Near(nn.Module):
    """Activations of 2e4, a third of the largest half number, and torch's RMSNorm after them."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.stem, self.fc = nn.Linear(input_shape[0], WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, num_classes)
        with torch.no_grad():
            self.fc.weight *= 2e4

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.fc(torch.tanh(self.stem(x)))))  # type: ignore[no-any-return]


class LayerScaled(nn.Module):
    """Residual branches that start at 1e-4 of their size, as in ConvNeXt: small gradients, which a loss scale carries."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(input_shape[0], WIDTH)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1e-4)) for _ in range(2))
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch, scale in zip(self.branches, self.scales, strict=True):
            x = x + scale * branch(x)
        return self.head(x)  # type: ignore[no-any-return]


VIT = ("model.kwargs.embed_dim=16", "model.kwargs.depth=2", "model.kwargs.num_heads=2", "model.kwargs.patch_size=4")
HERE = "controls:"
HEALTHY: tuple[Control, ...] = (
    Control("mlp", "model=mlp", "vectors", ("model.kwargs.hidden=[16,16]",), FP16),
    Control("mlp_bf16_master", "model=mlp", "vectors", ("model.kwargs.hidden=[16,16]",), "bf16_master"),
    Control("resnet", "model=resnet", "images", ("model.kwargs.widths=[8,8]",), FP16),
    Control("resnet_master", "model=resnet", "images", ("model.kwargs.widths=[8,8]",), MASTER),
    Control("vit", "model=vit", "images", VIT, FP16),
    Control("vit_bf16", "model=vit", "images", VIT, BF16),
    Control("gpt", "model=gpt", "tokens", (LM, "model.kwargs.dim=16", "model.kwargs.depth=2"), FP16),
    Control("gpt_master", "model=gpt", "tokens", (LM, "model.kwargs.dim=16", "model.kwargs.depth=2"), MASTER),
    Control("groupnorm", f"{HERE}GroupConv", "images", (), FP16),
    Control("lstm", f"{HERE}Recurrent", "tokens", (LM,), FP16),
    Control("gru_master", f"{HERE}Recurrent", "tokens", (LM, "model.kwargs.cell=GRU"), MASTER),
    Control("autoencoder", f"{HERE}Autoencoder", "reconstruction", (REGRESSION,), FP16),
    Control("autoencoder_tied", f"{HERE}Autoencoder", "reconstruction", (REGRESSION, "model.kwargs.tied=true"), MASTER),
    Control("mixture", f"{HERE}Mixture", "vectors", (), FP16),
    Control("masked", f"{HERE}Masked", "sentences", (), FP16),
    Control("masked_finfo_master", f"{HERE}Masked", "sentences", ("model.kwargs.mask=finfo",), MASTER),
    Control("frozen", f"{HERE}Frozen", "vectors", (), FP16),
    Control("encoder", f"{HERE}Encoder", "sentences", (), FP16),
    Control("near_the_limit", f"{HERE}Near", "vectors", (), FP16),
    Control("layer_scale", f"{HERE}LayerScaled", "vectors", (), FP16),
)
