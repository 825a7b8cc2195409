"""What a run leaves behind for people: metrics, trajectories, a picture, progress on the terminal."""
