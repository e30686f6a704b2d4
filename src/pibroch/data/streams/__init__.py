"""Events that come while training goes on: a stream's records as batches, each trained once."""
