"""Triton kernels of the hot ops.

Imported only if triton is installed; `TRITON_INTERPRET=1` runs them on a CPU.
"""
