"""Bundled workloads by name: digits bring their data, others read the folder that --data names."""

from collections.abc import Callable
from pathlib import Path

from synchromesh.workloads import classification, coco, digits, multi30k, ptb, shakespeare, sst2
from synchromesh.workloads.workload import Workload

# name -> (data folder or None, synthetic rows instead of data) -> Workload
BUNDLED: dict[str, Callable[[Path | None, bool], Workload]] = {
    "digits/cnn": digits.cnn,
    "digits/wide": digits.wide,
    "digits/vit": digits.vit,
    **classification.WORKLOADS,
    **coco.WORKLOADS,
    **ptb.WORKLOADS,
    **sst2.WORKLOADS,
    **shakespeare.WORKLOADS,
    **multi30k.WORKLOADS,
}
