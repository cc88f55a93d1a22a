"""Tests of `synchromesh/values`."""
