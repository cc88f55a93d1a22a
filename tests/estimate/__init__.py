"""Tests of `synchromesh/estimate`."""
