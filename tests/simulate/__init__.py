"""Tests of simulations."""
