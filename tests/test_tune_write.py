"""`--write` and the command line: one place of the file changes, and errors are one line."""

from __future__ import annotations

import json
import os
import stat

import click
import pytest
from click.testing import CliRunner
from helpers import SPECS, TEXT, edited
from test_tune import GPU, Inline, fake, time_of
from test_tune_store import lines

import kgen.tune
from kgen.durations import parse_seconds
from kgen.errors import KgenError, SpecError, UsageError
from kgen.spec import load_spec
from kgen.tune.command import parse_devices, progress_bar, tune_command
from kgen.tune.space import enumerate_space
from kgen.tune.write_back import edit, write_schedule

HYBRID = {"strategy": "hybrid", "threads": 256}
TILED = {"strategy": "two_kernel", "tile_h": 16, "tile_w": 32, "threads": 128}


def written(text: str, schedule=HYBRID) -> str:
    return edit(text.encode(), schedule, "demo.yaml").decode()


def test_a_value_changes_and_nothing_else():
    text = edited("  strategy: two_kernel", "  strategy: two_kernel   # why: it was measured")
    text = "# on top\n" + text.replace("problem:", "problem:   # sizes\n  # of x")
    new = written(text)
    assert new == text.replace(
        "  strategy: two_kernel   # why: it was measured",
        "  strategy: hybrid   # why: it was measured\n  threads: 256",
    )


def test_knobs_that_go_leave_their_comments_behind():
    text = edited(
        "  strategy: two_kernel\n",
        "  # above\n  strategy: two_kernel\n  tile_h: 8  # rows\n  # between\n  threads: 64\n"
        "  # at the end\n\n",
    )
    assert written(text) == edited(
        "  strategy: two_kernel\n",
        "  # above\n  strategy: hybrid\n  # rows\n  # between\n  threads: 256\n  # at the end\n\n",
        TEXT,
    )


def test_a_flow_mapping_stays_one():
    text = edited("schedule:\n  strategy: two_kernel", "schedule: {strategy: two_kernel}  # short")
    new = written(text, TILED)
    line = "schedule: {strategy: two_kernel, tile_h: 16, tile_w: 32, threads: 128}  # short"
    assert line in new.splitlines()
    assert new.replace(line, "") == text.replace("schedule: {strategy: two_kernel}  # short", "")


def test_a_comment_inside_a_flow_mapping_is_not_lost():
    text = edited("schedule:\n  strategy: two_kernel",
                  "schedule: {\n  strategy: two_kernel,  # measured\n  tile_h: 8}")  # fmt: skip
    with pytest.raises(UsageError, match=r"comment .* write it by hand: schedule: \{strategy: hy"):
        written(text)


def test_a_missing_schedule_is_put_before_the_targets():
    text = edited("schedule:\n  strategy: two_kernel\n", "")
    new = written(text)
    assert new == text.replace(
        "targets:", "schedule:\n  strategy: hybrid\n  threads: 256\ntargets:"
    )


@pytest.mark.parametrize("tail", ["", "\n", "\n\n# the end\n", "  # eps\n"])
def test_a_missing_schedule_is_put_last_where_there_are_no_targets(tail):
    text = edited("schedule:\n  strategy: two_kernel\ntargets: [sm_90a]\n", "").rstrip("\n") + tail
    new = written(text)
    assert "schedule:\n  strategy: hybrid\n  threads: 256" in new
    rest = new.replace("schedule:\n  strategy: hybrid\n  threads: 256\n", "")
    assert rest.split() == text.split()
    assert load_text(new).schedule.threads == 256


def test_a_schedule_at_the_end_of_a_file_without_a_last_line_end():
    text = edited("schedule:\n  strategy: two_kernel\ntargets: [sm_90a]\n",
                  "targets: [sm_90a]\nschedule:\n  strategy: two_kernel")  # fmt: skip
    assert written(text).endswith("schedule:\n  strategy: hybrid\n  threads: 256\n")


def load_text(text: str):
    from kgen.spec import parse_spec
    from kgen.yaml_source import parse_yaml

    return parse_spec(parse_yaml(text.encode(), "demo.yaml"))


def test_line_endings_and_byte_order_mark_stay():
    raw = b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()
    new = edit(raw, TILED, "demo.yaml")
    assert new.startswith(b"\xef\xbb\xbfversion")
    assert new.count(b"\n") == new.count(b"\r\n") == raw.count(b"\n") + 3
    assert b"  threads: 128\r\n" in new


