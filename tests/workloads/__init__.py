"""Tests of `synchromesh/workloads`."""
