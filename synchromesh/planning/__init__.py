"""Planning: who asks for a plan, on live ranks, for clusters that are not there, of layers."""
