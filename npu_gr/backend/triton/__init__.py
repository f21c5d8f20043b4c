"""Triton kernels of the hot ops.

Imported only where triton is, and `TRITON_INTERPRET=1` runs them on a CPU.
"""
