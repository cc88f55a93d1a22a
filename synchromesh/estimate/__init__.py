"""Estimates: the facts of a cluster that need not be there, from data sheets."""
