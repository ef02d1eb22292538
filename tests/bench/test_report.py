import argparse
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from bench import __main__ as bench_main
from bench import report
from bench.harness import results
from bench.harness import sweep_log as sweep_log
from bench.report.group import groups
from bench.report.read import read_files
from bench.report.result import Span, parse_result
from bench.report.tables import markdown
from bench.report.timeline_figure import _rows, inversions, network_tasks, timeline_figure
from commsched.core.errors import ConfigError

STEP_SECONDS = {"ddp": 0.2, "fifo": 0.16, "commsched": 0.13}


def network(priority, ready, start, stop, name="conv [0]"):
    return {"track": "network", "name": name, "priority": priority, "ready": ready, "start": start, "stop": stop}


TIMELINE = [
    {"track": "backward", "name": "conv", "priority": None, "start": 0.0, "stop": 0.04},
    network(1, 0.02, 0.021, 0.05),
    network(2, 0.03, 0.05, 0.08),  # while 0 waits
    network(0, 0.04, 0.08, 0.10),
    {"track": "wait", "name": "conv", "priority": None, "start": 0.04, "stop": 0.10},
    {"track": "forward", "name": "conv", "priority": None, "start": 0.10, "stop": 0.12},
]


def row(system="commsched", rho=1.0, **changes):
    median = STEP_SECONDS[system] * max(1, rho)
    bound = 0.12 * max(1, rho)
    return {
        "system": system,
        "model": "uniform",
        "workers": 2,
        "servers": 0,
        "bandwidth_bps": 5e8,
        "link": "500mbit tbf",
        "emulated": True,
        "transport": "ps",
        "config": "partition 1.0 MB, credit 4.0 MB",
        "rho": rho,
        "step_seconds": {"median": median, "low": 0.98 * median, "high": 1.02 * median, "count": 3},
        "step_samples": [0.98 * median, median, 1.02 * median],
        "bound_seconds": bound,
        "slowed_bound_seconds": 1.1 * bound,
        "bound_overhead_seconds": None,
        "fifo_bound_seconds": 1.3 * bound,
        "efficiency": bound / median,
        "speedup_vs_ddp": STEP_SECONDS["ddp"] / STEP_SECONDS[system],
        "speedup_vs_ddp_tuned": None,
        "possible_speedup_vs_ddp": STEP_SECONDS["ddp"] * max(1, rho) / bound,
        "exposed_seconds": 0.01,
        "cpu_seconds_per_step": 0.02,
        "max_difference": 2e-7,
        "stands_for": {"gradient_bytes": 5.5e8, "compute_seconds": 0.3, "bandwidth_bps": 1e10},
        "simulated_seconds": 1.03 * median,
        "timeline": TIMELINE,
        **changes,
    }


def unknown(record):
    """``record`` with None wherever that may stand."""
    needed = ("system", "model", "workers", "servers", "emulated", "step_seconds")
    return {key: value if key in needed else None for key, value in record.items()}


SIMULATED = {"simulated": True, "emulated": False, "link": "simulated", "max_difference": None, "stands_for": None}


def sample():
    measured = [row(system, rho) for rho in (0.5, 1.0, 2.0) for system in STEP_SECONDS]
    return [*measured, unknown(row("fifo", model="bare", emulated=False)), row("commsched", 1.0, model="vgg16", **SIMULATED)]


def write(path, rows):
    results.write(path, rows)
    return path


def make(tmp_path, rows):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    page, table = tmp_path / "report.html", tmp_path / "table.md"
    given = [str(write(tmp_path / "in.json", rows)), "--out", str(page), "--markdown", str(table)]
    assert report.run(parser.parse_args(given)) == 0
    return page.read_text(), table.read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("report"), sample())


# --- the page ---


