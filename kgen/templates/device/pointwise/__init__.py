"""One device function an op of the chain; the file is named after the op."""
