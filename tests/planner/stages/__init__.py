"""Tests of `synchromesh/planner/stages`."""