def test_a_whole_file_in_flow_style():
    values = json.dumps(load_text(TEXT).model_dump(mode="json", include={"version", "name"}))
    problem = '"problem": {"batch": 2, "in_channels": 3, "out_channels": 12, "height": 19, '
    problem += '"width": 24, "kernel_size": 3}, "chain": [{"group_norm": {"num_groups": 4}}]}'
    new = written(values[:-1] + ", " + problem)
    assert load_text(new).schedule.model_dump(exclude_none=True) == HYBRID


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
@pytest.mark.parametrize("schedule", [HYBRID, TILED], ids=["hybrid", "two_kernel"])
def test_shipped_specs_keep_every_other_line(path, schedule, tmp_path):
    raw = path.read_bytes()
    try:
        new = edit(raw, schedule, path.name)
    except UsageError:
        pytest.skip("the schedule does not fit this spec")
    target = tmp_path / path.name
    target.write_bytes(new)
    spec = load_spec(target)
    assert spec.schedule.model_dump(exclude_none=True) == schedule
    assert spec.problem == load_spec(path).problem
    before, after = raw.decode().splitlines(), new.decode().splitlines()
    start = next(i for i, line in enumerate(before) if line.startswith(("schedule", "targets")))
    assert after[:start] == before[:start]
    assert after[-1] == before[-1]
    for line in before:
        if "#" in line:
            assert line[line.index("#") :] in new.decode()


