"""`megabatch bench`, and the measurements that the scripts in benchmarks/ share: memory, time, errors against float64."""
