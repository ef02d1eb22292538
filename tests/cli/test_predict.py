"""``commsched predict``: what it reads, and that its figures are those of the bound and the simulator."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from commsched.cli.main import main
from commsched.core.scheduler import SchedulerConfig
from commsched.simulator.lower_bound import lower_bound
from tests import warm
from tests.jobs.job import ROOT, run_job

LAYERS = [
    {"name": f"layer {number}", "shapes": [[250_000]], "forward_seconds": 0.010, "backward_seconds": 0.020}
    for number in range(10)
]
PROFILE = {"model": "ten layers", "layers": LAYERS, "source": "by hand"}
STATS = {
    "world_size": 2,
    "compute_seconds": 0.3,
    "layers": [
        {"name": each["name"], "bytes": 1_000_000, "forward_seconds": 0.010, "backward_seconds": 0.020} for each in LAYERS
    ],
}


def rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object, *options: str) -> list[dict[str, Any]]:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(record))
    arguments = ["predict", "--model", str(path), "--workers", "2", "--bandwidth", "200mbit", *options, "--json"]
    assert main(arguments) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_row_has_the_bound_and_two_systems_that_do_not_beat_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = rows(tmp_path, capsys, PROFILE)
    bound = 1e3 * lower_bound([0.010] * 10, [0.020] * 10, [0.040] * 10)
    assert row["bound"] == pytest.approx(bound)
    assert bound <= row["commsched"] < 1.1 * bound
    assert row["ddp"] > row["commsched"]
    assert row["speedup"] == pytest.approx(row["ddp"] / row["commsched"])
    assert row["rho"] == pytest.approx(0.4 / 0.3)


def test_the_rows_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    found = rows(tmp_path, capsys, PROFILE, "--bandwidth", "200mbit,1gbit", "--plot", str(plot))
    assert len(found) == 2
    assert plot.read_text().count("<svg") == 1
    (tmp_path / "m.json").write_text(json.dumps(PROFILE))
    arguments = ["predict", "--model", str(tmp_path / "m.json"), "--workers", "2", "--bandwidth", "1gbit"]
    assert main([*arguments, "--plot", str(tmp_path / "plot.xyz")]) == 2
    out, said = capsys.readouterr()
    assert f"--plot {tmp_path}/plot.xyz: give the name an ending that says the format: " in said
    assert main([*arguments, "--plot", str(tmp_path / "nowhere" / "plot.svg")]) == 2
    out += capsys.readouterr().out
    assert out == ""  # it is refused before anything is simulated


def test_without_matplotlib_the_plot_has_its_pip_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.json").write_text(json.dumps(PROFILE))
    monkeypatch.setattr("commsched.cli.predict.find_spec", lambda module: None)
    arguments = ["predict", "--model", str(tmp_path / "m.json"), "--workers", "2", "--bandwidth", "1gbit", "--plot", "p.svg"]
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith('--plot needs matplotlib: pip install "commsched[report]"\n')


def test_the_statistics_of_a_job_are_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(tmp_path, capsys, STATS) == rows(tmp_path, capsys, PROFILE)


def test_time_outside_of_layers_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data is loaded for 0.5 s, in which averages arrive, so that no layer waits for one."""
    [row] = rows(tmp_path, capsys, {**STATS, "compute_seconds": 0.8})
    assert row["bound"] == pytest.approx(800)


def test_clipping_16_bits_and_servers_change_the_bound_as_they_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [plain] = rows(tmp_path, capsys, PROFILE)
    [halved] = rows(tmp_path, capsys, PROFILE, "--wire16")
    assert halved["bound"] == pytest.approx(1e3 * lower_bound([0.010] * 10, [0.020] * 10, [0.020] * 10))
    assert halved["ddp"] < plain["ddp"]  # it has a hook for that
    [clipped] = rows(tmp_path, capsys, PROFILE, "--clip")
    assert clipped["bound"] >= plain["bound"] * (1 - 1e-9)
    assert clipped["commsched"] >= clipped["bound"] * (1 - 1e-9)
    [served] = rows(tmp_path, capsys, PROFILE, "--servers", "1")
    assert served["bound"] > plain["bound"]


def test_the_table_has_a_row_for_each_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(PROFILE))
    assert main(["predict", "--model", str(path), "--workers", "2,64", "--bandwidth", "1gbit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SIMULATED: ten layers, 10.0 MB of gradients in 10 layers, 300.0 ms of computation per step.")
    assert lines[2].split()[:4] == ["workers", "Gbit/s", "transport", "rho"]
    assert [line.split()[0] for line in lines[3:]] == ["2", "64"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_each_number_of_workers_has_the_transport_that_auto_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(tmp_path, capsys, PROFILE, "--workers", "7,8")
    assert [row["transport"] for row in found] == ["ps", "gloo"]
    [on_shards] = rows(tmp_path, capsys, PROFILE, "--workers", "8", "--transport", "ps")
    assert on_shards["transport"] == "ps"
    assert on_shards["commsched"] != found[1]["commsched"]
    [served] = rows(tmp_path, capsys, PROFILE, "--workers", "8", "--servers", "8")
    assert served["transport"] == "ps"


def test_over_gloo_a_loop_that_clips_waits_for_norms_up_to_16_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More ranks make no averages by halves, so that such a loop waits for all of them, as DDP does."""
    late, all_ = rows(tmp_path, capsys, PROFILE, "--workers", "16,17", "--clip")
    assert late["commsched"] < 0.98 * all_["commsched"]


def test_where_commsched_is_slower_than_ddp_a_line_says_what_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three small messages cost more than one, and a loop that clips waits for all of them."""
    layers = [{**layer, "shapes": [[15_000]], "forward_seconds": 1e-4, "backward_seconds": 2e-4} for layer in LAYERS[:3]]
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**PROFILE, "layers": layers}))
    assert main(["predict", "--model", str(path), "--workers", "64", "--bandwidth", "1gbit", "--clip"]) == 0
    *_, row, line = capsys.readouterr().out.splitlines()
    commsched, ddp = row.split()[5:7]
    said = re.fullmatch(
        "commsched is slower than DDP at 64 workers and 1 Gbit/s: (.*) ms against (.*) ms. With COMMSCHED_PARTITION=25MiB "
        "COMMSCHED_FUSION=25MiB it takes (.*) ms.",
        line,
    )
    assert said is not None, line
    assert said.groups() == (commsched, ddp, ddp)


