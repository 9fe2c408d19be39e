"""The report: one page that shows every figure, refers to nothing outside and escapes all it shows.

Every figure in here is made up for these tests; none was measured.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from helpers import ROOT, TEXT, python

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from click.testing import CliRunner
from PIL import Image

from kgen.bench.record import Ceilings, Context, Record, RecordError, Row, RowTimes
from kgen.cli import cli
from kgen.emit import render
from kgen.errors import UsageError
from kgen.plan import make_plan
from kgen.report import write_pictures, write_report
from kgen.report.block import title
from kgen.report.charts import bars_words, roofline_words, spread
from kgen.report.drawings import smem_pictures, steps, tile_picture
from kgen.report.figures import best_kernel, check_figures, speedup, summary
from kgen.report.page import SCRIPT, page
from kgen.report.pictures import COLOURS
from kgen.report.text import one_line, printable, significant, slug
from kgen.spec import load_spec, parse_spec
from kgen.yaml_source import parse_yaml

FLAGSHIP = (ROOT / "specs/conv8x32_k3_gn8.yaml").read_text()
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&${7*7}{{ 7*7 }}\x00\x1b"


def times(median, spread=0.01, rounds=120):
    return RowTimes(
        median=median,
        p20=median * (1 - spread),
        p80=median * (1 + 1.5 * spread),
        rounds=rounds,
        relative_error=0.00321,
    )


def row(label, cold=None, graph=None, warm=None, kind="baseline", **more):
    timed = {"cold": cold, "warm": warm, "graph": graph}
    facts = {key: times(value) for key, value in timed.items() if value is not None}
    return Row(label=label, kind=kind, **facts, **more)


def made_up_rows(digest=None):
    """Test data: figures of a plausible size."""
    return (
        row("kgen single_pass", 0.5637, 0.4804, 0.6048, "kgen", strategy="single_pass",
            kernel_sha256=digest, verified_cases=7, max_error=1.132e-6, rms_error=1.536e-7,
            recheck_error=1.133e-6, host_us=11.27, first_call_ms=913.5,
            ncu={"dram__bytes.sum": 1.4012e9}),
        row("kgen recompute", 0.7333, 0.6913, 0.7804, "kgen", strategy="recompute",
            verified_cases=7, max_error=1.141e-6, rms_error=1.541e-7, recheck_error=1.142e-6,
            host_us=11.31, first_call_ms=887.2),
        row("kgen two_kernel", 1.6188, None, 1.6632, "kgen", strategy="two_kernel",
            verified_cases=7, max_error=1.839e-6, rms_error=1.802e-7, host_us=14.6),
        Row(label="kgen hybrid", kind="kgen", strategy="hybrid",
            failed="CUDA error: out of memory"),
        row("eager", 2.951, 2.839, 2.97, max_error=8.13e-4, rms_error=9.1e-5, recheck_error=8.13e-4,
            host_us=61.2, first_call_ms=402.1),
        row("compile", 1.301, 1.204, 1.33, max_error=8.15e-4, rms_error=9.2e-5, host_us=38.4,
            first_call_ms=8123.0),
        row("compile-max-autotune", 1.24, 1.152, 1.27, max_error=8.16e-4, rms_error=9.3e-5,
            first_call_ms=20411.0),
        row("channels_last", 2.21, 2.105, 2.25, max_error=8.17e-4, rms_error=9.4e-5),
    )  # fmt: skip


def made_up(text=FLAGSHIP, rows=None, warnings=(), **changes):
    """Test data: a record of the flagship on a GPU of this test's invention."""
    spec = parse_spec(parse_yaml(text.encode(), "test"))
    plan = make_plan(spec)
    g, N = plan.g, plan.g.N or 4
    context = {
        "gpu": "Testing GPU (made-up figures)",
        "driver": "580.00.01",
        "sms": 132,
        "torch": "2.11.0+test",
        "cuda": "13.0",
        "cudnn": 91900,
        "nvrtc": "13.0",
        "kgen": "0.1.0",
        "python": "3.12.3",
        "date": "2026-11-30T10:00:00+00:00",
        "command": "kgen bench specs/conv8x32_k3_gn8.yaml --output test.json",
        "flags": {"cudnn.allow_tf32": True, "matmul.precision": "highest"},
        "clocks_before": {"sm_mhz": 1980.0, "memory_mhz": 3201.0},
        "clocks_after": {"sm_mhz": 1965.0, "temperature_c": 51.0},
        "warnings": tuple(warnings),
        **changes.pop("context", {}),
    }
    mma = {"fp16": 7.9e14, "bf16": 7.95e14, "tf32": 3.97e14}
    facts = {
        "name": spec.name,
        "spec": text,
        "spec_hash": spec.hash(),
        "x": (N, g.C_in, g.H, g.W),
        "y": (N, g.C_out, g.P, g.Q),
        "bytes_needed": 4 * N * (g.x_elements + g.y_elements),
        "flops": 2 * N * g.y_elements * g.taps,
        "ceilings": Ceilings(copy_bytes=4.156e12, fill_bytes=3.2e12, mma_flops=mma),
        "rows": made_up_rows() if rows is None else tuple(rows),
        **changes,
    }
    return Record(context=Context(**context), **facts)


