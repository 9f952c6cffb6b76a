"""The real backend: the same scheduler and block tables on a real model."""
