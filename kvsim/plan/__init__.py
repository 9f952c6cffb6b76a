"""Capacity planning: from a serve line to what fits, and from a start-up log to what it means."""