VOID = {"br", "col", "hr", "img", "input", "link", "meta", "wbr"}


class Page(HTMLParser):
    """Every tag with its attributes, the text, and what is not well-formed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.problems, self.ids = [], [], [], []
        self.texts = []
        self.feed(text)
        self.close()
        self.problems += [f"{tag} is not closed" for tag in self.open]
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            self.problems.append(f"{tag} repeats an attribute")
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()} closes something else")

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def report(tmp_path, *records):
    paths = []
    for number, record in enumerate(records):
        paths.append(tmp_path / f"record{number}.json")
        record.save(paths[-1])
    return write_report(paths, tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def flagship_page(tmp_path_factory):
    return report(tmp_path_factory.mktemp("flagship"), made_up(warnings=("the clock fell",)))


def test_the_page_is_well_formed_and_accessible(flagship_page):
    found = Page(flagship_page)
    assert found.problems == []
    assert len(set(found.ids)) == len(found.ids)
    tags = found.tags
    assert ("html", {"lang": "en"}) in tags
    assert any(attrs.get("name") == "viewport" for tag, attrs in tags if tag == "meta")
    assert all("scope" in attrs for tag, attrs in tags if tag == "th")
    pictures = [attrs for _, attrs in tags if attrs.get("role") == "img"]
    assert len(pictures) >= 4
    assert all(attrs["aria-label"] for attrs in pictures)
    assert any("0.4804 ms (graph" in attrs["aria-label"] for attrs in pictures)
    targets = {f"#{one}" for one in found.ids}
    assert {attrs["href"] for tag, attrs in tags if tag == "a"} <= targets


def test_the_page_refers_to_nothing_outside(flagship_page):
    for tag, attrs in Page(flagship_page).tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "image", "form"), tag
        assert "src" not in attrs, tag
        for name in ("href", "xlink:href", "action", "data", "poster", "srcset"):
            assert attrs.get(name, "#").startswith("#"), (tag, attrs[name])
        assert not [name for name in attrs if name.startswith("on")], tag
        assert all(one.startswith("#") for one in re.findall(r"url\(([^)]*)", str(attrs)))
    style = re.search(r"<style>(.*?)</style>", flagship_page, re.DOTALL)[1]
    assert "@import" not in style
    assert "url(" not in style
    assert flagship_page.count("<script>") == 1
    assert "default-src &#39;none&#39;" in flagship_page


def test_the_same_records_give_the_same_bytes(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests'); from pathlib import Path; "
        "from kgen.report import *; from kgen.bench.record import load_record; "
        "a, out = map(Path, sys.argv[1:]); write_report([a, a], out / 'page.html'); "
        "write_pictures(load_record(a), out)"
    )
    source = tmp_path / "record.json"
    made_up().save(source)
    for seed in ("1", "2"):
        out = tmp_path / seed
        out.mkdir()
        done = python("-c", code, str(source), str(out), cwd=ROOT, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
    first = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()}
    second = {path.name: path.read_bytes() for path in (tmp_path / "2").iterdir()}
    assert len(first) == 5
    assert first == second


def test_every_figure_of_every_row_is_shown(flagship_page):
    text = Page(flagship_page).text
    record = made_up()
    for one in record.rows:
        assert one.label in text
        for kind in ("cold", "warm", "graph"):
            if (found := one.times(kind)) is None:
                continue
            assert f"{found.rounds} {100 * found.relative_error:.2f} %" in text
            for value in (found.median, found.p20, found.p80):
                assert f" {significant(value)} " in text, (one.label, kind)
            assert f" {significant(record.bytes_needed / found.median / 1e6)} " in text
            assert f" {significant(record.flops / found.median / 1e9)} " in text
            share = record.bytes_needed / found.median * 1e3 / record.ceilings.copy_bytes
            assert f" {100 * share:.1f} % " in text
        for error in (one.max_error, one.rms_error, one.recheck_error):
            assert error is None or f" {error:.2e} " in text, one.label
        for value in (one.host_us, one.first_call_ms):
            assert value is None or f" {significant(value)} " in text, one.label
    assert "dram__bytes.sum 1.4012e+09" in text


def test_factors_compare_medians_of_the_same_kind(flagship_page):
    record, text = made_up(), Page(flagship_page).text
    best = record.row("kgen single_pass")
    against = speedup(record, best, "eager")
    assert (against.kind, round(against.factor, 2)) == ("graph", 5.91)
    assert "5.91 times as fast as eager (2.839 ms)" in text
    assert "2.51 times as fast as compile (1.204 ms)" in text
    cold_only = record.row("kgen two_kernel")
    assert speedup(record, cold_only, "eager").kind == "cold"
    assert speedup(record, cold_only, "eager", "graph") is None
    assert speedup(record, record.row("kgen hybrid"), "eager") is None
    assert speedup(record, best, "nobody") is None


def test_a_failed_row_is_named_with_its_reason_and_has_no_bar(flagship_page):
    text = Page(flagship_page).text
    assert "kgen hybrid failed: CUDA error: out of memory" in text
    drawn = bars_words(made_up())
    assert "kgen hybrid failed: CUDA error: out of memory" in drawn
    assert "kgen hybrid" not in roofline_words(made_up())


def test_missing_times_are_said_to_be_missing(tmp_path):
    rows = [row("kgen two_kernel", warm=1.5, kind="kgen"), row("eager", cold=2.0)]
    record = made_up(rows=rows)
    text = Page(report(tmp_path, record)).text
    assert "no graph times in the record" in text
    assert "no cold times in the record" in text
    assert "holds no graph or cold times of it (only warm)" in text
    assert "The record holds no counters" in text
    assert summary(record).startswith("No kernel of kgen could be timed: kgen two_kernel")
    assert "compile is not in the record." in summary(made_up(rows=made_up_rows()[:5]))


def test_missing_ceilings_and_an_empty_record(tmp_path):
    none = Ceilings(copy_bytes=0, fill_bytes=0, mma_flops={})
    text = Page(report(tmp_path, made_up(ceilings=none))).text
    assert "copy, read and written not measured" in text
    assert "copy bandwidth not measured" in text
    assert "mma ceilings not measured" in text
    text = Page(report(tmp_path, made_up(rows=[], ceilings=none))).text
    assert "No kernel of kgen is in this record." in text
    assert "no row has times" in text


def test_which_rows_meet_the_tolerance(flagship_page, tmp_path):
    text = Page(flagship_page).text
    assert "kgen single_pass meets 0.0001" in text
    assert "eager misses 0.0001 (8.13e-04)" in text
    assert "kgen hybrid not compared" in text
    later = row("kgen two_kernel", 1.0, kind="kgen", max_error=1e-6, recheck_error=0.5)
    fast_but_wrong = row("kgen recompute", 0.1, kind="kgen", max_error=2e-3)
    nothing = row("kgen single_pass", 0.1, kind="kgen", max_error=float("nan"))
    right = row("kgen hybrid", 2.0, kind="kgen", max_error=1e-6)
    record = made_up(rows=[later, fast_but_wrong, right, nothing])
    assert best_kernel(record) is right
    text = Page(page([record])).text
    assert "kgen two_kernel misses 0.0001 (5.00e-01)" in text
    assert "kgen single_pass misses 0.0001 (nan)" in text
    assert best_kernel(made_up(rows=[fast_but_wrong])) is fast_but_wrong
    assert "which misses the tolerance" in summary(made_up(rows=[fast_but_wrong]))


def test_warnings_stand_before_the_figures(flagship_page):
    assert flagship_page.index("the clock fell") < flagship_page.index("Bars are medians")
    assert '<div class="warnings" role="note">' in flagship_page


def test_circumstances_and_command_are_shown(flagship_page):
    text, context = Page(flagship_page).text, made_up().context
    for one in (context.gpu, context.driver, context.torch, context.nvrtc, context.date):
        assert one in text
    assert "cudnn.allow_tf32 True" in text
    assert "sm_mhz 1,980 1,965" in text
    assert "memory_mhz 3,201 \u2013" in text
    assert context.command in text
    assert "mma tf32 397.0 TFLOP/s" in text


def test_hostile_text_is_only_text(tmp_path):
    rows = [
        row(HOSTILE, 0.5, 0.4, kind="kgen", strategy=HOSTILE, ncu={HOSTILE: 1.0}),
        Row(label=HOSTILE + "2", kind="baseline", failed=HOSTILE),
    ]
    context = dict.fromkeys(("gpu", "driver", "torch", "command", "date", "kgen"), HOSTILE)
    record = made_up(
        name=HOSTILE, spec_hash=HOSTILE, rows=rows, warnings=(HOSTILE,),
        context={**context, "flags": {HOSTILE: HOSTILE}, "clocks_before": {HOSTILE: 1.0}},
    )  # fmt: skip
    for one in (record, record.model_copy(update={"spec": HOSTILE})):
        text = report(tmp_path, one)
        found = Page(text)
        assert found.problems == []
        assert [tag for tag, _ in found.tags].count("script") == 1
        assert "img" not in [tag for tag, _ in found.tags]
        assert not [attrs for _, attrs in found.tags if "onerror" in attrs]
        assert "alert(1)" in found.text
        assert "${7*7}{{ 7*7 }}" in found.text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    pictures = write_pictures(record, tmp_path / "pictures")
    assert all(path.parent == tmp_path / "pictures" for path in pictures)
    for path in pictures:
        if path.suffix == ".svg":
            tags = {one.tag.split("}")[1] for one in ET.parse(path).iter()}
            assert tags <= {"svg", "title", "style", "rect", "g", "path", "defs", "use", "text",
                            "clipPath", "tspan"}  # fmt: skip


def test_a_spec_that_no_longer_parses_leaves_the_measurements(tmp_path):
    text = Page(report(tmp_path, made_up().model_copy(update={"spec": "version: 9\n"}))).text
    assert "Plan and source cannot be shown: record:" in text
    assert "0.4804" in text
    assert "conv8x32_k3_gn8 at x [128, 8, 256, 256]" in text


def test_records_of_one_spec_stand_together_by_date(tmp_path):
    late = made_up(context={"date": "2026-12-03"})
    other = made_up(TEXT)
    early = made_up(context={"date": "2026-11-01"})
    text = report(tmp_path, late, other, early, early)
    found = Page(text)
    assert found.problems == []
    assert len(set(found.ids)) == len(found.ids)
    dates = re.findall(r'<p class="about">.*?spec ([0-9a-f]+) &middot; (\S+)', text)
    flagship, demo = early.spec_hash, other.spec_hash
    assert dates == [
        (flagship, "2026-11-01"), (flagship, "2026-11-01"), (flagship, "2026-12-03"),
        (demo, other.context.date),
    ]  # fmt: skip
    assert text.count('<pre class="code hl"') == 2
    assert text.count("The emitted source is the same as that of") == 2


def test_the_source_shown_is_compared_with_the_one_measured(tmp_path):
    spec = parse_spec(parse_yaml(FLAGSHIP.encode(), "test"))
    source = render(spec)["kernel.cu"]
    digest = hashlib.sha256(source.encode()).hexdigest()
    text = report(tmp_path, made_up(rows=made_up_rows(digest)))
    shown = re.search(r'<pre class="code hl"[^>]*>(.*?)</pre>', text, re.DOTALL)[1]
    assert html.unescape(re.sub(r"<[^>]+>", "", shown)) == source
    assert "The source below is the one that was measured" in text
    text = report(tmp_path, made_up(rows=made_up_rows("0" * 64)))
    assert "The source below is not the one that was measured" in text
    text = report(tmp_path, made_up())
    assert "Whether the source below was measured is not in the record" in text


def test_titles_are_the_block_in_words():
    def words(file):
        spec = load_spec(ROOT / "specs" / file)
        return title(made_up((ROOT / "specs" / file).read_text()), spec)

    assert words("conv8x32_k3_gn8.yaml") == (
        "conv 8\u219232 3\u00d73, + bias, \u00d7 scale, sigmoid, GroupNorm(8) "
        "at x [128, 8, 256, 256]"
    )
    assert words("conv16x24_s2p1.yaml").startswith(
        "conv 16\u219224 3\u00d73 stride 2 padding 1 without bias, + bias"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda one: one.stem)
def test_every_shipped_spec_has_a_page(path, tmp_path):
    record = made_up(path.read_text())
    found = Page(report(tmp_path, record))
    assert found.problems == []
    plan = make_plan(load_spec(path))
    for launch in plan.launches:
        assert launch.kernel in found.text
        assert f"{launch.smem_bytes:,} bytes of dynamic shared memory each" in found.text
    for region in plan.smem_map:
        assert f"{region.offset:,} {region.offset + region.bytes:,} {region.bytes:,}" in found.text
    tile = tile_picture(plan)
    assert (tile is None) == (plan.strategy == "hybrid")
    if tile is not None:
        x, y, width, height = tile.tile
        assert 0 <= x < x + width <= tile.width + 1e-6
        assert 0 <= y < y + height <= tile.height + 1e-6
        assert tile.words in found.text
    for bar in smem_pictures(plan):
        ends = [one.x + one.width for one in bar.segments]
        assert ends == sorted(ends)
        assert max(ends) <= 460 + 1e-6


def test_grids_are_those_of_the_measured_batch_and_gpu():
    record = made_up((ROOT / "specs/conv8x32_dynamic.yaml").read_text())
    plan = make_plan(load_spec(ROOT / "specs/conv8x32_dynamic.yaml"))
    assert [one.grid for one in steps(plan, record)] == ["64 blocks", "128 blocks"]
    fused = make_plan(load_spec(ROOT / "specs/conv8x32_k3_gn8.yaml"))
    assert [one.grid for one in steps(fused, made_up())] == ["128 blocks", "127 blocks"]
    hybrid = make_plan(load_spec(ROOT / "specs/conv8x32_hybrid.yaml"))
    assert steps(hybrid, made_up())[0].kernel == "convolution of the library"


def test_launches_are_drawn_to_the_times_that_ncu_took_of_the_same_source(tmp_path):
    plan = make_plan(load_spec(ROOT / "specs/conv8x32_k3_gn8.yaml"))
    mine, other = "a" * 64, "b" * 64
    timed = [
        row("kgen single_pass", 0.5, 0.4, kind="kgen", kernel_sha256=digest, launch_ns=launch_ns)
        for digest, launch_ns in ((other, (9.0, 9.0)), (mine, (2000.0, 438_000.0)))
    ]
    found = steps(plan, made_up(rows=timed), mine)
    assert [one.bar for one in found] == [(0.0, pytest.approx(5 / 11)), (pytest.approx(5 / 11),
                                          pytest.approx(100 - 5 / 11))]  # fmt: skip
    assert [one.time for one in found] == [
        "2.000 µs under ncu, 0.5 %",
        "438.0 µs under ncu, 99.5 %",
    ]
    assert [one.bar for one in steps(plan, made_up(rows=timed), "c" * 64)] == [None, None]
    short = [row("kgen single_pass", 0.5, kind="kgen", kernel_sha256=mine, launch_ns=(1.0,))]
    assert [one.bar for one in steps(plan, made_up(rows=short), mine)] == [None, None]

    digest = hashlib.sha256(
        render(load_spec(ROOT / "specs/conv8x32_k3_gn8.yaml"))["kernel.cu"].encode()
    ).hexdigest()
    same = row("kgen single_pass", 0.5, kind="kgen", kernel_sha256=digest,
               strategy="single_pass", launch_ns=(2000.0, 438_000.0))  # fmt: skip
    page = report(tmp_path, made_up(rows=[same]))
    assert Page(page).problems == []
    assert page.count('<svg class="duration"') == 2
    assert "438.0 µs under ncu, 99.5 %" in Page(page).text
    assert "holds no times of single launches" not in page


def test_pictures_for_a_readme(tmp_path):
    written = write_pictures(made_up(), tmp_path / "new" / "folder")
    assert [path.name for path in written] == [
        "conv8x32_k3_gn8_roofline.svg", "conv8x32_k3_gn8_roofline.png",
        "conv8x32_k3_gn8_bars.svg", "conv8x32_k3_gn8_bars.png",
    ]  # fmt: skip
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(
        path.name for path in written
    )
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
                assert image.width == 960
                assert len(image.getcolors(1 << 24)) > 20
        else:
            root = ET.parse(path).getroot()
            assert root.attrib["role"] == "img"
            text = path.read_text("utf-8")
            assert "prefers-color-scheme: dark" in text
            assert "kgen single_pass" in text
            assert not re.search(r"#[0-9a-f]{2}fe[0-9a-f]{2}", text), "a stand-in colour is left"


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_light_and_dark(flagship_page):
    for block in re.findall(r":root\[[^{]*\{(.*?)\}", flagship_page, re.DOTALL):
        colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
        assert set(COLOURS) < set(colours)
        code = [name for name in colours if name.startswith("code")]
        pairs = [(name, "soft") for name in ("ink", "muted", *code)]
        pairs += [(name, "paper") for name in ("ink", "muted", "link", "good", "bad", "kgen",
                                               "baseline")]  # fmt: skip
        pairs += [("ink", f"tint{number}") for number in range(4)] + [("ink", "warn-ground")]
        for text, ground in pairs:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground, colours[text])


def test_labels_are_spread_without_leaving_their_column():
    assert spread([0.5, 0.51, 0.52], 0.1, 0.0, 1.0) == pytest.approx([0.32, 0.42, 0.52])
    assert spread([0.01, 0.02, 0.03], 0.1, 0.0, 1.0) == pytest.approx([0.0, 0.1, 0.2])
    assert spread([1.4], 0.1, 0.0, 1.0) == [1.0]
    assert spread([], 0.1, 0.0, 1.0) == []


def test_numbers_and_names_as_shown():
    assert [significant(one) for one in (0.48041, 2759.2, 12345.6, 0, 1e-7, 3.2e12)] == [
        "0.4804", "2,759", "12,346", "0", "1.000e-07", "3.200e+12",
    ]  # fmt: skip
    assert significant(float("inf")) == "inf"
    assert one_line("a\n b\x1b") == "a b\ufffd"
    assert printable("a\r\nb\ud800") == "a\nb\ufffd"
    assert one_line("a\n b\x1b", 3) == "a \u2026"
    assert slug("../../etc/x y") == "______etc_x_y"
    assert slug("") == "record"


@pytest.mark.parametrize("folder", [False, True])
def test_bad_input_is_refused_in_one_line(tmp_path, folder):
    output = tmp_path / "report.html"
    output.write_text("old")
    with pytest.raises(UsageError, match="no records given"):
        write_report([], output)
    broken = tmp_path / "broken.json"
    if folder:
        broken.mkdir()
    else:
        broken.write_text("{}")
    good = tmp_path / "good.json"
    made_up().save(good)
    with pytest.raises(RecordError) as caught:
        write_report([good, broken], output)
    assert "\n" not in str(caught.value)
    assert str(broken) in str(caught.value)
    assert output.read_text() == "old"


def test_output_that_cannot_be_written(tmp_path):
    good = tmp_path / "good.json"
    made_up().save(good)
    (tmp_path / "file").write_text("")
    for output in (tmp_path, tmp_path / "file" / "report.html"):
        with pytest.raises(UsageError, match="cannot be written") as caught:
            write_report([good], output)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be written"):
        write_pictures(made_up(), tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "good.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bytes_needed": 0}, "bytes_needed: is not a positive number"),
        ({"flops": -1}, "flops: is not a positive number"),
        ({"rows": (row("eager", 0.0),)}, "rows.0.cold.median: is not a positive ms"),
        ({"rows": (row("eager", float("inf")),)}, "rows.0.cold.median: is not a positive ms"),
        ({"rows": (row("eager", 1.0).model_copy(update={
            "cold": times(1.0).model_copy(update={"p20": 1.2})}),)}, "needs p20 <= median <= p80"),
    ],
)  # fmt: skip
def test_figures_that_cannot_be_are_refused(change, said, tmp_path):
    record = made_up().model_copy(update=change)
    with pytest.raises(RecordError, match="here: ") as caught:
        check_figures(record, "here")
    assert said in str(caught.value)
    with pytest.raises(RecordError):
        write_pictures(record, tmp_path)


def test_the_script_is_the_one_that_the_policy_allows(flagship_page):
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = next(
        attrs["content"]
        for tag, attrs in Page(flagship_page).tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert f"script-src 'sha256-{digest}'" in policy
    assert f"<script>{SCRIPT}</script>" in flagship_page


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    system = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with sync_api.sync_playwright() as play:
        try:
            started = play.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser starts: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_in_a_browser(browser, width, tmp_path):
    text = report(tmp_path, made_up(warnings=(HOSTILE * 3,)), made_up(TEXT, name=HOSTILE * 3))
    tab = browser.new_page(viewport={"width": width, "height": 800})
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("dialog", lambda dialog: (said.append("a dialog"), dialog.dismiss()))
    tab.goto((tmp_path / "out" / "report.html").as_uri())
    for details in tab.locator("details > summary").all():
        details.click()
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    tab.click("#theme")
    assert tab.evaluate(ground) != light
    tab.click("#theme")
    assert tab.evaluate(ground) == light
    assert said == []
    assert "<svg" in text
    tab.close()


def test_the_command_writes_page_and_pictures(tmp_path):
    record = tmp_path / "a.json"
    made_up().save(record)
    page_at, folder = tmp_path / "page.html", tmp_path / "pictures"
    result = CliRunner().invoke(
        cli, ["report", str(record), "-o", str(page_at), "--pictures", str(folder)]
    )
    assert result.exception is None, result.output
    assert page_at.read_text().startswith("<!doctype html>")
    assert sorted(one.suffix for one in folder.iterdir()) == [".png", ".png", ".svg", ".svg"]
    assert result.output.count(": written") == 5
    assert CliRunner().invoke(cli, ["report"]).exit_code == 2
