"""The examples train as the same scripts do without commsched's lines.

Equal means: on each of two ranks every loss that is printed, of each step, is the same float32 to the last bit as under
DistributedDataParallel, which takes the place of commsched's lines; an average of two is the same whoever makes it. Where
nothing is drawn at random and no row of a batch depends on the others, the mean of the ranks' losses is also that of one
process with commsched's lines deleted, on the joint batch, up to rounding.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("sklearn")

from tests import warm
from tests.jobs.job import ROOT, run_job

EXAMPLES = ROOT / "examples"
NAMES = ("language_model", "digits_convolutional", "digits_transformer", "gan", "lora")
COMPILED = "language_model --compile eager"
CLIPS = ("language_model", "digits_transformer")  # by a norm, which torch adds up in 32 bits and commsched in 64
RANKS, STEPS = 2, 6
OURS = re.compile(r"^(?P<indent> *)(?P<code>\S.*)  # line [12]\n", re.MULTILINE)
WRAPS = re.compile(r"(\w+) = cs\.ScheduledOptimizer\(\1, (?P<model>\w+)\)")

#: What each script printed of its losses, by its name and the rank.
Losses = dict[tuple[str, int], list[str]]


def deleted(ours: re.Match[str]) -> str:
    return ""


def ddp_instead(ours: re.Match[str]) -> str:
    """The line that wraps an optimizer becomes one that wraps its model."""
    wraps = WRAPS.fullmatch(ours["code"])
    model = wraps["model"] if wraps else None
    return f"{ours['indent']}{model} = torch.nn.parallel.DistributedDataParallel({model})\n" if model else ""


def plain(directory: Path, names: tuple[str, ...], replace: Callable[[re.Match[str]], str]) -> list[Path]:
    """The examples without commsched's lines, each beside what it reads."""
    (directory / "examples").mkdir()
    for name in ("LICENSE", "examples/digits.py"):
        (directory / name).symlink_to(ROOT / name)
    scripts = []
    for name in names:
        text, count = OURS.subn(replace, (EXAMPLES / f"{name}.py").read_text())
        assert count >= 2
        code = text.split('"""', 2)[2]
        assert not re.search(r"\bcs\b|commsched", code), code
        scripts.append(directory / "examples" / f"{name}.py")
        scripts[-1].write_text(text)
    return scripts


class Printed(NamedTuple):
    """``ours``: by the examples as they are; ``theirs``: by the same under DistributedDataParallel; ``sizes``: by name, of
    the gradients of each model."""

    ours: Losses
    theirs: Losses
    sizes: dict[str, list[str]]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """By scripts that run one after the other in the same processes."""
    directory = tmp_path_factory.mktemp("examples")
    ours, theirs = [EXAMPLES / f"{name}.py" for name in NAMES], plain(directory, NAMES, ddp_instead)
    out = directory / "out"
    compiled = f"{EXAMPLES}/{COMPILED.replace(' ', '.py ', 1)}"
    command = [sys.executable, "-m", "tests.examples.rank", out, STEPS, *ours, compiled, "ddp", *theirs]
    environ = {"PYTHONPATH": f"{ROOT}:{EXAMPLES}"}
    code, _, err = run_job("-n", str(RANKS), "--", *map(str, command), environ=environ, imports=warm.TORCH)
    assert code == 0, err
    losses: dict[tuple[Path, str, int], list[str]] = {}
    sizes: dict[str, list[str]] = {}
    for rank in range(RANKS):
        for block in Path(f"{out}.{rank}").read_text().split("script ")[1:]:
            script, *lines = block.splitlines()
            path, _, options = script.partition(" ")
            name = f"{Path(path).stem} {options}".strip()
            losses[Path(path).parent, name, rank] = [line for line in lines if " loss " in line]
            if averaged := [line.removeprefix("gradients of ") for line in lines if line.startswith("gradients of ")]:
                sizes[name] = averaged
    return Printed(
        *(
            {(name, rank): each for (place, name, rank), each in losses.items() if place == scripts[0].parent}
            for scripts in (ours, theirs)
        ),
        sizes,
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_is_that_of_distributed_data_parallel(name: str, printed: Printed) -> None:
    ours, theirs, _ = printed
    for rank in range(RANKS):
        assert [line.split(" loss ")[0] for line in ours[name, rank]] == [f"rank {rank} step {step}" for step in range(STEPS)]
        if name in CLIPS:
            assert list(map(loss_of, ours[name, rank])) == pytest.approx(list(map(loss_of, theirs[name, rank])), rel=1e-6)
        else:
            assert ours[name, rank] == theirs[name, rank]
    assert ours[name, 0] != ours[name, 1]  # of different data


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_size_of_the_gradients(name: str, printed: Printed) -> None:
    page = (ROOT / "docs" / "examples.md").read_text().partition("## On a network")[2]
    [row] = re.findall(rf"^\| `{name}.py` \| ([^|;]*KB[^|;]*)", page, re.MULTILINE)
    assert sorted(re.findall(r"\d+ KB", row)) == sorted(printed.sizes[name])


def test_the_compiled_language_model_has_the_same_losses(printed: Printed) -> None:
    for rank in range(RANKS):
        plain, compiled = (list(map(loss_of, printed.ours[name, rank])) for name in ("language_model", COMPILED))
        assert compiled == pytest.approx(plain, rel=1e-6)


def test_the_mean_of_the_losses_is_that_of_one_process_on_the_joint_batch(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "digits_transformer"
    (script,) = map(str, plain(tmp_path, (name,), deleted))
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, "--steps", str(STEPS), "--batch", str(32 * RANKS)])
    runpy.run_path(script, run_name="__main__")
    joint = [loss_of(line) for line in capsys.readouterr().out.splitlines() if " loss " in line]
    assert len(joint) == STEPS
    for step, expected in enumerate(joint):
        mean = sum(loss_of(printed.ours[name, rank][step]) for rank in range(RANKS)) / RANKS
        assert mean == pytest.approx(expected, rel=1e-5), f"step {step}"


def loss_of(line: str) -> float:
    return float(line.split(" loss ")[1])
