"""The only package that touches the process groups of the trainer's world.

Importing it makes megatron.core importable without CUDA.
"""

from megatron_sao.parallel import cpu

cpu.install()
