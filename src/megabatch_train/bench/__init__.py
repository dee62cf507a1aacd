"""The measurements of `megabatch bench` and of the scripts in benchmarks/: memory, time, and errors relative to float64."""
