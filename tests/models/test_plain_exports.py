"""What PyTorch exports without simplifying it, sizes computed of sizes, is sharded and trained."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")

from onnxpar.api.pytorch.export_module import Example, plain_export  # noqa: E402
from onnxpar.cli import main  # noqa: E402


class Frames(torch.nn.Module):
    """Features of a sound, as wav2vec 2.0 makes them, two of which become one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(1, 8, 5, stride=3)
        self.second = torch.nn.Conv1d(8, 8, 3, stride=2)
        self.scale = torch.nn.Linear(1, 8)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, sound: Any) -> Any:
        x = self.second(torch.relu(self.first(sound[:, None]))).transpose(1, 2)
        length = ((sound.shape[1] - 5) // 3 + 1 - 3) // 2 + 1
        place = torch.arange(length, dtype=x.dtype)[:, None] / length
        x = x + self.scale(place)
        half = length // 2
        return self.head(x[:, : half * 2].reshape(x.shape[0], half, 16))


class Skips(torch.nn.Module):
    """A U-Net of two levels, which pads what an odd size has lost."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.inner = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.up = torch.nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = torch.nn.Conv2d(8, 5, 3, padding=1)

    def forward(self, image: Any) -> Any:
        fine = torch.relu(self.first(image))
        x = self.up(torch.relu(self.inner(torch.nn.functional.max_pool2d(fine, 2))))
        high, wide = fine.shape[2] - x.shape[2], fine.shape[3] - x.shape[3]
        pads = (wide // 2, wide - wide // 2, high // 2, high - high // 2)
        return self.last(torch.cat([torch.nn.functional.pad(x, pads), fine], 1))


def frames() -> Example:
    return Example(
        Frames().eval(), {"sound": torch.randn(3, 67)}, {"sound": {0: "batch", 1: "time"}},
        ranges={"time": (24, 4000)},
    )  # fmt: skip


def skips() -> Example:
    return Example(
        Skips().eval(),
        {"image": torch.randn(3, 3, 9, 11)},
        {"image": {0: "batch", 2: "height", 3: "width"}},
        ranges={"height": (4, 512), "width": (4, 512)},
    )


CASES = {
    "frames": (frames, ["batch=3,time=67", "batch=1,time=40"]),
    "skips": (skips, ["batch=3,height=9,width=7", "batch=1,height=8,width=5"]),
}


@pytest.fixture(scope="module", params=CASES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A model, and options that name sizes to compare it at."""
    make: Callable[[], Example]
    make, cases = CASES[request.param]
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("plain") / "model.onnx"
    ir.save(plain_export(make(), optimize=False), path)
    return path, [option for case in cases for option in ("--symbol", case)]


@pytest.mark.parametrize(
    ("train", "preset"),
    [
        (True, "tp=2"),
        *(
            pytest.param(train, preset, marks=pytest.mark.full)
            for train, preset in ((False, "tp=2"), (False, "dp=2"), (True, "dp=2"))
        ),
    ],
)
def test_sharded_at_odd_sizes(
    exported: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    train: bool,
    preset: str,
) -> None:
    model, cases = exported
    options = ["--train", "--loss", "mse", "--optimizer", "adamw"] if train else []
    out = str(tmp_path / "out")
    assert main(["shard", str(model), "--strategy", preset, "-o", out, *options]) == 0
    assert main(["inspect", out, "--json"]) == 0
    assert not re.search(r"\b_d\d", capsys.readouterr().out)
    steps = ["--steps", "2"] if train else []
    assert main(["verify", out, "--model", str(model), *cases, *steps]) == 0
