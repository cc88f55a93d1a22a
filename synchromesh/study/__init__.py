"""A study: strategies compared on one workload, in turns, so that each meets the same machine."""
