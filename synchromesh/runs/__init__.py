"""Runs: what a run says of its steps: spans, shares of time, memory, and its folder."""
