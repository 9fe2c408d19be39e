"""The documents say what the project does, and their figures come from committed results."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from kgen.bench.record import load_record
from kgen.bench.timing import LEAST_ROUNDS, TARGET
from kgen.constraints import check
from kgen.exporters.kernelbench import kernelbench_source
from kgen.report.text import significant
from kgen.spec import FUSED, STRATEGIES, load_spec, parse_spec
from kgen.yaml_source import parse_yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import sanitize
import table

README = (ROOT / "README.md").read_text()
BENCHES = {path: load_record(path) for path in sorted(ROOT.glob("benchmarks/results/bench_*.json"))}


@pytest.mark.parametrize("name", table.TABLES)
def test_a_table_is_what_the_script_makes_of_the_results(name):
    document = (ROOT / name).read_text()
    shown = document.split(f"{table.BEGIN}\n")[1].split(f"\n{table.END}")[0]
    assert shown == table.TABLES[name]()
    assert shown.count("\n| ") >= 4


def test_readme_speaks_of_the_flagship_as_it_was_measured():
    text = re.search(
        r"block takes ([\d.]+) ms where eager takes ([\d.]+) and torch.compile ([\d.]+)", README
    )
    record = load_record(table.result(table.FLAGSHIP))
    for told, label in zip(text.groups(), ("kgen single_pass", "eager", "compile"), strict=True):
        half_a_digit = 0.5 * 10 ** -len(told.partition(".")[2])
        assert abs(float(told) - record.row(label).graph.median) <= half_a_digit, label


def test_blocks_measured_twice_agree_within_one_percent():
    twice = [name for name in table.BLOCKS if table.result(f"{name}_again").exists()]
    assert len(twice) >= 4
    for name in twice:
        first, second = (load_record(table.result(one)) for one in (name, f"{name}_again"))
        for row in first.rows:
            if row.kind == "kgen":
                ratio = second.row(row.label).graph.median / row.graph.median
                assert abs(ratio - 1) <= 0.01, (name, row.label)


def test_the_report_is_that_of_the_flagships_record():
    page = (ROOT / "benchmarks/results/report_conv8x32_k3_gn8.html").read_text()
    record = load_record(table.result(table.FLAGSHIP))
    assert record.context.date in page
    picture = (ROOT / "benchmarks/results/pictures/conv8x32_k3_gn8_bars.svg").read_text()
    for row in record.rows:
        assert f"{row.label} {significant(row.graph.median)} ms" in picture
    assert "µs under ncu" in page


def test_readme_spec_is_the_flagship():
    text = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1]
    assert parse_spec(parse_yaml(text.encode(), "README")) == load_spec(
        ROOT / "specs/conv8x32_k3_gn8.yaml"
    )


def test_readme_kernel_lines_are_in_the_emitted_kernel():
    text = re.search(r"```cuda\n(.*?)```", README, re.DOTALL)[1]
    assert text in (ROOT / "generated/conv8x32_k3_gn8/kernel.cu").read_text()
    assert text.count("\n") >= 12


def test_tests_that_a_document_names_exist():
    text = (ROOT / "docs/pytorch.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert len(named) > 40
    for file, function in named:
        assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(), (file, function)
    for script in re.findall(r"`(benchmarks/\w+\.(?:py|json))`", text):
        assert (ROOT / script).exists(), script


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


def test_bench_md_tells_when_a_column_ends():
    text = " ".join((ROOT / "docs/bench.md").read_text().split())
    assert f"after {LEAST_ROUNDS} rounds or more" in text
    assert f"is known to {100 * TARGET:g} %" in text


def test_benchmarked_specs_are_the_ones_that_are_here():
    folders = (ROOT / "specs", ROOT / "benchmarks/specs")
    here = {path.stem: path for folder in folders for path in folder.glob("*.yaml")}
    for record in BENCHES.values():
        assert load_spec(here[record.name]).hash() == record.spec_hash
        assert here[record.name].read_text() == record.spec


def test_results_are_those_of_the_kernels_as_they_are():
    digests = {}
    for record in BENCHES.values():
        spec = parse_spec(parse_yaml(record.spec.encode(), record.name))
        for row in record.rows:
            if row.kind == "kgen":
                variant = spec if spec.schedule.strategy == row.strategy else None
                variant = variant or spec.with_strategy(row.strategy)
                digest = digests.setdefault(variant, sanitize.kernel_digest(variant))
                assert row.kernel_sha256 == digest, (record.name, row.label)


def test_the_measured_kernels_are_right_and_free_of_failures():
    for record in BENCHES.values():
        for row in record.rows:
            assert row.failed is None, (record.name, row.label)
            if row.kind == "kgen":
                assert row.verified_cases >= 7, (record.name, row.label)
                assert row.max_error == row.recheck_error < 1e-4, (record.name, row.label)


def test_the_tuner_came_within_three_percent_of_the_best():
    record = json.loads((ROOT / "benchmarks/results/h200_tuning.json").read_text())
    assert len(record["rows"]) >= 3
    for row in record["rows"]:
        assert row["seconds"] <= 60
        assert row["kept_after_kill"] + row["tuned"]["measured"] == (
            sum(row["tuned"]["counts"].values()) - row["tuned"]["counts"]["constraint"]
        )
        assert row["exhaustive"]["left"] == 0
        assert row["tuned_over_best"] <= 1.03, row["spec"]


def test_kernelbench_found_the_exported_flagship_right_at_every_scale():
    record = json.loads((ROOT / "benchmarks/results/h200_kernelbench.json").read_text())
    assert record["check"]["valid"]
    assert record["trials"]["correctness"] == 5
    assert [one["scale"] for one in record["scales"]] == [1.0, 3.0, 0.01, -1.0]
    assert all(one["compiled"] and one["correct"] for one in record["scales"])
    assert {"eager", "torch.compile"} <= set(record["references"])
    spec = load_spec(ROOT / "specs/conv8x32_k3_gn8.yaml")
    assert record["kernel_sha256"] == sanitize.kernel_digest(spec)
    source = kernelbench_source(spec)
    assert record["candidate_sha256"] == hashlib.sha256(source.encode()).hexdigest()


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
        "two_kernel": 1.7e-6, "hybrid": 3.5e-5, "single_pass": 4.8e-6, "recompute": 8.8e-5,
    }  # fmt: skip
    for strategy, shown in shown_for.items():
        rows = [row for row in record["rows"] if row["strategy"] == strategy]
        worst = max(row["max_difference"] for row in rows)
        assert worst <= shown < 1.1 * worst, (strategy, worst)
        assert f"{shown:.1e}".replace("e-0", "e-") in text
        assert all(row["findings"] == [] for row in rows)
