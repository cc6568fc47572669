"""Readers of files that other programs write: PyTorch, tokenizers, mpirun, and of token files."""

import io
import json
import pickle
import zipfile
from copy import deepcopy
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.hostile.attack import Files, Reader
from tests.fuzz.hostile.small_directories import generator, make, trained_on
from tests.fuzz.hostile.values import (
    change_bytes,
    change_json,
    change_text,
    scalar,
)


class Runs:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("true",)


# -- state dicts of PyTorch ------------------------------------------------------------------------


@cache
def _net() -> tuple[Any, Any]:
    """A module, and its optimizer after a step."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return net, optimizer


def _stored(content: Any, legacy: bool = False) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def _states(work: Path, case: Path) -> list[Files]:
    net, optimizer = (item.state_dict() for item in _net())
    return [
        {"net.pt": _stored(net, legacy), "optimizer.pt": _stored(optimizer, legacy)}
        for legacy in (False, True)
    ]


def _change_states(files: Files, draw: Random) -> Files:
    name = draw.choice(sorted(files))
    kind = draw.randrange(4)
    if kind == 0:
        return {**files, name: change_bytes(files[name], draw)}
    if kind == 1:
        return {**files, name: _stored(_other_state(name, draw))}
    try:
        with zipfile.ZipFile(io.BytesIO(files[name])) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
    except Exception:  # the older form, or an earlier change broke it
        return {**files, name: change_bytes(files[name], draw)}
    pickled = [m for m in members if m.endswith("data.pkl")]
    member = draw.choice((*pickled, *members))
    members[member] = change_bytes(members[member], draw)
    stream = io.BytesIO()
    way = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(stream, "w", way) as archive:
        for each, data in members.items():
            archive.writestr(each, data)
    return {**files, name: stream.getvalue()}


def _other_state(name: str, draw: Random) -> Any:
    """A state dict with other values, keys, types and shapes."""
    import torch

    # A copy: inner dicts of an optimizer are its own.
    state = deepcopy(_net()[name == "optimizer.pt"].state_dict())
    kind = draw.randrange(5)
    if kind == 0:
        return draw.choice((Runs(), [], {}, None, {"state": Runs()}, {1: 2}, torch.ones(3)))
    places = [(state, key) for key in state]
    for key in ("state", "param_groups"):
        for inner in (state.get(key) or {}).values() if key == "state" else state.get(key, ()):
            places += [(inner, field) for field in inner]
    owner, key = draw.choice(places)
    if kind == 1:
        del owner[key]
    elif kind == 2:
        owner[draw.choice(("more", "0.weight", 7, None))] = owner[key]
    elif kind == 3:
        owner[key] = scalar(draw)
    else:
        huge = torch.ones(1).expand(10**12)
        shapes = (torch.ones(2, 2), torch.ones(3, 4, dtype=torch.int8), torch.ones(0), huge)
        odd = (torch.ones(3, 4, dtype=torch.complex64), torch.ones(3, 4).to_sparse(), Runs())
        owner[key] = draw.choice((*shapes, *odd))
    return state


def _read_states(case: Path) -> None:
    from onnxpar.api.pytorch.files import load_state

    # A copy: what a case leaves in them must not change the next one.
    for into, name in zip(deepcopy(_net()), ("net.pt", "optimizer.pt"), strict=True):
        load_state(into, case / name)


def _folders(work: Path, case: Path) -> list[Files]:
    """A folder of torch.distributed.checkpoint."""
    import warnings

    from torch.distributed import checkpoint

    net, optimizer = (item.state_dict() for item in _net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only one process
        checkpoint.save({"m": net, "o": optimizer}, checkpoint_id=work / "folder", no_dist=True)
    return [{path.name: path.read_bytes() for path in (work / "folder").iterdir()}]


def _change_folder(files: Files, draw: Random) -> Files:
    name = draw.choice((".metadata", *files))
    if draw.randrange(10) == 0:
        return {**files, name: pickle.dumps(Runs())}
    return {**files, name: change_bytes(files[name], draw)}


def _read_folder(case: Path) -> None:
    from onnxpar.api.pytorch.distributed_folder import optimizer_in, weights_in

    weights_in(case, _net()[0])
    optimizer_in(case, *_net())


# -- others ----------------------------------------------------------------------------------------


def _token_files(work: Path, case: Path) -> list[Files]:
    text = b"tokens.bin,seq=4,dtype=uint8"
    return [{"tokens.bin": bytes(range(16)) * 4, "argument": text}]


def _change_tokens(files: Files, draw: Random) -> Files:
    if draw.random() < 0.5:
        return {**files, "tokens.bin": change_bytes(files["tokens.bin"], draw)}
    text = files["argument"]
    sizes = (b"0", b"-1", b"9" * 40, b"1e3", b"\xc2\xb2", b"", b"4,seq=5", str(2**62).encode())
    kinds = (b"uint8", b"uint32", b"float32", b"O", b"V0", b"", b"uint8,more=1")
    if draw.random() < 0.5:
        return {**files, "argument": b"tokens.bin,seq=%b,dtype=uint8" % draw.choice(sizes)}
    if draw.random() < 0.5:
        return {**files, "argument": b"tokens.bin,seq=4,dtype=%b" % draw.choice(kinds)}
    return {**files, "argument": change_text(text, draw)}


def _read_token_file(case: Path) -> None:
    from onnxpar_runtime.training.token_file import token_windows

    for array in token_windows("--data", _token_argument(case)):
        array.sum()


def _token_argument(case: Path) -> str:
    # The system takes no argument with a zero byte.
    text = (case / "argument").read_bytes().decode("utf-8", "replace").replace("\0", "")
    return text.replace("tokens.bin", str(case / "tokens.bin"))


def _tokenizers(work: Path, case: Path) -> list[Files]:
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {text: number for number, text in enumerate(["</s>", *alphabet, "ab"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    config = {"chat_template": template, "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    return [
        {
            "t/tokenizer.json": made.to_str().encode(),
            "t/config.json": json.dumps({"eos_token_id": [0]}).encode(),
            "t/tokenizer_config.json": json.dumps(config).encode(),
        }
    ]


def _change_tokenizer(files: Files, draw: Random) -> Files:
    name = draw.choice(sorted(files))
    return {**files, name: change_json(files[name], draw)}


def _read_tokenizer(case: Path) -> None:
    from onnxpar_runtime.generation.text import Tokenizer

    tokenizer = Tokenizer(case / "t")
    tokenizer.decode(tokenizer.encode("ab </s> ba"))
    tokenizer.chat([{"role": "user", "content": "ab"}])


def _generated(more: tuple[str, ...], case: Path) -> list[str]:
    places = [str(case / "generator"), "--tokenizer", str(case / "t")]
    return ["generate", *places, "--prompt", "ab </s> ba", "--max-new-tokens", "2", *more]


def _parquet_files(work: Path, case: Path) -> list[Files]:
    import pyarrow
    from pyarrow import parquet

    x = pyarrow.array([[0.5] * 64] * 6, pyarrow.list_(pyarrow.float32()))
    rows = pyarrow.table({"x": x, "labels": [1, 2, 3, 1, 2, 3]})
    found: list[Files] = []
    for way in ("none", "snappy", "zstd"):
        parquet.write_table(rows, work / "a.parquet", compression=way, row_group_size=3)
        found.append({"a.parquet": (work / "a.parquet").read_bytes()})
    return found


def _read_parquet_file(case: Path) -> None:
    from onnxpar_runtime.training.parquet import read_parquet

    for array in read_parquet(case / "a.parquet", ["x", "labels"]).values():
        array.sum()


def _hosts(work: Path, case: Path) -> list[Files]:
    return [{"hosts": b"a slots=2 max_slots=4\n# none\n\nb slots=1\n"}]


def _read_hosts(case: Path) -> None:
    from onnxpar_runtime.hosts import hosts_of

    assert len(hosts_of(["--hostfile", str(case / "hosts")]).entries) < 10**6


def _bodies(work: Path, case: Path) -> list[Files]:
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
        "max_completion_tokens": 4,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = {
        "model": "m",
        "prompt": [[1, 2], [3]],
        "max_tokens": 4,
        "stop": ["a"],
        "seed": 1,
        "n": 2,
    }
    return [{"body.json": json.dumps(item).encode()} for item in (chat, text)]


def _change_body(files: Files, draw: Random) -> Files:
    return _change_tokenizer(files, draw)


def _read_body(case: Path) -> None:
    from onnxpar_runtime.serving.asked import chat_of, completion_of
    from onnxpar_runtime.serving.fields import Fields, Refusal

    text = (case / "body.json").read_bytes()
    for read in (
        lambda: chat_of(Fields(text), "m", None, lambda messages: str(messages)),
        lambda: completion_of(Fields(text), "m", None),
    ):
        try:
            read()
        except Refusal as refusal:
            # What the client gets.
            json.dumps(refusal.body).encode()


_PARQUET = Reader(
    "parquet", _parquet_files, lambda f, d: {"a.parquet": change_bytes(f["a.parquet"], d)},
    _read_parquet_file,
    (lambda case: trained_on("flat", "parquet:{}/a.parquet", case),), partial(make, "flat"),
)  # fmt: skip
FOREIGN: tuple[Reader, ...] = (
    # Not everyone has the package.
    *((_PARQUET,) if find_spec("pyarrow") else ()),
    Reader("state-dict", _states, _change_states, _read_states, ()),
    Reader("state-folder", _folders, _change_folder, _read_folder, ()),
    Reader(
        "tokens", _token_files, _change_tokens, _read_token_file,
        (lambda case: trained_on("words", f"tokens:{_token_argument(case)}", case),),
        partial(make, "words"),
    ),
    Reader(
        "tokenizer", _tokenizers, _change_tokenizer, _read_tokenizer,
        (partial(_generated, ()), partial(_generated, ("--chat",))), generator,
    ),
    Reader("hosts", _hosts, lambda f, d: {"hosts": change_text(f["hosts"], d)}, _read_hosts, ()),
    Reader("request", _bodies, _change_body, _read_body, ()),
)  # fmt: skip
