"""Tests of `synchromesh/doctor`."""
