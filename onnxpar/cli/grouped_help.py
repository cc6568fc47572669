"""The help of `onnxpar`: its commands in groups, and an example of each."""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperGroup

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Shard a model": ("shard", "plan", "annotate", "inspect", "verify", "ops"),
    "Run it": ("run", "generate", "serve", "launch"),
    "Train it": ("train", "eval", "checkpoint"),
    "Look at it": ("view", "report", "trace", "diagnose"),
    "Set up": ("doctor", "completion"),
}
"""The commands of each group."""

EXAMPLES: Mapping[str, str] = {
    "shard": "onnxpar shard model.onnx --strategy dp=2,tp=4 -o out",
    "plan": "onnxpar plan model.onnx --devices 8 --machine a100 --memory 40GiB -o strategy.yaml",
    "annotate": "onnxpar annotate model.onnx --strategy strategy.yaml -o annotated.onnx",
    "inspect": "onnxpar inspect out --node '/layer0/*'",
    "verify": "onnxpar verify out --model model.onnx --symbol batch=4,seq=16",
    "ops": "onnxpar ops --json",
    "run": "mpirun -n 8 onnxpar run out --inputs in.npz --outputs out.npz",
    "generate": "mpirun -n 2 onnxpar generate out --tokens prompt.json --max-new-tokens 20",
    "serve": "mpirun -n 2 onnxpar serve out --tokenizer model --port 8000",
    "train": "mpirun -n 8 onnxpar train out --data digits --batch-size 64 --epochs 3 --lr 0.1",
    "eval": "mpirun -n 8 onnxpar eval out --data digits --batch-size 64 --metric accuracy",
    "launch": "onnxpar launch -- eval out --data digits --batch-size 64 --metric accuracy",
    "checkpoint": "onnxpar checkpoint reshard checkpoints/step-100 new --to out",
    "checkpoint reshard": "onnxpar checkpoint reshard checkpoints/step-100 new --to out",
    "checkpoint merge": "onnxpar checkpoint merge checkpoints/step-100 complete",
    "checkpoint export": "onnxpar checkpoint export checkpoints -o new.onnx --model model.onnx",
    "checkpoint import": (
        "onnxpar checkpoint import new --to out --module net:build --state-dict net.pt"
    ),
    "view": "onnxpar view out --rank 3",
    "report": "onnxpar report out --log train.jsonl -o report.html",
    "trace": "onnxpar trace traces",
    "diagnose": "onnxpar diagnose onnxpar-failed",
    "doctor": "onnxpar doctor",
    "completion": "onnxpar completion bash > ~/.local/share/bash-completion/completions/onnxpar",
}
"""An example of each command, and of each command of a group."""


def example(name: str) -> str:
    """Returns what the help of a command ends with."""
    return f"\b\nExample: {EXAMPLES[name]}"


class GroupedHelp(TyperGroup):
    """Lists the commands under the titles of their groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands of each group with the first sentence of their help."""
        room = formatter.width - 6 - max(map(len, self.commands), default=0)
        for title, names in GROUPS.items():
            rows = [
                (name, self.commands[name].get_short_help_str(room))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
