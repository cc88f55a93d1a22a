"""Tests of tracing: rows, coupling."""
