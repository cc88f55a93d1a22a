"""Tests of `synchromesh/trace/rules`."""
