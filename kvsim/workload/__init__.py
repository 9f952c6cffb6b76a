"""Where requests come from: traces, synthetic workloads, presets."""
