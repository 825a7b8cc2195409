"""Trajectories as tensors: the packed batch, how it is cut into micro-batches, and the one index rule."""
