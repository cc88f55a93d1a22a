"""Training: a model under a plan, from `prepare` through steps and evaluation."""
