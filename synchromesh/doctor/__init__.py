"""The doctor: the machines of a run surveyed, and what will go wrong on them."""