def test_a_file_that_changed_is_not_written(tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text(TEXT)
    path.write_text(TEXT + "# mine\n")
    with pytest.raises(UsageError, match=r"demo\.yaml: changed while it was tuned") as caught:
        write_schedule(path, HYBRID, TEXT.encode())
    assert "\n" not in str(caught.value)
    assert path.read_text() == TEXT + "# mine\n"
    assert os.listdir(tmp_path) == ["demo.yaml"]


def test_writing_is_whole_and_keeps_mode_and_link(tmp_path):
    path, link = tmp_path / "demo.yaml", tmp_path / "link.yaml"
    path.write_text(TEXT)
    path.chmod(0o640)
    link.symlink_to(path)
    write_schedule(link, HYBRID, TEXT.encode())
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert load_spec(path).schedule.threads == 256
    assert sorted(os.listdir(tmp_path)) == ["demo.yaml", "link.yaml"]


def test_a_file_that_went_is_an_error_of_one_line(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        write_schedule(tmp_path / "gone.yaml", HYBRID, TEXT.encode())
    assert os.listdir(tmp_path) == []


# ---- The command ------------------------------------------------------------------------------


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text(edited("  strategy: two_kernel", "  strategy: two_kernel  # for now"))
    return path


@pytest.fixture
def faked(monkeypatch):
    """`kgen tune` with a GPU, an executor and times that are faked."""
    real = kgen.tune.tune

    def tune(spec, **options):
        return real(spec, **options, found=[GPU], executors=lambda _: Inline(), evaluator=fake)

    monkeypatch.setattr(kgen.tune, "tune", tune)


def invoke(*arguments):
    return CliRunner().invoke(tune_command, [str(one) for one in arguments])


def test_tuning_and_writing(spec_file, faked, tmp_path):
    store = tmp_path / "s.jsonl"
    done = invoke(spec_file, "--strategies", "hybrid", "--store", store, "--write")
    assert done.exception is None, done.output
    assert "winner: hybrid, threads 256" in done.output
    assert "schedule written" in done.output
    assert spec_file.read_text() == edited(
        "  strategy: two_kernel", "  strategy: hybrid  # for now\n  threads: 256"
    )
    assert len(lines(store)) == 11
    assert min(line["outcome"]["ms"] for line in lines(store)) == time_of(HYBRID)
    again = invoke(spec_file, "--strategies", "hybrid", "--store", store, "--write")
    assert "unchanged, the default schedule won" in again.output


def test_json_alone_is_printed(spec_file, faked, tmp_path):
    done = invoke(spec_file, "--strategies", "hybrid", "--store", tmp_path / "s", "--json")
    values = json.loads(done.stdout)
    assert values["winner"]["schedule"] == HYBRID
    assert values["where"]["gpu"] == "Fake GPU"
    assert spec_file.read_text().count("hybrid") == 0  # no --write


def test_a_file_that_changes_while_it_is_tuned(spec_file, monkeypatch, tmp_path):
    def tune(spec, **options):
        spec_file.write_text(spec_file.read_text() + "# edited meanwhile\n")
        return real(spec, **options, found=[GPU], executors=lambda _: Inline(), evaluator=fake)

    real = kgen.tune.tune
    monkeypatch.setattr(kgen.tune, "tune", tune)
    done = invoke(spec_file, "--strategies", "hybrid", "--store", tmp_path / "s", "--write")
    assert isinstance(done.exception, UsageError)
    assert "changed while it was tuned" in str(done.exception)
    assert spec_file.read_text().endswith("# edited meanwhile\n")
    assert "winner: hybrid" in done.output  # the result is not lost with it


def test_simulation_says_what_it_is(spec_file):
    done = invoke(spec_file, "--simulate", "--strategies", "hybrid,two_kernel")
    assert done.exception is None
    assert "ranked by the cost model alone" in done.output
    assert "nothing was compiled" in done.output
    assert "winner" not in done.output
    values = json.loads(invoke(spec_file, "--simulate", "--strategies", "hybrid", "--json").stdout)
    assert values["simulated"] is True
    assert values["winner"] is None
    space = enumerate_space(load_spec(spec_file), ["hybrid"])
    assert [row["predicted_ms"] for row in values["rows"]] == sorted(
        one.predicted_ms for one in space.candidates
    )


@pytest.mark.parametrize(
    "option", [["--write"], ["--devices", "0"], ["--store", "x"]], ids=lambda one: one[0]
)
def test_what_simulation_cannot_do_is_refused(spec_file, option):
    done = invoke(spec_file, "--simulate", *option)
    assert isinstance(done.exception, UsageError)
    assert option[0] in str(done.exception)


@pytest.mark.parametrize("option", ["--strategies", "--maths"])
def test_an_option_without_a_name_is_refused(spec_file, option):
    done = invoke(spec_file, "--simulate", option, " , ")
    assert str(done.exception) == f"{option}: expected a name, or several with commas between them"


def test_without_a_gpu_simulation_is_named(spec_file):
    from kgen.verify import why_no_device

    if not why_no_device():
        pytest.skip("there is a GPU")
    done = invoke(spec_file)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(why_no_device())
    assert "--simulate" in str(done.exception)


def test_nothing_right_is_a_failed_check(spec_file, monkeypatch, tmp_path):
    from kgen.tune.task import Outcome

    real = kgen.tune.tune
    monkeypatch.setattr(
        kgen.tune,
        "tune",
        lambda spec, **options: real(
            spec, **options, found=[GPU], executors=lambda _: Inline(),
            evaluator=lambda task: Outcome("compile", "no"),
        ),
    )  # fmt: skip
    done = invoke(spec_file, "--strategies", "hybrid", "--store", tmp_path / "s", "--write")
    assert isinstance(done.exception, KgenError)
    assert done.exception.exit_code == 1
    assert load_spec(spec_file).schedule.strategy == "two_kernel"


def test_ctrl_c_prints_what_is_known_and_writes_nothing(spec_file, monkeypatch, tmp_path):
    import signal

    seen = []

    def evaluator(task):
        if task.step == "measure":
            seen.append(task)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGINT)
        return fake(task)

    real = kgen.tune.tune
    monkeypatch.setattr(
        kgen.tune,
        "tune",
        lambda spec, **options: real(
            spec, **options, found=[GPU], executors=lambda _: Inline(), evaluator=evaluator
        ),
    )
    store = tmp_path / "s"
    done = CliRunner().invoke(
        tune_command,
        [str(spec_file), "--strategies", "hybrid", "--store", str(store), "--write"],
        standalone_mode=False,
    )
    assert isinstance(done.exception, click.Abort)
    assert "interrupted after" in done.output
    assert "winner" in done.output
    assert len(lines(store)) == 3
    assert load_spec(spec_file).schedule.strategy == "two_kernel"


def test_a_bad_spec_is_refused_as_everywhere(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(edited("num_groups: 4", "num_groups: 5"))
    assert isinstance(invoke(path, "--simulate").exception, SpecError)
    assert "no such file" in str(invoke(tmp_path / "none.yaml").exception)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("5m", 300), ("1h", 3600), ("90", 90), ("1.5m", 90), (" 2 s ", 2), ("0.5", 0.5)],
)
def test_lengths_of_time(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "0", "0s", "-5", "5d", "1e3", "1h30m", "inf", "1_0", "٣"]
)
def test_bad_lengths_of_time_name_the_rule(text, spec_file):
    if text == "٣":  # a digit elsewhere, and to `float` too
        assert parse_seconds(text) == 3
        return
    done = invoke(spec_file, f"--budget={text}")
    assert isinstance(done.exception, UsageError)
    assert "60s, 5m, 1h" in str(done.exception)
    assert "\n" not in str(done.exception)


def test_lists_of_devices():
    assert parse_devices(None) is None
    assert parse_devices("0") == [0]
    assert parse_devices("0, 2") == [0, 2]
    for bad in ("", "a", "0,", "-1", "0;1", "²"):
        with pytest.raises(UsageError, match="--devices"):
            parse_devices(bad)


def test_no_bar_off_a_terminal(capsys):
    with progress_bar("demo") as show:
        show(None)
    assert capsys.readouterr().err == ""


def test_the_bar_shows_best_and_time_left(monkeypatch):
    import io
    import sys

    from kgen.tune.run import Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress_bar("demo") as show:
        show(Progress(3, 11, 0.25, 42.0))
    text = shown.getvalue()
    for part in ("tuning demo", "3/11", "best 0.25 ms", "42 s left"):
        assert part in text
