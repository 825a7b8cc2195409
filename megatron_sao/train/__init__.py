"""The trainer: `loop.py` is the run, `sao_step.py` is the algorithm; the other files are their parts."""
