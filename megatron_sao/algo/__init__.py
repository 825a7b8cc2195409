"""The mathematics of SAO: tensors and scalars in, tensors out. No model, no process group, no configuration.

Read `gae.py` (advantages and value targets), `dis.py` (the policy loss), `value_loss.py`, then `policy_losses.py`
(the control arms) and `statistics.py`. Every function takes per-token arrays of equal shape and an action mask;
what stands in a masked slot, NaN included, changes neither a result nor a gradient.
"""
