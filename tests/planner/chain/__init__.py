"""Tests of `synchromesh/planner/chain`."""
