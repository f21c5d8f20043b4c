"""npu_gr: generative recommendation under a P99 deadline. Importing the package does nothing slow."""

__version__ = "0.1.0"
