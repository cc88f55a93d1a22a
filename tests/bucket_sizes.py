"""Gradient buckets of other sizes: tests whose models are small fill several of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from synchromesh.values import buckets
from synchromesh.values.buckets import BucketSizes

SEVERAL = BucketSizes(full=600, first=200)  # bytes: a model of 1 KB fills at least two


@contextmanager
def bucket_sizes(full: int, first: int, **more: int) -> Iterator[None]:
    """Inside, and in ranks that are forked inside, buckets are full at these bytes."""
    before, buckets.SIZES = buckets.SIZES, BucketSizes(full, first, **more)
    try:
        yield
    finally:
        buckets.SIZES = before
