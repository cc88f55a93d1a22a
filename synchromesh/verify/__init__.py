"""Verification: a plan beside one process, with how far rounding alone goes."""
