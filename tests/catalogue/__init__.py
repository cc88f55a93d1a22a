"""Tests of `synchromesh/catalogue`."""
