"""Cost: predicted step time and memory of a plan."""
