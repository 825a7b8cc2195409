"""The only package that touches process groups. Importing it makes megatron.core importable without CUDA."""

from megatron_sao.parallel import cpu

cpu.install()
