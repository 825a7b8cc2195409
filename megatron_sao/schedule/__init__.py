"""The scheduler: which prompts are issued, which trajectories are fresh enough to train on, and when weights move."""
