"""Compressed sums of gradients as pure functions of what ranks send each other."""
