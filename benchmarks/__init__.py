"""Benchmarks: each prints the table that the README beside it shows."""