def test_the_page_has_every_figure_with_its_axes(made):
    page = made[0]
    labels = (
        "efficiency T*/T (1 is the bound)",
        "speed-up against DDP (times)",
        "possible: T(DDP) / T*",
        "rho = communication / computation",
        "ms per step",
        "ms since the step began",
        "measured ms per step",
        "simulated ms per step",
    )
    assert [label for label in labels if label not in page] == []
    figures = re.findall(r'<figure>\n<div class="scroll" role="img" aria-label="([^"]*)"', page)
    emulated = "uniform, 2 workers, no separate servers, 500mbit tbf (EMULATED)"
    assert figures == [
        f"rho figure: {emulated}",
        f"distribution figure: {emulated}",
        f"timeline figure: {emulated}",
        *(f"{kind} figure: vgg16, 2 workers, no separate servers (simulated)" for kind in ("rho", "distribution", "timeline")),
        "measured against simulated step times",
    ]


def test_every_row_stands_in_the_table_of_the_page(made):
    body = re.search(r'<table class="rows">(.*?)</table>', made[0], re.DOTALL)[1]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in body.split("<tr>")[2:]]
    assert len(rows) == len(sample())
    assert [cells[0] for cells in rows].count("uniform (EMULATED)") == 9
    assert [cells[0] for cells in rows].count("vgg16 (simulated)") == 1
    bare = next(cells for cells in rows if cells[0] == "bare")
    assert bare[5:10] == ["fifo", "-", "-", "160.0 [156.8, 163.2]", "-"]
    headings = re.findall(r"<th[^>]*>(.*?)</th>", body)
    slowed = headings.index("T* slowed ms")
    assert headings[slowed - 1 : slowed + 1] == ["T* ms", "T* slowed ms"]
    measured = next(cells for cells in rows if cells[0] == "uniform (EMULATED)")
    assert measured[slowed - 1 : slowed + 1] == ["120.0", "132.0"]
    assert bare[slowed] == "-"


def test_emulated_and_simulated_are_said_everywhere(made):
    page = made[0]
    assert "<title>commsched benchmark: uniform, bare, vgg16 (in part EMULATED, simulated)</title>" in page
    assert "<strong>EMULATED</strong> rows train" in page
    assert "<strong>simulated</strong> rows were computed" in page
    drawings = re.findall(r'aria-label="[^"]*uniform[^"]*" tabindex="0">\s*<svg.*?</svg>', page, re.DOTALL)
    assert len(drawings) == 3
    assert all("(EMULATED)" in drawing.partition("<svg")[2] for drawing in drawings)


def summary(page):
    """What a reader sees first: each verdict, each row of the five columns, and each bar's label and widths."""
    head = page.partition("<body>")[2].partition("<h2>")[0]
    tables = re.findall(r'<table class="rows five">(.*?)</table>', head, re.DOTALL)
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", line) for table in tables for line in table.split("<tr>")[1:]]
    bars = re.findall(r'class="bar" role="img" aria-label="([^"]*)"', head)
    widths = [float(width) for width in re.findall(r"(?:width|left): ([\d.]+)%", head)]
    return re.findall(r'<p class="verdict">(.*?)</p>', head), rows, bars, widths


def test_a_sentence_five_columns_and_a_bar_of_each_system_come_first(tmp_path):
    page, _ = make(tmp_path, [row(exposed_seconds=0.03), row("ddp", exposed_seconds=0.08), row("ddp", rho=3.0)])
    said, rows, bars, widths = summary(page)
    assert said == ["commsched is 1.54 times as fast as DDP; 1.67 times is possible."]
    assert rows == [
        ["system", "ms/step", "speed-up vs DDP", "possible", "max difference"],
        ["ddp", "200.0", "1.00", "1.67", "2.0e-07"],
        ["commsched", "130.0", "1.54", "1.67", "2.0e-07"],
    ]
    assert bars == [
        "ddp: 120.0 + 80.0 ms of computation and exposed communication",
        "commsched: 100.0 + 30.0 ms of computation and exposed communication",
    ]
    assert widths == [60.0, 40.0, 60.0, 50.0, 15.0, 60.0]  # each bar's computation, exposed part and bound


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speedup_vs_ddp": 1.004}, ["commsched is as fast as DDP (1.00 times); 1.67 times is possible."]),
        ({"speedup_vs_ddp": 0.9, "possible_speedup_vs_ddp": 1.01}, ["0.90 times as fast as DDP; nothing was to be gained."]),
        ({"possible_speedup_vs_ddp": None}, ["commsched is 1.54 times as fast as DDP."]),
        (
            {"speedup_vs_ddp_tuned": 1.28},
            ["1.54 times as fast as DDP, and 1.28 times as fast as DDP with tuned buckets; 1.67 times"],
        ),
        ({"max_difference": 0.5}, ["WRONG here: its time means nothing."]),
        ({"speedup_vs_ddp": None}, []),
    ],
)
def test_the_sentence_says_no_more_than_is_known(tmp_path, changes, said):
    found = summary(make(tmp_path, [row(**changes)])[0])[0]
    assert len(found) == len(said)
    assert all(words in sentence for words, sentence in zip(said, found))


