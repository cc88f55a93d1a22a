"""The compressors by the words of plans."""

from torch import Tensor

from synchromesh.compression.compressor import Compressor
from synchromesh.compression.largest import Largest
from synchromesh.compression.low_rank import LowRank
from synchromesh.compression.quantised import Quantised
from synchromesh.values.compression import CompressedSizes


def of(sizes: CompressedSizes, index: int, like: Tensor) -> Compressor:
    """One rank's side of a bucket. index: of the rank. like: of the type of gradients."""
    makers = {"topk": Largest, "powersgd": LowRank}
    return makers.get(sizes.name, Quantised)(sizes, index, like)
