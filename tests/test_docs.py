"""The documents say what the project does, and their figures come from committed results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from kgen.constraints import check
from kgen.spec import FUSED, STRATEGIES, load_spec, parse_spec
from kgen.yaml_source import parse_yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import sanitize

README = (ROOT / "README.md").read_text()
BLOCKS = ROOT / "benchmarks/results/h200_blocks.json"
SHAPES = ROOT / "benchmarks/results/h200_shapes.json"


def test_readme_table_is_what_the_script_makes_of_the_results():
    script = [sys.executable, "benchmarks/table.py", str(BLOCKS.relative_to(ROOT))]
    made = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    shown = README.split("<!-- measured: begin -->\n")[1].split("\n<!-- measured: end -->")[0]
    assert shown == made.rstrip("\n")
    assert shown.count("\n| `") >= 5


def test_readme_spec_is_the_flagship():
    text = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1]
    assert parse_spec(parse_yaml(text.encode(), "README")) == load_spec(
        ROOT / "specs/conv8x32_k3_gn8.yaml"
    )


def test_readme_kernel_lines_are_in_the_emitted_kernel():
    text = re.search(r"```cuda\n(.*?)```", README, re.DOTALL)[1]
    assert text in (ROOT / "generated/conv8x32_k3_gn8/kernel.cu").read_text()
    assert text.count("\n") >= 12


def test_links_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)


def test_results_name_their_circumstances():
    results = sorted(ROOT.glob("benchmarks/results/*.json"))
    assert results
    for path in results:
        record = json.loads(path.read_text())
        record = record.get("context", record)  # of `kgen bench`
        where = ("gpu", "driver", "torch") if "gpu" in record else ("cpu", "python", "numpy")
        for key in (*where, "nvrtc", "kgen", "command", "date"):
            assert record[key], (path.name, key)


def test_measured_specs_are_the_shipped_ones():
    for spec in json.loads(BLOCKS.read_text())["specs"]:
        assert load_spec(ROOT / "specs" / spec["spec"]).hash() == spec["spec_hash"], spec["spec"]


def kernel_digest(file, strategy):
    """Of the kernel that a shipped spec gives today for a strategy."""
    return sanitize.kernel_digest(sanitize.variant(str(ROOT / "specs" / file), strategy))


def test_results_are_those_of_the_kernels_as_they_are():
    for spec in json.loads(BLOCKS.read_text())["specs"]:
        for label, row in spec["rows"].items():
            if label.startswith("kgen "):
                digest = kernel_digest(spec["spec"], label.removeprefix("kgen "))
                assert row["kernel_sha256"] == digest, (spec["name"], label)


def test_the_measured_kernels_are_right_and_free_of_failures():
    for file in (BLOCKS, SHAPES):
        for spec in json.loads(file.read_text())["specs"]:
            for label, row in spec["rows"].items():
                assert "failed" not in row, (spec["name"], label)
                if label.startswith("kgen "):
                    assert row["verified_cases"] >= 3, (spec["name"], label)


def test_sanitizer_verdicts_are_complete_and_clean():
    record = json.loads((ROOT / "benchmarks/results/h200_sanitizer.json").read_text())
    cases = [str(path) for path in sorted((ROOT / "specs").glob("*.yaml"))]
    flagship = str(ROOT / "specs/conv8x32_k3_gn8.yaml")
    cases = [flagship, *(one for one in cases if one != flagship)]
    cases += [f"{flagship}={shape}" for shape in sanitize.SHAPES]
    wanted = {sanitize.label(*pair): pair for pair in sanitize.pairs(cases)}
    assert {one["tool"] for one in record["results"]} == set(sanitize.TOOLS)
    for one in record["results"]:
        assert one["clean"], one["tool"]
        assert set(one["ran"]) == set(wanted)
    for label, pair in wanted.items():
        digest = sanitize.kernel_digest(sanitize.variant(*pair))
        assert record["kernel_sha256"][label] == digest, label


def test_counters_are_of_the_flagship_as_it_is():
    record = json.loads((ROOT / "benchmarks/results/h200_counters.json").read_text())
    for row in record["rows"]:
        if row["size"] == "as in the spec":
            spec = load_spec(ROOT / "specs" / record["spec"]).with_strategy(row["strategy"])
            assert row["spec_hash"] == spec.hash()
            assert row["dram_over_needed"] <= 1.10
    assert {row["strategy"] for row in record["rows"]} == set(FUSED)


def test_simulator_and_gpu_agreed_on_every_shipped_spec():
    record = json.loads((ROOT / "benchmarks/results/h200_agreement.json").read_text())
    ran = {(row["spec"], row["strategy"]) for row in record["rows"]}
    assert ran >= {
        (path.name, strategy)
        for path in (ROOT / "specs").glob("*.yaml")
        for strategy in STRATEGIES
        if not check(load_spec(path).with_strategy(strategy))
    }
    text = (ROOT / "docs/simulator.md").read_text()
    shown_for = {
        "two_kernel": 1.6e-6, "hybrid": 3.9e-5, "single_pass": 4.3e-6, "recompute": 8.8e-5,
    }  # fmt: skip
    for strategy, shown in shown_for.items():
        rows = [row for row in record["rows"] if row["strategy"] == strategy]
        worst = max(row["max_difference"] for row in rows)
        assert worst <= shown < 1.1 * worst, (strategy, worst)
        assert f"{shown:.1e}".replace("e-0", "e-") in text
        assert all(row["findings"] == [] for row in rows)