def test_the_sentence_is_about_the_middle_one_of_several_rows(tmp_path):
    medians = {ratio: {"median": 0.2 / ratio, "low": None, "high": None} for ratio in (1.1, 1.5, 1.3)}
    rows = [row(speedup_vs_ddp=ratio, step_seconds=seconds) for ratio, seconds in medians.items()]
    assert "1.30 times as fast as DDP" in summary(make(tmp_path, rows)[0])[0][0]


def test_rows_of_the_same_sizes_are_a_pair_whatever_their_measured_rho(tmp_path):
    """Two sizes of a sweep differ in time and in nothing else; rho is measured anew."""

    def rows(name, *rhos):
        sizes = zip(("partition 1 MB", "partition 4 MB"), (0.8, 1.0), rhos)
        found = [
            row(config=config, rho=rho, step_seconds={"median": median, "low": median, "high": median})
            for config, median, rho in sizes
        ]
        return write(tmp_path / name, found)

    out = tmp_path / "out.html"
    files = [str(rows("before.json", 1.01, 1.03)), str(rows("after.json", 1.031, 1.009))]
    assert bench_main.main(["report", *files, "--compare", "--out", str(out)]) == 0
    table = re.search(r'<table class="rows pairs">(.*?)</table>', out.read_text(), re.DOTALL)[1]
    found = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    assert [cells[1].rpartition(", ")[2] for cells in found] == ["partition 1 MB", "partition 4 MB"]
    assert [cells[2:4] for cells in found] == [["800.0", "800.0"], ["1000.0", "1000.0"]]


def test_without_exposed_times_there_is_no_bar(tmp_path):
    assert summary(make(tmp_path, [row(exposed_seconds=None)])[0])[2:] == ([], [])


def test_the_page_fits_a_phone_and_the_dark(tmp_path):
    page = make(tmp_path, [row(), row("ddp")])[0]
    assert "@media (prefers-color-scheme: dark)" in page
    assert "color-scheme: light dark" in page
    body = page.partition("<body>")[2]
    wide = re.findall(r"<(?:table|svg)\b", body)
    assert len(wide) == len(re.findall(r'<div class="scroll"[^>]*>\s*<(?:table|svg|\?xml)', body)) > 0


def test_two_runs_are_compared_row_by_row(tmp_path, capsys):
    before = write(tmp_path / "before.json", [row(), row("ddp"), row("fifo")])
    faster = {"median": 0.1, "low": 0.098, "high": 0.102, "count": 3}
    near = {"median": 0.201, "low": 0.197, "high": 0.205, "count": 3}
    after = write(tmp_path / "after.json", [row("ddp", step_seconds=near), row(step_seconds=faster)])
    out = tmp_path / "out.html"
    assert bench_main.main(["report", str(before), str(after), "--compare", "--out", str(out)]) == 0
    table = re.search(r'<table class="rows pairs">(.*?)</table>', out.read_text(), re.DOTALL)[1]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    where = "uniform, 2 workers, 500mbit tbf, rho 1, ps"
    assert rows == [
        ["commsched", where, "130.0", "100.0", "-23.1 %", "faster"],
        ["ddp", where, "200.0", "201.0", "+0.5 %", "no clear difference"],
    ]
    assert bench_main.main(["report", str(before), "--compare", "--out", str(out)]) == 1
    assert "--compare needs two FILEs, not 1" in capsys.readouterr().err


