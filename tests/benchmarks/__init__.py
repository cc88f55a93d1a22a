"""Tests of the benchmarks: of what they say and write, not of what they measure."""
