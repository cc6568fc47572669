"""PyTorch's side of tools/bench/step.py: one rank of one process, or of one of its modes.

The networks are written as a user of PyTorch would: fused attention, `nn.Linear`, the optimizers of
`torch.optim` with their defaults. Weights are those of the ONNX file, or of
step_networks.py if the network was exported from there. Several ranks are joined by
gloo, and find one another through a file. They are the processes that the driver started, one for
each rank, or those of mpirun on two nodes.
"""

# mypy: ignore-errors
# PyTorch is installed only where this is measured, and its types are not strict.

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from started_script import expect_driver

if __name__ == "__main__":
    # Before the imports of PyTorch, which may not be installed.
    expect_driver("tools/bench/step.py")

import numpy as np
import onnx
import step_networks
import torch
import torch.distributed as dist
from onnx import numpy_helper
from step_cases import MICRO_BATCHES, WEIGHT_DECAY, Batch, Job, Spent, serve
from step_networks import stages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Weights = dict[str, np.ndarray]


def linear(weights: Weights, name: str) -> nn.Linear:
    """The affine map of an ONNX MatMul, whose weight is stored [in, out], and its Add if any."""
    rows, columns = weights[f"{name}.weight"].shape
    bias = weights.get(f"{name}.bias")
    layer = nn.Linear(rows, columns, bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weights[f"{name}.weight"].T.copy()))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return layer


def norm(weights: Weights, name: str) -> nn.LayerNorm:
    """The LayerNormalization of a name."""
    layer = nn.LayerNorm(weights[f"{name}.weight"].shape[0])
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weights[f"{name}.weight"]))
        layer.bias.copy_(torch.tensor(weights[f"{name}.bias"]))
    return layer


def table(weights: Weights, name: str) -> nn.Embedding:
    """The embedding of a name."""
    return nn.Embedding.from_pretrained(torch.tensor(weights[f"{name}.weight"]), freeze=False)


class Perceptron(nn.Module):
    """models/mlp.py."""

    def __init__(self, weights: Weights) -> None:
        """Takes the weights."""
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (linear(weights, f"fc{n}") for n in (1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, 1, 28, 28]."""
        return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x.flatten(1))))))


class Block(nn.Module):
    """One block of models/transformer.py."""

    def __init__(self, weights: Weights, scope: str, head: int) -> None:
        """Takes the weights; `head` is the width of an attention head."""
        super().__init__()
        self.head = head
        self.ln1, self.ln2 = norm(weights, f"{scope}.ln1"), norm(weights, f"{scope}.ln2")
        self.q, self.k, self.v, self.o = (
            linear(weights, f"{scope}.attn.{part}_proj") for part in ("q", "k", "v", "out")
        )
        self.fc1, self.fc2 = (linear(weights, f"{scope}.mlp.fc{n}") for n in (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream [batch, seq, width] after the block."""
        normed = self.ln1(x)
        parts = (layer(normed).unflatten(-1, (-1, self.head)) for layer in (self.q, self.k, self.v))
        # Heads as many as the projections give here: under tensor parallel a rank has its own.
        query, key, value = (part.transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))


class Transformer(nn.Module):
    """models/transformer.py, the head not tied."""

    def __init__(self, weights: Weights, heads: int) -> None:
        """Takes the weights."""
        super().__init__()
        self.wte, self.wpe = table(weights, "wte"), table(weights, "wpe")
        head = self.wte.embedding_dim // heads
        layers = len({name.split(".")[0] for name in weights if name.startswith("layer")})
        self.blocks = nn.Sequential(*(Block(weights, f"layer{n}", head) for n in range(layers)))
        self.ln_f, self.lm_head = norm(weights, "ln_f"), linear(weights, "lm_head")

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] of tokens [batch, seq]."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return self.lm_head(self.ln_f(self.blocks(x)))


def network(job: Job) -> nn.Module:
    """The job's network with the weights of its ONNX file."""
    if job.case.form:
        return step_networks.network(job.case.name, job.case.sizes)
    model = onnx.load(job.files)
    weights = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    if job.case.name == "mlp":
        return Perceptron(weights)
    options = job.case.options
    return Transformer(weights, int(options[options.index("--heads") + 1]))


