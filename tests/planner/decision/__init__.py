"""Tests of `synchromesh/planner/decision`."""
