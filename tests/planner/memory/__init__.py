"""Tests of `synchromesh/planner/memory`."""
