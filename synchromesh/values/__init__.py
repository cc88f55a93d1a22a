"""Values: what all parts speak of; frozen, checked once, without torch.distributed."""
