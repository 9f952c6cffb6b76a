"""Questions asked of runs: records, metrics, tables, charts."""
