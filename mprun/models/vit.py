"""A small Vision Transformer: timm's, at a size that trains on a CPU.

The defaults suit 8 x 8 images: 16 patches of 2 x 2 pixels, 4 blocks of width 64, 136 thousand parameters. The tokens
are averaged; on so little data a class token costs one to two points.

The start is not timm's, whose standard deviation of 0.02 for every matrix is meant for a width near 1000. At width 64
each block would begin at almost nothing; so the linear layers of the blocks get Xavier's initialisation. And beside a
patch, which a normalised image embeds with a standard deviation near 1, a position of 0.02 would be nothing: the
network would begin as a bag of patches, and spend a fifth of a short run on learning where they are. So positions and
patches both start at 1. (The classifier keeps 0.02, hence small first logits.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from mprun.errors import ConfigError
from mprun.imports import no_wandb, uncollected


def vit(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    patch_size: int = 2,
    embed_dim: int = 64,
    depth: int = 4,
    num_heads: int = 4,
    mlp_ratio: float = 2.0,
    class_token: bool = False,
    global_pool: str = "avg",
    dropout: float = 0.0,
    attn_dropout: float = 0.0,
    drop_path: float = 0.0,
) -> nn.Module:
    """Build the model, float32 on the CPU.

    Args:
        input_shape: (C, H, W) with H = W.
        num_classes: size of the output.
        patch_size: side of a patch in pixels; divides H.
        embed_dim: width of a token; a multiple of ``num_heads``.
        depth: number of blocks.
        num_heads: attention heads of a block.
        mlp_ratio: width of a block's hidden layer, in units of ``embed_dim``.
        class_token: prepend a learned token.
        global_pool: how tokens become one vector: ``avg``, or ``token`` for the class token.
        dropout: on the embeddings and on both outputs of a block.
        attn_dropout: on the attention weights.
        drop_path: probability to skip the last block for a sample; earlier blocks proportionally less.

    Returns:
        A module from images (B, C, H, W) to logits (B, num_classes).

    Raises:
        ConfigError: sizes that do not fit together.
    """
    if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
        raise ConfigError(f"the vit takes square images (C, H, H), not inputs of shape {tuple(input_shape)}")
    channels, side, _ = input_shape
    if patch_size < 1 or side % patch_size:
        raise ConfigError(f"model.kwargs.patch_size={patch_size} does not divide the image's side of {side} pixels")
    if num_heads < 1 or embed_dim % num_heads:
        raise ConfigError(f"model.kwargs.embed_dim={embed_dim} is not a multiple of model.kwargs.num_heads={num_heads}")
    if global_pool == "token" and not class_token:
        raise ConfigError("model.kwargs.global_pool=token needs model.kwargs.class_token=true")

    with no_wandb(), uncollected("timm"):
        from timm.models.vision_transformer import VisionTransformer  # two seconds: only where it is needed

    model = VisionTransformer(
        img_size=side,
        patch_size=patch_size,
        in_chans=channels,
        num_classes=num_classes,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
        class_token=class_token,
        global_pool=global_pool,
        pos_drop_rate=dropout,
        proj_drop_rate=dropout,
        attn_drop_rate=attn_dropout,
        drop_path_rate=drop_path,
    )
    _initialise(model)
    return cast(nn.Module, model)


def _initialise(model: nn.Module) -> None:
    """Start tokens, positions and blocks at the scale of the input, in place."""
    stem = cast(nn.Conv2d, model.get_submodule("patch_embed.proj"))
    nn.init.normal_(stem.weight, std=stem.weight[0].numel() ** -0.5)
    nn.init.normal_(model.get_parameter("pos_embed"), std=1.0)
    for module in model.get_submodule("blocks").modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
