"""Files of PyTorch that are damaged, incomplete or hostile are refused, and say why."""

import dataclasses
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxpar.core.errors import OnnxparError

torch = pytest.importorskip("torch", reason="reads files of PyTorch: the extra torch")

from torch.distributed import checkpoint  # noqa: E402

from onnxpar.api.pytorch.distributed_folder import weights_in  # noqa: E402
from onnxpar.api.pytorch.files import load_state  # noqa: E402


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return torch.nn.Linear(6, 4)


def refused(net: Any, content: Any, message: str) -> None:
    torch.save(content, "n.pt")
    with pytest.raises(OnnxparError, match=f"n.pt.*{message}"):
        load_state(net, Path("n.pt"))


class Code:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_weights_of_another_form(net: Any) -> None:
    own = net.state_dict()
    refused(net, [1], "expected a module's state dict, tensors by name, got list")
    refused(net, {1: own["bias"]}, "tensors by name, got a dict with 1")
    complex_ = own["bias"].to(torch.complex64)
    refused(net, {**own, "bias": complex_}, "'bias': expected torch.float32, got torch.complex64")
    refused(net, {**own, "x": Code()}, "other objects than tensors, which may run code")
    assert not Path("ran").exists()


def test_states_of_another_form(net: Any) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    groups = optimizer.state_dict()["param_groups"]
    refused(optimizer, {"state": {}}, "with 'state' by number and a list of 'param_groups', got a")
    for state, wanted in (([1], groups), ({0: 3}, groups), ({}, 5), ({}, [{"params": 2}])):
        refused(optimizer, {"state": state, "param_groups": wanted}, "expected an optimizer's stat")
    text = {"state": {0: {"step": "a"}}, "param_groups": groups}
    refused(optimizer, text, "state 0, step: expected a tensor, got str")


def test_damaged_and_compressed_files(net: Any) -> None:
    torch.save(net.state_dict(), "good.pt")
    content = Path("good.pt").read_bytes()
    found = content.index(net.weight.detach().numpy().tobytes())
    Path("n.pt").write_bytes(content[:found] + b"\x01\x02" + content[found + 2 :])
    with pytest.raises(OnnxparError, match=r"n.pt: expected .* record 'good/data/0' is damaged"):
        load_state(net, Path("n.pt"))
    with (
        zipfile.ZipFile("good.pt") as good,
        zipfile.ZipFile("n.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in good.namelist():
            packed.writestr(name, bytes(1 << 20) if name.endswith("/0") else good.read(name))
    with pytest.raises(OnnxparError, match=r"n.pt: expected .* record '.*' is compressed"):
        load_state(net, Path("n.pt"))
    Path("n.pt").write_bytes(b"")
    with pytest.raises(OnnxparError, match=r"n.pt: expected a file of torch.save: got an empty"):
        load_state(net, Path("n.pt"))


def no_chunks(entries: Any, places: Any) -> None:
    entries["weight"].chunks.clear()


def half(entries: Any, places: Any) -> None:
    (chunk,) = entries["weight"].chunks
    entries["weight"].chunks[0] = dataclasses.replace(chunk, sizes=torch.Size([2, 6]))


def twice(entries: Any, places: Any) -> None:
    (chunk,) = entries["weight"].chunks
    half = dataclasses.replace(chunk, sizes=torch.Size([2, 6]))
    entries["weight"].chunks[:] = [half, half]


def outside(entries: Any, places: Any) -> None:
    (chunk,) = entries["weight"].chunks
    entries["weight"].chunks[0] = dataclasses.replace(chunk, offsets=torch.Size([1, 0]))


def place(**changed: Any) -> Callable[[Any, Any], None]:
    def change(entries: Any, places: Any) -> None:
        for key, info in places.items():
            places[key] = dataclasses.replace(info, **changed)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_chunks, "chunks that make up its 24 elements, got 0 with 0 elements"),
        (half, "chunks that make up its 24 elements, got 1 with 12 elements"),
        (twice, "chunks that make up its 24 elements, got 1 with 24 elements"),
        (outside, r"expected chunks within its shape \(4, 6\), got one of \(4, 6\) at \(1, 0\)"),
        (place(offset=10**15), "expected .* bytes at 1000000000000000, got a file of"),
        (place(length=-1), "expected -1 bytes at"),
        (place(length=10**13), "expected 10000000000000 bytes at"),
        (place(relative_path="../__0_0.distcp"), "no file '../__0_0.distcp'"),
    ],
)
def test_a_description_that_does_not_fit(
    net: Any, change: Callable[[Any, Any], None], message: str
) -> None:
    file = saved(net)
    description = Path("dcp", ".metadata")
    metadata = pickle.loads(description.read_bytes())
    change(metadata.state_dict_metadata, metadata.storage_data)
    description.write_bytes(pickle.dumps(metadata))
    file.replace("__0_0.distcp") if "no file" in message else None
    with pytest.raises(OnnxparError, match=message):
        weights_in(Path("dcp"), net)


def test_damaged_data_and_links(net: Any) -> None:
    file = saved(net)
    content = file.read_bytes()
    found = content.index(net.weight.detach().numpy().tobytes())
    file.write_bytes(content[:found] + b"\x01\x02" + content[found + 2 :])
    with pytest.raises(OnnxparError, match=r"dcp, tensor 'weight'.* record '.*' is damaged"):
        weights_in(Path("dcp"), net)
    file.replace("elsewhere")
    file.symlink_to(Path("elsewhere").resolve())
    with pytest.raises(OnnxparError, match=r"expected files in the folder, got '.*', a link"):
        weights_in(Path("dcp"), net)


def saved(net: Any) -> Path:
    """Writes the folder `dcp`; returns its file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only one process
        checkpoint.save(net.state_dict(), checkpoint_id="dcp", no_dist=True)
    (file,) = Path("dcp").glob("*.distcp")
    return file
