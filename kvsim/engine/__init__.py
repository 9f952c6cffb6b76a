"""What a serving engine decides: scheduling and KV block allocation. Standard library and numpy."""
