"""The engine: process groups, local programs, gradients and optimizer states of one rank."""