def test_rows_of_another_rho_or_size_are_no_pair(tmp_path):
    before = write(tmp_path / "before.json", [row(rho=0.5), row(rho=1.0), row("ddp", gradient_bytes=48e6)])
    after = write(tmp_path / "after.json", [row(rho=1.02), row(rho=2.0), row("ddp", gradient_bytes=24e6)])
    out = tmp_path / "out.html"
    assert bench_main.main(["report", str(before), str(after), "--compare", "--out", str(out)]) == 0
    table = re.search(r'<table class="rows pairs">(.*?)</table>', out.read_text(), re.DOTALL)[1]
    [cells] = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    assert cells[0] == "commsched"
    assert "rho 1, ps" in cells[1]


def test_a_comparison_begins_with_the_second_run(tmp_path):
    before = write(tmp_path / "before.json", [row(speedup_vs_ddp=1.9), row("ddp")])
    after = write(
        tmp_path / "after.json", [row(speedup_vs_ddp=1.2, step_seconds={"median": 0.2, "low": 0.19, "high": 0.21}), row("ddp")]
    )
    out = tmp_path / "out.html"
    assert bench_main.main(["report", str(before), str(after), "--compare", "--out", str(out)]) == 0
    assert "commsched is 1.20 times as fast as DDP" in out.read_text()
    assert "1.90 times as fast" not in out.read_text()


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_read(tmp_path, capsys):
    before = write(tmp_path / "before.json", [row()])
    for missing in ([str(tmp_path)], [str(tmp_path / "missing" / "out.html")]):
        with pytest.raises(SystemExit):
            bench_main.main(["report", str(before), "--out", *missing])
    said = capsys.readouterr().err
    assert f"'{tmp_path}' is a directory" in said
    assert f"there is no directory '{tmp_path / 'missing'}'" in said


def test_rows_over_another_transport_are_no_pair(tmp_path):
    before = write(tmp_path / "before.json", [row(), row(transport="gloo")])
    after = write(
        tmp_path / "after.json", [row(transport="gloo", step_seconds={"median": 0.1, "low": 0.098, "high": 0.102, "count": 3})]
    )
    out = tmp_path / "out.html"
    assert bench_main.main(["report", str(before), str(after), "--compare", "--out", str(out)]) == 0
    table = re.search(r'<table class="rows pairs">(.*?)</table>', out.read_text(), re.DOTALL)[1]
    [cells] = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    assert cells[:2] == ["commsched", "uniform, 2 workers, 500mbit tbf, rho 1, gloo"]


def test_a_page_of_measured_rows_says_nothing_of_emulation(tmp_path):
    page, table = make(tmp_path, [row(emulated=False)])
    assert "EMULATED" not in page + table
    assert "<title>commsched benchmark: uniform</title>" in page


def test_the_page_asks_for_nothing_outside(made):
    page = re.sub(r' xmlns(:\w+)?="[^"]*"', "", made[0])
    assert "http:" not in page
    assert "https:" not in page
    assert "<script" not in page
    assert [link for link in re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page) if not link.startswith("#")] == []
    assert [link for link in re.findall(r"url\(([^)]*)\)", page) if not link.startswith("#")] == []


def test_what_a_drawing_refers_to_is_its_own(made):
    for svg in re.findall(r"<svg.*?</svg>", made[0], re.DOTALL):
        names = set(re.findall(r'\bid="([^"]*)"', svg))
        used = set(re.findall(r'href="#([^"]*)"', svg)) | set(re.findall(r"url\(#([^)]*)\)", svg))
        assert used <= names
    names = re.findall(r'\bid="([^"]*)"', made[0])
    assert len(names) == len(set(names))


def test_a_report_is_the_same_each_time(made, tmp_path):
    again = make(tmp_path, sample())[0]
    before = made[0].partition("<h2>Environment</h2>")[0]
    assert again.partition("<h2>Environment</h2>")[0] == before


