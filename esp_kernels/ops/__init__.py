"""The public functions, one file an op."""
