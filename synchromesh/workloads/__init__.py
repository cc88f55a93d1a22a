"""Bundled workloads by name: digits bring their data, others read the folder that --data names."""

from collections.abc import Callable
from pathlib import Path

from synchromesh.workloads import cifar100, digits, mnist, ptb, sst2
from synchromesh.workloads.workload import Workload

# name -> (data folder or None, synthetic rows instead of data) -> Workload
BUNDLED: dict[str, Callable[[Path | None, bool], Workload]] = {
    "digits/cnn": digits.cnn,
    "digits/vit": digits.vit,
    "mnist/vgg11": mnist.vgg11,
    "cifar100/resnet18": cifar100.resnet18,
    "cifar100/resnet50": cifar100.resnet50,
    "cifar100/vit_tiny": cifar100.vit_tiny,
    "cifar100/vit_b16": cifar100.vit_b16,
    "ptb/lstm": ptb.lstm,
    "ptb/lstm_small": ptb.lstm_small,
    **sst2.WORKLOADS,
}
