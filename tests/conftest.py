"""Markers that depend on the machine: `gpu` needs a CUDA device, `nvrtc` the NVRTC wheel."""

from __future__ import annotations

import os

import pytest


def _why_no_nvrtc() -> str:
    from kgen.compiler import CompileError, nvrtc_version

    try:
        nvrtc_version()
    except CompileError as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        from kgen.verify import why_no_device

        reason = why_no_device()
        if reason and os.environ.get("KGEN_REQUIRE_GPU") == "1":
            pytest.fail(f"KGEN_REQUIRE_GPU=1, but {reason}", pytrace=False)
        if reason:
            pytest.skip(f"needs a GPU: {reason}")
    if item.get_closest_marker("nvrtc"):
        reason = _why_no_nvrtc()
        if reason:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share one cache of their own and never touch the user's."""
    if "KGEN_TEST_CACHE" not in os.environ:
        os.environ["KGEN_TEST_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("KGEN_CACHE_DIR", os.environ["KGEN_TEST_CACHE"])
