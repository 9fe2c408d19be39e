"""Runs the PTX that NVRTC made of an emitted kernel on a CPU, with numpy, and watches it.

The very text that would become machine code is parsed and executed: every PTX register is one
array over many threads, divergence goes by lowest program counter, and each memory access can be
checked for bounds, alignment, initialisation and races. Nothing here needs torch or a GPU.
"""
