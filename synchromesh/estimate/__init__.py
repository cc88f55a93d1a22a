"""Estimates: profiles and plans for a cluster that need not be there, from data sheets."""