def tensor_parallel(net: nn.Module, ranks: int) -> nn.Module:
    """Splits the network as Megatron-LM does: columns, then rows; the last layer by columns."""
    plan: dict[str, ParallelStyle] = {}
    if isinstance(net, Perceptron):
        plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
        plan["fc3"] = ColwiseParallel(output_layouts=Replicate())
    elif not isinstance(net, Transformer):
        for part in net.modules():
            if isinstance(part, step_networks.Block):
                part.order_by_heads()
        columns, rows = net.parallel()
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        if isinstance(net, step_networks.Gpt):
            head = f"{len(net) - 1}.1"
            plan["0.tokens"] = RowwiseParallel(input_layouts=Replicate())
            plan[head] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    else:
        columns, rows = ("q", "k", "v", "fc1"), ("o", "fc2")
        plan = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
        plan |= {f"blocks.*.{name}": RowwiseParallel() for name in rows}
        plan["wte"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(net, init_device_mesh("cpu", (ranks,)), plan)


def build(job: Job, rank: int) -> nn.Module:
    """The network as the job's way has it, among its ranks."""
    net = network(job).to(job.device)
    if job.way == "compile":
        return torch.compile(net)
    if job.ranks == 1:
        return net
    store = f"file://{Path(job.scratch) / 'gloo'}"
    backend = "gloo" if job.device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=job.ranks)
    if job.way == "tp":
        return tensor_parallel(net, job.ranks)
    if job.way == "pp":
        return stages(net, job.ranks)[rank]
    return fully_sharded(net, job.ranks) if job.level > 1 else DistributedDataParallel(net)


def fully_sharded(net: nn.Module, ranks: int) -> nn.Module:
    """Shards parameters, gradients and states with FSDP2, each part of the network by itself."""
    mesh = init_device_mesh("cpu", (ranks,))
    for part in [*net.children(), net]:
        # gloo has no mean.
        fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(enable=True)
    return net


def optimizer(job: Job, net: nn.Module) -> torch.optim.Optimizer:
    """The job's optimizer; tensors of one dim do not decay."""
    decay = WEIGHT_DECAY[job.optimizer]
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
    }
    if job.level == 1:
        return ZeroRedundancyOptimizer(groups, kinds[job.optimizer], lr=job.rate)
    return kinds[job.optimizer](groups, lr=job.rate)


def pipeline_loss(job: Job, rank: int, stage: nn.Module) -> Callable[[list[Tensor]], Tensor]:
    """What runs a step's forward and backward passes through the stages, and gives the loss."""
    device = torch.device(job.device)
    found = PipelineStage(stage, rank, job.ranks, device)
    schedule = Schedule1F1B(
        found,
        MICRO_BATCHES,
        loss_fn=lambda logits, labels: functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten()
        ),
    )

    def run(arrays: list[Tensor]) -> Tensor:
        losses: list[Tensor] = []
        inputs = arrays[:1] if rank == 0 else ()
        if rank == job.ranks - 1:
            schedule.step(*inputs, target=arrays[1], losses=losses)
        else:
            schedule.step(*inputs)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss

    return run


def stepper(job: Job, rank: int, spent: Spent) -> Callable[[int, Batch], float]:
    """Returns what does a step, and gives its loss."""
    torch.set_num_threads(job.threads)
    if job.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    net = build(job, rank)
    update = optimizer(job, net)
    # Parameters stay in float32; what autocast computes in 16 bits, onnxpar does too.
    low = nullcontext() if not job.compute else torch.autocast(job.device, torch.bfloat16)
    through = pipeline_loss(job, rank, net) if job.way == "pp" else None

    def step(number: int, batch: Batch) -> float:
        names = (job.case.input, "labels")
        arrays = [torch.from_numpy(batch[name]).to(job.device) for name in names]
        if job.way == "dp" and job.ranks > 1:
            arrays = [array.tensor_split(job.ranks)[rank] for array in arrays]
        with spent.on("forward_backward"):
            update.zero_grad()
            if through is not None:
                found = through(arrays)
        if through is not None:
            with spent.on("update"):
                update.step()
            return found.item()
        with spent.on("forward_backward"):
            with low:
                logits = net(arrays[0]).float()
            # Under tensor parallel a rank has its own columns of the GPT's logits.
            with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
                loss = functional.cross_entropy(logits.flatten(0, -2), arrays[1].flatten())
                loss.backward()
        with spent.on("update"):
            update.step()
        found = loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()
        if job.way == "dp" and job.ranks > 1:
            # The mean over the ranks' equal parts, which onnxpar tells too.
            dist.all_reduce(found)
            found = found / job.ranks
        return found.item()

    return step


def main(text: str, rank: int) -> None:
    """Serves a job."""
    job, spent = Job.read(text), Spent()
    serve(job, rank, stepper(job, rank, spent), spent)
    if job.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(os.environ.get("OMPI_COMM_WORLD_RANK") or sys.argv[2]))
