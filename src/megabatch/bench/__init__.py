"""What the benchmarks share: a fresh process for each measurement, its peak memory, the truth in float64, the machine."""
