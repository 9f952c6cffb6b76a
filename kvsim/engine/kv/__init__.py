"""KV cache policies: contiguous, paged, and paged with sharing."""