HOSTILE = "<script>alert('$x$')</script> | [a](b) & \"_q_\""


def test_a_hostile_name_is_only_text(tmp_path):
    hostile = [row(system, model=HOSTILE, config=HOSTILE, link=HOSTILE) for system in STEP_SECONDS]
    page, table = make(tmp_path, [*hostile, row(system="ddp") | {"system": HOSTILE}])
    assert "<script" not in page
    assert "&lt;script&gt;alert(" in page
    line = next(line for line in table.splitlines() if "commsched" in line)
    assert len(re.findall(r"(?<!\\)\|", line)) == 15
    assert "\\<script\\>" in line
    assert "[a]\\(b)" in line


def test_wrong_weights_are_an_alarm(tmp_path):
    page, table = make(tmp_path, [row(max_difference=0.5)])
    assert "1 rows are WRONG" in page
    assert "5.0e-01 WRONG" in page
    assert "5.0e-01 WRONG" in table


def test_weights_that_are_not_finite_are_an_alarm(tmp_path):
    page, table = make(tmp_path, [row(max_difference=None, correct=False)])
    assert "1 rows are WRONG" in page
    assert "- WRONG |" in table


def test_faster_than_the_bound_is_an_alarm(tmp_path):
    page, table = make(tmp_path, [row(bound_seconds=0.2), row("ddp")])
    assert "1 rows are DISTURBED: they were faster than T*" in page
    assert "0.923 DISTURBED |" in table


def test_few_steps_have_a_range_and_one_has_neither(tmp_path):
    many = row("fifo", step_samples=[0.16] * 6)
    table = make(tmp_path, [row("ddp"), many, row(step_samples=[0.13])])[1]
    assert "| ddp | ps | 200.0 [196.0, 204.0] range |" in table
    assert "| fifo | ps | 160.0 [156.8, 163.2] |" in table
    assert "| commsched | ps | 130.0 |" in table


def test_the_cores_of_the_cluster_that_a_row_stands_for(tmp_path):
    real = {"gradient_bytes": 5.5e8, "compute_seconds": 0.3, "bandwidth_bps": 1e10, "host_cores": 2.34}
    page = make(tmp_path, [row(stands_for=real)])[0]
    assert "550 MB, 300.0 ms, 10 Gbit/s, 2.3 cores" in page
    assert "The CPU cost of messages and bytes is that of the\nmachine below, not scaled" in page


def test_rows_without_ddp_say_so(tmp_path):
    page = make(tmp_path, [row(speedup_vs_ddp=None, possible_speedup_vs_ddp=None)])[0]
    assert "DDP was not measured" in page


def test_how_far_the_simulator_is_off(made):
    assert "The simulator is off by 3.0% of the measured time (median)." in made[0]


def test_the_environment_is_told(made):
    environment = made[0].partition("<h2>Environment</h2>")[2]
    assert '<th scope="row">processor</th>' in environment
    assert "GiB" in environment
    assert "load average before" in environment


# --- the table ---


def test_the_markdown_table(made):
    lines = made[1].splitlines()
    start = lines.index("**uniform, 2 workers, no separate servers, 500mbit tbf (EMULATED)**")
    assert lines[start + 2] == (
        "| model | workers | servers | link | rho | system | transport | ms/step [low, high] | T* ms | efficiency "
        "| speed-up vs DDP | possible | CPU s/step | max difference |"
    )
    assert lines[start + 9] == (
        "| uniform (EMULATED) | 2 | 0 | 500mbit tbf | 1.00 | commsched | ps | 130.0 [127.4, 132.6] range | 120.0 | 0.923 "
        "| 1.54 | 1.67 | 0.020 | 2.0e-07 |"
    )


def test_the_table_of_what_is_unknown_has_dashes(made):
    assert "| bare | 2 | 0 | - | - | fifo | - | 160.0 [156.8, 163.2] | - | - | - | - | - | - |" in made[1]


