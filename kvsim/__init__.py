"""kvsim: how many LLM requests fit on your GPUs, and why."""

__version__ = "0.1.0"
