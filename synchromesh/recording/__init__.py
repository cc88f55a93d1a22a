"""Recording: what happens in training steps on all ranks, and how far devices are used."""
