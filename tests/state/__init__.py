"""Tests of `synchromesh/state`."""
