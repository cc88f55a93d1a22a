"""Vision transformers (Dosovitskiy et al. 2021, arXiv 2010.11929) of `transformers`."""

from torch import nn


def vit(
    size: int, patch: int, width: int, layers: int, heads: int, channels: int, classes: int,
    expansion: int = 4,
) -> nn.Module:  # fmt: skip
    """A ViT for images (n, channels, size, size) in patches of patch x patch pixels.

    expansion: hidden neurons of a block's perceptron over `width`."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size, patch_size=patch, num_channels=channels, hidden_size=width,
        intermediate_size=expansion * width, num_hidden_layers=layers, num_attention_heads=heads,
    )  # fmt: skip
    config.num_labels = classes
    return ViTForImageClassification(config)
