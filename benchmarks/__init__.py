"""Benchmarks: each prints the table that the README beside it shows, and measures afresh."""

import os

os.environ["SYNCHROMESH_CACHE"] = "off"  # inherited by the ranks that a benchmark starts