def test_where_nothing_helps_a_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two halves of the only message cost twice what one costs."""
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**PROFILE, "layers": LAYERS[:1]}))
    dear = ("--overhead", "0.01", "--latency", "0", "--clip")
    assert main(["predict", "--model", str(path), "--workers", "8", "--bandwidth", "10gbit", *dear]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("commsched is slower than DDP at 8 workers and 10 Gbit/s: ")
    assert line.endswith(" ms. No other transport, servers or larger sizes help: DDP is the better choice there.")


def test_an_unknown_transport_and_servers_without_ps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", "m.json", *CLUSTER, "--transport", "glo"]) == 2
    assert "--transport='glo' is unknown; did you mean gloo? there are: auto, ps, gloo" in capsys.readouterr().err
    assert main(["predict", "--model", "m.json", *CLUSTER, "--transport", "gloo", "--servers", "2"]) == 2
    assert "--servers 2 cannot be used with transport=gloo: only ps has servers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({}, "not a profile: KeyError"),
        ({"world_size": 2, "layers": []}, "these statistics have no layers; take those of rank 0"),
        ([], "not a profile"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object, said: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(record))
    assert main(["predict", "--model", str(path), "--workers", "2", "--bandwidth", "1gbit"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--workers", "1", "'1' is not a number of at least 2"),
        ("--bandwidth", "10", "bandwidth='10' is not a rate"),
        ("--latency", "-1", "'-1' is not a time"),
    ],
)
def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str], option: str, value: str, said: str) -> None:
    options = {"--workers": "2", "--bandwidth": "1gbit", option: value}
    with pytest.raises(SystemExit):
        main(["predict", "--model", "m.json", *(f"{name}={each}" for name, each in options.items())])
    assert said in capsys.readouterr().err


CLUSTER = ("--workers", "2", "--bandwidth", "200mbit")


def test_a_script_is_a_model() -> None:
    """It runs as one process, ends before its last step, and prints on stderr."""
    pytest.importorskip("sklearn")
    script = str(ROOT / "examples" / "digits_torch.py")
    command = ["--model", script, *CLUSTER, "--json", "--", "--steps", "1000000"]
    code, out, err = run_job(*command, subcommand="predict", imports=(*warm.TORCH, "sklearn.datasets"))
    assert code == 0, err
    [row] = json.loads(out)
    assert row["bound"] <= min(row["commsched"], row["ddp"])
    assert row["partition_bytes"] == SchedulerConfig().partition_bytes  # a job chooses no other for so small a model
    assert err == f"commsched: {script} runs as one process until it has trained 31 steps\n"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("print('hello')", 0),
        ("import sys; sys.exit(3)", 3),
        ("import commsched; commsched.init()", 0),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_a_script_that_trains_nothing_is_refused(script: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    failed, out, err = run_job("--model", str(path), *CLUSTER, subcommand="predict")
    assert (failed, out) == (2, "")
    hint = "if it printed an error, that is above" if code else "is line 2 in it, and does it train for long enough?"
    assert f"{path} ended with exit code {code}, before 31 steps of a ScheduledOptimizer (PyTorch) were over; {hint}" in err


def test_a_script_whose_steps_say_nothing_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    write = "import json, os, time; open(os.environ['COMMSCHED_RECORD'], 'w').write(json.dumps({'error': 'no step'}))"
    path.write_text(f"{write}; time.sleep(1000)")
    failed, out, err = run_job("--model", str(path), *CLUSTER, subcommand="predict")
    assert (failed, out) == (2, "")
    assert f"ConfigError: the layers of {path} cannot be recorded: no step" in err


def test_a_script_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", "/nope/train.py", *CLUSTER]) == 2
    assert "--model /nope/train.py: there is no such file" in capsys.readouterr().err


def test_a_file_that_is_not_there_and_a_directory_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "m.json"
    assert main(["predict", "--model", str(missing), *CLUSTER]) == 2
    assert capsys.readouterr().err == f"commsched: ConfigError: --model {missing}: there is no such file\n"
    for directory in (tmp_path, tmp_path / "train.py"):
        directory.mkdir(exist_ok=True)
        assert main(["predict", "--model", str(directory), *CLUSTER]) == 2
        assert capsys.readouterr().err == f"commsched: ConfigError: --model {directory} is a directory\n"


def test_only_a_script_takes_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", "m.json", *CLUSTER, "--", "--steps", "3"]) == 2
    assert "--steps: only a training script (--model train.py) takes arguments" in capsys.readouterr().err
