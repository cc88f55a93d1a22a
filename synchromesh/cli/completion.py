"""What a shell completes, besides options: TARGETs and clusters. It runs at every press of a key,
so the names of bundled workloads stand here too: `workloads.BUNDLED` imports torch."""

import argparse
import os

IMAGES = "vgg11 vgg16 vgg_small resnet18 resnet50 resnet_small vit_tiny vit_b16 vit_small"
IMAGES += " inception_v3 inception_small"
NETS = {
    "digits": "cnn wide vit", "mnist": IMAGES, "cifar10": IMAGES, "cifar100": IMAGES,
    "coco": "unet unet_small segnet segnet_small", "ptb": "lstm lstm_small",
    "sst2": "bert bert_small roberta roberta_small lstm lstm_small bags",
    "shakespeare": "gpt2 gpt2_small", "multi30k": "gnmt gnmt_small",
}  # fmt: skip
TARGETS = tuple(f"{data}/{net}" for data, nets in NETS.items() for net in nets.split())


def targets(prefix: str, **_: object) -> list[str]:
    """Bundled workloads, and Python files, behind which a function is named."""
    from argcomplete.completers import FilesCompleter

    files = FilesCompleter(["py"])(prefix)
    return [*TARGETS, *(f if f.endswith("/") else f"{f}:" for f in files)]


def clusters(**_: object) -> tuple[str, ...]:
    """Names of the catalogue."""
    from synchromesh import catalogue

    return catalogue.names()


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell and exits, where one asks."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
