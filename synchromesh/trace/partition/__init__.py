"""Partition: the local graph of each component under a layout, and what it holds and sends."""