def test_systems_have_one_order_and_rhos_that_hardly_differ_are_one():
    rows = [row("commsched", 1.04), row("ddp", 1.0), row("fifo", 1.02), row("ddp", 2.0)]
    (group,) = groups(map(parse_result, rows))
    assert [[result.system for result in at] for at in group.at_rho] == [["fifo", "ddp", "commsched"], ["ddp"]]
    assert group.hardest() == group.at_rho[0]


def test_real_rows_of_several_rates_are_one_group_and_emulated_ones_are_not():
    rates = [{"link": "500mbit tbf", "rho": 1.0}, {"link": "1gbit tbf", "rho": 0.5}]
    assert len(groups(parse_result(row(emulated=False, **rate)) for rate in rates)) == 1
    assert len(groups(parse_result(row(**rate)) for rate in rates)) == 2


def test_clipped_rows_are_a_group_that_says_so():
    plain, clipped = groups(parse_result(row(clip=clip, unclipped_bound_seconds=0.1)) for clip in ("norm", None))
    assert plain.mark == "EMULATED"
    assert clipped.mark == "EMULATED, clipping by norm"


def test_gradients_of_several_sizes_are_several_groups():
    found = groups(parse_result(row(gradient_bytes=size)) for size in (72e6, 8e6, 72e6))
    assert [group.title.split(", ")[1] for group in found] == ["8 MB of gradients", "72 MB of gradients"]
    assert [len(group.results) for group in found] == [1, 2]


def test_markdown_needs_no_file():
    assert markdown([parse_result(row())]).count("\n") == 5


# --- inversions ---


def tasks(*entries):
    return network_tasks(Span("network", "", start, start + 0.01, priority, ready) for priority, ready, start in entries)


def starts(*entries):
    return [task.start for task in inversions(tasks(*entries))]


def test_a_task_before_a_more_urgent_one_that_waits_is_an_inversion():
    assert starts((1, 0.0, 0.01), (2, 0.0, 0.05), (0, 0.02, 0.08)) == [0.05]
    assert starts((2, 0.0, 0.05), (0, 0.02, 0.08), (1, 0.0, 0.01)) == [0.05]  # in whatever order they are listed


def test_in_order_of_priority_there_is_none():
    assert starts((3, 0.0, 0.0), (0, 0.01, 0.01), (1, 0.0, 0.02)) == []


def test_what_becomes_ready_as_another_starts_could_not_have_been_waited_for():
    assert starts((1, 0.0, 0.05), (0, 0.0495, 0.08)) == []


def test_tasks_that_start_in_one_moment_do_not_wait_for_each_other():
    assert starts((1, 0.0, 0.05), (0, 0.0, 0.05)) == []


def test_without_a_ready_time_or_a_priority_nothing_is_judged():
    assert starts((1, None, 0.05), (0, 0.0, 0.08)) == []
    assert starts((1, 0.0, 0.05), (0, None, 0.08)) == []
    assert starts((None, 0.0, 0.05), (0, 0.0, 0.08)) == []


@pytest.mark.parametrize(
    ("timeline", "said"),
    [
        (TIMELINE, "1 of 3 tasks are priority inversions"),
        ([entry | {"ready": None} for entry in TIMELINE], "priority inversions were not recorded"),
        ([entry | {"priority": None} for entry in TIMELINE], "sends without priorities"),
        (TIMELINE[:1], "its network was not recorded"),
    ],
)
def test_a_timeline_says_what_it_knows_of_inversions(timeline, said):
    (group,) = groups([parse_result(row(timeline=timeline))])
    (panel,) = timeline_figure(group).axes
    assert panel.get_title(loc="left") == f"commsched (partition 1.0 MB, credit 4.0 MB): {said}"


def test_the_most_urgent_task_has_the_first_row():
    assert _rows(tasks((2, 0.0, 0.0), (None, 0.0, 0.01), (0, 0.0, 0.02), (1, 0.0, 0.03))) == [2, 3, 0, 1]


def test_without_priorities_the_last_to_start_has_the_first_row():
    assert _rows(tasks((None, 0.0, 0.0), (None, 0.0, 0.01), (None, 0.0, 0.02))) == [2, 1, 0]


# --- files ---


