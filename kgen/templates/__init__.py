"""Jinja templates of what kgen emits; device functions are plain CUDA in `device/`."""
