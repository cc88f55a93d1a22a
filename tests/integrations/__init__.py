"""Tests of loops of other libraries around a trainer of ours."""
