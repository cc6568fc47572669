"""The benchmark of planning knows a program again, whatever its mesh axes are called."""

from pathlib import Path

import mlp
import plan
import yaml
from _exporter import save

from onnxpar.cli import main


def test_programs_that_differ_in_what_people_read_are_the_same(tmp_path: Path) -> None:
    model = tmp_path / "mlp.onnx"
    save(mlp.build(mlp.Config()), model)
    renamed = tmp_path / "renamed.yaml"
    renamed.write_text(
        yaml.safe_dump({"mesh": {"rows": 2}, "dataset": {"x": ["rows", None, None, None]}})
    )
    graphs = []
    for number, strategy in enumerate((renamed, "dp", "tp")):
        out = tmp_path / str(number)
        arguments = ["shard", str(model), "--strategy", str(strategy), "--devices", "2"]
        assert main([*arguments, "--symbol", "batch:divisor=2", "-o", str(out)]) == 0
        graphs.append(plan.graphs(out))
    assert graphs[0] == graphs[1] != graphs[2]