def test_a_sweeps_lines_are_read_with_what_failed(tmp_path):
    path = tmp_path / "sweep.jsonl"
    with sweep_log.SweepLog(path) as log:
        log.add(sweep_log.Cell({"rho": 1}, [row()], {"cores": 2}, 1.0))
        log.add(sweep_log.Cell({"rho": 2}, [], {"cores": 2}, 1.0, "JobFailed: rank 1 ended"))
    read = read_files([path])
    assert [result.system for result in read.results] == ["commsched"]
    assert [(failure.options, failure.error) for failure in read.failures] == [("rho=2", "JobFailed: rank 1 ended")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": None}, "row 1: system is None, not a text"),
        ({"workers": "2"}, "row 1: workers is '2', not a whole number of at least 0"),
        ({"efficiency": "high"}, "row 1: efficiency is 'high', not a finite number"),
        ({"emulated": 1}, "row 1: emulated is 1, not true or false"),
        ({"clip": "value"}, "row 1: clip is 'value', not one of norm, scaler"),
        ({"step_seconds": {}}, "row 1: median is None, not a finite number"),
        ({"step_seconds": 3}, "row 1: step_seconds is 3, not an object"),
        ({"timeline": [3]}, "row 1: timeline has 3, which is not an object"),
        ({"timeline": [TIMELINE[0] | {"track": "disk"}]}, "timeline has a track 'disk'; there are forward, backward, "),
        ({"timeline": [TIMELINE[0] | {"stop": -1}]}, "timeline has 'conv' on backward, which stops before it starts"),
        ({"timeline": [TIMELINE[1] | {"priority": 0.5}]}, "timeline has a priority 0.5, which is not a whole number"),
    ],
)
def test_a_row_of_something_else_is_refused_by_name(change, message, tmp_path):
    path = write(tmp_path / "in.json", [row() | change])
    with pytest.raises(ConfigError) as error:
        read_files([path])
    assert str(error.value).startswith(f"{path}, row 1: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON: "),
        ("[]", "not results of a benchmark: those have schema, environment and rows"),
        ('{"schema": 9, "environment": {}, "rows": []}', "has schema 9, but this program knows schema 1"),
        ('{"schema": 1, "environment": {}, "rows": {}}', "rows is not a list, or environment not an object"),
        ('{"schema": 1, "environment": {}, "rows": []}', "there are no rows to report"),
        ('{"schema": 1, "environment": {}, "rows": [1]}', "row 1: is of type int, not an object"),
        ("\xff", "not JSON: "),
    ],
)
def test_a_file_of_something_else_is_refused(content, message, tmp_path, capsys):
    path = tmp_path / "in.json"
    path.write_bytes(content.encode("latin-1"))
    assert bench_main.main(["report", str(path), "--out", str(tmp_path / "out.html")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


def test_nan_in_a_file_is_refused(tmp_path):
    path = tmp_path / "in.json"
    path.write_text(json.dumps({"schema": 1, "environment": {}, "rows": [row(efficiency=float("nan"))]}))
    with pytest.raises(ConfigError, match="efficiency is nan, not a finite number"):
        read_files([path])


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_without_a_package_the_line_that_installs_it_is_said(module, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert bench_main.main(["report", str(write(tmp_path / "in.json", sample()))]) == 1
    assert capsys.readouterr().err == f'python -m bench report: this needs {module}: pip install "commsched[report]"\n'


def test_the_timeline_is_a_picture_of_its_own(tmp_path, capsys):
    picture = tmp_path / "step.svg"
    path = str(write(tmp_path / "in.json", sample()))
    assert bench_main.main(["report", path, "--out", str(tmp_path / "out.html"), "--timeline", str(picture)]) == 0
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "ms since the step began" in picture.read_text()
    path = str(write(tmp_path / "in.json", [each | {"timeline": []} for each in sample()]))
    assert bench_main.main(["report", path, "--out", str(tmp_path / "out.html"), "--timeline", str(picture)]) == 1
    assert "no step was recorded: measure with python -m bench train" in capsys.readouterr().err
