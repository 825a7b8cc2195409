"""Episodes: environments, the conversation in token ids, engine clients, and turns put together into trajectories.

Imports no torch and no Megatron: the scheduler runs on a laptop.
"""
