"""One file a math: how operands are split and multiplied."""
