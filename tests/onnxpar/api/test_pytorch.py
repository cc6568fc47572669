"""A PyTorch module goes in with all of its names, and its trained parameters come back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar.core.errors import DirectoryError, ModelError
from tests.training_cases import after_training, batch_of, shard

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra torch")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra torch")

import onnxpar  # noqa: E402


class Language(torch.nn.Module):
    """A language model with a tied head, a frozen, an unused and a shared parameter, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.fc = torch.nn.Linear(8, 8)
        self.again = torch.nn.Linear(8, 8, bias=False)
        self.again.weight = self.fc.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.unused = torch.nn.Linear(2, 2)
        self.fixed = torch.nn.Parameter(torch.linspace(1, 2, 8), requires_grad=False)
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        # As modules of Hugging Face call theirs, but of another type.
        self.config = np.ones(3)

    def forward(self, ids: Any, scale: Any = None) -> Any:
        x = self.embed(ids) * self.fixed
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.again(torch.tanh(self.fc(x)))
        return self.head(x if scale is None else x * scale)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Language()


IDS = torch.zeros(3, 5, dtype=torch.int64)
OPEN = ({0: "batch", 1: "seq"},)


def test_a_trained_module_comes_back_with_all_names(tmp_path: Path) -> None:
    model = onnxpar.from_torch(net().train(), IDS, dynamic_shapes=OPEN, outputs=("logits",))
    directory = shard(tmp_path / "m", model, "dp=2", optimizer="adamw")
    batch = batch_of(directory, np.random.default_rng(0), batch=4, seq=6)
    with after_training(directory, batch, lr=0.05, epochs=2) as group:
        outputs = group.evaluate(batch, outputs=True)["outputs"]
    assert outputs is not None
    module = net(seed=1)
    fresh = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = onnxpar.state_dict(tmp_path / "ck", module)
    assert all(torch.equal(fresh[name], tensor) for name, tensor in module.state_dict().items())
    # Untrained tensors are those of the module; both names of a tied weight have the trained one.
    assert torch.equal(found["unused.weight"], fresh["unused.weight"])
    assert torch.equal(found["head.weight"], found["embed.weight"])
    assert torch.equal(found["again.weight"], found["fc.weight"])
    for name in ("head.weight", "fc.weight", "fc.bias", "norm.weight", "norm.running_mean"):
        assert not torch.equal(found[name], fresh[name]), name
    module.load_state_dict(found)
    with torch.no_grad():
        logits = module.eval()(torch.from_numpy(batch["ids"])).numpy()
    wanted = outputs["logits"]
    # Sums of at most 10 terms, some ten after another: 10 sqrt(10) 2^-24 = 2e-6 of the largest, in
    # both programs.
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=4e-6 * np.abs(wanted).max())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of transformers and PyTorch, about themselves
@pytest.mark.parametrize("kind", ["gpt2", "llama", "vit"])
def test_a_module_of_hugging_face_needs_no_wrapper(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}

    def network() -> Any:
        torch.manual_seed(0)
        if kind == "gpt2":
            config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, **tokens)
            return transformers.GPT2LMHeadModel(config)
        if kind == "llama":
            config = transformers.LlamaConfig(intermediate_size=64, **sizes, **tokens)
            return transformers.LlamaForCausalLM(config)
        config = transformers.ViTConfig(
            image_size=16, patch_size=4, intermediate_size=64, num_labels=10, **sizes
        )
        return transformers.ViTForImageClassification(config)

    name, shape = "input_ids", {0: "batch", 1: "seq"}
    traced = torch.zeros(3, 5, dtype=torch.int64)
    if kind == "vit":
        name, shape, traced = "pixel_values", {0: "batch"}, torch.zeros(2, 3, 16, 16)
    module = network().eval()
    model = onnxpar.from_torch(
        module, kwargs={name: traced}, dynamic_shapes={name: shape}, outputs=("logits",)
    )
    assert getattr(module.config, "use_cache", True) is True
    directory = shard(tmp_path / "m", model, "dp=2,tp=2", optimizer="adamw")
    batch = batch_of(directory, np.random.default_rng(0), batch=4, seq=6)
    with after_training(directory, batch, lr=1e-2, epochs=2) as group:
        outputs = group.evaluate(batch, outputs=True)["outputs"]
    assert outputs is not None
    untrained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(onnxpar.state_dict(tmp_path / "ck", module))
    # The position ids of some networks are a buffer.
    changed = [n for n, t in module.state_dict().items() if not torch.equal(t, untrained[n])]
    assert set(dict(module.named_parameters())) <= set(changed)
    with torch.no_grad():
        logits = module(**{name: torch.from_numpy(batch[name])}).logits.numpy()
    wanted = outputs["logits"]
    # As in tests/models/test_export_torch.py: thirty sums of at most 128 terms one after the other.
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_inputs_may_be_positional_or_named_and_symbols_names_or_dims() -> None:
    module = net().eval()
    scale = torch.ones(3, 1, 8)
    batch = torch.export.Dim("batch", min=2, max=64)
    models = [
        onnxpar.from_torch(module, (IDS, scale), dynamic_shapes=({0: batch}, [batch, None, None])),
        onnxpar.from_torch(
            module,
            (IDS,),
            {"scale": scale},
            dynamic_shapes={"ids": {0: "batch"}, "scale": {0: "batch"}},
        ),
    ]
    for model in models:
        shapes = {v.name: [str(d) for d in v.shape or ()] for v in model.graph.inputs}
        assert shapes == {"ids": ["batch", "5"], "scale": ["batch", "1", "8"]}
        assert [v.name for v in model.graph.outputs] == ["output"]
        assert {"fc.weight", "embed.weight"} <= set(model.graph.initializers)
    assert len(onnxpar.from_torch(module, IDS).graph.inputs) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": (IDS, None, 3)}, "Language.forward: too many positional arguments"),
        ({"args": IDS.numpy()}, "Language.forward, argument 'ids': expected a tensor, got ndarray"),
        ({"args": (IDS, 0.5)}, "Language.forward, argument 'scale': expected a tensor, got float"),
        ({"args": IDS, "kwargs": {"idx": IDS}}, "Language.forward: .*idx"),
        (
            {"args": IDS, "dynamic_shapes": {"idz": {0: "batch"}}},
            "dynamic_shapes: expected one of ids, got 'idz'.*ids",
        ),
        (
            {"args": IDS, "dynamic_shapes": {"ids": {0: 3}}},
            "dynamic_shapes, input 'ids', dim 0: expected a name or a torch.export.Dim, got 3",
        ),
        (
            {"args": IDS, "dynamic_shapes": ({}, {})},
            "dynamic_shapes: expected at most 1 entries, one for each of ids, got 2",
        ),
        ({"args": IDS, "outputs": ()}, "outputs: expected a name for at least one result"),
        ({"args": IDS, "outputs": ("a", "b")}, "2 names for outputs, of which there are 1"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        onnxpar.from_torch(net().eval(), **arguments)
    with pytest.raises(ModelError, match=r"module: expected a torch\.nn\.Module, got function"):
        onnxpar.from_torch(net, IDS)  # type: ignore[arg-type]


def test_a_module_of_shards_is_refused() -> None:
    module = net()
    module.fc.weight.full_tensor = None  # as a DTensor has it
    with pytest.raises(ModelError, match=r"Language: expected complete tensors, got 'fc\.weight'"):
        onnxpar.from_torch(module, IDS)


def test_what_is_not_the_modules_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "w.safetensors"
    with pytest.raises(DirectoryError, match=r"expected a .safetensors file"):
        onnxpar.state_dict(file, net())
    file.write_bytes(b"no")
    with pytest.raises(DirectoryError, match=r"expected a .safetensors file"):
        onnxpar.state_dict(file, net())
    save_file({"fc.wait": torch.zeros(8, 8)}, file)
    with pytest.raises(ModelError, match=r"it has no 'fc.wait'.*fc.weight"):
        onnxpar.state_dict(file, net())
    save_file({"fc.weight": torch.zeros(8, 7)}, file)
    with pytest.raises(ModelError, match=r"fc.weight: expected the module's shape \(8, 8\), got"):
        onnxpar.state_dict(file, net())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PyTorch's, about itself
def test_shard_takes_pytorchs_program_and_says_how_to_export_a_module() -> None:
    linear = torch.nn.Linear(4, 6).eval()
    with pytest.raises(ModelError, match=r"got Linear; use onnxpar.shard_module\(module"):
        onnxpar.shard(linear, ((2, 1),))
    program = torch.onnx.export(linear, (torch.zeros(8, 4),), dynamo=True, verbose=False)
    sharded = onnxpar.shard(program, ((2, 1),))
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    with torch.no_grad():
        wanted = linear(torch.from_numpy(x)).numpy()
    # Sums of five terms, each at most four times the largest sum.
    atol = 5 * 4 * 2**-24 * np.abs(wanted).max()
    np.testing.assert_allclose(sharded(x), wanted, rtol=0, atol=atol)
