"""Tests of `synchromesh/planner`."""
