"""Plain CUDA device functions, pasted into what kgen emits; no Jinja."""
