"""Tests of `synchromesh/trace/capture`."""
